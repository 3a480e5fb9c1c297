"""What a disk tier has to bear: restarts, kills, full and failing disks, damaged files, segments written anew."""

from __future__ import annotations

import errno
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from random import Random

import numpy as np
import pytest

from pdlink.errors import ConfigError
from pdlink.store.below import GuardedTier
from pdlink.store.cleared import Cleared
from pdlink.store.line import Line
from pdlink.store.record import Group, RecordShape, seal
from pdlink.store.tiers.base import DAMAGED
from pdlink.store.tiers.disk import Disk
from pdlink.store.tiers.files import DirectFile, Journal
from pdlink.store.tiers.segments import FullSegments, Segment
from tests.waiting import WAIT_S

from .harness import key, read, record

SEGMENT_NBYTES = 256 << 10
"""Four records."""
CAPACITY_NBYTES = 3 * (SEGMENT_NBYTES + SEGMENT_NBYTES // 64) + 4096


def disk(path: Path, capacity_nbytes: int = CAPACITY_NBYTES) -> Disk:
    return Disk(path, "model", capacity_nbytes, SEGMENT_NBYTES)


def here(tier: Disk, upto: int) -> list[int]:
    """Numbers of the records that are there, each read and compared."""
    known = tier.contains(list(map(key, range(upto))))
    found = [number for number in range(upto) if read(tier, key(number)) == record(number)]
    assert found == [number for number in range(upto) if known[number]]
    return found


_HEAD = """
import contextlib, os, resource, signal, subprocess, sys
from pathlib import Path
from random import Random
from pdlink.store.tiers.disk import Disk
"""


def run(code: str, *arguments: object, under: Sequence[str] = ()) -> int:
    words = [*under, sys.executable, "-c", _HEAD + code, *map(str, arguments)]
    return subprocess.run(words, check=False, timeout=50).returncode


def failing(number: int) -> Callable[..., int]:
    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    return fail


def test_a_restarted_tier_has_its_records_and_fills_the_segment_it_was_filling(tmp_path: Path) -> None:
    for begun in range(3):
        tier = disk(tmp_path)
        assert here(tier, 12) == list(range(3 * begun))
        assert tier.nbytes == 3 * begun * 65536
        for number in range(3 * begun, 3 * begun + 3):
            assert tier.put(key(number), record(number))
        tier.close()
    assert (tmp_path / "model/records").stat().st_size == 3 * SEGMENT_NBYTES


def test_the_room_of_the_next_segment_is_there_before_it_is_needed(tmp_path: Path) -> None:
    tier, records = disk(tmp_path), tmp_path / "model/records"
    for number, num_segments in enumerate((1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3)):
        assert tier.put(key(number), record(number))
        assert records.stat().st_size == num_segments * SEGMENT_NBYTES
    assert here(tier, 12) == list(range(12))
    tier.close()


def test_the_files_never_take_more_than_the_capacity_also_when_it_is_lowered(tmp_path: Path) -> None:
    for capacity in (CAPACITY_NBYTES, CAPACITY_NBYTES, CAPACITY_NBYTES - SEGMENT_NBYTES, 100_000):
        tier = disk(tmp_path, capacity)
        for number in range(40):
            tier.put(key(number), record(number, 30_000))
            assert sum(path.stat().st_blocks * 512 for path in (tmp_path / "model").iterdir()) <= capacity
            assert tier.nbytes <= capacity
        assert tier.contains([key(39)]) == [True]
        tier.close()


def test_a_segment_that_was_read_from_stays_and_the_others_go_as_a_whole(tmp_path: Path) -> None:
    tier = disk(tmp_path)
    for number in range(12):
        tier.put(key(number), record(number))
    assert read(tier, key(1)) == record(1)
    tier.put(key(12), record(12))
    assert here(tier, 13) == [0, 1, 2, 3, 8, 9, 10, 11, 12]
    assert tier.nbytes == 9 * 65536


def test_a_directory_belongs_to_one_process_and_a_namespace_to_one_model(tmp_path: Path) -> None:
    tier = disk(tmp_path)
    with pytest.raises(ConfigError, match="another process uses"):
        disk(tmp_path)
    other = Disk(tmp_path, "other", CAPACITY_NBYTES, SEGMENT_NBYTES)
    tier.put(key(1), record(1))
    assert other.contains([key(1)]) == [False]
    tier.close()
    assert here(disk(tmp_path), 2) == [1]


def test_the_capacity_is_of_all_namespaces_and_unused_ones_go_first(tmp_path: Path) -> None:
    """The records of a model that was replaced do not stay on the disk for ever."""
    half = CAPACITY_NBYTES // 2
    for age, name in ((300, "older"), (200, "old")):
        with_one_segment = Disk(tmp_path, name, half, SEGMENT_NBYTES)
        with_one_segment.put(key(1), record(1))
        with_one_segment.close()
        written_s = (tmp_path / name / "journal").stat().st_mtime - age
        os.utime(tmp_path / name / "journal", (written_s, written_s))
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/journal").write_text("not ours")
    tier = disk(tmp_path)
    assert tier.put(key(0), record(0))
    assert {path.name for path in tmp_path.iterdir()} == {"model", "old", "older", "photos"}
    for number in range(1, 5):
        tier.put(key(number), record(number))
    assert {path.name for path in tmp_path.iterdir()} == {"model", "old", "photos"}
    used = Disk(tmp_path, "old", half, SEGMENT_NBYTES)
    for number in range(5, 9):
        tier.put(key(number), record(number))
    assert read(used, key(1)) == record(1)
    assert here(tier, 9) == list(range(9))
    assert {path.name for path in tmp_path.iterdir()} == {"model", "old", "photos"}, "one that is open stays"
    assert {path.name for path in (tmp_path / "old").iterdir()} == {"journal", "records"}


@pytest.mark.parametrize("nbytes", [0, 8192])
def test_a_capacity_without_room_for_a_record_is_a_wrong_setting(tmp_path: Path, nbytes: int) -> None:
    with pytest.raises(ConfigError, match=r"^tiers\.max_local_disk_size: "):
        disk(tmp_path, nbytes)


def test_a_path_that_is_no_directory_is_a_wrong_setting(tmp_path: Path) -> None:
    (tmp_path / "model").touch()
    with pytest.raises(ConfigError, match="name another"):
        disk(tmp_path)


def test_removed_records_do_not_come_back_with_a_restart(tmp_path: Path) -> None:
    tier = disk(tmp_path)
    for number in range(6):
        tier.put(key(number), record(number))
    tier.remove(key(2))
    tier.close()
    tier = disk(tmp_path)
    assert here(tier, 6) == [0, 1, 3, 4, 5]
    tier.clear()
    tier.put(key(9), record(9))
    tier.close()
    assert here(disk(tmp_path), 10) == [9]


def test_a_writer_killed_in_the_middle_of_a_put_leaves_a_miss(tmp_path: Path) -> None:
    code = """
tier = Disk(Path(sys.argv[1]), "model", 1 << 20, 256 << 10)
for number in range(3):
    tier.put(bytes([number]) * 32, memoryview(bytes([number]) * 65536))
real = os.pwrite
def half(file, piece, offset):
    real(file, piece[:len(piece) // 2], offset)
    os.kill(os.getpid(), signal.SIGKILL)
os.pwrite = half
tier.put(bytes([3]) * 32, memoryview(bytes([3]) * 65536))
"""
    assert run(code, tmp_path) == -9
    tier = Disk(tmp_path, "model", 1 << 20, 256 << 10)
    for number in range(3):
        assert read(tier, bytes([number]) * 32) == memoryview(bytes([number]) * 65536)
    assert tier.contains([bytes([3]) * 32]) == [False]
    assert tier.put(bytes([3]) * 32, memoryview(bytes([3]) * 65536))


def test_whatever_moment_a_writer_is_killed_at_all_that_is_found_is_right(tmp_path: Path) -> None:
    code = """
tier = Disk(Path(sys.argv[1]), "model", 1 << 20, 256 << 10)
draw = Random(int(sys.argv[2]))
print("open", flush=True)
while True:
    key = bytes([draw.randrange(40)]) * 32
    tier.put(key, memoryview(key * 2048))
    if draw.random() < 0.1:
        tier.remove(key)
"""
    seed = 11
    print("seed", seed)
    draw, found = Random(seed), 0
    for _ in range(4):
        words = [sys.executable, "-c", _HEAD + code, str(tmp_path), str(draw.randrange(1000))]
        child = subprocess.Popen(words, stdout=subprocess.PIPE)
        assert child.stdout is not None
        child.stdout.readline()
        threading.Event().wait(draw.random() * 0.2)  # any moment is as good as another
        child.kill()
        child.wait()
        child.stdout.close()
        tier = Disk(tmp_path, "model", 1 << 20, 256 << 10)
        for number in range(40):
            got = read(tier, bytes([number]) * 32)
            assert got is None or got == bytes([number]) * 65536
            found += got is not None
        tier.close()
    assert found


def test_a_file_system_that_refuses_more_room_is_used_as_far_as_it_goes(tmp_path: Path) -> None:
    """RLIMIT_FSIZE: the second segment cannot be had, so the first one is written anew."""
    code = """
resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000))
tier = Disk(Path(sys.argv[1]), "model", 1 << 20, 256 << 10)
into = bytearray(65536)
for number in range(20):
    key = bytes([number]) * 32
    assert tier.put(key, memoryview(key * 2048))
    assert tier.get(key, memoryview(into)) == 65536 and into == key * 2048
tier.close()
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
tier = Disk(Path(sys.argv[1]), "other", 1 << 20, 256 << 10)
assert not tier.put(key, memoryview(key * 2048))
assert tier.nbytes == 0 and tier.contains([key]) == [False]
"""
    assert run(code, tmp_path) == 0


def test_a_disk_that_is_really_full_keeps_what_it_has_and_is_used_again(tmp_path: Path) -> None:
    """A file system of 1 MiB, mounted for the child only, whose rest somebody else takes."""
    if subprocess.run(["unshare", "-rm", "true"], check=False, capture_output=True).returncode:
        pytest.skip("this user may not mount")
    code = """
root = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", root], check=True)
tier, into = Disk(root, "model", 8 << 20, 256 << 10), bytearray(65536)
put = lambda number: tier.put(bytes([number]) * 32, memoryview(bytes([number]) * 65536))
found = lambda: [n for n in range(40) if tier.get(bytes([n]) * 32, memoryview(into)) and into == bytes([n]) * 65536]
assert put(0)
with (root / "rest").open("wb", buffering=0) as file, contextlib.suppress(OSError):
    while file.write(bytes(4096)):
        pass
assert os.statvfs(root).f_bfree == 0
for number in range(1, 12):
    put(number)
    assert not found() or found()[-1] == number
assert found()
(root / "rest").unlink()
assert all(map(put, range(12, 20))) and set(range(12, 20)) <= set(found())
"""
    assert run(code, tmp_path, under=["unshare", "-rm"]) == 0


@pytest.mark.parametrize(("number", "raises"), [(errno.ENOSPC, False), (errno.EDQUOT, False), (errno.EIO, True)])
def test_a_record_that_could_not_be_written_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, raises: bool
) -> None:
    tier = disk(tmp_path)
    tier.put(key(0), record(0))
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", failing(number))
        if raises:
            with pytest.raises(OSError, match="Input/output error"):
                tier.put(key(1), record(1))
        else:
            assert not tier.put(key(1), record(1))
    assert here(tier, 2) == [0]
    assert tier.put(key(1), record(1))
    assert here(tier, 2) == [0, 1]


