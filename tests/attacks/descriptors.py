"""A worker whose descriptors are used up: dials, invitations and connections fail, and nothing else does.

    python -m tests.attacks.descriptors TRANSPORT

Prefill and two decodes in one process, so that both sides run out. Between any two attempts the honest decode brings
a transfer home. Exit status 0 if all lived and the second decode works as soon as there are descriptors again.
"""

from __future__ import annotations

import os
import resource
import sys
import threading
from dataclasses import replace

import numpy as np

import pdlink
from pdlink.config import TransportConfig
from pdlink.events import HandlingFailed, listen
from pdlink.kv.groups import KVGroups
from pdlink.kv.plan import warm_up
from pdlink.reasons import Code, Reason
from pdlink.transport.base import Transport
from pdlink.transport.tcp import TcpTransport
from pdlink.transport.ucx import UcxTransport
from tests.endpoint.conftest import TIMEOUTS, Handler, Receives, SenderLog, Sends, layout
from tests.waiting import until

SRC, DST, TOKENS = [3, 0, 9, 4], [5, 1], 13
MOST_SPARE = 14
"""Descriptors left for an attempt; a session over any transport needs fewer."""
QUICK = replace(TIMEOUTS, connect_s=0.5)


def transport(kind: str) -> Transport:
    return TcpTransport() if kind == "tcp" else UcxTransport(kind.removeprefix("ucx-"), devices="lo")


class Node:
    def __init__(self, kind: str, name: str, block_tokens: int) -> None:
        config = TransportConfig(batch_timeout_s=5.0)
        self.node = pdlink.Node(
            name, KVGroups((layout(block_tokens),)), transports=[transport(kind)], transport=config, deadlines=QUICK
        )
        self.endpoint = self.node.endpoint
        self.sender, self.receiver = Sends(self.endpoint.sender), Receives(self.endpoint.receiver)

    def close(self) -> None:
        self.node.close()


class Descriptors:
    """All that the process may still open."""

    def __init__(self) -> None:
        self._taken: list[int] = []

    def take_all(self) -> None:
        while True:
            try:
                self._taken.append(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
            except OSError:
                return

    def give_back(self, count: int | None = None) -> None:
        for _ in range(len(self._taken) if count is None else count):
            os.close(self._taken.pop())


def transfer(prefill: Node, decode: Node, transfer_id: str) -> str:
    """What became of it: "ready", or why it failed."""
    log, handler = SenderLog(), Handler()
    prefill.sender.announce(transfer_id, log.failed, log.end)
    decode.receiver.expect(transfer_id, prefill.endpoint.address, handler)
    decode.receiver.offer(transfer_id, DST, 0, TOKENS)
    sender = prefill.sender
    sender.publish(transfer_id, SRC, TOKENS, 0)
    for layer in range(3):
        sender.layer_ready(transfer_id, layer, 0, TOKENS)
    sender.finish(transfer_id, 42)
    calls = handler.wait()
    if calls[0].startswith("failed"):
        sender.cancel(transfer_id, "the other side has given up")
    log.wait()
    return calls[0].removesuffix(" 42")


def hang_up(node: Node) -> None:
    """End its sessions, and let it try again at once the peers that refused it."""
    ended = threading.Event()

    def end() -> None:
        for peer in node.endpoint.peers():
            node.endpoint.sessions.lose(peer, Reason(Code.PEER_LOST, "again, please"))
        node.endpoint.sessions.known.forget_refusals()
        ended.set()

    node.endpoint.work.call(end)
    until(lambda: ended.is_set() and not node.endpoint.num_closing(), "the sessions are over")


def main(kind: str) -> int:
    warm_up()
    failures: list[HandlingFailed] = []
    listen(lambda event: failures.append(event) if isinstance(event, HandlingFailed) else None)
    prefill, honest, late = Node(kind, "prefill", 4), Node(kind, "honest", 8), Node(kind, "late", 8)
    pages = prefill.node.pages(0)
    pages[:] = np.random.default_rng(7).integers(0, 256, pages.shape, np.uint8)
    assert transfer(prefill, honest, "first") == "ready"
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 40, highest + 40))
    descriptors = Descriptors()
    became: list[str] = []
    for spare in range(MOST_SPARE):
        descriptors.take_all()
        descriptors.give_back(spare)
        became.append(transfer(prefill, late, f"late-{spare}"))
        assert transfer(prefill, honest, f"honest-{spare}") == "ready"
        for node in (prefill, honest, late):
            assert node.endpoint.failure == "", node.endpoint.failure
        hang_up(late)
    for spare, outcome in enumerate(became):
        print(f"{spare} spare: {outcome}")
    descriptors.give_back()
    assert became[0].startswith("failed")
    assert transfer(prefill, late, "after") == "ready"
    assert transfer(prefill, honest, "last") == "ready"
    assert not failures, failures
    for node in (late, honest, prefill):
        node.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
