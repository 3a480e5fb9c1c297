"""`GuardedTier`: a tier behind its breaker, with threads that wait for it, and never an exception."""

from __future__ import annotations

import logging
import threading
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from pdlink.events import TierCalled, emit
from pdlink.store.breaker import Breaker
from pdlink.store.line import Line

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdlink.store.tiers.base import Tier

log = logging.getLogger(__name__)
_T = TypeVar("_T")

_READERS = 2
"""Threads that read from one tier; two keep a disk busy with records of a megabyte and more."""


class GuardedTier:
    def __init__(self, tier: Tier, *, deadline_s: float, clock: Callable[[], float]) -> None:
        self.tier = tier
        self.askers = Line(f"pdlink-ask-{tier.name}")
        self.readers = Line(f"pdlink-read-{tier.name}", _READERS)
        self.writers = Line(f"pdlink-write-{tier.name}")
        self.queued_nbytes = 0
        """Of records that wait to be written; the store's lock guards it."""
        self.doomed: set[bytes] = set()
        self.all_doomed = False
        """Cleared records, or all, until the tier has dropped them: they are not found meanwhile."""
        self._breakers = {True: Breaker(deadline_s), False: Breaker(deadline_s)}
        """Of look-ups, and of calls that move records: a tier that still answers the first is left alone, too."""
        self._clock = clock
        self._lock = threading.Lock()

    @property
    def available(self) -> bool:
        """Whether it would be asked now."""
        with self._lock:
            return self._allows(self._clock())

    @property
    def answers(self) -> bool:
        """False from the failure or stall after which it is left alone until a call succeeds."""
        with self._lock:
            return not self._keeps_away(self._clock())

    def call(self, what: str, function: Callable[[], _T], otherwise: _T, nbytes: int = 0) -> _T:
        """What `function` gives, in this thread; `otherwise` if the tier is kept away or the call raises."""
        with self._lock:
            began_s = self._clock()
            if not self._allows(began_s):
                return otherwise
            kept_away = self._keeps_away(began_s)
            breaker = self._breakers[what == "contains"]
            call = breaker.begin(began_s)
        failed = True
        result = otherwise
        try:
            result = function()
            failed = False
        except OSError as error:
            log.warning("tier %s: %s failed: %s", self.tier.name, what, error)
        except Exception:
            log.exception("tier %s: %s failed", self.tier.name, what)
        with self._lock:
            now_s = self._clock()
            breaker.end(call, now_s, failed=failed)
            keeps_away = self._keeps_away(now_s)
        if keeps_away and not kept_away:
            log.warning("tier %s is left alone for a while", self.tier.name)
        elif kept_away and not keeps_away:
            log.warning("tier %s answers again", self.tier.name)
        outcome = "failed" if failed else "missed" if result is None or result is False else "done"
        emit(TierCalled(tier=self.tier.name, call=what, outcome=outcome, nbytes=nbytes, took_s=now_s - began_s))
        return result

    def _allows(self, now_s: float) -> bool:
        return all(breaker.allows(now_s) for breaker in self._breakers.values())

    def _keeps_away(self, now_s: float) -> bool:
        return any(breaker.keeps_away(now_s) for breaker in self._breakers.values())

    def hides(self, key: bytes) -> bool:
        return self.all_doomed or key in self.doomed

    def drop(self, keys: Sequence[bytes] | None) -> None:
        """Remove these records, or all, in this thread; what fails stays doomed."""
        if keys is None and self._done("clear", self.tier.clear):
            self.all_doomed = False
        for key in keys or ():
            if self._done("remove", partial(self.tier.remove, key)):
                self.doomed.discard(key)

    def _done(self, what: str, function: Callable[[], None]) -> bool:
        def do() -> bool:
            function()
            return True

        return self.call(what, do, False)

    def close(self, timeout_s: float) -> None:
        for line in (self.askers, self.readers, self.writers):
            line.close(timeout_s)
        self.tier.close()