def test_a_record_that_cannot_be_read_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = disk(tmp_path)
    for number in range(2):
        tier.put(key(number), record(number))
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", failing(errno.EIO))
        with pytest.raises(OSError, match="Input/output error"):
            read(tier, key(1))
    assert here(tier, 2) == [0]
    assert tier.put(key(1), record(1))
    tier.close()
    assert here(disk(tmp_path), 2) == [0, 1]


@pytest.mark.parametrize("while_open", [True, False])
def test_what_a_truncated_file_no_longer_has_is_a_miss(tmp_path: Path, while_open: bool) -> None:
    tier = disk(tmp_path)
    for number in range(8):
        tier.put(key(number), record(number))
    if not while_open:
        tier.close()
    os.truncate(tmp_path / "model/records", 5 * 65536 + 1000)
    if not while_open:
        tier = disk(tmp_path)
    for number in range(8):
        assert read(tier, key(number)) in (None, record(number))
    assert here(tier, 4) == [0, 1, 2, 3]
    for number in range(4, 12):
        assert tier.put(key(number), record(number))
    assert here(tier, 12)[-4:] == [8, 9, 10, 11]


def test_what_was_truncated_away_is_not_listed_again_when_the_file_has_grown(tmp_path: Path) -> None:
    tier = disk(tmp_path)
    for number in range(8):
        tier.put(key(number), record(number))
    tier.close()
    os.truncate(tmp_path / "model/records", 0)
    for upto in (8, 9):
        tier = disk(tmp_path)
        assert here(tier, 9) == list(range(8, upto))
        tier.put(key(8), record(8))
        tier.close()


