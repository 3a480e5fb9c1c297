"""`Gathering`: which part of the arena to put into huge pages next. No memory, clock or thread in it."""

from __future__ import annotations

from collections import deque

STEP_NBYTES = 16 << 20
"""At a time: some hundredths of a second, in which the keeper does nothing else."""
AGE_S = 2.0
"""For which memory is left alone when it has come: who asked for it fills it now, and has better use for the core."""
_MOST_TRIES = 3
"""Of a step whose pages a device or a read under way holds."""


class Gathering:
    """Of the first bytes of an arena, as many as have memory."""

    def __init__(self) -> None:
        self._grown: deque[tuple[float, int]] = deque()
        """When so many bytes had memory, first ones first."""
        self._ripe_nbytes = 0
        """That have had memory for long enough."""
        self._end = 0
        """Where the steps that were handed out end."""
        self._left: deque[tuple[int, int]] = deque()
        """Begin and tries of steps that did not succeed."""
        self._over = False

    def next(self, committed_nbytes: int, now_s: float) -> int | None:
        """Where the next step of `STEP_NBYTES` begins, all of which has had memory for `AGE_S`; None if there is
        nothing to do."""
        if self._over:
            return None
        if committed_nbytes > (self._grown[-1][1] if self._grown else self._ripe_nbytes):
            self._grown.append((now_s, committed_nbytes))
        while self._grown and self._grown[0][0] + AGE_S <= now_s:
            _, self._ripe_nbytes = self._grown.popleft()
        if self._end + STEP_NBYTES <= self._ripe_nbytes:
            return self._end
        return self._left[0][0] if self._left else None

    def settled_nbytes(self, committed_nbytes: int) -> int:
        """How many bytes from the begin, in whole steps, nobody will try to put into huge pages any more."""
        if self._over:
            return committed_nbytes // STEP_NBYTES * STEP_NBYTES
        return min([self._end, *(begin for begin, _ in self._left)])

    def tried(self, begin: int, gathered: bool | None) -> None:
        """What `pages.gather` said of that step."""
        if gathered is None:
            self._over = True
            return
        tries = 1
        if begin == self._end:
            self._end += STEP_NBYTES
        else:
            tries += self._left.popleft()[1]
        if not gathered and tries < _MOST_TRIES:
            self._left.append((begin, tries))
