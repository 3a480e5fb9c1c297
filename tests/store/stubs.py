"""A tier in memory that fails, stalls and lies when told to."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from pdlink.store.record import HEADER_NBYTES, Group, RecordShape
from tests.waiting import WAIT_S

if TYPE_CHECKING:
    from collections.abc import Sequence

SHAPE = RecordShape("uint8", 4, (Group("full", (0, 1), 2, 1, 512),))
"""Records of two pages."""


class StubTier:
    """Implements `pdlink.store.tiers.base.Tier`."""

    name = medium = "stub"
    is_server = False
    verifies = False
    answers = True
    problem = ""
    capacity_nbytes = 0

    def __init__(self) -> None:
        self.records: dict[bytes, bytes] = {}
        self.calls: list[str] = []
        self.error: Exception | None = None
        self.going = threading.Event()
        """While clear, `get` and `put` stall."""
        self.going.set()
        self.stalled = threading.Event()
        self.kept = threading.Semaphore(0)
        """Released by each put."""
        self.closed = False

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.records.values()))

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        self._called("contains")
        return [key in self.records for key in keys]

    def get(self, key: bytes, into: memoryview) -> int | None:
        self._called("get")
        self._stall()
        record = self.records.get(key)
        if record is None or len(record) > len(into):
            return None
        into[: len(record)] = record
        return len(record)

    def put(self, key: bytes, record: memoryview) -> bool:
        self._called("put")
        self._stall()
        self.records[key] = bytes(record)
        self.kept.release()
        return True

    def remove(self, key: bytes) -> None:
        self._called("remove")
        self.records.pop(key, None)

    def clear(self) -> None:
        self.records.clear()

    def close(self) -> None:
        self.closed = True

    def flip(self, key: bytes, at: int = HEADER_NBYTES) -> None:
        record = bytearray(self.records[key])
        record[at] ^= 1
        self.records[key] = bytes(record)

    def _called(self, what: str) -> None:
        self.calls.append(what)
        if self.error is not None:
            raise self.error

    def _stall(self) -> None:
        if not self.going.is_set():
            self.stalled.set()
            assert self.going.wait(WAIT_S)


class StubRunTier(StubTier):
    """The same, several in a call."""

    def __init__(self) -> None:
        super().__init__()
        self.runs: list[int] = []
        """How many records each call had."""
        self.fails = False
        """Whether a run does, and each record alone does not."""

    def get_run(self, wanted: Sequence[tuple[bytes, memoryview]]) -> list[int | None]:
        self._run(len(wanted))
        return [self.get(key, into) for key, into in wanted]

    def put_run(self, records: Sequence[tuple[bytes, memoryview]]) -> list[bool]:
        self._run(len(records))
        return [self.put(key, record) for key, record in records]

    def _run(self, size: int) -> None:
        self.runs.append(size)
        if self.fails:
            raise OSError("one of them fails")


class GatedTier(StubTier):
    """Gives one record when it may."""

    def __init__(self) -> None:
        super().__init__()
        self.late, self.gate = b"", threading.Event()

    def get(self, key: bytes, into: memoryview) -> int | None:
        if key == self.late:
            assert self.gate.wait(WAIT_S)
        return super().get(key, into)