def test_what_was_truncated_away_is_not_listed_again_in_room_that_was_taken_ahead(tmp_path: Path) -> None:
    tier = disk(tmp_path)
    for number in range(8):
        tier.put(key(number), record(number))
    tier.close()
    os.truncate(tmp_path / "model/records", 0)
    tier = disk(tmp_path)
    for number in range(8, 11):
        tier.put(key(number), record(number))
    tier.close()
    assert (tmp_path / "model/records").stat().st_size == 2 * SEGMENT_NBYTES
    tier = disk(tmp_path)
    assert here(tier, 11) == [8, 9, 10]
    tier.close()


def test_room_is_taken_by_one_thread_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the file system has no call for it, libc writes zeros over what another thread has written since."""
    file, go_on, begun = DirectFile(tmp_path / "records"), threading.Event(), threading.Event()
    right, calls = os.posix_fallocate, list[int]()

    def slow(fd: int, at: int, nbytes: int) -> None:
        calls.append(at)
        begun.set()
        assert go_on.wait(WAIT_S)
        right(fd, at, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", slow)
    first, second = (threading.Thread(target=file.grow, args=(SEGMENT_NBYTES,)) for _ in range(2))
    first.start()
    assert begun.wait(WAIT_S)
    begun.clear()
    second.start()
    assert not begun.wait(0.1), "the second one waits for the first"
    go_on.set()
    for thread in (first, second):
        thread.join(WAIT_S)
    assert calls == [0], "and finds the room there"
    file.close()


def test_a_record_whose_entry_names_another_key_is_a_miss(tmp_path: Path) -> None:
    tier = disk(tmp_path)
    for number in range(2):
        tier.put(key(number), record(number))
    tier.close()
    journal = tmp_path / "model/journal"
    raw = bytearray(journal.read_bytes())
    raw[4096:4128], raw[4160:4192] = raw[4160:4192], raw[4096:4128]
    journal.write_bytes(raw)
    tier = disk(tmp_path)
    assert tier.contains([key(0), key(1)]) == [True, True]
    assert read(tier, key(0)) is None
    assert read(tier, key(1)) is None


@pytest.mark.parametrize("seed", range(12))
def test_whatever_is_in_the_journal_all_that_is_found_is_right(tmp_path: Path, seed: int) -> None:
    draw = Random(seed)
    tier = disk(tmp_path)
    for number in range(12):
        tier.put(key(number), record(number))
    tier.close()
    journal = tmp_path / "model/journal"
    raw = bytearray(journal.read_bytes())
    for _ in range(draw.choice([1, 20, 400])):
        at = (
            draw.randrange(len(raw)) if draw.random() < 0.2 else 4096 + draw.randrange(256) + 4096 * draw.randrange(3)
        )
        raw[at % len(raw)] = draw.randrange(256)
    journal.write_bytes(raw[: draw.choice([len(raw), draw.randrange(len(raw))])])
    tier = disk(tmp_path)
    for number in range(12):
        assert read(tier, key(number)) in (None, record(number))
    for number in range(30):
        assert tier.put(key(number), record(number))
        assert read(tier, key(number)) == record(number)


def test_a_record_whose_segment_is_written_anew_while_it_is_read_is_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = disk(tmp_path)
    tier.put(key(0), record(0))
    move = tier._file.read

    def late(offset: int, into: memoryview) -> bool:
        for number in range(1, 40):
            tier.put(key(number), record(number))
        return move(offset, into)

    with monkeypatch.context() as patch:
        patch.setattr(tier._file, "read", late)
        assert tier.get(key(0), memoryview(bytearray(1 << 20))) is None, "it is not damaged"
    assert here(tier, 40)[-1] == 39


def test_a_tier_cleared_during_a_put_does_not_have_the_record_nor_gives_its_room_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = disk(tmp_path)
    tier.put(key(0), record(0))
    move = tier._file.write

    def late(offset: int, data: memoryview) -> bool:
        monkeypatch.undo()
        tier.clear()
        for number in range(10, 18):
            assert tier.put(key(number), record(number))
        return move(offset, data)

    monkeypatch.setattr(tier._file, "write", late)
    assert not tier.put(key(1), record(1))
    assert here(tier, 20) == list(range(10, 18))
    for number in range(20, 24):
        tier.put(key(number), record(number))
    assert here(tier, 24) == [*range(10, 18), *range(20, 24)]


def test_files_stay_open_until_the_last_call_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A descriptor that is closed under a call may name another file by then."""
    tier = disk(tmp_path)
    move = tier._file.write

    def late(offset: int, data: memoryview) -> bool:
        tier.close()
        with pytest.raises(ConfigError, match="another process uses"):
            disk(tmp_path)
        return move(offset, data)

    monkeypatch.setattr(tier._file, "write", late)
    assert tier.put(key(1), record(1))
    assert not tier.put(key(2), record(2))
    assert here(disk(tmp_path), 3) == [1]


