"""Data-parallel engines: several behind the URL of one server, each with a KV cache of its own.

To placement each is a worker of its own: with the server's URL and health, and addresses, load, cached prefixes and
failures of its own. A leg names its engine in a header, or the server would pick one.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from pdlink.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .members import ListedWorker

HEADER = "X-data-parallel-rank"
"""Of vLLM (0.24 to 0.32), which counts the engines behind one port from 0."""


def id_of(url: str, engine: int | None) -> str:
    """Names a worker among those of its side; no base URL has a query."""
    return url if engine is None else f"{url}?data_parallel_rank={engine}"


class EngineBehind(NamedTuple):
    number: int | None
    """None of a server that is not told which of its engines to use."""
    control: tuple[str, ...]
    kv_events: tuple[str, ...]

    @property
    def headers(self) -> dict[str, str]:
        """Of each leg that it gets."""
        return {} if self.number is None else {HEADER: str(self.number)}


def engines_of(entry: ListedWorker) -> tuple[EngineBehind, ...]:
    """The engines of a server, which lists the addresses of one after those of another.

    Raises ConfigError for addresses that cannot be shared out evenly.
    """
    count = entry.data_parallel
    if count == 1:
        return (EngineBehind(None, entry.control, entry.kv_events),)
    for name, found in (("control", entry.control), ("kv_events", entry.kv_events)):
        if len(found) % count:
            raise ConfigError(
                f"{name}: got {len(found)} for {entry.url} with data_parallel {count}; expected as many for each "
                "engine; list those of the first engine, then of the second, or a range of ports"
            )
    return tuple(
        EngineBehind(index, _part(entry.control, index, count), _part(entry.kv_events, index, count))
        for index in range(count)
    )


def workers_of(side: str, entries: Iterable[ListedWorker]) -> list[tuple[str, ListedWorker, EngineBehind]]:
    """All workers of the servers that are listed, with base URLs. Raises ConfigError, also for a repeated one."""
    found: list[tuple[str, ListedWorker, EngineBehind]] = []
    urls = set()
    for entry in entries:
        url = entry.url.rstrip("/")
        if not is_base_url(url):
            raise ConfigError(
                f"{side}: got {entry.url!r}; expected http://HOST:PORT or https://HOST:PORT, without a user; write "
                "one of them"
            )
        if url in urls:
            raise ConfigError(f"{side}: {url} is listed twice")
        urls.add(url)
        found += [(url, entry, engine) for engine in engines_of(entry)]
    return found


def is_base_url(text: str) -> bool:
    """Whether requests can be sent to paths below it."""
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError:
        return False
    named = parts.username is None and parts.password is None  # they would not be sent, and shown on pages
    return bool(re.fullmatch(r"https?://[^\s?#]+", text) and named and host and port != 0)


def _part(addresses: tuple[str, ...], index: int, count: int) -> tuple[str, ...]:
    size = len(addresses) // count
    return addresses[index * size : (index + 1) * size]
