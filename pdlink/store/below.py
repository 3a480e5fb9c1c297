"""`Below`: the tiers below memory, each behind a guard with threads of its own, in the order of search."""

from __future__ import annotations

import logging
import os
import threading
import time
from concurrent.futures import CancelledError, wait
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pdlink.store.guard import GuardedTier
from pdlink.store.interface import PlaceState
from pdlink.store.line import Line
from pdlink.store.record import Miss, expiry, is_hashed, pack, seal, unseal
from pdlink.store.tiers.base import ListingTier, ReadOnly

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdlink.memory.buffers import Bytes
    from pdlink.store.cleared import Cleared
    from pdlink.store.codec import Codec
    from pdlink.store.record import RecordShape
    from pdlink.store.tiers.base import Tier

log = logging.getLogger(__name__)

_LEARN_S = 2.0
"""For the file that says what was cleared."""
_CLOSE_S = 1.0
"""For tiers to close, at least."""


class Brought(NamedTuple):
    """A record that a tier had."""

    expires_at_s: float
    summed: bool
    """Whether its header has sums."""
    checked: bool
    """Whether its payload is what was put; else who reads it compares the sums."""


class Question:
    """Which records of a batch one tier has: asked once, for all of them, when the first of them is to be written."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        self._keys = keys
        self._known: dict[bytes, bool] | None = None
        self._lock = threading.Lock()

    def has(self, key: bytes, ask: Callable[[Sequence[bytes]], list[bool]]) -> bool | None:
        """Whether the tier has it; None where it does not answer."""
        with self._lock:
            if self._known is None:
                self._known = dict(zip(self._keys, ask(self._keys), strict=False))
        return self._known.get(key)


class Below:
    """Thread-safe. Knows records by key and bytes; who may read or write the bytes is for the caller to hold."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        names: Sequence[str],
        *,
        codecs: Sequence[Codec | None],
        cleared: Cleared,
        hashed: bool,
        deadline_s: float,
        clock: Callable[[], float],
    ) -> None:
        """Starts the threads. names, codecs: one each. deadline_s: longest call before a tier is left alone.

        hashed: records have a digest of their own, also where every tier checks what it gives back.
        cleared: what was cleared before and may still be there.
        """
        self._cleared = cleared
        self.hashed = hashed or not all(getattr(tier, "verifies", False) for tier in tiers)
        """One for all tiers: copies of one header may go to two of them at the same time."""
        self._deadline_s, self._clock = deadline_s, clock
        self._noting = noting = Line("pdlink-store-note")
        self.tiers = [
            GuardedTier(tier, name, codec=codec, cleared=cleared, noting=noting, deadline_s=deadline_s, clock=clock)
            for tier, name, codec in zip(tiers, names, codecs, strict=True)
        ]
        learned = [noting.submit(tier.learn_cleared) for tier in self.tiers]
        done, late = wait(learned, _LEARN_S)
        for each in done:
            each.result()
        if late:
            log.warning(
                "the file that says what was cleared does not answer: nothing is found in tiers before it does"
            )

    def close(self) -> None:
        """End the threads, as far as the tiers let them within one deadline for all."""
        lines = [line for tier in self.tiers for line in tier.lines]
        for line in lines:
            line.end()
        deadline_s = time.monotonic() + self._deadline_s
        for line in lines:
            line.close(max(0.0, deadline_s - time.monotonic()))
        closing = Line("pdlink-store-close", len(self.tiers))
        for tier in self.tiers:
            closing.put(tier.tier.close)
        for line in (closing, self._noting):
            line.close(max(_CLOSE_S, deadline_s - time.monotonic()))

    # --- Asking

    def ask(self, keys: Sequence[bytes], timeout_s: float) -> list[int]:
        """Per key the index of the first tier that says it has it in time; -1 for none."""
        first = [-1] * len(keys)
        if not keys:
            return first
        answers: list[list[bool]] = [[] for _ in self.tiers]
        missing = threading.Semaphore(0)
        gone = threading.Event()

        def ask(index: int, tier: GuardedTier) -> None:
            if not gone.is_set():
                answers[index] = self._contains(tier, keys)
                missing.release()

        asked = [(index, tier) for index, tier in enumerate(self.tiers) if tier.available]
        for index, tier in asked:
            if not tier.askers.put(partial(ask, index, tier)):
                missing.release()
        deadline_s = self._clock() + timeout_s
        for _ in asked:
            missing.acquire(timeout=max(0.0, deadline_s - self._clock()))
        gone.set()
        for index, answer in reversed(list(enumerate(answers))):
            for at, found in enumerate(answer[: len(keys)]):
                if found and not self.tiers[index].hides(keys[at]):
                    first[at] = index
        return first

    def prefix_in(self, index: int, keys: Sequence[bytes]) -> int:
        """How many leading keys one tier says it has. Waits for it in this thread."""
        return (*self._contains(self.tiers[index], keys), False).index(False)

    def _contains(self, tier: GuardedTier, keys: Sequence[bytes]) -> list[bool]:
        """Not of what is hidden now: the tier may drop it while it answers."""
        nothing: list[bool] = []
        hidden = {key for key in keys if tier.hides(key)} if tier.forgets else ()
        found = tier.call("contains", partial(tier.tier.contains, keys), nothing)
        return [has and key not in hidden for key, has in zip(keys, found, strict=False)] if hidden else found

    # --- Records

    def bring(self, first: int, key: bytes, record: Bytes, shape: RecordShape, *, checks: bool) -> Brought | None:
        """Read a record, from the first tier from `first` on that has it whole. In this thread.

        checks: the payload, too, where the tier does not see to that.
        """
        for tier in self.tiers[first:]:
            if tier.hides(key):
                continue
            nbytes = tier.call("get", partial(tier.tier.get, key, record.data), None, len(record))
            if nbytes is None:
                continue
            miss = unseal(record, key, shape, nbytes, verified=tier.verifies or not checks)
            if miss is None and not (tier.verifies or is_hashed(record)):
                miss = Miss("payload_checksum")  # of those who need none: nobody could check it
            if miss is None and (expires_at_s := expiry(record)) > time.time():
                if self.hashed and not is_hashed(record):  # put when there were other tiers
                    seal(record, key, shape, expires_at_s)
                return Brought(expires_at_s, summed=is_hashed(record), checked=tier.verifies or checks)
            if miss is not None:
                log.warning("tier %s: record %s is none: %s", tier.name, key.hex()[:16], miss.reason)
            tier.writers.put(partial(self._remove, tier, key), alone=True)
        return None

    def forget(self, key: bytes) -> None:
        """Remove a record that was found wrong from the tiers that check none. In the background."""
        for tier in self.tiers:
            if not tier.verifies:
                tier.writers.put(partial(self._remove, tier, key), alone=True)

    def _remove(self, tier: GuardedTier, key: bytes) -> None:
        """While nobody writes to the tier."""
        tier.call("remove", partial(tier.tier.remove, key), None)

    def offer(
        self,
        index: int,
        key: bytes,
        record: Bytes,
        shape: RecordShape,
        expires_at_s: float | None,
        *,
        summed: bool,
        question: Question,
    ) -> bool | None:
        """Whether one tier has a record afterwards, whose bytes nobody changes meanwhile. In this thread.

        None if the bytes are not the record that was sealed.

        expires_at_s: by the clock that all hosts share, `time.time`; None for a record that is sealed already.
        summed: as `seal`. question: of the batch that the record is one of.
        """
        tier = self.tiers[index]
        if tier.hides(key):
            return False
        found = question.has(key, partial(self._contains, tier))
        if found is None or found:
            return bool(found)
        if expires_at_s is not None:
            seal(record, key, shape, expires_at_s, hashed=self.hashed, summed=summed)
        elif unseal(record, key, shape) is not None:
            return None
        stored = pack(record, shape, tier.codec)
        return tier.call("put", partial(tier.tier.put, key, stored.data), False, len(stored))

    def repack(self, index: int, key: bytes, shape: RecordShape, codec: Codec | None) -> bool:
        """Whether one tier has a record in that codec afterwards; readers miss it for a moment. In this thread."""
        tier, record = self.tiers[index], np.empty(shape.nbytes, np.uint8)
        nbytes = tier.call("get", partial(tier.tier.get, key, record.data), None, len(record))
        if (
            nbytes is None
            or unseal(record, key, shape, nbytes, verified=tier.verifies) is not None
            or tier.hides(key)
        ):
            return False
        seal(record, key, shape, expiry(record), hashed=self.hashed)
        stored = pack(record, shape, codec)
        self._remove(tier, key)
        return tier.call("put", partial(tier.tier.put, key, stored.data), False, len(stored))

    def note_clear(self, keys: Sequence[bytes] | None, places: Sequence[str] | None) -> tuple[bytes, bool]:
        """Note that these records, or all, are to go from the tiers of these names, or from all. Waits for a disk, no
        longer than the deadline.

        Gives what names the clear, for `doom`, and whether it is noted.
        """
        media = [tier.medium for tier in self._in(places) if not isinstance(tier.tier, ReadOnly)]
        try:
            return self._noting.submit(partial(self._cleared.add, media, keys)).result(self._deadline_s)
        except (TimeoutError, CancelledError):
            log.error("a clear could not be noted within %.1f s: what tiers have is found again", self._deadline_s)
            return os.urandom(8), False

    def keys_ending(self, ending: bytes, places: Sequence[str] | None) -> tuple[list[bytes], bool]:
        """Keys in the tiers of these names, or in all, that end so; and whether all those tiers could say it.

        Waits for the tiers, for each no longer than the deadline.
        """
        found, whole = list[bytes](), True
        for tier in self._in(places):
            if isinstance(tier.tier, ReadOnly):
                continue
            known: list[bytes] | None = None
            if isinstance(tier.tier, ListingTier):
                listed = partial(tier.call, "list", partial(tier.tier.keys_ending, ending), known)
                with suppress(TimeoutError, CancelledError):
                    known = tier.askers.submit(listed).result(self._deadline_s)
            if known is None:
                log.warning("tier %s does not say what it has: what is cleared may be found there again", tier.name)
                whole = False
            else:
                found += known
        return found, whole

    def doom(self, keys: Sequence[bytes] | None, places: Sequence[str] | None, clear: bytes) -> None:
        """Forget these records, or all, in the tiers of these names, or in all: hidden now, removed later.

        The caller sees to it that no record becomes known meanwhile.
        """
        for tier in self._in(places):
            for key in list(tier.queued) if keys is None else keys:
                tier.queued.pop(key, None)
            tier.doom(keys, clear)

    def _in(self, places: Sequence[str] | None) -> list[GuardedTier]:
        return [tier for tier in self.tiers if places is None or tier.name in places]

    def try_again(self) -> None:
        """Have tiers that were away forget what was cleared meanwhile, or before this process began."""
        for tier in self.tiers:
            tier.try_again()

    def flush(self, timeout_s: float) -> bool:
        """Wait until the writers have done what is in line; whether `timeout_s` was enough."""
        written = threading.Semaphore(0)
        lines = [tier.writers.put(written.release, alone=True) for tier in self.tiers]
        deadline_s = self._clock() + timeout_s
        return all(lines) and all(written.acquire(timeout=max(0.0, deadline_s - self._clock())) for _ in self.tiers)

    # --- What others want to know

    def states(self) -> list[PlaceState]:
        return [
            PlaceState(
                guarded.name,
                guarded.tier.nbytes,
                guarded.tier.capacity_nbytes,
                None,
                answers=guarded.answers,
                forgets=guarded.forgets,
                problem=guarded.problem,
            )
            for guarded in self.tiers
        ]

    def problems(self) -> dict[str, str]:
        """By name: why a tier keeps less than its settings say."""

        def left_alone(tier: GuardedTier) -> str:
            return f"{tier.failure or 'it stalled'} ({tier.medium}); it is left alone for a while"

        return {tier.name: left_alone(tier) if tier.is_left_alone else tier.problem for tier in self.tiers}

    def answering(self) -> dict[str, bool]:
        return {tier.name: tier.answers for tier in self.tiers}

    def gauges(self) -> dict[str, float]:
        """Bytes by name."""
        return {tier.name: tier.tier.nbytes for tier in self.tiers}
