"""`Below`: the tiers below memory, in the order of search, each behind a guard with threads of its own."""

from __future__ import annotations

import logging
import os
import threading
import time
from concurrent.futures import CancelledError, wait
from contextlib import suppress
from functools import partial
from itertools import compress
from typing import TYPE_CHECKING, TypeVar

from pdlink.breaker import Breaker
from pdlink.events import TierCalled, emit
from pdlink.store.cleared import EVERYTHING
from pdlink.store.interface import PlaceState
from pdlink.store.line import FIRST, Line, Width
from pdlink.store.tiers.base import DAMAGED, ListingTier, ReadOnly, RoutedTier, RunTier, SettlingTier, TellingTier

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdlink.store.cleared import Cleared
    from pdlink.store.codec import Codec
    from pdlink.store.tiers.base import Tier

log = logging.getLogger(__name__)
_T = TypeVar("_T")

_LEARN_S = 2.0
"""For the file that says what was cleared."""
_CLOSE_S = 1.0
"""For tiers to close, at least."""
_FORGET = ("remove", "clear", "settle", "list")
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
"""After a record that a tier did not take, before it is offered another one."""
_REFUSALS = 3
"""In a row, before operators are told."""
RUN_NBYTES, FIRST_RUN_NBYTES = 4 << 20, 1 << 20
"""Bytes of records that a tier moves in one call, where it can. The first records of a fetch come in shorter runs: it
gets none of a run before all are there."""
_NOBODYS = bytes(16)
"""Key of no record."""
_OF_SERVERS = "; see that it runs and that tiers.remote_url is right; it is a miss until it answers"


