"""Shared host memory: page-aligned, sealed, gone when its last holder is gone."""

from __future__ import annotations

import fcntl
import mmap
import os

import pytest

from pdlink.memory import buffers, pages
from pdlink.memory.buffers import Buffer
from pdlink.memory.pages import HUGE_PAGE_NBYTES, PAGE_NBYTES


def test_a_buffer_is_whole_zeroed_pages() -> None:
    with Buffer(PAGE_NBYTES + 1) as buffer:
        assert buffer.nbytes == 2 * PAGE_NBYTES == len(buffer.array)
        assert buffer.ptr % PAGE_NBYTES == 0
        assert not buffer.array.any()


@pytest.mark.parametrize("nbytes", [0, -1])
def test_an_empty_buffer_is_refused(nbytes: int) -> None:
    with pytest.raises(ValueError, match=str(nbytes)):
        Buffer(nbytes)


def test_another_mapping_of_the_descriptor_is_the_same_memory() -> None:
    with Buffer(PAGE_NBYTES) as buffer, mmap.mmap(buffer.fd, PAGE_NBYTES) as other:
        buffer.array[5] = 77
        assert other[5] == 77


def test_a_buffer_cannot_shrink() -> None:
    """A peer that has mapped it would be killed by SIGBUS."""
    with Buffer(2 * PAGE_NBYTES) as buffer:
        assert fcntl.fcntl(buffer.fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        with pytest.raises(PermissionError):
            os.ftruncate(buffer.fd, PAGE_NBYTES)


def test_close_gives_the_descriptor_back_once_and_views_stay_valid() -> None:
    buffer = Buffer(PAGE_NBYTES)
    view = buffer.array[10:20]
    buffer.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(buffer.fd)
    buffer.close()
    view[:] = 3
    assert buffer.array[10:20].tolist() == [3] * 10


@pytest.mark.usefixtures("steady_descriptors")
def test_a_buffer_that_does_not_fit_is_refused_before_any_of_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux would fill it until the out-of-memory killer strikes somebody."""
    monkeypatch.setattr(buffers, "available_nbytes", lambda: 10 * PAGE_NBYTES)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match=f"{11 * PAGE_NBYTES} bytes does not fit into {10 * PAGE_NBYTES}"):
        Buffer(10 * PAGE_NBYTES + 1)
    assert len(os.listdir("/proc/self/fd")) <= before
    with Buffer(10 * PAGE_NBYTES):
        pass


def test_a_large_range_is_reserved_at_once_and_gets_memory_where_it_is_asked_for() -> None:
    with Buffer(60 << 30, committed_nbytes=1) as buffer:
        assert len(buffer.array) == 60 << 30
        assert os.fstat(buffer.fd).st_blocks * 512 <= HUGE_PAGE_NBYTES
        buffer.populate(4 << 20, 8 << 20)
        buffer.populate(4 << 20, 4 << 20)
        assert 4 << 20 <= os.fstat(buffer.fd).st_blocks * 512 <= 4 * HUGE_PAGE_NBYTES


def test_a_kernel_that_cannot_populate_gives_the_memory_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_MADV_POPULATE_WRITE", 1000)
    with Buffer(8 << 20, committed_nbytes=1) as buffer:
        buffer.populate(0, 4 << 20)
        assert os.fstat(buffer.fd).st_blocks * 512 >= 4 << 20
