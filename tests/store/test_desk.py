"""What clients of a store process hold, under random schedules, and with planted bugs; what they are told."""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest

from pdlink.store import wire
from pdlink.store.server.desk import Desk, _Coming

from .desk_world import MOVES, World
from .stubs import SHAPE

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_SCHEDULES = 240


def schedule(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2**40) for _ in range(rng.randint(200, 800))]


def test_no_schedule_breaks_the_desk() -> None:
    counts: Counter[str] = Counter()
    for seed in range(NUM_SCHEDULES):
        world = World()
        try:
            world.play(schedule(seed))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error
        counts += world.counts
    reached = {"stood", "garbage refused", "expired", "resumed", "buried", "told", *MOVES}
    assert {name for name, count in counts.items() if count} >= reached, counts


def _leases_outlive_the_connection(_: Any) -> Callable[..., None]:
    return lambda self: self._fetches.clear()


def _reservations_end_with_the_connection(right: Any) -> Callable[..., None]:
    def disconnected(self: Desk) -> None:
        right(self)
        self.resumed(())

    return disconnected


def _all_end(right: Any) -> Callable[..., None]:
    return lambda self, writing: right(self, ())


def _none_ends(_: Any) -> Callable[..., None]:
    return lambda self, writing: None


def _everybodys(_: Any) -> Callable[..., Any]:
    def taken(self: Desk, serials: Any) -> Any:
        known = self._store._catalog._writing
        found = [(known[serial].slot, shape) for serial in serials if serial in known for shape in [SHAPE]]
        for slot, _ in found:
            self._writing.pop(slot.serial, None)
        return found

    return taken


def _dead_stay(_: Any) -> Callable[..., None]:
    return lambda self: self.disconnected()


def _always_stood(right: Any) -> Callable[..., None]:
    def handle(self: Desk, message: wire.Request) -> None:
        tell = self.tell
        if isinstance(message, wire.Release):
            self.tell = lambda _: tell(wire.Count(message.call, 1))
        right(self, message)
        self.tell = tell

    return handle


MUTANTS: dict[str, tuple[str, Callable[[Any], Callable[..., Any]]]] = {
    "leases outlive their connection": ("disconnected", _leases_outlive_the_connection),
    "reservations end with their connection": ("disconnected", _reservations_end_with_the_connection),
    "a client that comes again has lost what it writes": ("resumed", _all_end),
    "a client that comes again keeps what it has forgotten": ("resumed", _none_ends),
    "a client ends what is another one's": ("_taken", _everybodys),
    "reservations of the dead stay": ("gone", _dead_stay),
    "a release is always told that the lease stood": ("handle", _always_stood),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_planted_bug_is_found(name: str) -> None:
    method, change = MUTANTS[name]

    def breaks(seed: int) -> bool:
        try:
            World().play(schedule(seed))
        except (AssertionError, KeyError):
            return True
        return False

    with patch.object(Desk, method, change(getattr(Desk, method))):
        assert any(breaks(seed) for seed in range(NUM_SCHEDULES))


def test_lives_of_a_store_that_number_alike_are_found() -> None:
    """A late commit would mean another record."""
    with patch("pdlink.store.store.secrets.randbelow", lambda _: 0):
        for seed in range(NUM_SCHEDULES):
            try:
                World().play(schedule(seed))
            except (AssertionError, KeyError):
                return
    raise AssertionError("no schedule has found it")


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
