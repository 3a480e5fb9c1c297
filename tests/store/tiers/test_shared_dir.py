"""What a shared directory has to bear: writers that die, full file systems, strangers' files, other nodes."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from pdlink.errors import ConfigError
from pdlink.store import late
from pdlink.store.tiers.shared_dir import SharedDir
from tests.waiting import WAIT_S, until

from .harness import key, read, record

FILE_NBYTES = 65536 + 64


def files(root: Path) -> list[Path]:
    return [path for path in (root / "model").rglob("*") if path.is_file()]


def python(code: str, *arguments: object) -> subprocess.Popen[bytes]:
    head = "import os, resource, signal, sys; from pathlib import Path; from pdlink.store.tiers import shared_dir\n"
    return subprocess.Popen([sys.executable, "-c", head + code, *map(str, arguments)])


def test_a_writer_killed_in_the_middle_leaves_a_miss_and_a_file_that_goes_after_an_hour(tmp_path: Path) -> None:
    code = """
real = os.write
def half(file, piece):
    if len(piece) < 1000:
        return real(file, piece)
    real(file, piece[:len(piece) // 2])
    os.kill(os.getpid(), signal.SIGKILL)
shared_dir.os.write = half
shared_dir.SharedDir(Path(sys.argv[1]), "model").put(bytes.fromhex(sys.argv[2]), memoryview(bytes(65536)))
"""
    assert python(code, tmp_path, key(1).hex()).wait(50) == -9
    (leftover,) = files(tmp_path)
    assert leftover.stat().st_size == 64 + 32768
    tier = SharedDir(tmp_path, "model")
    assert not tier.contains([key(1)])[0]
    assert read(tier, key(1)) is None
    assert files(tmp_path) == [leftover], "it may belong to a slow writer"
    old_s = time.time() - 3700
    os.utime(leftover, (old_s, old_s))
    assert tier.put(key(1), record(1))
    tier = SharedDir(tmp_path, "model")
    assert not leftover.exists()
    assert read(tier, key(1)) == record(1)


def test_a_file_system_that_refuses_more_bytes_keeps_nothing_of_the_record(tmp_path: Path) -> None:
    """RLIMIT_FSIZE: a real write is cut short, and the next one fails."""
    code = """
resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))
tier = shared_dir.SharedDir(Path(sys.argv[1]), "model", 1 << 20)
big, small = bytes(32), bytes([1]) * 32
assert not tier.put(big, memoryview(bytes(65536)))
assert tier.nbytes == 0 and tier.contains([big]) == [False]
assert tier.put(small, memoryview(bytes(1000)))
assert tier.nbytes == 1064
"""
    assert python(code, tmp_path).wait(50) == 0
    assert [path.stat().st_size for path in files(tmp_path)] == [1064]


@pytest.mark.parametrize(
    ("number", "raises"), [(errno.ENOSPC, False), (errno.EDQUOT, False), (errno.EROFS, False), (errno.EIO, True)]
)
def test_only_a_failing_medium_is_an_error_of_a_put(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, raises: bool
) -> None:
    tier = SharedDir(tmp_path, "model", 1 << 20)

    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", fail)
        if raises:
            with pytest.raises(OSError, match="Input/output error"):
                tier.put(key(1), record(1))
        else:
            assert not tier.put(key(1), record(1))
            assert os.strerror(number) in tier.problem
    assert files(tmp_path) == []
    assert tier.nbytes == 0
    assert tier.put(key(1), record(1))
    assert tier.problem == ""


def test_a_directory_that_does_not_answer_at_the_start_is_told_and_used_when_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(late, "WAIT_S", 0.01)
    answers = threading.Event()
    monkeypatch.setattr(SharedDir, "_remove_leftovers", lambda _: answers.wait(WAIT_S))
    tier = SharedDir(tmp_path, "model")
    assert f"{tmp_path} does not answer" in tier.problem
    answers.set()
    until(lambda: not tier.problem, "it is used")
    assert tier.put(key(1), record(1))
    assert read(tier, key(1)) == record(1)


@pytest.mark.usefixtures("steady_descriptors")
def test_a_read_error_closes_the_file_and_keeps_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = SharedDir(tmp_path, "model")
    tier.put(key(1), record(1))

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "readv", fail)
        with pytest.raises(OSError, match="Input/output error"):
            read(tier, key(1))
    assert len(os.listdir("/proc/self/fd")) <= before
    assert read(tier, key(1)) == record(1)


def test_short_reads_and_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, write, readv = SharedDir(tmp_path, "model"), os.write, os.readv
    monkeypatch.setattr(os, "write", lambda file, piece: write(file, piece[:1000]))
    monkeypatch.setattr(os, "readv", lambda file, pieces: readv(file, [pieces[0][:7000]]))
    assert tier.put(key(1), record(1))
    assert read(tier, key(1)) == record(1)


def test_processes_that_put_one_key_at_once_leave_one_whole_record(tmp_path: Path) -> None:
    code = """
