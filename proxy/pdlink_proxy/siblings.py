"""The other processes of the same proxy. They share nothing but a port, and a caller who reaches one means all.

So /metrics, /health and /pdlink/state ask the others, and what an operator changes is told to them. Each process
listens on a socket in a directory that only this user can open. A question is one line of JSON, the answer is what
follows until the end. A process that hangs, or is being started again, does not answer: what is shown is then of the
processes that did, and says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from .records import RequestRecord  # noqa: TC001  (msgspec reads the annotation at run time)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Answer = Callable[[Any], object]

log = logging.getLogger("pdlink.proxy")

ANSWER_S = 1.0
MAX_NBYTES = 64 * 2**20
MEMBERS_FILE = "members.json"
"""The workers as an operator has changed them."""


class SiblingPlace(msgspec.Struct, frozen=True):
    """Of one process among them."""

    directory: str
    number: int
    """From 0."""
    processes: int


class Doing(msgspec.Struct, frozen=True):
    """What one process does now."""

    running: int
    queued: int
    in_flight: dict[str, int]
    """Legs, by side and id of the worker."""
    records: list[RequestRecord] = []
    num_ended: int = 0
    """Requests since its start."""


class Siblings:
    """The others, seen from one process. Use it as a context manager once `answers` are set."""

    def __init__(self, place: SiblingPlace) -> None:
        self.number, self.processes = place.number, place.processes
        self.directory = Path(place.directory)
        self.answers: Mapping[str, Answer] = {}
        """By question; gets its argument and returns what is encoded as MessagePack."""
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Siblings:
        path = _socket_of(self.directory, self.number)
        path.unlink(missing_ok=True)  # of a process that was killed
        self._server = await asyncio.start_unix_server(self._serve, path, limit=MAX_NBYTES)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()

    async def ask_all(self, question: str, argument: object = None) -> dict[int, Any]:
        """By number of a process, the answers of the others that answer in time. Costs `ANSWER_S` at most."""
        others = [number for number in range(self.processes) if number != self.number]
        found = await asyncio.gather(*(self._ask(number, question, argument) for number in others))
        return {number: answer for number, answer in zip(others, found, strict=True) if answer is not None}

    def said(self, answered: Mapping[int, object]) -> dict[str, Any]:
        """For people: of which processes an answer is. answered: by number, of the others."""
        known = {self.number, *answered}
        return {
            "this": self.number,
            "answered": sorted(known),
            "silent": [number for number in range(self.processes) if number not in known],
        }

    async def _ask(self, number: int, question: str, argument: object) -> Any:
        try:
            async with asyncio.timeout(ANSWER_S):
                reader, writer = await asyncio.open_unix_connection(_socket_of(self.directory, number))
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


def tell(directory: Path, number: int, question: str, argument: object) -> None:
    """Ask a process from outside, and wait until it has taken it in. Raises OSError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as to:
        to.settimeout(ANSWER_S)
        to.connect(str(_socket_of(directory, number)))
        to.sendall(msgspec.json.encode([question, argument]) + b"\n")
        while to.recv(4096):
            pass


def _socket_of(directory: Path, number: int) -> Path:
    return directory / f"{number}.sock"
