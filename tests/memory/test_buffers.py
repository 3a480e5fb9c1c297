"""Shared host memory: page-aligned, sealed, gone when its last holder is gone."""

from __future__ import annotations

import fcntl
import mmap
import os
import re
from pathlib import Path

import numpy as np
import pytest

from pdlink.memory import buffers
from pdlink.memory.buffers import HUGE_PAGE_NBYTES, PAGE_NBYTES, Buffer


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


def test_memory_that_is_gathered_into_huge_pages_keeps_its_bytes_and_its_other_mappings() -> None:
    with Buffer(3 * HUGE_PAGE_NBYTES, committed_nbytes=2 * HUGE_PAGE_NBYTES) as buffer:
        assert buffer.ptr % HUGE_PAGE_NBYTES == 0
        buffer.array[: 2 * HUGE_PAGE_NBYTES : 997] = 7
        before = buffer.array[: 2 * HUGE_PAGE_NBYTES].copy()
        with mmap.mmap(buffer.fd, buffer.nbytes) as other:
            gathered = buffer.gather(PAGE_NBYTES, 2 * HUGE_PAGE_NBYTES)
            assert np.array_equal(buffer.array[: 2 * HUGE_PAGE_NBYTES], before)
            buffer.array[HUGE_PAGE_NBYTES] = 9
            assert other[HUGE_PAGE_NBYTES] == 9
        assert _num_huge(buffer.ptr) == (1 if gathered else 0) or gathered is False  # busy pages stay as they were


def _num_huge(address: int) -> int:
    """Huge pages that this process maps from there on."""
    text = Path("/proc/self/smaps").read_text()
    mapping = next(
        part for part in re.split(r"^(?=[0-9a-f]+-)", text, flags=re.MULTILINE) if part.startswith(f"{address:x}-")
    )
    return int(re.search(r"ShmemPmdMapped: +(\d+)", mapping)[1]) * 1024 // HUGE_PAGE_NBYTES  # type: ignore[index]


def test_what_is_smaller_than_a_huge_page_needs_no_gathering() -> None:
    with Buffer(PAGE_NBYTES) as buffer:
        assert buffer.gather(0, PAGE_NBYTES)


@pytest.mark.usefixtures("steady_descriptors")
def test_a_buffer_that_does_not_fit_is_refused_before_any_of_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux would fill it until the out-of-memory killer strikes somebody."""
    monkeypatch.setattr(buffers, "available_nbytes", lambda: 10 * PAGE_NBYTES)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match=f"{11 * PAGE_NBYTES} bytes does not fit into {10 * PAGE_NBYTES}"):
        Buffer(10 * PAGE_NBYTES + 1)
    assert len(os.listdir("/proc/self/fd")) == before
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
    monkeypatch.setattr(buffers, "_MADV_POPULATE_WRITE", 1000)
    with Buffer(8 << 20, committed_nbytes=1) as buffer:
        buffer.populate(0, 4 << 20)
        assert os.fstat(buffer.fd).st_blocks * 512 >= 4 << 20


def test_what_is_available_is_less_than_what_there_is() -> None:
    total = os.sysconf("SC_PHYS_PAGES") * PAGE_NBYTES
    assert 0 < buffers.available_nbytes() <= total


def test_a_containers_limit_counts_where_it_is_below_the_machines_memory(tmp_path: Path) -> None:
    """The kernel kills at the limit, whatever MemAvailable says."""
    group = tmp_path / "sys/fs/cgroup/pods/worker"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 99 kB\nMemAvailable:   1000 kB\n")
    assert buffers.available_nbytes(tmp_path) == 1000 * 1024
    (tmp_path / "proc/self/cgroup").write_text("0::/pods/worker\n")
    assert buffers.available_nbytes(tmp_path) == 1000 * 1024

    def limit(where: Path, text: str, used: int, idle: int) -> int:
        (where / "memory.max").write_text(f"{text}\n")
        (where / "memory.current").write_text(f"{used}\n")
        (where / "memory.stat").write_text(f"anon 7\ninactive_file {idle}\nactive_file 9\n")
        return buffers.available_nbytes(tmp_path)

    assert limit(group, "max", 5, 0) == 1000 * 1024
    assert limit(group, "5000", 3000, 500) == 2500
    assert limit(group.parent, "4000", 3000, 0) == 1000, "the group above has a limit too"
    assert limit(group.parent, "4000", 9000, 0) == 0
