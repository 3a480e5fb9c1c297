"""Peers: NIXL and Mooncake on the same runs, in the same processes, buffers and rounds as our transports.

Each is imported where its wheels are installed (nixl, mooncake-transfer-engine or its build without CUDA) and in its
own two processes only. Both are used as their documentation says; what they can prepare is prepared before it is
timed. Versions that these lines were written for: nixl 1.5.1, mooncake-transfer-engine 0.3.13.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import os
import select
import time
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from pdlink.errors import TransportFailure, TransportUnavailable
from pdlink.transport.base import Occurrence, Probe

from .foreign import ForeignTransport

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdlink.kv.layout import RunArray

POLL_PAUSE_S = 50e-6
"""Between two looks at a transfer that NIXL's own thread is busy with: looking without a pause takes the second core
away from it (0.9 to 1.2 GB/s over tcp without, 1.3 with; 2 cores)."""
MOONCAKE_BATCH = 16
"""Requests per call. More than a few hundred are rejected ("queue full"), and 16 to 32 were fastest (1.1 GB/s, 0.65
with 256; 2 cores)."""


def _import(module: str, wheel: str, settings: Mapping[str, str]) -> Probe:
    """Whether a peer can be used. settings: environment of its libraries, which read it when they are loaded."""
    for name, value in settings.items():
        os.putenv(name, value)  # of this process, which is the peer's alone
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        return Probe(module, ok=False, reason=f"not installed: pip install {wheel}")
    try:
        importlib.import_module(module)
    except ImportError as error:
        return Probe(module, ok=False, reason=f"installed, but cannot be loaded: {error}")
    return Probe(module, ok=True)


class Nixl(ForeignTransport):
    """A NIXL agent with its UCX backend; WRITE requests that are made once and posted again for each transfer."""

    name: ClassVar[str] = "nixl"
    asynchronous: ClassVar[bool] = True

    def __init__(self, tls: str, progress_thread: bool = True) -> None:
        """tls: NIXL's UCX_TLS, "" for its default.

        progress_thread: NIXL's default, and what serving engines use. Without it the sender only makes progress while
        its caller looks, and then spends a whole core of the caller on that.
        """
        super().__init__()
        self._tls, self._progress_thread = tls, progress_thread
        self._agent: Any = None
        self._remote = ""
        self._remote_base = 0
        self._open: list[tuple[int, str, int, float, Any]] = []
        self._always_readable = -1

    @classmethod
    def probe(cls) -> Probe:
        return _import("nixl._api", "nixl", {"NIXL_LOG_LEVEL": "ERROR", "UCX_WARN_UNUSED_ENV_VARS": "n"})

    def open(self) -> None:
        if self._tls:
            os.putenv("UCX_TLS", self._tls)
        self._always_readable, writer = os.pipe()
        os.close(writer)  # end of file is readable, for good

    def _make_agent(self, role: str, progress_thread: bool) -> None:
        api = importlib.import_module("nixl._api")
        logging.getLogger("nixl").setLevel(logging.ERROR)
        self._agent = api.nixl_agent(
            role, api.nixl_agent_config(enable_prog_thread=progress_thread, backends=["UCX"])
        )
        if "UCX" not in self._agent.backends:
            raise TransportUnavailable("NIXL has no UCX backend here")
        self._agent.register_memory([(self.buffer.ptr, self.buffer.nbytes, 0, "")], "DRAM")

    def invite(self, peer: str) -> bytes:
        self._make_agent("receiver", progress_thread=True)
        metadata = self._agent.get_agent_metadata()
        return json.dumps({"metadata": metadata.hex(), "base": self.buffer.ptr}).encode()

    def connect(self, peer: str, invitation: bytes) -> None:
        target = json.loads(invitation)
        self._make_agent("sender", self._progress_thread)
        name = self._agent.add_remote_agent(bytes.fromhex(target["metadata"]))
        self._remote = name.decode() if isinstance(name, bytes) else name
        self._remote_base = target["base"]

    def prepare(self, runs: RunArray) -> Any:
        device = np.zeros(len(runs), dtype=np.int64)
        local = np.stack([runs[:, 0] + self.buffer.ptr, runs[:, 2], device], axis=1).astype(np.uint64)
        remote = np.stack([runs[:, 1] + self._remote_base, runs[:, 2], device], axis=1).astype(np.uint64)
        agent = self._agent
        return agent.initialize_xfer(
            "WRITE", agent.get_xfer_descs(local, "DRAM"), agent.get_xfer_descs(remote, "DRAM"), self._remote
        )

    def push(self, ticket: int, peer: str, nbytes: int, prepared: Any, timeout_s: float) -> None:
        started_s = time.monotonic()
        state = self._agent.transfer(prepared)
        if state == "ERR":
            raise TransportFailure("NIXL reports an error")
        if state == "DONE":
            self.done(ticket, peer, nbytes, started_s)
        else:
            self._open.append((ticket, peer, nbytes, started_s, prepared))

    def poll(self) -> list[Occurrence]:
        still_open = []
        for entry in self._open:
            ticket, peer, nbytes, started_s, request = entry
            state = self._agent.check_xfer_state(request)
            if state == "ERR":
                raise TransportFailure("NIXL reports an error")
            if state == "DONE":
                self.done(ticket, peer, nbytes, started_s)
            else:
                still_open.append(entry)
        self._open = still_open
        found = super().poll()
        if still_open and not found and self._progress_thread:
            select.select([], [], [], POLL_PAUSE_S)
        return found

    def fileno(self) -> int:
        """Always readable: NIXL has nothing to wait on, it is to be polled."""
        return self._always_readable

    def lane(self, peer: str) -> str:
        return f"ucx {self._tls or 'default'}" + ("" if self._progress_thread else ", polled")

    def close(self) -> None:
        if self._agent is not None:
            # NIXL's copy of libnl crashes in its exit handlers (1.5.1); this process has nothing left to do.
            os._exit(0)


class Mooncake(ForeignTransport):
    """Mooncake's transfer engine over its TCP transport; blocking batches of a few requests."""

    name: ClassVar[str] = "mooncake"

    def __init__(self) -> None:
        super().__init__()
        self._engine: Any = None
        self._target = ""
        self._remote_base = 0

    @classmethod
    def probe(cls) -> Probe:
        return _import(
            "mooncake.engine", "mooncake-transfer-engine", {"GLOG_minloglevel": "3", "MC_LOG_LEVEL": "ERROR"}
        )

    def open(self) -> None: ...

    def _make_engine(self) -> None:
        self._engine = importlib.import_module("mooncake.engine").TransferEngine()
        if self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
            raise TransportUnavailable("Mooncake's engine does not start")
        if self._engine.register_memory(self.buffer.ptr, self.buffer.nbytes) != 0:
            raise TransportUnavailable("Mooncake cannot register the buffer")

    def invite(self, peer: str) -> bytes:
        self._make_engine()
        return json.dumps({"target": f"127.0.0.1:{self._engine.get_rpc_port()}", "base": self.buffer.ptr}).encode()

    def connect(self, peer: str, invitation: bytes) -> None:
        target = json.loads(invitation)
        self._target, self._remote_base = target["target"], target["base"]
        self._make_engine()

    def prepare(self, runs: RunArray) -> list[tuple[list[int], list[int], list[int]]]:
        columns = runs + (self.buffer.ptr, self._remote_base, 0)
        parts = [columns[first : first + MOONCAKE_BATCH] for first in range(0, len(runs), MOONCAKE_BATCH)]
        return [(part[:, 0].tolist(), part[:, 1].tolist(), part[:, 2].tolist()) for part in parts]

    def push(self, ticket: int, peer: str, nbytes: int, prepared: Any, timeout_s: float) -> None:
        started_s = time.monotonic()
        for local, remote, lengths in prepared:
            if self._engine.batch_transfer_sync_write(self._target, local, remote, lengths) != 0:
                raise TransportFailure("Mooncake reports a failed batch")
        self.done(ticket, peer, nbytes, started_s)

    def fileno(self) -> int:
        raise NotImplementedError("nothing to wait for: a push has landed when submit returns")

    def lane(self, peer: str) -> str:
        return "tcp"

    def close(self) -> None:
        if self._engine is not None:
            os._exit(0)  # its threads do not end by themselves in time, and this process has nothing left to do
