"""What one leg counts for at its worker: its load while it runs, and how it went for the breaker and the outlier."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from .fleet import WorkerState
    from .worker import Worker

MIN_PACE_TOKENS = 512
"""To compute for the pace of a leg to count: shorter ones measure the connection."""


class LegAccount:
    """From when a leg leaves until its worker has nothing to do for it any more. `end` is the only end."""

    __slots__ = ("_ahead", "_breaker", "_call", "_freed", "_outlier", "_probe", "_tokens", "_work", "_worker") + (
        "ended",
        "failed",
        "sent_s",
    )

    def __init__(
        self,
        worker: Worker,
        work: WorkerState,
        tokens: int,
        now_s: float,
        freed: Callable[[], object],
    ) -> None:
        """work: of the worker's present life, in which this leg's tokens are counted. now_s: time.monotonic. freed:
        called when the worker has less to do."""
        self._worker, self._work, self._tokens, self._freed = worker, work, tokens, freed
        self.sent_s = now_s
        self._ahead = work.load
        """Tokens that the worker has to do, with this leg's."""
        self._breaker, self._outlier = worker.breaker, worker.outlier  # of the life of the worker that gets the leg
        self.ended = False
        self.failed = False
        """By its worker's own fault."""
        self._call, self._probe = 0, False
        if worker.on_trial:  # else no leg finds anything out
            self._call = self._breaker.begin(now_s)
            self._probe = self._outlier.begin()

    def end(self, now_s: float, *, well: bool | None, pace: float | None = None) -> None:
        """The worker has nothing to do for it any more. well: None if the end says nothing of the worker, as of a leg
        that was given up. pace: seconds for a unit of its work, at least so many if it was given up.

        Of several calls the first counts. A failure that shows after it counts as one, too.
        """
        breaker, outlier, first = self._breaker, self._outlier, not self.ended
        if well and first:  # nearly every end
            if breaker.failures or self._call:
                breaker.end(self._call, now_s, failed=False)
            outlier.end(now_s, probe=self._probe, failed=False, pace=pace)
        elif well is False:
            if self.failed:
                return
            self.failed = True
            breaker.end(self._call, now_s, failed=True)
            outlier.end(now_s, probe=self._probe and first, failed=True)
            self._worker.judged()
        elif not first:
            return
        else:
            breaker.drop(self._call)
            outlier.drop(now_s, probe=self._probe, at_least=pace)
        if well is not False and self._worker.on_trial:  # nothing else can change
            self._worker.judged()
        if first:
            self.ended = True
            self._work.finished(self._tokens, now_s, served=well is True)
            self._freed()

    def pace(self, now_s: float) -> float | None:
        """Of a prompt: seconds for each token that was ahead; None if they are too few to say."""
        return (now_s - self.sent_s) / self._ahead if self._ahead >= MIN_PACE_TOKENS else None
