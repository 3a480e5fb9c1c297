"""`Segment`: a part of a disk tier's file, filled from its start and emptied as a whole, and which one goes next.

The oldest one goes, unless it is read far more than the others are: then it counts as new. So records whose chance to
be read falls with their age leave in order, and records that are read at any age stay.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from .files import EntryArray

_HOT = 2.5
"""The oldest segment stays if it was read so many times as often as one is on average. With less, chance decides: of
records that are read at a uniform age, 79 segments, 2.0 found 0.915, and 2.5 all, as FIFO does."""


@dataclass(slots=True, eq=False)
class Segment:
    index: int
    end_page: int = 0
    """Where the next record goes, from the segment's start."""
    num_entries: int = 0
    """In its region of the journal."""
    loaded: EntryArray | None = None
    """What the journal had of it."""
    new: list[bytes] = field(default_factory=list)
    """Keys of the records put here since. Some may be gone, of both."""
    writers: int = 0
    epoch: int = 0
    """Counts how often it was emptied."""
    reads: float = 0.0
    """Since it was new, also while it is filled; what was read before the last reclaims counts less."""

    @property
    def keys(self) -> list[bytes]:
        return [*([] if self.loaded is None else self.loaded["key"].tolist()), *self.new]


class FullSegments:
    """Segments that may be emptied for new records, oldest first."""

    def __init__(self, segments: Iterable[Segment] = ()) -> None:
        self._segments = deque(segments)

    def add(self, segment: Segment) -> None:
        """As the newest."""
        self._segments.append(segment)

    def clear(self) -> None:
        self._segments.clear()

    def add_first(self, segment: Segment) -> None:
        """As the oldest."""
        self._segments.appendleft(segment)

    def take(self, spared: Callable[[Segment], bool] = lambda _: False) -> Segment | None:
        """The segment that goes; None if all are being written to or `spared`. Costs a look at each."""
        size, reads = len(self._segments), 0.0
        for segment in self._segments:
            segment.reads *= 1 - 0.5 / size  # twice as many reclaims as there are segments count
            reads += segment.reads
        for _ in range(2 * size):
            segment = self._segments.popleft()
            is_hot = segment.reads * size > _HOT * reads
            if not segment.writers and not spared(segment):
                reads -= segment.reads
                segment.reads = 0.0
                if not is_hot:
                    return segment
            self._segments.append(segment)
        return None