@pytest.mark.parametrize("nbytes", [1, 4096, 5000, (9 << 20) + 77])
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("refused", ["nothing", "open", "read"])
def test_every_memory_is_taken_with_and_without_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nbytes: int, shift: int, refused: str
) -> None:
    opened = os.open

    def refuse(path: Path, flags: int, *mode: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT")
        return opened(path, flags, *mode)

    with monkeypatch.context() as patch:
        if refused == "open":
            patch.setattr(os, "open", refuse)
        if refused == "read":
            patch.setattr(os, "preadv", failing(errno.EINVAL))
        tier = Disk(tmp_path, "model", 64 << 20)
    assert not (refused != "nothing" and tier._file.direct)
    memory = memoryview(mmap.mmap(-1, 12 << 20))
    data = Random(nbytes).randbytes(nbytes)
    memory[shift : shift + nbytes] = data
    assert tier.put(key(1), memory[shift : shift + nbytes])
    memory[:] = b"\xee" * len(memory)
    assert tier.get(key(1), memory[shift : shift + nbytes + 100]) == nbytes
    assert memory[shift : shift + nbytes] == data
    assert set(memory[shift + nbytes : shift + nbytes + 5000]) == {0xEE}
    tier.close()


def test_short_reads_and_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, pwrite, preadv = disk(tmp_path), os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda file, piece, at: pwrite(file, piece[:8192], at))
    monkeypatch.setattr(os, "preadv", lambda file, pieces, at: preadv(file, [pieces[0][:4096]], at))
    assert tier.put(key(1), record(1))
    assert read(tier, key(1)) == record(1)


