"""`Books`: what a store knows of the records in its arena, under one lock, and whom it tells of them.

The catalog knows who may write, read and drop a record. Beside it stands what copies and checks must know of a
readable one (its shape, whether its header has sums, whether anybody has compared them), and what changed since
listeners and metrics were told.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from itertools import islice, pairwise
from math import inf, isinf
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

from pdlink.events import ChangeTeller, RecordsChanged, WriteDropped, emit
from pdlink.store.interface import MEMORY, RecordChange

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from pdlink.kv.hashing import Preimage
    from pdlink.store.below import GuardedTier
    from pdlink.store.catalog import Catalog
    from pdlink.store.kept import Emptied
    from pdlink.store.record import RecordShape
    from pdlink.store.slots import Change, Slot, SlotLease

_T = TypeVar("_T")

_PIECE_KEYS = 512
"""Of a long prompt, looked at while the lock is held: some milliseconds."""
_LET_OTHERS_S = 2e-5
"""The kernel adds some more."""


def pieces(some: Sequence[_T], *, first: int = _PIECE_KEYS, last_first: bool = False) -> Iterator[Sequence[_T]]:
    """Keys of a prompt, or something of each, in parts for which the lock is held: others have it in between.

    first: how many the first part has.
    """
    bounds = [0, *range(first, len(some), _PIECE_KEYS), len(some)] if some else []
    parts = [*pairwise(bounds)]
    for index, (begin, end) in enumerate(reversed(parts) if last_first else parts):
        if index:
            let_others()
        yield some[begin:end]


def let_others() -> None:
    """Have the lock that was just released: a thread that wakes up for it is slower than one that takes it again."""
    time.sleep(_LET_OTHERS_S)


class Books:
    """The caller holds `lock`, but where it says otherwise."""

    def __init__(self, catalog: Catalog, epoch_s: Callable[[], float]) -> None:
        """epoch_s: what the catalog's clock lacks to the one that all hosts share; it changes when that one is
        set."""
        self.lock = threading.Lock()
        """Held for decisions only: nobody copies, hashes or waits under it."""
        self.room_taken = threading.Condition(self.lock)
        """Notified when there is work for the keeper."""
        self.catalog = catalog
        self.shapes: dict[bytes, RecordShape] = {}
        """Of the readable records."""
        self.summed: set[bytes] = set()
        """Keys of readable records whose headers have their sums already."""
        self.unchecked: set[bytes] = set()
        """Keys of readable records that nobody has compared with their sums since they came from a tier."""
        self.debts: dict[GuardedTier, OrderedDict[bytes, None]] = {}
        """By tier, which may have the name of one that was removed: keys of readable records that it is to have and
        has not got, next one first (`WriteThrough`)."""
        self.num_dropped = 0
        """Records that were evicted while a tier was still to have them, since the last flush."""
        self._epoch_s = epoch_s
        self._ends_at_s: dict[bytes, float] = {}
        """When records are found no more, by the clock that all hosts share; only of records that were asked for."""
        self._uncounted: list[Change] = []
        """Changes that no metric has heard of."""
        self._dropped: Counter[str] = Counter()
        """Debts by tier whose records were evicted, and that no metric has heard of."""
        self._announcer: ChangeTeller[RecordChange] = ChangeTeller()

    def steps(self, some: Iterator[_T]) -> Iterator[list[_T]]:
        """The items of `some`, in pieces. Each piece is made under the lock, and others have the lock in between.

        Call it without the lock. A caller that stops early leaves the rest of `some` undone.
        """
        while True:
            with self.lock:
                piece = list(islice(some, _PIECE_KEYS))
                self.note()
            yield piece
            if len(piece) < _PIECE_KEYS:
                return
            let_others()

    def while_more(self, step: Callable[[], bool]) -> None:
        """Call `step` under the lock until it answers False; others have the lock in between. Without the lock."""
        more = True
        while more:
            with self.lock:
                more = step()
            let_others()

    def leases(self, keys: Sequence[bytes], holder: str, request: str, deadline_s: float) -> list[SlotLease]:
        """The longest readable prefix of `keys`, as `Catalog.lease`, in pieces. Without the lock."""
        leases = []
        for piece in pieces(keys):
            with self.lock:
                leases.append(self.catalog.lease(piece, holder, request, deadline_s))
            if len(leases[-1].slots) < len(piece):
                break
        return leases

    def commit(
        self,
        slots: Sequence[Slot],
        shape: RecordShape,
        *,
        summed: bool,
        checked: bool = True,
        expires_at_s: float = inf,
        preimages: Mapping[bytes, Preimage | None] | None = None,
    ) -> list[bytes]:
        """The shares of these slots are there; the keys that are readable now. Call `tell` afterwards.

        summed, checked: of the records. expires_at_s: by the clock that all hosts share, if sooner than was asked.
        preimages: of the keys, for listeners.
        """
        readable = self.catalog.commit(slots, expires_at_s - self._epoch_s())
        self.note(preimages or {})
        self.shapes.update(dict.fromkeys(readable, shape))
        for slot in slots:
            if slot.key not in self.shapes:  # it was removed while it was sealed
                self._ends_at_s.pop(slot.key, None)
        self.summed.update(readable if summed else ())
        self.unchecked.update(() if checked else readable)
        return readable

    def expires_at_s(self, key: bytes) -> float:
        """Of a record, by the clock that all hosts share: the same whenever it is asked, because two tiers may get a
        copy of its header at the same time."""
        expires_s = self.catalog.expires_s(key)
        if isinf(expires_s):  # for ever, or it is not here
            return expires_s
        return self._ends_at_s.setdefault(key, round(expires_s + self._epoch_s(), 3))

    def note(self, preimages: Mapping[bytes, Preimage | None] = MappingProxyType({})) -> None:
        """Bring the books up to the catalog's last change. `tell` tells listeners and metrics of it later."""
        if not self.catalog.changes:
            return
        changes, self.catalog.changes = self.catalog.changes, []
        for change in changes:
            self._uncounted.append(change)
            is_there = change.kind == "stored"
            if not is_there:
                self.summed.discard(change.key)
                self.unchecked.discard(change.key)
                self.shapes.pop(change.key, None)
                self._ends_at_s.pop(change.key, None)
                for tier, debts in self.debts.items():
                    if change.key in debts:
                        del debts[change.key]
                        self._dropped[tier.name] += change.kind == "evicted"
            known = preimages.get(change.key) if is_there else None
            self._announcer.note(RecordChange(MEMORY, is_there, change.key, known))

    def announce(self, preimages: Iterable[tuple[bytes, Preimage | None]]) -> None:
        """As `AnyStore.announce`. `tell` tells it."""
        for key, preimage in preimages:
            if preimage is not None and self.catalog.lookup([key]):
                self._announcer.note(RecordChange(MEMORY, True, key, preimage))

    def clear(self) -> int:
        """Forget all records, however many, at once; how many there were. `tell` frees them."""
        self.note()
        was = self.catalog.clear()
        was.tables.extend((self.shapes, self.summed, self.unchecked, self._ends_at_s, *self.debts.values()))
        self.shapes, self.summed, self.unchecked, self._ends_at_s = {}, set(), set(), {}
        self.debts = {tier: OrderedDict() for tier in self.debts}
        self._announcer.note_all(self._gone(was))
        return len(was.records)

    def _gone(self, was: Emptied) -> Iterator[RecordChange]:
        """What goes with a clear, newest first; frees it meanwhile. Without the lock."""
        counts = Counter[int]()
        while was.records:
            key, record = was.records.popitem()
            if not record.missing:
                counts[record.slot.nbytes] += 1
                yield RecordChange(MEMORY, False, key)
        for nbytes, count in counts.items():
            emit(RecordsChanged(kind="removed", records=count, nbytes=count * nbytes))
        was.free()

    # --- Without the lock

    def tell(self) -> None:
        """What came and went, to listeners and metrics; after every change that the catalog may have made."""
        with self.lock:
            self.note()
            changes, self._uncounted = self._uncounted, []
            dropped, self._dropped = self._dropped, Counter()
            self.num_dropped += dropped.total()
        self._announcer.tell()
        for tier in dropped.elements():
            emit(WriteDropped(tier=tier))
        for (kind, nbytes), count in Counter((change.kind, change.nbytes) for change in changes).items():
            emit(RecordsChanged(kind=kind, records=count, nbytes=count * nbytes))

    def wait_told(self) -> None:
        """Until listeners have heard what came and went by now."""
        self._announcer.wait_told()

    def listen(self, changed: Callable[[RecordChange], None]) -> None:
        """As `AnyStore.listen`, of the arena."""
        with self.lock:
            self.note()
            readable = self.catalog.readable()
            self._announcer.add(changed, (RecordChange(MEMORY, True, key) for key in readable))
        self._announcer.tell()

    def check(self) -> None:
        """Raise AssertionError if the books are wrong."""
        with self.lock:
            self.note()
            self.catalog.check()
            readable = set(self.catalog.readable())
            assert self.shapes.keys() == readable, "shapes of other records than are readable"
            assert self.summed <= readable
            assert self.unchecked <= readable
            assert self._ends_at_s.keys() <= readable | self.catalog.writing()
