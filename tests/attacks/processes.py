"""What an attacker sees of a process: its ports; and what must not grow: descriptors, threads, memory."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_LISTEN = "0A"


def listening_ports(pid: int) -> dict[int, str]:
    """TCP ports of this process, by any socket it holds, with the address each is bound to."""
    mine = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            mine.add(os.readlink(fd))
    ports = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == _LISTEN and f"socket:[{columns[9]}]" in mine:
                host, port = columns[1].split(":")
                ports[int(port, 16)] = address_of(host)
    return ports


def address_of(hexadecimal: str) -> str:
    """The kernel's spelling of an address in /proc/net/tcp: 32-bit words in the order of the host."""
    words = [hexadecimal[at : at + 8] for at in range(0, len(hexadecimal), 8)]
    packed = b"".join(struct.pack("=I", int(word, 16)) for word in words)
    return socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed)


@dataclass(frozen=True)
class Holdings:
    descriptors: int
    threads: int
    resident_nbytes: int

    @classmethod
    def of(cls, pid: int) -> Holdings:
        return cls(
            len(list(Path(f"/proc/{pid}/fd").iterdir())),
            len(list(Path(f"/proc/{pid}/task").iterdir())),
            int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
        )


@contextlib.contextmanager
def connected(address: str, port: int, *, reset: bool = False) -> Iterator[socket.socket]:
    """A connection to attack through; sending and receiving give up after two seconds."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)
    with socket.create_connection((host, port), timeout=5.0) as connection:
        connection.settimeout(2.0)
        if reset:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        yield connection


def throw(address: str, port: int, *pieces: bytes) -> bytes:
    """Send these bytes and read what comes back; being cut off is an answer, too."""
    got = b""
    with contextlib.suppress(OSError), connected(address, port) as connection:
        for piece in pieces:
            connection.sendall(piece)
        connection.shutdown(socket.SHUT_WR)
        while more := connection.recv(65536):
            got += more
    return got
