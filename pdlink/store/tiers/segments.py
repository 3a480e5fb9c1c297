"""`Segment`: a part of a disk tier's file, which is filled from its start and emptied as a whole."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .journal import EntryArray


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

    @property
    def name(self) -> bytes:
        """What the policy knows it by."""
        return self.index.to_bytes(4, "little")

    @property
    def keys(self) -> list[bytes]:
        return [*([] if self.loaded is None else self.loaded["key"].tolist()), *self.new]
