"""The other processes of the same proxy: they serve one port, and a caller who reaches one of them means all.

Each listens on a socket in a directory that only they can open. A question is one line of JSON, the answer what
follows until the end. A process that is being started again does not answer, and what it knew is lost with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from . import load_table, prefix_table
from .accounts import SharedAccounts
from .load_table import LoadTable
from .prefix_table import PrefixTable
from .steps import Leg

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Answer = Callable[[Any], object]

log = logging.getLogger("pdlink.proxy")

ANSWER_S = 1.0
MAX_NBYTES = 64 * 2**20
LOAD_FILE, SHARES_FILE, MEMBERS_FILE = "load", "shares", "members.json"
PREFIX_FILES = {leg.value: f"prefixes-{leg.value}" for leg in Leg}
"""By leg."""


def make_tables(directory: Path, processes: int) -> None:
    """What the processes map; before they start."""
    for name in (LOAD_FILE, SHARES_FILE):
        load_table.make(directory / name, processes)
    for prefixes in PREFIX_FILES.values():
        prefix_table.make(directory / prefixes)


def tell(directory: Path, number: int, question: str, argument: object) -> None:
    """Ask a process from outside, and wait until it has taken it in. Raises OSError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as to:
        to.settimeout(ANSWER_S)
        to.connect(str(_socket_of(directory, number)))
        to.sendall(msgspec.json.encode([question, argument]) + b"\n")
        while to.recv(4096):
            pass


class Place(msgspec.Struct, frozen=True):
    """Of one process among them."""

    directory: str
    number: int
    """From 0."""
    processes: int


class Family:
    """The others, seen from one process. Use it as a context manager once `answers` are set."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.directory = Path(place.directory)
        self.load = LoadTable(self.directory / LOAD_FILE, place.number, place.processes)
        self._shares = LoadTable(self.directory / SHARES_FILE, place.number, place.processes)
        self.accounts = SharedAccounts(self._shares)
        """Of the shares of the queue."""
        self.prefixes = {leg: PrefixTable(self.directory / name) for leg, name in PREFIX_FILES.items()}
        self.answers: Mapping[str, Answer] = {}
        """By question; gets its argument and returns what is encoded as MessagePack."""
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Family:
        path = self._socket(self.place.number)
        path.unlink(missing_ok=True)  # of a process that was killed
        self._server = await asyncio.start_unix_server(self._serve, path, limit=MAX_NBYTES)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()
        self.load.close()
        self._shares.close()

    def owner_of(self, name: str) -> int:
        """The process that keeps the books of this name; the same in all of them."""
        return zlib.crc32(name.encode(errors="surrogateescape")) % self.place.processes

    async def ask_all(self, question: str, argument: object = None) -> list[Any]:
        """The answers of the others that answer in time."""
        others = [number for number in range(self.place.processes) if number != self.place.number]
        found = await asyncio.gather(*(self.ask(number, question, argument) for number in others))
        return [answer for answer in found if answer is not None]

    async def ask(self, number: int, question: str, argument: object = None) -> Any:
        """The answer of one of them; None if it does not answer in time."""
        try:
            async with asyncio.timeout(ANSWER_S):
                reader, writer = await asyncio.open_unix_connection(self._socket(number))
                with contextlib.closing(writer):
                    writer.write(msgspec.json.encode([question, argument]) + b"\n")
                    return msgspec.msgpack.decode(await reader.read())
        except (OSError, ValueError, EOFError):  # TimeoutError is an OSError
            return None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            question, argument = msgspec.json.decode(await reader.readline())
            writer.write(msgspec.msgpack.encode(self.answers[question](argument)))
            await writer.drain()
        except (OSError, ValueError, KeyError) as error:
            log.debug("a question of another process: %s", error)
        finally:
            writer.close()

    def _socket(self, number: int) -> Path:
        return _socket_of(self.directory, number)


def _socket_of(directory: Path, number: int) -> Path:
    return directory / f"{number}.sock"