def test_a_segment_that_was_just_filled_does_not_go_first(tmp_path: Path) -> None:
    tier = disk(tmp_path)
    for number in range(12):
        tier.put(key(number), record(number))
    for number in range(4, 8):  # of the middle one, as often as the newest was while it was filled
        assert read(tier, key(number)) == record(number)
    assert all(tier.put(key(number), record(number)) for number in range(12, 16))
    assert here(tier, 16) == list(range(4, 16))


def run_of(numbers: Iterable[int]) -> list[tuple[bytes, memoryview]]:
    """Records in memory that the kernel takes as it is."""
    run = []
    for number in numbers:
        memory = memoryview(mmap.mmap(-1, 65536))
        memory[:] = record(number)
        run.append((key(number), memory))
    return run


def test_a_run_goes_to_the_disk_and_comes_back_in_one_call_for_each_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, calls = disk(tmp_path), list[tuple[str, int]]()
    pwritev, preadv, pwrite = os.pwritev, os.preadv, os.pwrite

    def counted(name: str, call: Callable[..., int]) -> Callable[..., int]:
        def count(file: int, data: Sequence[memoryview], at: int) -> int:
            calls.append((name, len(data)))
            return call(file, data, at)

        return count

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", counted("write", pwritev))
        patch.setattr(os, "preadv", counted("read", preadv))
        patch.setattr(os, "pwrite", counted("entries", pwrite))
        assert all(tier.put_run(run_of(range(6))))
        assert [call for call in calls if call[0] != "read"] == [
            ("write", 4),
            ("entries", 4 * 64),
            ("write", 2),
            ("entries", 2 * 64),
        ]
        calls.clear()
        into = run_of([9] * 6)
        assert tier.get_run([(key(number), memory) for number, (_, memory) in enumerate(into)]) == [65536] * 6
        assert len(calls) <= 2
        assert all(memory == record(number) for number, (_, memory) in enumerate(into))
    tier.close()
    assert here(disk(tmp_path), 7) == [0, 1, 2, 3, 4, 5]


