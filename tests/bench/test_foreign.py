"""Anchors and peers move the same runs as our transports, and say why where they cannot."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
from rich.progress import Progress

from pdlink.errors import TransportFailure
from pdlink.kv.layout import RunArray
from pdlink.memory.buffers import Buffer
from pdlink.transport.base import BatchDone, BatchStatus, Probe
from pdlink_bench import anchors, peers
from pdlink_bench.foreign import ForeignTransport
from pdlink_bench.rounds import Contestant, RoundSettings, measure
from pdlink_bench.workload import Workload

needs_anchors = pytest.mark.skipif(not anchors.BUILT, reason=anchors.NOT_BUILT)
WORKLOADS = {
    "blocks": Workload(num_layers=2, num_heads=2, head_dim=16, num_tokens=40),
    "heads": Workload(num_layers=3, num_heads=2, head_dim=12, num_tokens=37, dst_order="LPBHT", dst_block_tokens=6),
}


@needs_anchors
def test_anchors_deliver_every_byte_of_every_layout() -> None:
    contestants = {
        "sockets": Contestant(anchors.SocketPair, asynchronous=False),
        "puts-shm": Contestant(partial(anchors.PutLoop, "shm"), asynchronous=False),
        "puts-tcp": Contestant(partial(anchors.PutLoop, "tcp"), asynchronous=False),
    }
    results = measure(WORKLOADS, contestants, RoundSettings((), 1, 1, 10.0), Progress(disable=True))
    unusable = {anchors.NOT_BUILT} | ({anchors.PutLoop.probe().reason} - {""})
    for case in results.cases.values():
        for name, lane in case.transports.items():
            assert lane.problem == "" or (name != "sockets" and lane.problem in unusable)


@needs_anchors
def test_a_run_outside_of_the_buffer_is_refused_before_anything_moves() -> None:
    with Buffer(4096) as here, Buffer(4096) as there:
        from pdlink_bench import _anchors

        reader = _anchors.SocketReader(there.ptr, there.nbytes, "")
        writer = _anchors.SocketWriter(here.ptr, here.nbytes, reader.port, "")
        with pytest.raises(ValueError, match="outside"):
            writer.declare(np.array([[4000, 0, 97]], dtype=np.int64))
        batch = writer.declare(np.array([[0, 4000, 97]], dtype=np.int64))
        with pytest.raises(OSError, match=r"reset|hung up|Broken pipe"):
            writer.push(batch, 5.0)
        assert not there.array.any()
        del writer, reader


@pytest.mark.parametrize("peer", [peers.Nixl(""), peers.Mooncake()])
def test_a_peer_that_is_not_installed_says_what_to_install(
    peer: ForeignTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(os, "putenv", lambda *_: None)
    probe = peer.probe()
    assert not probe.ok
    assert "pip install" in probe.reason


def test_a_peer_whose_libraries_are_missing_says_which(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: True)
    monkeypatch.setattr(os, "putenv", lambda *_: None)
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    probe = peers.Mooncake.probe()
    assert not probe.ok
    assert "cannot be loaded" in probe.reason


class Recorder(ForeignTransport):
    """Notes what it is asked for."""

    name = "recorder"

    def __init__(self) -> None:
        super().__init__()
        self.prepared: list[RunArray] = []

    @classmethod
    def probe(cls) -> Probe:
        return Probe(cls.name, ok=True)

    def open(self) -> None: ...

    def invite(self, peer: str) -> bytes:
        return b""

    def connect(self, peer: str, invitation: bytes) -> None: ...

    def prepare(self, runs: RunArray) -> int:
        self.prepared.append(runs)
        return len(self.prepared)

    def push(self, ticket: int, peer: str, nbytes: int, prepared: int, timeout_s: float) -> None:
        self.done(ticket, peer, nbytes, 0.0)

    def fileno(self) -> int:
        return -1

    def lane(self, peer: str) -> str:
        return ""

    def close(self) -> None: ...


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    with Buffer(1 << 20) as buffer:
        transport = Recorder()
        transport.register(buffer)
        yield transport


def test_batches_are_prepared_once_and_reported_each_time(recorder: Recorder) -> None:
    workload = WORKLOADS["heads"]
    plan = workload.plan()
    for _ in range(3):
        for layer in range(workload.num_layers):
            ticket = recorder.submit("peer", plan.run_lists(layer), 1.0)
            [done] = recorder.poll()
            assert isinstance(done, BatchDone)
            assert (done.ticket, done.status, done.nbytes) == (ticket, BatchStatus.OK, workload.nbytes // 3)
    assert len(recorder.prepared) == workload.num_layers
    assert sum(int(runs[:, 2].sum()) for runs in recorder.prepared) == workload.nbytes


def test_a_second_buffer_is_refused(recorder: Recorder) -> None:
    with Buffer(4096) as second, pytest.raises(TransportFailure, match="one buffer"):
        recorder.register(second)
