"""What a store process tells a client of a fetch while its chunks come."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from pdlink.store import wire
from pdlink.store.server.desk import _Coming


def test_chunks_that_come_while_a_client_does_not_read_wait_as_one_message() -> None:
    come: list[Any] = []
    fetch: Any = SimpleNamespace(leading=lambda first: come[first:], unchecked=frozenset())
    told: list[wire.Coming] = []
    line: list[Callable[[], None]] = []
    desk: Any = SimpleNamespace(tell=told.append, in_line=line.append)
    coming = _Coming(desk, 7, fetch)
    for serial in range(10_000):
        come.append(SimpleNamespace(serial=serial, offset=serial, nbytes=1, key=b"k"))
        coming.more()
    assert len(line) == 1
    line.pop()()
    assert [(each.first, len(each.slots)) for each in told] == [(0, 10_000)]
    come.append(SimpleNamespace(serial=10_000, offset=0, nbytes=1, key=b"k"))
    coming.more()
    line.pop()()
    assert [(each.first, len(each.slots)) for each in told[1:]] == [(10_000, 1)]