def test_a_run_of_which_a_part_is_written_at_once_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, pwritev, preadv = disk(tmp_path), os.pwritev, os.preadv
    monkeypatch.setattr(os, "pwritev", lambda file, run, at: pwritev(file, [run[0][:4096]], at))
    monkeypatch.setattr(os, "preadv", lambda file, run, at: preadv(file, [run[0][:4096]], at))
    assert all(tier.put_run(run_of(range(4))))
    into = run_of([9] * 4)
    assert tier.get_run([(key(number), memory) for number, (_, memory) in enumerate(into)]) == [65536] * 4
    assert all(memory == record(number) for number, (_, memory) in enumerate(into))


def test_entries_of_a_run_of_which_a_part_is_written_at_once_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, pwrite = disk(tmp_path), os.pwrite
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", lambda file, data, at: pwrite(file, data[:64], at))
        assert all(tier.put_run(run_of(range(4))))
    tier.close()
    assert here(disk(tmp_path), 4) == [0, 1, 2, 3]


def test_one_record_of_a_run_that_cannot_be_read_takes_no_other_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, preadv = disk(tmp_path), os.preadv
    assert all(tier.put_run(run_of(range(4))))

    def bad(file: int, run: Sequence[memoryview], at: int) -> int:
        if at <= 65536 < at + sum(map(len, run)):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(file, run, at)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", bad)
        with pytest.raises(OSError, match="Input/output error"):
            tier.get_run(run_of(range(4)))
    assert here(tier, 4) == [0, 2, 3]


def test_a_disk_that_reads_nothing_is_left_alone_and_loses_few_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, noting = disk(tmp_path), Line("note")
    guarded = GuardedTier(tier, "disk", cleared=Cleared(), noting=noting, deadline_s=WAIT_S, clock=lambda: 0.0)
    assert all(tier.put_run(run_of(range(12))))
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", failing(errno.EIO))
        assert guarded.get(run_of(range(12))) == [None] * 12
    assert guarded.is_left_alone
    assert here(tier, 12) == [4, 5, 6, 7, 8, 9, 10, 11]
    noting.end()


def test_one_damaged_record_of_a_run_is_damaged_alone(tmp_path: Path) -> None:
    tier = disk(tmp_path)
    assert all(tier.put_run(run_of(range(4))))
    with (tmp_path / "model/records").open("r+b") as file:
        file.seek(2 * 65536)
        file.write(bytes(4096))
    assert tier.get_run(run_of(range(4))) == [65536, 65536, DAMAGED, 65536]
    assert here(tier, 4) == [0, 1, 3]


def test_segments_go_in_the_order_they_were_filled_in_also_after_a_restart(tmp_path: Path) -> None:
    tier = disk(tmp_path)
    for number in range(18):  # the second segment is being filled again
        tier.put(key(number), record(number))
    tier.close()
    tier = disk(tmp_path)
    for number in range(18, 22):
        tier.put(key(number), record(number))
    assert here(tier, 22) == list(range(12, 22))


def played(num_segments: int, age_of: Callable[[Random, int], int]) -> tuple[int, int, int]:
    """Reads of records of random ages: found, found by FIFO, and all; a record comes for each."""
    seed, each = 5, 50
    print("seed", seed)
    draw, full, active = Random(seed), FullSegments(), Segment(0)
    where: list[Segment | None] = []
    hits = fifo_hits = asked = 0
    for number in range(6 * num_segments * each):
        if number % each == 0 and number:
            full.add(active)
            if number >= num_segments * each:
                victim = full.take()
                where = [None if segment is victim else segment for segment in where]
            active = Segment(number)
        where.append(active)
        age = age_of(draw, (num_segments - 1) * each)
        if age <= number:
            asked += 1
            fifo_hits += age < (num_segments - 1) * each + number % each
            if (segment := where[number - age]) is not None:
                hits += 1
                segment.reads += 1
    return hits, fifo_hits, asked