class GuardedTier:
    """A tier behind its breakers, with threads that wait for it, and never an exception."""

    def __init__(
        self,
        tier: Tier,
        name: str,
        *,
        codec: Codec | None = None,
        cleared: Cleared,
        noting: Line,
        deadline_s: float,
        clock: Callable[[], float],
    ) -> None:
        """name: its own one. codec: of what is put; what comes back says itself how it is packed.

        cleared: by earlier processes, and not dropped by the tier yet; read and written in `noting`'s thread.
        """
        self.tier, self.name, self.codec = tier, name, codec
        self.verifies = tier.verifies
        """Whether what `get` brings is what was put, by a checksum of the tier's own."""
        self.askers = Line(f"pdlink-ask-{name}", FIRST if isinstance(tier, RoutedTier) else 1)
        """Several where one store that does not answer is not to keep look-ups from others."""
        self.readers = Line(f"pdlink-read-{name}", FIRST, Width(FIRST))
        self.writers = Line(f"pdlink-write-{name}", FIRST, Width(FIRST))
        self.queued_nbytes = 0
        """Of records that wait to be written; the store's lock guards it."""
        self.queued: dict[bytes, int] = {}
        """By their keys the serials of their slots, unless they were cleared since; the store's lock guards it."""
        self.refuses = False
        """Whether it did not take the last record that it was offered. The store's lock guards this and the next."""
        self._refusals, self._told = 0, ""
        self.try_again_s = self._pause_s = 0.0
        """When to offer it one again, and how long the pause before that is."""
        self._unheard = tier.is_server
        """Whether it is a server that has answered no look-up since the last one that failed, or none yet."""
        self._looking = False
        self.medium = tier.medium
        """What keeps the records, by a name that the next process knows it by."""
        self._cleared, self._noting = cleared, noting
        self._knows_cleared = False
        self._doomed: dict[bytes, bytes] = {}
        """Cleared records, or `EVERYTHING`, until the tier has dropped them: they are not found meanwhile. With the
        clear that named them last. `_lock` guards changes."""
        self._asking, self._moving, self._forgetting = (Breaker(deadline_s) for _ in range(3))
        """Of look-ups, of calls that move records, and of calls that remove them. A tier that fails at one of the
        first two is left alone; one that only removes nothing is read."""
        self.removed = False
        """Nothing is found in it any more, and nothing is asked of it."""
        self._kept_away = False
        """Whether it was left alone after the last call."""
        self.failure = ""
        """Of the last call that failed; empty while the tier answers, and of one that only stalled."""
        self._clock = clock
        self._lock = threading.Lock()
        self._in_runs = tier if isinstance(tier, RunTier) else None

    def took(self, now_s: float, *, taken: bool) -> None:
        """Whether it took a record that it was offered. Under the store's lock."""
        if taken:
            self._pause_s = 0.0
        elif not self.refuses or now_s >= self.try_again_s:
            self._pause_s = min(_LONGEST_PAUSE_S, 2 * self._pause_s or _FIRST_PAUSE_S)
            self.try_again_s = now_s + self._pause_s
        self.refuses, self._refusals = not taken, 0 if taken else self._refusals + 1
        if self.problem != self._told:
            self._told = self.problem
            if self._told:
                log.warning("tier %s: %s", self.name, self._told)
            else:
                log.warning("tier %s takes records again", self.name)

    @property
    def problem(self) -> str:
        """Why it keeps less than its settings say; empty while it does not."""
        if not self._knows_cleared:
            return "the file that says what was cleared does not answer; the tier is used as soon as it does"
        return self.tier.problem or ("it takes no records" if self._refusals >= _REFUSALS else "")

    @property
    def available(self) -> bool:
        """Whether it would be asked now."""
        with self._lock:
            return self._allows(self._clock(), self._moving)

    @property
    def answers(self) -> bool:
        """False while it is left alone, and while its medium has not answered yet."""
        return self.tier.answers and not self.is_left_alone

    @property
    def is_left_alone(self) -> bool:
        """From a failure or stall on, until a call succeeds."""
        with self._lock:
            return self._keeps_away(self._clock())

    @property
    def stalls(self) -> bool:
        """Whether a call takes longer than the deadline."""
        with self._lock:
            return any(one.stalls(self._clock()) for one in (self._asking, self._moving, self._forgetting))

    def runs(self, some: Sequence[tuple[_T, int]], most_nbytes: int = RUN_NBYTES) -> list[list[_T]]:
        """Records, each with its bytes, in parts that it is to read or write in one call."""
        runs: list[list[_T]] = []
        run_nbytes = 0
        for one, nbytes in some:
            run_nbytes += nbytes
            if not runs or self._in_runs is None or run_nbytes > most_nbytes:
                runs.append([])
                run_nbytes = nbytes
            runs[-1].append(one)
        return runs

    def get(self, wanted: Sequence[tuple[bytes, memoryview]]) -> list[int | None]:
        """As `Tier.get`, of each key and the memory for its record; None for what a failure leaves out."""
        if wanted and self._in_runs is not None:
            nothing: list[int | None] = []
            sizes = [len(into) for _, into in wanted]
            got = self.call("get", partial(self._in_runs.get_run, wanted), nothing, sizes)
            if got or len(wanted) == 1:
                return got or [None]
        return [self.call("get", partial(self.tier.get, *each), None, [len(each[1])]) for each in wanted]

    def put(self, records: Sequence[tuple[bytes, memoryview]]) -> list[bool]:
        """As `Tier.put`, of each."""
        if records and self._in_runs is not None:
            nothing: list[bool] = []
            sizes = [len(record) for _, record in records]
            put = self.call("put", partial(self._in_runs.put_run, records), nothing, sizes)
            if put or len(records) == 1:
                return put or [False]
        return [self.call("put", partial(self.tier.put, *each), False, [len(each[1])]) for each in records]

    def call(self, what: str, function: Callable[[], _T], otherwise: _T, sizes: Sequence[int] = ()) -> _T:
        """What `function` gives, in this thread; `otherwise` if the tier is kept away or the call raises.

        sizes: bytes of the records that it moves, of which it may give a list.
        """
        with self._lock:
            began_s = self._clock()
            breaker = self._asking if what == "contains" else self._forgetting if what in _FORGET else self._moving
            if not self._allows(began_s, breaker):
                return otherwise
            call = breaker.begin(began_s)
        failed = True
        result = otherwise
        try:
            result = function()
            failed = False
        except OSError as error:
            told, self.failure = self.failure, f"{what} failed: {error}"
            if self.failure != told:
                remedy = _OF_SERVERS if self.tier.is_server else ""
                log.warning("tier %s (%s): %s%s", self.name, self.medium, self.failure, remedy)
        except Exception as error:
            self.failure = f"{what} failed: {type(error).__name__}: {error}"
            log.exception("tier %s (%s): %s failed", self.name, self.medium, what)
        with self._lock:
            now_s = self._clock()
            breaker.end(call, now_s, failed=failed)
            kept_away, self._kept_away = self._kept_away, self._keeps_away(now_s)
            now_away = self._kept_away
            if not (failed or now_away):
                self.failure = ""
            if what == "contains" and self.tier.is_server:
                self._unheard = failed
        if now_away and not kept_away:
            log.warning("tier %s is left alone for a while", self.name)
        elif kept_away and not now_away:
            log.warning("tier %s answers again", self.name)
        each = result if sizes and isinstance(result, list) else [result]
        came = [one not in (None, False, DAMAGED) for one in each]
        outcome = "failed" if failed else "done" if any(came) else "missed"
        moved = list(compress(sizes, came))
        emit(
            TierCalled(
                tier=self.name,
                call=what,
                outcome=outcome,
                num_records=len(moved),
                nbytes=sum(moved),
                took_s=now_s - began_s,
            )
        )
        return result

    def _allows(self, now_s: float, breaker: Breaker) -> bool:
        return not self.removed and all(one.allows(now_s) for one in {self._asking, self._moving, breaker})

    def _keeps_away(self, now_s: float) -> bool:
        return self._asking.keeps_away(now_s) or self._moving.keeps_away(now_s)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of them it says it has; none if it does not answer. Not of what is hidden now: the tier may drop it
        while it answers."""
        nothing: list[bool] = []
        hidden = {key for key in keys if self.hides(key)} if self.forgets else ()
        found = self.call("contains", partial(self.tier.contains, keys), nothing)
        return [has and key not in hidden for key, has in zip(keys, found, strict=False)] if hidden else found

    def remove(self, key: bytes) -> None:
        """While nobody writes to it."""
        self.call("remove", partial(self.tier.remove, key), None)

    @property
    def forgets(self) -> bool:
        """Whether it may still have what was cleared, also while nobody knows what that is."""
        return bool(self._doomed) or not self._knows_cleared

    def hides(self, key: bytes) -> bool:
        return self.removed or not self._knows_cleared or key in self._doomed or EVERYTHING in self._doomed

    def learn_cleared(self) -> None:
        """Read what earlier processes cleared; everything is hidden before. By `noting`'s thread."""
        before = self._cleared.of(self.medium)
        with self._lock:
            self._doomed, self._knows_cleared = before | self._doomed, True

    def doom(self, keys: Sequence[bytes] | None, clear: bytes) -> None:
        """Hide these records, or all, and remove them while nobody writes."""
        named = [EVERYTHING] if keys is None else keys
        with self._lock:
            self._doomed.update(dict.fromkeys(named, clear))
        self.writers.put(partial(self._drop, named, clear), alone=True)

    def look_again(self) -> None:
        """Look a record up that nobody has, in `askers`' thread, at a server that has not answered: people hear of it
        before a prompt waits for it. Again, when it would be asked, until it answers."""
        if self._unheard and not self._looking:
            with self._lock:
                may = self._allows(self._clock(), self._asking)
            if may:
                self._looking = True
                self.askers.put(self._look)

    def _look(self) -> None:
        try:
            self.contains([_NOBODYS])
        finally:
            self._looking = False

    def try_again(self) -> None:
        """Have what is doomed still removed, if the tier would be asked now and nothing is in line for it."""
        if self._doomed and not len(self.writers):
            with self._lock:
                may = self._allows(self._clock(), self._forgetting)
            if may:
                self.writers.put(self.drop_again, alone=True)

    def drop_again(self) -> None:
        """Remove what is doomed still, while nobody writes: the tier was left alone, or failed."""
        if self._doomed:
            with self._lock:
                doomed = dict(self._doomed)
            for clear in set(doomed.values()):
                self._drop([key for key, named in doomed.items() if named == clear], clear)

    def _drop(self, keys: Sequence[bytes], clear: bytes) -> None:
        """Remove these records, in this thread; what fails stays doomed, and so does what was cleared again."""
        gone = []
        for key in keys:
            if key == EVERYTHING:
                done = self._done("clear", self.tier.clear)
            else:
                done = self._done("remove", partial(self.tier.remove, key))
            if done:
                gone.append(key)
        if gone and isinstance(self.tier, SettlingTier) and not self._done("settle", self.tier.settle):
            return
        with self._lock:
            for key in gone:
                if self._doomed.get(key) == clear:
                    del self._doomed[key]
        self._noting.put(partial(self._cleared.done, self.medium, gone, clear))

    def _done(self, what: str, function: Callable[[], None]) -> bool:
        def do() -> bool:
            function()
            return True

        return self.call(what, do, False)

    @property
    def lines(self) -> tuple[Line, Line, Line]:
        return self.askers, self.readers, self.writers


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
        self.hashed = hashed or not all(tier.verifies for tier in tiers)
        """One for all tiers: copies of one header may go to two of them at the same time."""
        self._deadline_s, self._clock = deadline_s, clock
        self._noting = Line("pdlink-store-note")
        self.tiers = [self._guarded(*each) for each in zip(tiers, names, codecs, strict=True)]
        """Removed ones, too: places are numbers of them."""
        self._learn(self.tiers)

    def _guarded(self, tier: Tier, name: str, codec: Codec | None) -> GuardedTier:
        return GuardedTier(
            tier,
            name,
            codec=codec,
            cleared=self._cleared,
            noting=self._noting,
            deadline_s=self._deadline_s,
            clock=self._clock,
        )

    def _learn(self, tiers: Sequence[GuardedTier]) -> None:
        done, late = wait([self._noting.submit(tier.learn_cleared) for tier in tiers], _LEARN_S)
        for each in done:
            each.result()
        if late:
            log.warning(
                "the file that says what was cleared does not answer: nothing is found in tiers before it does"
            )

    def add(self, tier: Tier, name: str, codec: Codec | None) -> None:
        """It is asked after the others from now on."""
        guarded = self._guarded(tier, name, codec)
        self._learn([guarded])
        self.hashed = self.hashed or not guarded.verifies
        self.tiers = [*self.tiers, guarded]

    def remove(self, index: int) -> None:
        """Ask nothing of a tier any more: calls that wait in its lines find it empty. Waits for calls under way, no
        longer than the deadline, and has it closed."""
        tier, deadline_s = self.tiers[index], time.monotonic() + self._deadline_s
        tier.removed = True
        for line in tier.lines:
            line.wait_end(max(0.0, deadline_s - time.monotonic()))
        closing = Line("pdlink-store-close")
        if isinstance(tier.tier, TellingTier):
            closing.put(tier.tier.leave)
        closing.put(tier.tier.close)
        closing.wait_end(max(_CLOSE_S, deadline_s - time.monotonic()))

    @property
    def there(self) -> list[GuardedTier]:
        """Not the removed ones."""
        return [tier for tier in self.tiers if not tier.removed]

    def close(self) -> None:
        """End the threads, as far as the tiers let them within one deadline for all. One that stalls is over it."""
        for tier in self.tiers:
            for line in tier.lines:
                line.end()
        stalling = [tier for tier in self.tiers if tier.stalls]
        deadline_s = time.monotonic() + self._deadline_s
        for tier in self.tiers:
            for line in tier.lines:
                line.close(0.0 if tier in stalling else max(0.0, deadline_s - time.monotonic()))
        closing = Line("pdlink-store-close", len(self.tiers))
        for tier in self.tiers:
            closing.put(tier.tier.close)
        for line in (closing, self._noting):
            line.close(_CLOSE_S if stalling else max(_CLOSE_S, deadline_s - time.monotonic()))

    # --- Asking

    def ask(self, keys: Sequence[bytes], timeout_s: float) -> list[int]:
        """Per key the index of the first tier that says it has it in time; -1 for none."""
        first = [-1] * len(keys)
        if not keys:
            return first
        tiers = self.tiers  # others may come meanwhile
        answers: list[list[bool]] = [[] for _ in tiers]
        missing = threading.Semaphore(0)
        gone = threading.Event()

        def ask(index: int, tier: GuardedTier) -> None:
            if not gone.is_set():
                answers[index] = tier.contains(keys)
                missing.release()

        asked = [(index, tier) for index, tier in enumerate(tiers) if tier.available]
        for index, tier in asked:
            if not tier.askers.put(partial(ask, index, tier)):
                missing.release()
        deadline_s = self._clock() + timeout_s
        for _ in asked:
            missing.acquire(timeout=max(0.0, deadline_s - self._clock()))
        gone.set()
        for index, answer in reversed(list(enumerate(answers))):
            for at, found in enumerate(answer[: len(keys)]):
                if found and not tiers[index].hides(keys[at]):
                    first[at] = index
        return first

    def prefix_in(self, index: int, keys: Sequence[bytes]) -> int:
        """How many leading keys one tier says it has. Waits for it in this thread."""
        return (*self.tiers[index].contains(keys), False).index(False)

    def forget(self, key: bytes) -> None:
        """Remove a record that was found wrong from the tiers that check none. In the background."""
        for tier in self.tiers:
            if not tier.verifies:
                tier.writers.put(partial(tier.remove, key), alone=True)

    def note_clear(self, keys: Sequence[bytes] | None, places: Sequence[str] | None) -> tuple[bytes, bool]:
        """Note that these records, or all, are to go from the tiers of these names, or from all. Waits for a disk, no
        longer than the deadline.

        Gives what names the clear, for `doom`, and whether it is noted. What is noted later than that is of the same
        name, so it goes when the tiers have forgotten.
        """
        clear = os.urandom(8)
        media = [tier.medium for tier in self._in(places) if not isinstance(tier.tier, ReadOnly)]
        try:
            return clear, self._noting.submit(partial(self._cleared.add, clear, media, keys)).result(self._deadline_s)
        except (TimeoutError, CancelledError):
            log.error("a clear could not be noted within %.1f s: what tiers have is found again", self._deadline_s)
            return clear, False

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
            tier.doom(keys, clear)

    def _in(self, places: Sequence[str] | None) -> list[GuardedTier]:
        return [tier for tier in self.there if places is None or tier.name in places]

    def try_again(self) -> None:
        """Ask servers that do not answer, and have tiers that were away forget what was cleared meanwhile, or before
        this process began."""
        for tier in self.tiers:
            tier.look_again()
            tier.try_again()

    def flush(self, timeout_s: float) -> bool:
        """Wait until the writers have done what is in line, but of a tier that stalls; whether `timeout_s` was
        enough."""
        written = threading.Semaphore(0)
        lines = [tier.writers.put(written.release, alone=True) for tier in self.there if not tier.stalls]
        deadline_s = self._clock() + timeout_s
        return all(lines) and all(written.acquire(timeout=max(0.0, deadline_s - self._clock())) for _ in lines)

    # --- What others want to know

    def states(self) -> list[PlaceState]:
        problems = self.problems()

        def state(guard: GuardedTier) -> PlaceState:
            tier, why = guard.tier, problems[guard.name]
            return PlaceState(guard.name, tier.nbytes, tier.capacity_nbytes, None, guard.answers, guard.forgets, why)

        return list(map(state, self.there))

    def problems(self) -> dict[str, str]:
        """By name: why a tier keeps less than its settings say."""

        def left_alone(tier: GuardedTier) -> str:
            return f"{tier.failure or 'it stalled'} ({tier.medium}); it is left alone for a while"

        return {tier.name: left_alone(tier) if tier.is_left_alone else tier.problem for tier in self.there}

    def answering(self) -> dict[str, bool]:
        return {tier.name: tier.answers for tier in self.there}

    def gauges(self) -> dict[str, float]:
        """Bytes by name."""
        return {tier.name: tier.tier.nbytes for tier in self.there}
