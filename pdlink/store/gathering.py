"""`Gathering`: which part of the arena to put into huge pages next. No memory, clock or thread in it."""

from __future__ import annotations

from collections import deque

STEP_NBYTES = 16 << 20
"""At a time: some hundredths of a second, in which the keeper does nothing else."""
_MOST_TRIES = 3
"""Of a step whose pages a device or a read under way holds."""


class Gathering:
    """Of the first bytes of an arena, as many as have memory."""

    def __init__(self) -> None:
        self._end = 0
        """Where the steps that were handed out end."""
        self._left: deque[tuple[int, int]] = deque()
        """Begin and tries of steps that did not succeed."""
        self._over = False

    def next(self, committed_nbytes: int) -> int | None:
        """Where the next step of `STEP_NBYTES` begins, all of which has memory; None if there is nothing to do."""
        if self._over:
            return None
        if self._end + STEP_NBYTES <= committed_nbytes:
            return self._end
        return self._left[0][0] if self._left else None

    def tried(self, begin: int, gathered: bool | None) -> None:
        """What `Buffer.gather` said of that step."""
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
