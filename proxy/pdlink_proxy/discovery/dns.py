"""`dns:prefill=HOST:PORT,decode=HOST:PORT`: every address of a name, asked all the time.

For headless Services and the like. A name that has no address now counts as a source that is down: DNS answers that
also while its server starts, and our own probe finds workers that are gone.
"""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

from pdlink.config.listen import HostPort
from pdlink.errors import ConfigError

from ..members import ListedWorker, Members
from .base import ROLES, SourceDown, pairs_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Resolve = Callable[[str, int], Awaitable[list[str]]]

ASK_S = 5.0
"""Between two questions; as long as the records of a headless Service are valid by default."""


class DnsSource:
    """Workers at all addresses of names."""

    def __init__(self, text: str, *, resolve: Resolve | None = None, ask_s: float = ASK_S) -> None:
        """Raises ConfigError for another text."""
        self._resolve, self._ask_s = resolve or _addresses, ask_s
        self._names: dict[str, tuple[str, int]] = {}
        for role, place in pairs_of(text, f"dns:{text}").items():
            host, _, port = place.rpartition(":")
            if role not in ROLES or not host or not port.isdecimal() or not 0 < int(port) < 2**16:
                raise ConfigError(f"discover: got dns:{text}; expected ROLE=HOST:PORT, roles {', '.join(ROLES)}")
            self._names[role] = host, int(port)

    def lists(self, role: str) -> bool:
        return role in self._names

    async def follow(self, tell: Callable[[Members], None]) -> None:
        last: Members | None = None
        while True:
            found = {}
            for role, (host, port) in self._names.items():
                try:
                    addresses = await self._resolve(host, port)
                except OSError as error:
                    raise SourceDown(f"{host}: {error.strerror or error}") from None
                found[role] = tuple(ListedWorker(url_of(address, port)) for address in sorted(set(addresses)))
            if (members := Members(**found)) != last:
                tell(members)
                last = members
            await asyncio.sleep(self._ask_s)


def url_of(address: str, port: int, scheme: str = "http") -> str:
    return f"{scheme}://{HostPort(address, port)}"


async def _addresses(host: str, port: int) -> list[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(each[4][0]) for each in found]
