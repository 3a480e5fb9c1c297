"""`pdlink_bench.carried`: what a session does for a transport's notes, without one."""

from __future__ import annotations

import pytest

from pdlink.transport.base import Occurrence, PeerClosed
from pdlink.transport.mapped import MappedTransport
from pdlink_bench.carried import Carried
from tests.conformance.transports.side import Side, join


class Held(MappedTransport):
    """Tells of the end of a peer in the third poll after it was closed."""

    def __init__(self) -> None:
        super().__init__(threads=1, within_process=True)
        self._held: list[Occurrence] = []
        self._polls_left = 3

    def poll(self) -> list[Occurrence]:
        self._held += super().poll()
        if self._polls_left:
            self._polls_left -= any(isinstance(one, PeerClosed) for one in self._held)
            return []
        told, self._held = self._held, []
        return told


@pytest.mark.timeout(60)
def test_end_of_a_peer_is_told_whose_connection_is_taken_only_then() -> None:
    writer, owner = Side(Carried(MappedTransport(threads=1, within_process=True))), Side(carried := Carried(Held()))
    for side in (writer, owner):
        side.add_buffer(4096, 0)
    with carried._lock:  # takes no connection meanwhile
        join(writer, owner)
        writer.close_peer("owner")
        writer.wait_closed("owner")
        owner.close_peer("writer")
    assert owner.closed_within("writer", 10.0)
    for side in (writer, owner):
        side.close()
