"""Huge pages under memory that is there already."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

import numpy as np
import pytest

from pdlink.memory import buffers
from pdlink.memory.buffers import Buffer
from pdlink.memory.pages import HUGE_PAGE_NBYTES, PAGE_NBYTES, gather


def test_memory_that_is_gathered_into_huge_pages_keeps_its_bytes_and_its_other_mappings() -> None:
    with Buffer(3 * HUGE_PAGE_NBYTES, committed_nbytes=2 * HUGE_PAGE_NBYTES) as buffer:
        assert buffer.ptr % HUGE_PAGE_NBYTES == 0
        buffer.array[: 2 * HUGE_PAGE_NBYTES : 997] = 7
        before = buffer.array[: 2 * HUGE_PAGE_NBYTES].copy()
        with mmap.mmap(buffer.fd, buffer.nbytes) as other:
            gathered = gather(buffer.array[PAGE_NBYTES : 2 * HUGE_PAGE_NBYTES])
            assert np.array_equal(buffer.array[: 2 * HUGE_PAGE_NBYTES], before)
            buffer.array[HUGE_PAGE_NBYTES] = 9
            assert other[HUGE_PAGE_NBYTES] == 9
        assert _num_huge(buffer.ptr) == (1 if gathered else 0) or gathered is False  # busy pages stay as they were


def test_memory_ahead_of_need_is_in_huge_pages_as_far_as_there_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    gathered = list[bool | None]()
    monkeypatch.setattr(buffers, "gather", lambda memory: gathered.append(gather(memory)))
    with Buffer(4 * HUGE_PAGE_NBYTES, committed_nbytes=HUGE_PAGE_NBYTES, huge=True) as buffer:
        buffer.populate(HUGE_PAGE_NBYTES, 3 * HUGE_PAGE_NBYTES, huge=True)
        assert not buffer.array.any()
        assert len(gathered) == 2
        assert _num_huge(buffer.ptr) == 3 or not all(gathered)


def _num_huge(address: int) -> int:
    """Huge pages that this process maps from there on."""
    text = Path("/proc/self/smaps").read_text()
    mapping = next(
        part for part in re.split(r"^(?=[0-9a-f]+-)", text, flags=re.MULTILINE) if part.startswith(f"{address:x}-")
    )
    return int(re.search(r"ShmemPmdMapped: +(\d+)", mapping)[1]) * 1024 // HUGE_PAGE_NBYTES  # type: ignore[index]


def test_what_is_smaller_than_a_huge_page_needs_no_gathering() -> None:
    with Buffer(PAGE_NBYTES) as buffer:
        assert gather(buffer.array)