tier, into = shared_dir.SharedDir(Path(sys.argv[1]), "model"), bytearray(300000)
for number in range(60):
    key = bytes([number % 3]) * 32
    tier.put(key, memoryview(bytes([int(sys.argv[2])]) * 300000))
    nbytes = tier.get(key, memoryview(into))
    assert nbytes is None or len(set(into)) == 1
    tier.remove(key)
"""
    SharedDir(tmp_path, "model")
    writers = [python(code, tmp_path, number) for number in range(3)]
    assert [writer.wait(50) for writer in writers] == [0, 0, 0]
    assert files(tmp_path) == []


def test_nodes_find_what_others_put_and_keep_the_bound_together(tmp_path: Path) -> None:
    """Oldest first, of any writer; a hit makes an old file young again."""
    one, other = (SharedDir(tmp_path, "model", 10 * FILE_NBYTES) for _ in range(2))
    old_s = time.time() - 7200
    for number in range(8):
        one.put(key(number), record(number))
        path = tmp_path / "model" / key(number).hex()[:2] / key(number).hex()[2:]
        os.utime(path, (old_s + number, old_s + number))
    assert read(other, key(0)) == record(0)
    for number in range(8, 12):
        assert other.put(key(number), record(number))
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 10 * FILE_NBYTES
    assert one.contains([key(number) for number in range(12)]) == [True] + [False] * 2 + [True] * 9
    again = SharedDir(tmp_path, "model", 4 * FILE_NBYTES)
    assert again.nbytes <= 4 * FILE_NBYTES


def test_namespaces_do_not_see_each_other(tmp_path: Path) -> None:
    one, other = SharedDir(tmp_path, "model"), SharedDir(tmp_path, "other")
    one.put(key(1), record(1))
    other.clear()
    assert other.contains([key(1)]) == [False]
    assert read(one, key(1)) == record(1)


def test_a_record_under_another_key_is_a_miss(tmp_path: Path) -> None:
    tier = SharedDir(tmp_path, "model")
    tier.put(key(1), record(1))
    target = tmp_path / "model" / key(2).hex()[:2] / key(2).hex()[2:]
    target.parent.mkdir()
    files(tmp_path)[0].rename(target)
    assert read(tier, key(2)) is None


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/nowhere", path)])
def test_a_strangers_file_under_a_records_name_blocks_nobody(tmp_path: Path, make: object) -> None:
    tier = SharedDir(tmp_path, "model", 1 << 20)
    path = tmp_path / "model" / key(1).hex()[:2] / key(1).hex()[2:]
    path.parent.mkdir()
    assert callable(make)
    make(path)
    assert read(tier, key(1)) is None
    tier.put(key(1), record(1))
    tier.put(key(2), record(2))
    assert read(tier, key(2)) == record(2)
    tier.clear()
    assert tier.contains([key(2)]) == [False]


def test_files_that_are_no_records_are_left_alone(tmp_path: Path) -> None:
    """As file servers and people leave them."""
    strange = [tmp_path / "model" / name for name in (".snapshot", "00", "README")]
    SharedDir(tmp_path, "model")
    for path in strange:
        path.write_bytes(bytes(1000))
    (tmp_path / "model" / key(0).hex()[:2] / "folder").mkdir(parents=True)
    tier = SharedDir(tmp_path, "model", 3 * FILE_NBYTES)
    for number in range(9):
        assert tier.put(key(number), record(number))
    tier.clear()
    assert tier.nbytes == 0
    assert sorted(files(tmp_path)) == sorted(strange)


def test_a_directory_that_is_not_mounted_is_a_wrong_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="mount or create it"):
        SharedDir(tmp_path / "missing", "model")
    assert not (tmp_path / "missing").exists()


def test_files_and_directories_are_for_their_user_only(tmp_path: Path) -> None:
    old = os.umask(0o022)
    try:
        assert SharedDir(tmp_path, "model").put(key(1), record(1))
    finally:
        os.umask(old)
    made = list((tmp_path / "model").rglob("*"))
    assert {path.stat().st_mode & 0o777 for path in made if path.is_file()} == {0o600}
    assert {path.stat().st_mode & 0o777 for path in [tmp_path / "model", *made] if path.is_dir()} == {0o700}
