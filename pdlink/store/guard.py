"""`GuardedTier`: a tier behind its breaker, with threads that wait for it, and never an exception."""

from __future__ import annotations

import logging
import threading
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from pdlink.breaker import Breaker
from pdlink.events import TierCalled, emit
from pdlink.store.cleared import EVERYTHING
from pdlink.store.line import FIRST, Line, Width
from pdlink.store.tiers.base import SettlingTier

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdlink.store.cleared import Cleared
    from pdlink.store.codec import Codec
    from pdlink.store.tiers.base import Tier

log = logging.getLogger(__name__)
_T = TypeVar("_T")

_FORGET = ("remove", "clear", "settle", "list")
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
"""After a record that a tier did not take, before it is offered another one."""
_REFUSALS = 3
"""In a row, before operators are told."""


class GuardedTier:
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
        self.verifies: bool = getattr(tier, "verifies", False)
        """Whether what `get` brings is what was put, by a checksum of the tier's own."""
        self.askers = Line(f"pdlink-ask-{name}")
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
        self.medium: str = getattr(tier, "medium", tier.name)
        """What keeps the records, by a name that the next process knows it by."""
        self._cleared, self._noting = cleared, noting
        self._knows_cleared = False
        self._doomed: dict[bytes, bytes] = {}
        """Cleared records, or `EVERYTHING`, until the tier has dropped them: they are not found meanwhile. With the
        clear that named them last. `_lock` guards changes."""
        self._asking, self._moving, self._forgetting = (Breaker(deadline_s) for _ in range(3))
        """Of look-ups, of calls that move records, and of calls that remove them. A tier that fails at one of the
        first two is left alone; one that only removes nothing is read."""
        self._kept_away = False
        """Whether it was left alone after the last call."""
        self.failure = ""
        """Of the last call that failed; empty while the tier answers, and of one that only stalled."""
        self._clock = clock
        self._lock = threading.Lock()

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
        known: str = getattr(self.tier, "problem", "")
        return known or ("it takes no records" if self._refusals >= _REFUSALS else "")

    @property
    def available(self) -> bool:
        """Whether it would be asked now."""
        with self._lock:
            return self._allows(self._clock(), self._moving)

    @property
    def answers(self) -> bool:
        """False while it is left alone, and while its medium has not answered yet."""
        opened: bool = getattr(self.tier, "answers", True)
        return opened and not self.is_left_alone

    @property
    def is_left_alone(self) -> bool:
        """From a failure or stall on, until a call succeeds."""
        with self._lock:
            return self._keeps_away(self._clock())

    def call(self, what: str, function: Callable[[], _T], otherwise: _T, nbytes: int = 0) -> _T:
        """What `function` gives, in this thread; `otherwise` if the tier is kept away or the call raises."""
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
            self.failure = f"{what} failed: {error}"
            log.warning("tier %s (%s): %s", self.name, self.medium, self.failure)
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
        if now_away and not kept_away:
            log.warning("tier %s is left alone for a while", self.name)
        elif kept_away and not now_away:
            log.warning("tier %s answers again", self.name)
        outcome = "failed" if failed else "missed" if result is None or result is False else "done"
        emit(TierCalled(tier=self.name, call=what, outcome=outcome, nbytes=nbytes, took_s=now_s - began_s))
        return result

    def _allows(self, now_s: float, breaker: Breaker) -> bool:
        return all(one.allows(now_s) for one in {self._asking, self._moving, breaker})

    def _keeps_away(self, now_s: float) -> bool:
        return self._asking.keeps_away(now_s) or self._moving.keeps_away(now_s)

    @property
    def forgets(self) -> bool:
        """Whether it may still have what was cleared, also while nobody knows what that is."""
        return bool(self._doomed) or not self._knows_cleared

    def hides(self, key: bytes) -> bool:
        return not self._knows_cleared or key in self._doomed or EVERYTHING in self._doomed

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