@pytest.mark.parametrize("num_segments", [7, 79])
def test_records_that_are_read_at_a_uniform_age_are_found_as_with_fifo(num_segments: int) -> None:
    """What is read at any age up to what the disk holds is never in the oldest segment, which FIFO takes."""
    hits, _, asked = played(num_segments, lambda draw, held: draw.randrange(int(0.97 * held)))
    assert hits > 0.999 * asked


def test_a_segment_that_is_read_far_more_than_others_stays(tmp_path: Path) -> None:
    draw, full = Random(1), FullSegments()
    hot = Segment(0)
    full.add(hot)
    others = [Segment(index) for index in range(1, 8)]
    for segment in others:
        full.add(segment)
    for number in range(40):
        hot.reads += 10
        draw.choice(others).reads += 1
        taken = full.take()
        assert taken is not None
        assert taken is not hot, number
        full.add(taken)


def test_a_file_system_that_is_too_small_is_told_and_forgotten_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = disk(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", failing(errno.ENOSPC))
        assert not tier.put(key(0), record(0))
        assert "has room for 0 of 3 parts: No space left" in tier.problem
    assert tier.put(key(0), record(0))
    assert tier.problem == ""
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", failing(errno.ENOSPC))
        assert not tier.put(key(1), record(1))
        assert "takes no more: No space left" in tier.problem
    assert tier.put(key(1), record(1))
    assert tier.problem == ""


def test_what_a_disk_makes_is_for_its_user_only(tmp_path: Path) -> None:
    old = os.umask(0o022)
    try:
        disk(tmp_path).close()
    finally:
        os.umask(old)
    assert (tmp_path / "model").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "model").iterdir()} == {0o600}


SHAPE = RecordShape("uint8", 4, (Group("full", (0,), 2, 1, 512),))


def sealed(number: int, ends_at_s: float) -> memoryview:
    made = np.zeros(SHAPE.nbytes, np.uint8)
    seal(made, key(number), SHAPE, ends_at_s)
    return made.data


def test_records_that_have_expired_are_not_counted_and_can_be_stored_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = time.time()
    tier = disk(tmp_path)
    for number, ends_at_s in enumerate([now_s + 100, now_s + 200, float("inf")]):
        assert tier.put(key(number), sealed(number, ends_at_s))
    keys = list(map(key, range(3)))
    for again in range(2):
        assert tier.contains(keys) == [True, True, True], again
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda: now_s + 102)
            assert tier.contains(keys) == [False, True, True], again
        tier.close()
        tier = disk(tmp_path)
    monkeypatch.setattr(time, "time", lambda: now_s + 102)
    assert tier.put(key(0), sealed(0, now_s + 300))
    assert tier.contains(keys) == [True, True, True]
    assert read(tier, key(0)) == sealed(0, now_s + 300)


@pytest.mark.parametrize("num_records", [40, 100, 1000])
def test_a_small_disk_that_knows_the_length_of_records_is_used_for_fifteen_sixteenths(
    tmp_path: Path, num_records: int
) -> None:
    nbytes = 5 * 4096
    tier = Disk(tmp_path, "model", num_records * nbytes, record_nbytes=nbytes)
    assert all(tier.put(key(number), memoryview(bytes(nbytes))) for number in range(3 * num_records))
    least = tier.nbytes
    for number in range(3 * num_records, 4 * num_records):
        assert tier.put(key(number), memoryview(bytes(nbytes)))
        least = min(least, tier.nbytes)
    assert least > 0.88 * tier.capacity_nbytes, "a part that was emptied, the journal and the rest of a division"


def test_a_disk_between_two_lengths_of_parts_is_used_as_a_whole(tmp_path: Path) -> None:
    tier = Disk(tmp_path, "model", 11 << 20, 4 << 20)
    most = max(tier.nbytes for number in range(300) if tier.put(key(number), record(number)))
    assert most > 0.95 * tier.capacity_nbytes


def test_a_record_that_is_longer_than_a_part_is_told(tmp_path: Path) -> None:
    tier = disk(tmp_path)
    assert not tier.put(key(0), memoryview(bytes(2 * SEGMENT_NBYTES)))
    assert "takes records of 0 MiB, not of 0" in tier.problem
    assert tier.put(key(1), record(1))
    assert not tier.problem


