"""KV that an operator cleared is not found again: not when its tier comes back, and not after a restart."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import gettempdir
from typing import TYPE_CHECKING

import pytest

from pdlink.config import state_directory
from pdlink.store import below
from pdlink.store.cleared import EVERYTHING, Cleared, places_of
from pdlink.store.eviction import Lru
from pdlink.store.interface import MEMORY
from pdlink.store.store import Store
from pdlink.store.tiers.base import DAMAGED
from pdlink.store.tiers.disk import Disk
from pdlink.store.tiers.shared_dir import SharedDir
from pdlink.store.tiers.valkey import Valkey
from tests.waiting import WAIT_S, until

from .stubs import SHAPE, StubTier
from .test_store import KEYS, put, read
from .tiers.server import valkey_server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pdlink.store.tiers.base import Tier


@contextmanager
def life(tier: Tier, file: Path) -> Iterator[Store]:
    """One life of a store over that medium."""
    store = Store(16 * SHAPE.nbytes, Lru(), [tier], cleared=[file], tier_deadline_s=WAIT_S)
    store.open()
    try:
        yield store
        store.check()
    finally:
        store.close()


class _Away(StubTier):
    """A tier whose removals fail while it is away, and that knows its medium again."""

    medium = "stub"

    def __init__(self, records: dict[bytes, bytes]) -> None:
        super().__init__()
        self.records = records
        self.away = False

    def remove(self, key: bytes) -> None:
        self._check()
        super().remove(key)

    def clear(self) -> None:
        self._check()
        super().clear()

    def _check(self) -> None:
        if self.away:
            raise OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize("everything", [False, True])
def test_what_a_tier_could_not_forget_is_hidden_and_removed_by_the_next_process(
    everything: bool, tmp_path: Path
) -> None:
    records: dict[bytes, bytes] = {}
    tier = _Away(records)
    with life(tier, tmp_path / "cleared") as store:
        put(store, KEYS[:2])
        assert store.flush(WAIT_S)
        tier.away = True
        store.clear(None if everything else KEYS[:1])
        assert store.flush(WAIT_S)
        assert store.lookup(KEYS[:2], WAIT_S).keys == ()
    assert KEYS[0] in records
    tier = _Away(records)
    tier.away = True
    with life(tier, tmp_path / "cleared") as store:
        assert read(store, KEYS[:2]) == 0, "it is found again"
        assert store.state().places[1].forgets
        if not everything:
            assert read(store, KEYS[1:2]) == 1, "others are found"
        tier.away = False
        until(lambda: not store.state().places[1].forgets, "the tier is cleaned up though nobody writes to it")
        assert KEYS[0] not in records
        store.clear(places=[MEMORY])
        put(store, KEYS[:1])
        assert store.flush(WAIT_S)
        store.clear(places=[MEMORY])
        assert read(store, KEYS[:1]) == 1, "computed again, it is kept again"
    with life(_Away(records), tmp_path / "cleared") as store:
        assert read(store, KEYS[:1]) == 1, "what is forgotten is cleared no more"


def test_a_tier_may_have_what_was_cleared_until_the_file_has_said_what_that_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, right = threading.Event(), Cleared.of

    def frozen(cleared: Cleared, medium: str) -> dict[bytes, bytes]:
        assert go_on.wait(WAIT_S)
        return right(cleared, medium)

    monkeypatch.setattr(Cleared, "of", frozen)
    monkeypatch.setattr(below, "_LEARN_S", 0.01)
    with life(_Away({}), tmp_path / "cleared") as store:
        assert store.state().places[1].forgets
        go_on.set()
        until(lambda: not store.state().places[1].forgets, "the file says that nothing was cleared")


def test_a_clear_that_is_noted_too_late_is_forgotten_when_the_tier_has_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next process hides and removes what was stored after the clear."""
    go_on, right, noted = threading.Event(), Cleared.add, threading.Event()

    def frozen(cleared: Cleared, clear: bytes, media: Sequence[str], keys: Sequence[bytes] | None) -> bool:
        assert go_on.wait(WAIT_S)
        done = right(cleared, clear, media, keys)
        noted.set()
        return done

    file = Cleared([tmp_path / "cleared"])
    store = Store(16 * SHAPE.nbytes, Lru(), [_Away({})], cleared=[tmp_path / "cleared"], tier_deadline_s=0.2)
    store.open()
    try:
        put(store, KEYS[:1])
        assert store.flush(WAIT_S)
        monkeypatch.setattr(Cleared, "add", frozen)
        assert not store.clear(KEYS[:1]).durable
        go_on.set()
        assert noted.wait(WAIT_S)
        until(lambda: not store.state().places[1].forgets, "the tier has forgotten")
        until(lambda: not file.of("stub"), "and so has the file")
    finally:
        go_on.set()
        store.close()


