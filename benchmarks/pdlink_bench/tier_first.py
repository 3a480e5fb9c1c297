"""The first token of a long prompt whose KV is in a tier, asked of a worker that has just been started.

A worker of our own engine computes the prompt once, and keeps it on a disk or on a Valkey server. Then it is killed
and started again, several times, with the page cache dropped; its first request is for that prompt, of which only the
last token is computed. The worker says when the last layer of the KV was in the engine's blocks. That has bare reads
of as many bytes beside it: of a file by two threads, unbuffered, into memory of small pages, or of what a server
sends into memory that waits for it. Then comes the pass of the last token, which the next request has alone: it finds
the KV in the engine's blocks.
"""

from __future__ import annotations

import itertools
import random
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from pdlink.config import WorkerConfig
from pdlink.fleet.child import start, stop
from pdlink.memory.buffers import Buffer
from pdlink.store.tiers.files import DirectFile
from pdlink.store.tiers.valkey import PART_NBYTES

from .http_load import WrongAnswer
from .measure import Measured
from .tier_cold import drop_cached
from .tier_valkey import ValkeyServer
from .warm import (
    BLOCK_TOKENS,
    CHUNK_TOKENS,
    DTYPE_NBYTES,
    HEAD_DIM,
    HEADS,
    MODEL,
    START_TIMEOUT_S,
    LoneWorker,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MOST = {"disk": 1.15, "valkey": 1.15}
"""Of bare reads, from the request until the last layer is in the engine's blocks."""
_READ_NBYTES, _NUM_READERS = 8 << 20, 2
_ANSWER_TOKENS = 2


class FirstSizes(NamedTuple):
    tokens: int = 32768
    """Of the prompt, beside its last one."""
    layers: int = 4

    @property
    def nbytes(self) -> int:
        """Of the KV that is loaded."""
        return self.tokens * self.layers * 2 * HEADS * HEAD_DIM * DTYPE_NBYTES


class Worker(LoneWorker):
    def __init__(self, model: Path, sizes: FirstSizes, place: str, tiers: dict[str, Any]) -> None:
        longest, memory = sizes.tokens + 2 * CHUNK_TOKENS, 2 * sizes.nbytes / 2**30 + 0.1
        config = WorkerConfig.model_validate(
            {
                "role": "both",
                "name": place,
                "model": {"path": str(model), "name": MODEL, "max_tokens": longest},
                "cache": {"num_blocks": longest // BLOCK_TOKENS + 8},
                "engine": {"threads": 2, "max_batched_tokens": 2048},
                "tiers": {
                    "chunk_size": CHUNK_TOKENS,
                    "max_local_cpu_size": memory,
                    "load_if_faster": False,
                    **tiers,
                },
                "summary_s": 0,
            }
        )
        self.child = start(place, "both", config.model_dump(mode="json"))


def measure(directory: Path, place: str, sizes: FirstSizes, restarts: int, tick: Callable[[], None]) -> Measured:
    """Seconds of each life: to the token of the "first" request, and to its KV "in blocks"; of the next one, out of
    "blocks"; and of "bare" reads.

    Raises WrongAnswer where not all was loaded, or the answer is another one; WorkerFailed without a server.
    """
    from pdlink.serve.checkpoint import write_checkpoint  # imports torch, and a list of options needs none

    model = directory / "model"
    write_checkpoint(
        model,
        num_layers=sizes.layers,
        max_tokens=sizes.tokens + 2 * CHUNK_TOKENS,
        hidden=HEADS * HEAD_DIM,
        heads=HEADS,
        kv_heads=HEADS,
        head_dim=HEAD_DIM,
    )
    if place == "disk":
        disk = directory / "first"
        tiers = {"local_disk": str(disk), "max_local_disk_size": max(1.0, 4 * sizes.nbytes / 2**30)}
        with closing(_file(directory / "bare", sizes.nbytes)) as file:
            return _measure(Worker(model, sizes, place, tiers), directory, place, sizes, restarts, file, tick)
    with closing(ValkeyServer()) as server, closing(Wire(server.path, sizes.nbytes)) as wire:
        worker = Worker(model, sizes, place, {"remote_url": f"unix://{server.path}?timeout_s=60"})
        return _measure(worker, directory, place, sizes, restarts, wire, tick)


class File(DirectFile):
    def take(self, into: memoryview) -> None:
        """Read it: parts by two threads, as our disk tier does."""

        def read(begin: int) -> None:
            if not self.read(begin, into[begin : begin + _READ_NBYTES]):
                raise OSError("the bare file is too short")

        with ThreadPoolExecutor(_NUM_READERS) as threads:
            list(threads.map(read, range(0, len(into), _READ_NBYTES)))


class Wire:
    """Values of one server, as long as the parts of our records, which it sends one after the other."""

    def __init__(self, path: str, nbytes: int) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._count = -(-nbytes // PART_NBYTES)
        for number in range(self._count):
            value = _bulk(bytes(PART_NBYTES))
            self._socket.sendall(b"*3\r\n$3\r\nSET\r\n" + _bulk(b"bare/%d" % number) + value)
            self._line()

    def take(self, into: memoryview) -> None:
        self._socket.sendall(b"".join(b"*2\r\n$3\r\nGET\r\n%s" % _bulk(b"bare/%d" % n) for n in range(self._count)))
        for begin in range(0, len(into), PART_NBYTES):
            self._line()
            part = into[begin : begin + PART_NBYTES]
            while part:
                if not (num := self._socket.recv_into(part)):
                    raise OSError("the server has ended")
                part = part[num:]
            self._line()

    def close(self) -> None:
        self._socket.close()

    def _line(self) -> None:
        while (byte := self._socket.recv(1)) != b"\n":
            if not byte:
                raise OSError("the server has ended")


def _bulk(value: bytes) -> bytes:
    return b"$%d\r\n%s\r\n" % (len(value), value)


def _file(path: Path, nbytes: int) -> File:
    file, step = File(path), _READ_NBYTES
    file.grow(nbytes)
    with Buffer(step) as buffer:
        for begin in range(0, nbytes, step):
            file.write(begin, buffer.array[: min(step, nbytes - begin)].data)
    return file


def _measure(
    worker: Worker,
    directory: Path,
    place: str,
    sizes: FirstSizes,
    restarts: int,
    bare: File | Wire,
    tick: Callable[[], None],
) -> Measured:
    numbers, names, found = random.Random(0), itertools.count(), Measured()
    prompt = [numbers.randrange(33, 127) for _ in range(sizes.tokens + 1)]
    try:
        worker.child.wait_ready(START_TIMEOUT_S)
        answer = worker.complete(prompt, _ANSWER_TOKENS, "computed")[0].text
        worker.ask("/pdlink/cache/move", {"prompt": prompt, "source": "memory", "destination": place})
        worker.ask("/pdlink/cache/clear", {"everything": True, "places": ["memory"]})
        worker.until_known(prompt, place, sizes.tokens)
        tick()
        for _ in range(restarts):
            worker.restart(directory)
            for what in ("first", "blocks"):
                streamed, sourced = worker.complete(prompt, _ANSWER_TOKENS, f"bench-{next(names)}")
                came = sourced["loaded" if what == "first" else "cached"]
                if came != sizes.tokens or streamed.text != answer:
                    raise WrongAnswer(f"{place}, {what}: {came} of {sizes.tokens} tokens came: {sourced}")
                found.add(what, streamed.first_s)
                if what == "first":
                    found.add("in blocks", worker.ask("/pdlink/events")["prompts"][-1]["at_s"] - streamed.asked_s)
            drop_cached(directory)
            with Buffer(sizes.nbytes) as buffer:
                began_s = perf_counter()
                bare.take(buffer.array[: sizes.nbytes].data)
                found.add("bare", perf_counter() - began_s)
            tick()
    finally:
        stop([worker.child], 10.0)
    return found