@pytest.mark.parametrize("mean_share", [0.2, 0.5, 1.0])
@pytest.mark.parametrize("num_segments", [7, 79])
def test_records_that_are_read_at_an_exponential_age_are_found_as_with_fifo(
    num_segments: int, mean_share: float
) -> None:
    hits, fifo_hits, asked = played(num_segments, lambda draw, held: int(draw.expovariate(1 / (mean_share * held))))
    print(f"{hits / asked:.4f}, FIFO {fifo_hits / asked:.4f}")
    assert hits >= 0.999 * fifo_hits


def test_records_that_are_kept_outlive_any_number_of_others(tmp_path: Path) -> None:
    tier = disk(tmp_path, 8 * (SEGMENT_NBYTES + SEGMENT_NBYTES // 64) + 4096)
    kept: set[bytes] = set()
    tier.keep(kept)
    numbers = [0, 1, 5, 9, 13, 17, 21]  # two in the first segment, one in each other one
    kept.update(key(number) for number in numbers)
    for number in range(160):
        assert tier.put(key(number), record(number))
        assert set(numbers[: sum(one <= number for one in numbers)]) <= set(here(tier, 24))
    tier.close()
    tier = disk(tmp_path, 8 * (SEGMENT_NBYTES + SEGMENT_NBYTES // 64) + 4096)
    assert set(numbers) <= set(here(tier, 24)), "also after a restart"
    for number in range(160, 260):
        assert tier.put(key(number), record(number))
    assert here(tier, 24) == [], "nobody keeps them any more"
    tier.close()


def full_of_kept(path: Path) -> tuple[Disk, list[int]]:
    """A disk of 8 segments of 16 records, three of which are kept in each."""
    tier = Disk(path, "model", 8 * ((1 << 20) + (1 << 14)) + 4096, 1 << 20)
    numbers = [number for number in range(128) if number % 16 in (0, 5, 10)]
    tier.keep({key(number) for number in numbers})
    for number in range(128):
        assert tier.put(key(number), record(number))
    return tier, numbers


def test_several_writers_find_room_where_every_segment_has_records_that_are_kept(tmp_path: Path) -> None:
    tier, numbers = full_of_kept(tmp_path)
    body, refused = record(0), list[int]()

    def write(first: int) -> None:
        refused.extend(number for number in range(first, 1024, 4) if not tier.put(key(number), body))

    writers = [threading.Thread(target=write, args=[first]) for first in range(128, 132)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(WAIT_S)
    assert refused == []
    assert here(tier, 128) == numbers
    tier.close()


def test_writers_go_on_after_a_run_that_failed_when_it_had_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had planned to write again what is kept."""
    tier, _ = full_of_kept(tmp_path)
    over = sealed(127, time.time() - 10)
    assert tier.put(key(128), record(128))  # the segment that is filled now has the kept ones of another
    tier.remove(key(127))
    assert tier.put(key(127), over)
    numbers = iter(range(129, 256))
    while tier._active is not None and tier._active.end_page + 16 <= 256:
        assert tier.put(key(number := next(numbers)), record(number))
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "strike", failing(errno.EIO))
        with pytest.raises(OSError, match="Input/output error"):
            tier.put_run([(key(300), record(300)), (key(127), over)])
    done = threading.Event()

    def write() -> None:
        if tier.put(key(301), record(301, 14 * 65536)):
            done.set()

    threading.Thread(target=write, daemon=True).start()
    assert done.wait(WAIT_S)
    tier.close()


def test_a_disk_that_cannot_write_again_what_is_kept_takes_others_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, _ = full_of_kept(tmp_path)
    monkeypatch.setattr(DirectFile, "read", failing(errno.EIO))
    for number in range(128, 512):
        assert tier.put(key(number), record(number))
    tier.close()


def test_a_segment_full_of_records_that_are_kept_is_passed_over(tmp_path: Path) -> None:
    tier = disk(tmp_path, 8 * (SEGMENT_NBYTES + SEGMENT_NBYTES // 64) + 4096)
    right, written = DirectFile.write, list[int]()

    def write(self: DirectFile, offset: int, record: memoryview) -> bool:
        written.append(offset)
        return right(self, offset, record)

    kept = {key(number) for number in range(4)}
    tier.keep(kept)
    for number in range(4):
        assert tier.put(key(number), record(number))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DirectFile, "write", write)
        for number in range(4, 204):
            assert tier.put(key(number), record(number))
    assert here(tier, 4) == [0, 1, 2, 3]
    assert len(written) == 200, "none of them was written again"
    tier.close()
