"""All sources of one proxy together: what each listed last, and since when it cannot be asked."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from pdlink.errors import ConfigError

from ..members import ListedWorker, Members
from .base import ROLES, SourceDown
from .dns import DnsSource
from .file import FileSource
from .kubernetes import KubernetesSource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ..dialects import Dialect
    from .base import WorkerSource

log = logging.getLogger("pdlink.proxy")

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0
"""After a failure; doubled each time, and drawn between half and all of it: proxies do not come back in step."""


def source_of(text: str, dialect: Dialect) -> WorkerSource:
    """The source that one entry of `discover` names. Raises ConfigError."""
    kind, _, rest = text.partition(":")
    if kind == "file" and rest:
        return FileSource(rest, dialect)
    if kind not in ("dns", "kubernetes") or not rest:
        raise ConfigError(f"discover: got {text!r}; expected file:PATH, dns:... or kubernetes:...; write one of them")
    found = DnsSource(rest) if kind == "dns" else KubernetesSource(rest)
    names_control = isinstance(found, KubernetesSource) and found.names_control
    if names_control and dialect.name != "vllm":
        raise ConfigError(
            f"discover: got {text!r} with dialect {dialect.name}; expected control=NAME for dialect: vllm; "
            f"leave it out"
        )
    if dialect.needs_control and found.lists("prefill") and not names_control:
        raise ConfigError(
            f"discover: got {text!r} with dialect {dialect.name}, whose workers need control addresses, and it names "
            "none; use file:PATH with `control` in each entry, or with dialect vllm kubernetes:... with control=NAME"
        )
    return found


@dataclass(slots=True)
class _Told:
    source: WorkerSource
    members: Members | None = None
    """None: it has not been heard."""
    heard_s: float | None = None
    """time.monotonic of the last list."""
    down: str = ""
    """Why it cannot be asked now."""


@dataclass(slots=True)
class Discovery:
    """Joins what sources list. One that is down keeps what it listed last."""

    sources: dict[str, _Told]
    replace: Callable[[Members], None]
    """Takes all workers. Raises ConfigError."""
    static: Members = field(default_factory=Members)
    """Of the settings."""
    pause_s: float = FIRST_PAUSE_S

    @classmethod
    def of(
        cls,
        texts: Sequence[str],
        dialect: Dialect,
        replace: Callable[[Members], None],
        static: Members,
    ) -> Discovery:
        """texts: `ProxyConfig.discover`. Raises ConfigError."""
        return cls({text: _Told(source_of(text, dialect)) for text in texts}, replace, static)

    async def follow(self, name: str) -> None:
        """Listen to one source until cancelled."""
        told, pause_s = self.sources[name], self.pause_s

        def tell(members: Members) -> None:
            nonlocal pause_s
            pause_s = self.pause_s
            if told.down:
                log.error("source %s answers again", name)
            told.members, told.heard_s, told.down = members, time.monotonic(), ""
            try:
                self.replace(self.members())
            except ConfigError as error:
                log.error("workers are unchanged: %s: %s", name, error)

        while True:
            try:
                await told.source.follow(tell)
            except SourceDown as error:
                if str(error) != told.down:
                    log.error("source %s is down, and the workers stay as it listed them last: %s", name, error)
                told.down = str(error)
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)

    def members(self) -> Members:
        """What all list."""
        return joined([self.static, *(told.members for told in self.sources.values() if told.members is not None)])

    def describe(self) -> dict[str, Any]:
        """For the proxy's GET /health, by source."""
        now = time.monotonic()
        return {
            name: {
                "stale": bool(told.down) or told.members is None,
                "reason": told.down or ("" if told.members is not None else "has not answered yet"),
                "heard_s_ago": None if told.heard_s is None else round(now - told.heard_s, 3),
                "workers": {
                    role: len(getattr(told.members, role)) if told.members is not None else 0 for role in ROLES
                },
            }
            for name, told in self.sources.items()
        }


def joined(lists: Iterable[Members]) -> Members:
    """One list of all. A worker that several have is one worker: it drains if any of them says so, and has the first
    addresses and cell that one of them names."""
    found: dict[str, dict[str, ListedWorker]] = {role: {} for role in ROLES}
    for members in lists:
        for role in ROLES:
            for entry in getattr(members, role):
                url = entry.url.rstrip("/")
                known = found[role].get(url)
                if known is not None:
                    entry = msgspec.structs.replace(
                        known,
                        drain=known.drain or entry.drain,
                        control=known.control or entry.control,
                        data_parallel=(known if known.control else entry).data_parallel,
                        kv_events=known.kv_events or entry.kv_events,
                        cell=known.cell or entry.cell,
                        store=known.store or entry.store,
                    )
                found[role][url] = entry
    return Members(*(tuple(found[role].values()) for role in ROLES))
