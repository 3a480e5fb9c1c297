"""One timer for the deadlines of all requests."""

from __future__ import annotations

import asyncio

import pytest

from pdlink_proxy.alarms import Alarms

from .virtual import in_virtual_time


def test_alarms_ring_once_each_at_their_time_whatever_others_do(caplog: pytest.LogCaptureFixture) -> None:
    rang: list[tuple[str, float]] = []

    async def play() -> None:
        loop, alarms = asyncio.get_running_loop(), Alarms()

        def of(name: str) -> None:
            rang.append((name, loop.time()))

        def late() -> None:
            of("late")

        def early() -> None:
            of("early")
            alarms.due_s.pop(cleared)
            alarms.set(again, loop.time())
            raise RuntimeError("its own")

        def cleared() -> None:
            of("cleared")

        def moved() -> None:
            of("moved")

        def again() -> None:
            of("again")

        for alarm, due_s in ((late, 30.0), (moved, 20.0), (early, 2.0), (cleared, 2.0), (moved, 3.0), (moved, 40.0)):
            alarms.set(alarm, due_s)
        await asyncio.sleep(35)
        alarms.set(late, 36.0)
        await asyncio.sleep(10)
        assert not alarms.due_s

    in_virtual_time(play)
    assert rang == [("early", 2.0), ("again", 2.0), ("late", 30.0), ("late", 36.0), ("moved", 40.0)]
    assert "its own" in caplog.text
