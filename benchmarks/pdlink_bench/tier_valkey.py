"""Our tier on a Valkey or Redis server beside the client that everybody has, redis-py with hiredis (extra `peers`).

Both keep a record in parts of one length, and compare the same checksum of what they give back.
"""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import xxhash

from pdlink.store.tiers.valkey import PART_NBYTES, Valkey

from .tier_lanes import DiskLane, TierLane
from .workers import WorkerFailed

_START_S = 20.0
PROGRAMS = ("valkey-server", "redis-server")


def places() -> str:
    """Where they are looked for: PATH, then where `make` unpacks servers for tests, beside this Python."""
    return os.pathsep.join([os.environ.get("PATH", ""), str(Path(sys.prefix) / "servers" / "bin")])


class ValkeyServer:
    """A server of this run, which keeps nothing on disk, on a Unix socket."""

    def __init__(self) -> None:
        """Raises WorkerFailed where no server is installed, or it does not start."""
        program = next(filter(None, (shutil.which(name, path=places()) for name in PROGRAMS)), None)
        if program is None:
            raise WorkerFailed(f"no {' or '.join(PROGRAMS)} in {places()}; apt-get install valkey-server")
        self._place = TemporaryDirectory(prefix="pdlink-")
        self.path = f"{self._place.name}/valkey"
        options = ["--port", "0", "--unixsocket", self.path, "--save", "", "--dir", self._place.name]
        self._process = subprocess.Popen([program, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert self._process.stdout is not None
        if not any(b"ready to accept" in line.lower() for line in self._process.stdout):
            self.close()
            raise WorkerFailed("the server did not start")

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(_START_S)
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._place.cleanup()


class RedisPy(TierLane):
    """SET of a record's parts, and GET with a copy to where they are wanted; each record in one pipeline."""

    checks = True

    def __init__(self, path: str) -> None:
        """Raises WorkerFailed where redis-py or hiredis is not installed."""
        try:
            redis: Any = importlib.import_module("redis")
            importlib.import_module("hiredis")
        except ImportError as error:
            raise WorkerFailed(f"{error.name}: not installed; pip install './benchmarks[peers]'") from error
        self._client = redis.Redis(unix_socket_path=path)
        self._digests: dict[int, bytes] = {}

    def put(self) -> None:
        for number, record in enumerate(self._views(0)):
            self._digests[number] = xxhash.xxh3_128_digest(record)
            with self._client.pipeline(transaction=False) as pipeline:
                for begin in range(0, len(record), PART_NBYTES):
                    pipeline.set(f"record {number}/{begin}", record[begin : begin + PART_NBYTES])
                pipeline.execute()

    def get(self) -> None:
        for number, room in enumerate(self._views(1)):
            begins = range(0, len(room), PART_NBYTES)
            with self._client.pipeline(transaction=False) as pipeline:
                for begin in begins:
                    pipeline.get(f"record {number}/{begin}")
                parts = pipeline.execute()
            for begin, part in zip(begins, parts, strict=True):
                room[begin : begin + PART_NBYTES] = part
            if xxhash.xxh3_128_digest(room) != self._digests[number]:
                raise OSError(f"redis-py: record {number} came back changed")

    def close(self) -> None:
        self._client.close()


class Served(DiskLane):
    """Our tier, which compares a checksum of what it gives back."""

    checks = True
    gathers = False

    def __init__(self, path: str) -> None:
        self.disk = Valkey(f"unix://{path}", "bench", timeout_s=60.0)
        self._round = 0

    def put(self) -> None:
        for number in range(self.count if self._round else 0):  # the server's memory is for one round
            self.disk.remove(self._key(number))
        super().put()


def lanes(server: ValkeyServer) -> dict[str, TierLane]:
    """Raises WorkerFailed."""
    return {"redis-py": RedisPy(server.path), "valkey": Served(server.path)}
