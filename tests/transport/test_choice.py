"""Which transports a worker opens; and a transport is one class and one line of the registry."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, ClassVar, cast

import numpy as np
import pytest

import pdlink
from pdlink.config import TransportConfig
from pdlink.errors import ConfigError, ProtocolError, TransportFailure
from pdlink.transport import choice
from pdlink.transport.base import BatchDone, BatchStatus, Occurrence, PeerClosed, Probe, Site, Transport
from tests.waiting import WAIT_S

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdlink.kv.layout import RunList
    from pdlink.memory.buffers import AnyBuffer, Bytes, HostBuffer


class Direct(Transport):
    """The smallest one there can be: copies inside this process, within `submit`."""

    name: ClassVar[str] = "direct"
    kind: ClassVar[str] = "direct"
    reach = "process"
    memory = ("host",)
    trust = "pool"
    invited: ClassVar[dict[bytes, list[Bytes]]] = {}
    """By invitation, in this process."""

    def __init__(self) -> None:
        self._regions: list[Bytes] = []
        self._peers: dict[str, list[Bytes]] = {}
        self._reports: list[Occurrence] = []
        self._fd = -1
        self._num_submitted = 0

    def probe(self) -> Probe:
        return Probe(self.name, ok=True)

    def open(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK)

    def register(self, buffer: AnyBuffer) -> int:
        self._regions.append(cast("HostBuffer", buffer).array)
        return len(self._regions) - 1

    def invite(self, peer: str) -> bytes:
        invitation = f"{id(self)} {peer}".encode()
        self.invited[invitation] = self._regions
        return invitation

    def connect(self, peer: str, invitation: bytes) -> None:
        if invitation not in self.invited:
            raise ProtocolError("no invitation of this process")
        self._peers[peer] = self.invited.pop(invitation)

    def submit(self, peer: str, lists: Sequence[RunList], timeout_s: float) -> int:
        if peer not in self._peers:
            raise TransportFailure(f"no open peer {peer}")
        nbytes = 0
        for run_list in lists:
            source, destination = self._regions[run_list.src_region], self._peers[peer][run_list.dst_region]
            for src, dst, length in run_list.runs.tolist():
                start = run_list.dst_base + dst
                destination[start : start + length] = source[run_list.src_base + src :][:length]
                nbytes += length
        self._num_submitted += 1
        self._report(BatchDone(self._num_submitted, peer, BatchStatus.OK, nbytes, 0.0, 0.0))
        return self._num_submitted

    def poll(self) -> list[Occurrence]:
        reports, self._reports = self._reports, []
        if reports:
            os.eventfd_read(self._fd)
        return reports

    def fileno(self) -> int:
        return self._fd

    def lane(self, peer: str) -> str:
        return self.name if peer in self._peers else ""

    def close_peer(self, peer: str) -> None:
        self._peers.pop(peer, None)
        self._report(PeerClosed(peer))

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _report(self, occurrence: Occurrence) -> None:
        self._reports.append(occurrence)
        os.eventfd_write(self._fd, 1)


def test_a_line_in_the_registry_makes_a_class_a_transport_of_every_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "TRANSPORTS", (*choice.TRANSPORTS, Direct))
    layout = pdlink.paged_layout(
        dtype="float16", itemsize=2, num_layers=2, num_blocks=8, block_tokens=4, num_heads=2, head_dim=8
    )
    kv = pdlink.KVGroups((layout,))
    with (
        pdlink.Node("prefill", kv, transport=pdlink.TransportConfig(kind="direct")) as prefill,
        pdlink.Node("decode", kv, transport=pdlink.TransportConfig(kind="direct")) as decode,
    ):
        for layer in range(2):
            for part in range(2):
                pages = prefill.pages(layer, part)
                pages[:] = np.random.default_rng(layer * 2 + part).integers(0, 256, pages.shape, dtype=np.uint8)
        incoming = decode.receive("t", prefill.address, [[5, 2]], range(7))
        with prefill.send("t", [[1, 6]], 7) as outgoing:
            for layer in range(2):
                outgoing.layer_ready(layer)
            outgoing.finish(42)
        assert incoming.wait(WAIT_S) == 42
        for layer in range(2):
            for part in range(2):
                sent, got = prefill.pages(layer, part), decode.pages(layer, part)
                assert (got[5] == sent[1]).all()
                assert (got[2, :3] == sent[6, :3]).all()
        assert [peer["lane"] for peer in prefill.report().peers] == ["direct"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kind": "pigeon"}, r"transport\.kind: got 'pigeon'; must be one of auto, mapped, tcp, ucx"),
    ],
)
def test_a_kind_that_no_transport_has_is_refused_with_those_there_are(settings: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        choice.open_transports(TransportConfig.model_validate(settings), [])


def test_every_transport_declares_itself() -> None:
    for one in choice.TRANSPORTS:
        made = one.configured(TransportConfig(), Site())
        assert made.capabilities.name == one.name
        assert one.memory, "moves nothing"
    assert len({one.name for one in choice.TRANSPORTS}) == len(choice.TRANSPORTS)
