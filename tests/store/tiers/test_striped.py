"""Several directories of one disk tier: each record in one of them, whatever becomes of the others."""

from __future__ import annotations

import errno
import os
import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from pdlink.errors import ConfigError
from pdlink.store import late
from pdlink.store.tiers.disk import Disk
from pdlink.store.tiers.striped import Striped
from tests.waiting import WAIT_S, until

from .harness import key, read, record

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pdlink.store.interface import RecordChange

KEYS = list(map(key, range(32)))


def opened(path: Path, *names: str) -> Striped:
    return Striped([path / name for name in names], "model", len(names) << 23)


def filled(tier: Striped) -> None:
    assert all(tier.put(which, record(number)) for number, which in enumerate(KEYS))


def right(tier: Striped) -> list[bool]:
    return [read(tier, which) == record(number) for number, which in enumerate(KEYS)]


def shares(tier: Striped) -> list[int]:
    return [sum(disk.contains(KEYS)) for disk in tier._disks]


def refuse(monkeypatch: pytest.MonkeyPatch, disk: Disk, number: int) -> None:
    def grow(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(disk._file, "grow", grow)


def test_directories_share_the_records_and_have_them_after_a_restart_in_any_order(tmp_path: Path) -> None:
    tier = opened(tmp_path, "a", "b")
    filled(tier)
    filled(tier)
    assert sum(shares(tier)) == len(KEYS), "each in one of them"
    assert min(shares(tier)) > len(KEYS) / 4
    tier.close()
    tier = opened(tmp_path, "b", "a", "c")
    assert all(right(tier))
    filled(tier)
    assert shares(tier)[2] == 0, "none is stored twice"
    tier.remove(KEYS[0])
    assert right(tier).count(False) == 1
    tier.clear()
    assert not any(tier.contains(KEYS))


def test_several_directories_that_do_not_answer_are_waited_for_no_longer_than_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited_s, go_on, now_s = list[float | None](), threading.Event(), 100.0

    def result(_: Future[None], timeout_s: float | None = None) -> None:
        nonlocal now_s
        waited_s.append(timeout_s)
        now_s += timeout_s or 0.0
        raise TimeoutError

    with monkeypatch.context() as patch:
        patch.setattr(late, "time", SimpleNamespace(monotonic=lambda: now_s))
        patch.setattr(Future, "result", result)
        parts = [late.Late(name, lambda: go_on.wait(WAIT_S)) for name in ("a", "b", "c")]
        for part in parts:
            part.wait()
            part.close()
    go_on.set()
    assert waited_s == [late.WAIT_S, 0.0, 0.0]


def test_what_is_asked_of_a_disk_while_it_opens_is_done_in_order() -> None:
    """A tier that is removed then leaves its listeners after they were added."""
    opens, begun, goes_on, done = threading.Event(), threading.Event(), threading.Event(), list[str]()
    disk = late.Late("a disk", lambda: opens.wait(WAIT_S))

    def listen(_: bool) -> None:  # noqa: FBT001
        begun.set()
        assert goes_on.wait(WAIT_S)
        done.append("listen")

    disk.then(listen)
    opens.set()
    assert begun.wait(WAIT_S)
    disk.then(lambda _: done.append("leave"))
    goes_on.set()
    until(lambda: disk.opened is not None, "it is open")
    disk.then(lambda _: done.append("later"))
    assert done == ["listen", "leave", "later"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS], ids=["full", "read-only"])
def test_what_one_directory_does_not_take_another_one_has(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = opened(tmp_path, "a", "b")
    with monkeypatch.context() as patch:
        refuse(patch, tier._disks[0], number)
        filled(tier)
        assert shares(tier) == [0, len(KEYS)]
        assert str(tmp_path / "a") in tier.problem
        assert str(tmp_path / "b") not in tier.problem
        assert os.strerror(number) in tier.problem
    tier.clear()
    filled(tier)
    assert min(shares(tier)) > 0
    assert tier.problem == ""


def test_a_directory_that_fails_within_a_run_keeps_what_it_has_of_it_and_another_one_has_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = Striped([tmp_path / "a", tmp_path / "b"], "model", 2 << 23, 65536)
    disk, calls = tier._disks[0], 0
    of_disk = [number for number, which in enumerate(KEYS) if int.from_bytes(which[:8], "little") % 2 == 0]
    write_run = disk._file.write_run

    def fail_later(offset: int, run: Sequence[memoryview]) -> None:
        nonlocal calls
        calls += 1
        if calls > 1:  # the first segment has a part of the run
            raise OSError(errno.EIO, "Input/output error")
        write_run(offset, run)

    monkeypatch.setattr(disk._file, "write_run", fail_later)
    assert all(tier.put_run([(KEYS[number], record(number)) for number in of_disk]))
    here = [one.contains(KEYS) for one in tier._disks]
    assert [first + second for first, second in zip(*here, strict=True)] == [
        int(number in of_disk) for number in range(len(KEYS))
    ], "each in one of them"
    assert sum(here[0]) > 0
    assert str(tmp_path / "a") in tier.problem


def test_all_directories_that_fail_are_a_failure_of_the_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = opened(tmp_path, "a", "b")
    for disk in tier._disks:
        refuse(monkeypatch, disk, errno.EIO)
    with pytest.raises(OSError, match="Input/output"):
        tier.put(KEYS[0], record(0))


def test_a_directory_that_cannot_be_read_costs_its_own_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = opened(tmp_path, "a", "b")
    filled(tier)
    own = tier._disks[0].contains(KEYS)

    def fail(*_: object) -> bool:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(tier._disks[0]._file, "read", fail)
    for number, (which, is_lost) in enumerate(zip(KEYS, own, strict=True)):
        if is_lost:
            with pytest.raises(OSError, match="Input/output"):
                read(tier, which)
        else:
            assert read(tier, which) == record(number)


def test_a_directory_that_cannot_be_used_at_the_start_is_told_and_left_out_until_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(late, "PAUSE_S", 0.01)
    (tmp_path / "a").write_text("a file")
    tier = opened(tmp_path, "a", "b")
    filled(tier)
    assert "tiers.local_disk" in tier.problem
    assert str(tmp_path / "a") in tier.problem
    with pytest.raises(OSError, match=r"tiers\.local_disk"):
        tier.remove(KEYS[0])
    heard: list[RecordChange] = []
    tier.listen(heard.append)
    assert len(heard) == len(KEYS) - 1
    (tmp_path / "a").unlink()
    until(lambda: not tier.problem, "it is open")
    tier.clear()
    filled(tier)
    assert min(shares(tier)) > 0
    assert sum(change.is_there for change in heard) == 2 * len(KEYS) - 1, "what comes into the late one is heard"
    tier.close()
    for name in "cd":
        (tmp_path / name).write_text("another file")
    with pytest.raises(ConfigError, match="cannot be used"):
        opened(tmp_path, "c", "d")


def test_a_directory_that_another_process_has_is_a_wrong_setting(tmp_path: Path) -> None:
    other = Disk(tmp_path / "b", "model", 1 << 20)
    with pytest.raises(ConfigError, match="another process uses"):
        opened(tmp_path, "a", "b")
    other.close()
    opened(tmp_path, "a", "b").close()