def test_a_record_that_is_cleared_again_while_it_is_removed_stays_cleared(tmp_path: Path) -> None:
    tier = _Away({})
    with life(tier, tmp_path / "cleared") as store:
        put(store, KEYS[:1])
        assert store.flush(WAIT_S)
        right = tier.remove

        def again(key: bytes) -> None:
            right(key)
            tier.remove = right  # type: ignore[method-assign]
            tier.away = True
            store.clear([key])

        tier.remove = again  # type: ignore[method-assign]
        store.clear(KEYS[:1])
        assert store.flush(WAIT_S)
        assert store.state().places[1].forgets, "the second clear was not done"
        assert list(Cleared([tmp_path / "cleared"]).of("stub")) == KEYS[:1]


def _disk(path: Path) -> Tier:
    return Disk(path, "model", 1 << 20)


def _shared(path: Path) -> Tier:
    path.mkdir(exist_ok=True)
    return SharedDir(path, "model")


def _valkey(path: Path) -> Tier:
    return Valkey(valkey_server().url, str(path))


@pytest.mark.parametrize("make", [_disk, _shared, _valkey])
def test_a_store_that_dies_before_its_tier_has_forgotten_finds_nothing_again(
    make: Callable[[Path], Tier], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dies between the answer to the clear and the removal."""
    with life(make(tmp_path / "medium"), tmp_path / "cleared") as store:
        put(store, KEYS[:2])
        assert store.flush(WAIT_S)
        with monkeypatch.context() as patch:
            patch.setattr(below.GuardedTier, "_drop", lambda *_: None)
            patch.setattr(below.GuardedTier, "try_again", lambda _: None)
            store.clear(KEYS[:1])
            assert store.flush(WAIT_S)
    with life(make(tmp_path / "medium"), tmp_path / "cleared") as store:
        assert read(store, KEYS[:1]) == 0
        assert read(store, KEYS[1:2]) == 1
        until(lambda: not store.state().places[1].forgets, "it is removed")
    with life(make(tmp_path / "medium"), tmp_path / "other") as store:
        assert read(store, KEYS[:1]) == 0, "the medium has forgotten it"


def test_a_directory_that_is_away_has_forgotten_nothing(tmp_path: Path) -> None:
    tier = _shared(tmp_path / "mount")
    tier.put(KEYS[0], memoryview(b"record"))
    (tmp_path / "mount").rename(tmp_path / "away")
    for forget in (partial(tier.remove, KEYS[0]), tier.clear):
        with pytest.raises(FileNotFoundError):
            forget()
    (tmp_path / "away").rename(tmp_path / "mount")
    tier.remove(KEYS[0])
    assert tier.contains(KEYS[:1]) == [False]


def test_a_directory_that_may_not_be_written_has_forgotten_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = _shared(tmp_path / "mount")
    tier.put(KEYS[0], memoryview(b"record"))

    def refused(_: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "unlink", refused)
    for forget in (partial(tier.remove, KEYS[0]), tier.clear):
        with pytest.raises(PermissionError):
            forget()


def test_a_clear_is_noted_elsewhere_where_the_first_file_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "full").write_text("no directory")
    paths = [tmp_path / "full" / "cleared", tmp_path / "home" / "cleared"]
    cleared = Cleared(paths)
    first, second = b"first---", b"second--"
    assert cleared.add(first, ["disk"], KEYS[:2])
    assert Cleared(paths).of("disk") == dict.fromkeys(KEYS[:2], first)
    assert cleared.add(second, ["disk", "valkey"], None)
    cleared.done("disk", KEYS[:2], first)
    assert Cleared(paths).of("disk") == Cleared(paths).of("valkey") == {EVERYTHING: second}
    assert not caplog.records
    assert not Cleared(paths[:1]).add(first, ["disk"], KEYS[:1])
    assert "make one of these paths writable" in caplog.text


def test_a_store_without_a_disk_notes_clears_in_its_state_dir_else_in_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, state = tmp_path / "disk", tmp_path / "state"
    assert places_of(disk, state) == [disk / "cleared", state / "cleared"]
    assert places_of(None, state) == [state / "cleared"]
    assert state_directory(state) == state
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    assert state_directory(None) == tmp_path / "xdg" / "pdlink"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert state_directory(None) == tmp_path / "home" / ".local" / "state" / "pdlink"
    monkeypatch.setattr(os.path, "expanduser", str)  # a container's user without a home
    assert state_directory(None) is None
    assert places_of(disk, None) == [disk / "cleared"]
    assert not Cleared(places_of(None, None)).add(b"clear---", ["valkey"], None)


def test_tests_note_what_they_clear_in_no_users_home() -> None:
    path = state_directory(None)
    assert path is not None
    assert path.is_relative_to(gettempdir())


def test_a_damaged_file_of_clears_is_said_and_stops_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "cleared").write_bytes(b"noise" * 1000)
    with life(_Away({}), tmp_path / "cleared") as store:
        assert "may be found again" in caplog.text
        put(store, KEYS[:1])
        assert store.clear(KEYS[:1]) == (1, False)
        assert "make one of these paths writable" in caplog.text


def test_a_disk_that_cannot_strike_a_record_out_still_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(tmp_path, "model", 1 << 20)
    disk.put(KEYS[0], memoryview(b"record"))

    def fails(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(disk._journal, "strike", fails)
        with pytest.raises(OSError, match="Input/output"):
            disk.remove(KEYS[0])
        assert disk.contains(KEYS[:1]) == [True], "what the journal says holds"
    disk.remove(KEYS[0])
    assert disk.contains(KEYS[:1]) == [False]
    disk.close()
    again = Disk(tmp_path, "model", 1 << 20)
    assert again.contains(KEYS[:1]) == [False]
    again.close()


@pytest.mark.parametrize("restarted", [False, True])
def test_a_removed_record_takes_entries_with_it_that_could_not_be_struck_out(
    restarted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read fails and so does the journal: the record is put again, and the old entry stands beside the new one."""
    disk = Disk(tmp_path, "model", 1 << 20)
    disk.put(KEYS[0], memoryview(b"record"))

    def fails(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(disk._journal, "strike", fails)
        patch.setattr(disk, "_read", lambda *_: b"")
        assert disk.get(KEYS[0], memoryview(bytearray(10))) == DAMAGED
    assert disk.put(KEYS[0], memoryview(b"record"))
    if restarted:
        disk.close()
        disk = Disk(tmp_path, "model", 1 << 20)
    disk.remove(KEYS[0])
    disk.close()
    again = Disk(tmp_path, "model", 1 << 20)
    assert again.contains(KEYS[:1]) == [False]
    again.close()


def test_a_clear_that_is_cut_short_brings_nothing_to_light_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process is killed in the middle of zeros: the tier is filled again, past what was left of the journal."""
    disk = Disk(tmp_path, "model", 64 << 20)
    many = [b"%032d" % number for number in range(3000)]
    for key in many:
        assert disk.put(key, memoryview(key))
    right, calls = os.pwrite, 0

    def killed(fd: int, data: bytes, at: int) -> int:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        return right(fd, data, at)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", killed)
        with pytest.raises(KeyboardInterrupt):
            disk.clear()
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path / "model", copy / "model")
    disk.close()
    again = Disk(copy, "model", 64 << 20)
    found = [key for key in many if again.contains([key])[0]]
    assert 0 < len(found) < len(many)
    assert found == many[: len(found)], "the head of the journal stands, and nothing behind it"
    again.clear()
    for number in range(2000):
        again.put(b"new %028d" % number, memoryview(b"new"))
    again.close()
    last = Disk(copy, "model", 64 << 20)
    assert not any(last.contains(many))
    last.close()
