"""Which workers there are: a list that replaces the one before, from settings, a source or an operator.

A list is never a change to the one before, so a missed one does no harm. A worker that stays listed keeps its state
and its requests; one that is listed as draining, or no more, gets no new request and finishes those it has.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, get_args

import msgspec

from pdlink.config import read_token
from pdlink.config.port_ranges import in_full
from pdlink.endpoint.token import credentials_of
from pdlink.errors import ConfigError, InvalidRequest
from pdlink.protocol.auth import ControlAddress

from .engines import engines_of
from .members import ListedWorker, Members, Role

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from pdlink.config import ProxyConfig

    from .dialects import Dialect
    from .pools import Pools
    from .worker import Worker

MAX_WORKERS = 100_000


def from_settings(config: ProxyConfig, dialect: Dialect) -> Members:
    """The workers that the settings list. Raises ConfigError for addresses of others, or none of the dialect."""
    control = {url.rstrip("/"): _with_key(addresses, config.token_file) for url, addresses in config.control.items()}
    kv_events = {url.rstrip("/"): sources for url, sources in config.kv_events.items()}
    cells = {url.rstrip("/"): cell for url, cell in config.cells.items()}
    stores = {url.rstrip("/"): _with_key((at,), config.token_file)[0] for url, at in config.stores.items()}
    engines = {url.rstrip("/"): count for url, count in config.data_parallel.items()}
    urls = {role: [url.rstrip("/") for url in getattr(config, role)] for role in get_args(Role)}
    every = {url for listed in urls.values() for url in listed}
    for name, given in (("control", control), ("cells", cells), ("kv_events", kv_events), ("stores", stores)):
        if unknown := given.keys() - every:
            raise ConfigError(
                f"{name}: got {', '.join(sorted(unknown))}; expected workers of this proxy; list it there"
            )
    if unknown := engines.keys() - set(urls["prefill"]):
        raise ConfigError(
            f"data_parallel: got {', '.join(sorted(unknown))}; expected prefill workers of this proxy; list it there"
        )
    members = Members(
        *(
            tuple(
                ListedWorker(
                    url,
                    control=control.get(url, ()),
                    kv_events=kv_events.get(url, ()),
                    data_parallel=engines.get(url, 1) if role == "prefill" else 1,
                    cell=cells.get(url, ""),
                    store=stores.get(url, ""),
                )
                for url in urls[role]
            )
            for role in get_args(Role)
        )
    )
    _check(members, "workers", dialect)
    return members


def _with_key(addresses: tuple[str, ...], token_file: str | None) -> tuple[str, ...]:
    """Where all share a token, the key that a connector proves is known without being written out."""
    if token_file is None:
        return addresses
    key = credentials_of(read_token(token_file, "token_file")).keys.public
    return tuple(address if "?" in address else f"{address}?key={key}" for address in addresses)


def _check(members: Members, what: str, dialect: Dialect) -> None:
    for entry in (*members.prefill, *members.decode):
        engines_of(entry)
    for entry in (*members.prefill, *members.decode, *members.both):
        try:
            if entry.store:
                ControlAddress.parse(entry.store)
        except InvalidRequest:
            raise ConfigError(
                f"{what}: stores: got {entry.store!r:.100} for {entry.url}; expected tcp://HOST:PORT, or "
                "tcp://HOST:PORT?key=KEY; correct it: its store would be asked by nobody"
            ) from None
    other = [entry.url for entry in (*members.decode, *members.both) if entry.data_parallel > 1]
    if not dialect.engine_paths:
        other += [entry.url for entry in members.prefill if entry.data_parallel > 1]
    if other:
        raise ConfigError(
            f"{what}: data_parallel: got it for {', '.join(other)}; expected prefill workers of dialect: vllm; leave "
            "it out: others share requests out among their engines by themselves"
        )
    if dialect.needs_control and (missing := [entry.url for entry in members.prefill if not entry.control]):
        raise ConfigError(f"{what}: no control for {', '.join(missing)}; give the addresses of its connector")


def _in_full(members: Members) -> Members:
    """With an address for each port of a range. Raises ValueError."""
    return Members(
        *(
            tuple(msgspec.structs.replace(entry, control=in_full(entry.control)) for entry in entries)
            for entries in (members.prefill, members.decode, members.both)
        )
    )


def parse(document: Any, what: str, *, dialect: Dialect) -> Members:
    """Workers as a file or an operator lists them: {"prefill": [...], "decode": [...], "both": [...]} of URLs or
    entries.

    Raises ConfigError, also for control addresses that are none of the dialect.
    """
    if not isinstance(document, dict):
        raise ConfigError(
            f"{what}: got {type(document).__name__}; expected a mapping of prefill, decode and both; write one"
        )
    plain = {
        side: [{"url": each} if isinstance(each, str) else each for each in entries]
        if isinstance(entries, list)
        else entries
        for side, entries in document.items()
    }
    try:
        members = _in_full(msgspec.convert(plain, Members))
    except (ValueError, RecursionError) as error:  # msgspec.ValidationError is a ValueError
        raise ConfigError(f"{what}: {error}") from None
    if len(members.prefill) + len(members.decode) + len(members.both) > MAX_WORKERS:
        raise ConfigError(f"{what}: got more than {MAX_WORKERS} workers; use several proxies")
    _check(members, what, dialect)
    return members


@dataclass(slots=True)
class Membership:
    """Keeps the pools as the last list says, and one task per server that watches it."""

    pools: Pools
    watch: Callable[[Sequence[Worker]], asyncio.Task[None]]
    """Begins to watch the health of a server: of one worker, or of several engines."""
    dialect: Dialect
    found_by: str = ""
    """The sources of `discovery`, where there are some."""
    changed: Callable[[], None] = lambda: None
    """Called after each list."""
    members: Members = field(default_factory=Members)
    _watching: dict[tuple[Worker, ...], asyncio.Task[None]] = field(default_factory=dict)
    _kept: Path | None = None

    def replace(self, members: Members) -> None:
        """From now on these are the workers. Raises ConfigError, and changes nothing then."""
        self.pools.replace(members)
        self.members = members
        servers = set(self.pools.servers)
        for gone in self._watching.keys() - servers:
            self._watching.pop(gone).cancel()
        for server in self.pools.servers:
            if server not in self._watching:
                self._watching[server] = self.watch(server)
        self.changed()

    def keep(self, path: Path) -> None:
        """Changes of operators are kept in this file, for the other processes of this proxy; take what is there."""
        self._kept = path
        self.read_kept()

    def save(self) -> None:
        """Keep the present list."""
        assert self._kept is not None
        new = self._kept.with_suffix(f".{os.getpid()}")
        new.write_bytes(msgspec.json.encode(self.members))
        new.replace(self._kept)

    def read_kept(self) -> None:
        """Take the list that another process has kept."""
        if self._kept is not None and self._kept.exists():
            self.replace(msgspec.json.decode(self._kept.read_bytes(), type=Members))
