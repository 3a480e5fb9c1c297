"""Keys of a deployment that is started by one process: made at its start, kept in memory, gone with it.

An operator of many hosts would have to bring files to all of them. These keys travel with the settings of each
worker instead, through the cluster's own channels, so they are as secret as those: with Ray, `RAY_USE_TLS=1` or a
private network. A process that reads settings finds them as files that have no name in any directory.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import zmq

from pdlink.protocol import auth

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, slots=True)
class Keys:
    """What one process of a deployment knows."""

    pair: auth.KeyPair
    allowed: str
    """Text of the allow-list: all processes of the deployment."""
    http_key: str = field(repr=False)
    """What callers of a worker's HTTP interface send."""


def make(names: Iterable[str]) -> dict[str, Keys]:
    """Keys for processes of these names, which all allow each other."""
    pairs = []
    for name in names:
        public, secret = (key.decode() for key in zmq.curve_keypair())
        pairs.append(auth.KeyPair(name, public, secret))
    allowed = "".join(f"{auth.allow_line(pair)}\n" for pair in pairs)
    http_key = secrets.token_urlsafe(32)
    return {pair.name: Keys(pair, allowed, http_key) for pair in pairs}


class Unnamed:
    """The files of one process and its children, which live until `close`."""

    def __init__(self, keys: Keys) -> None:
        self._fds: list[int] = []
        self.key_file = self._file("key", auth.write_key_file(keys.pair))
        self.allow_file = self._file("allow", keys.allowed)
        self.http_key_file = self._file("http", f"{keys.http_key}\n")

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()

    def _file(self, name: str, text: str) -> str:
        """A path that processes of this user can open."""
        fd = os.memfd_create(f"pdlink-{name}", os.MFD_CLOEXEC)
        self._fds.append(fd)
        os.fchmod(fd, 0o600)
        os.write(fd, text.encode())
        return f"/proc/{os.getpid()}/fd/{fd}"
