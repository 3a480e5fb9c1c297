"""`Fetch`: a prefix on its way into the arena, leased there until it is closed."""

from __future__ import annotations

from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdlink.store.interface import Wanted
    from pdlink.store.record import RecordShape
    from pdlink.store.slots import Lease, Slot


@dataclass(eq=False)
class Arrival:
    """A record that a thread reads into its slot. Those who want it wait for the same one."""

    slot: Slot
    shape: RecordShape
    waiting: list[tuple[Fetch, int]] = field(default_factory=list)
    """Who, and which of their chunks it is."""

    @property
    def checks(self) -> bool:
        """Whether one of them relies on the store to compare the sums."""
        return not all(fetch.wanted.checks for fetch, _ in self.waiting)


class Fetch:
    """Implements `AnyFetch`. Everything else of it is for `Fetching`, under the lock of the books."""

    def __init__(
        self, wanted: Wanted, give_up_s: float, deadline_s: float, release: Callable[[Fetch, Sequence[Slot]], bool]
    ) -> None:
        """give_up_s: when to go on with what is there. deadline_s: end of the leases."""
        self.wanted, self.give_up_s, self.deadline_s = wanted, give_up_s, deadline_s
        self.unchecked: set[bytes] = set()
        """As `AnyFetch.unchecked`."""
        self.slots: list[Slot | None] = []
        """One per chunk; None while it is on its way, or if it does not come."""
        self.leases: list[Lease] = []
        self.closed = False
        self.is_begun = False
        """Whether all chunks are in `slots` that will ever be."""
        self.failed_at: int | None = None
        """The first chunk that does not come."""
        self._release = release
        self.done: Future[tuple[Slot, ...]] = Future()
        """The leading chunks that are in the arena, once no more will come. Set in any thread."""

    def add(self, slot: Slot | None) -> int:
        """The next chunk; its index."""
        self.slots.append(slot)
        return len(self.slots) - 1

    def settled(self, index: int, slot: Slot | None) -> None:
        """Chunk `index` has come, or will not."""
        self.slots[index] = slot
        if slot is None and (self.failed_at is None or index < self.failed_at):
            self.failed_at = index

    @property
    def is_settled(self) -> bool:
        """Whether nothing that matters is on its way."""
        return self.is_begun and None not in self.slots[: self.failed_at]

    def finish(self) -> None:
        """Set `done`, if it is not; without the store's lock, because callbacks run here."""
        leading = takewhile(lambda slot: slot is not None, tuple(self.slots))  # more may come meanwhile
        with suppress(InvalidStateError):
            self.done.set_result(tuple(slot for slot in leading if slot is not None))

    def close(self, wrong: Sequence[Slot] = ()) -> bool:
        """As `AnyFetch.close`."""
        return self._release(self, wrong)
