"""What operators have set stands after a restart, however the process before has ended."""

from __future__ import annotations

import itertools
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from pdlink.store.eviction import Lru
from pdlink.store.interface import MEMORY
from pdlink.store.standing import KeptBelow, Standing
from pdlink.store.store import Store
from pdlink.store.tiers.disk import Disk
from tests.waiting import WAIT_S, until

from .stubs import SHAPE
from .test_store import KEYS, put

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MOST_NBYTES = 8 * SHAPE.nbytes
OTHERS = [bytes([number]) * 32 for number in range(100, 140)]


@contextmanager
def life(folder: Path, disk_nbytes: int = 1 << 20, ingestion: str = "all") -> Iterator[Store]:
    """Of a store with 16 records in memory, of which 4 may be pinned."""
    disk = Disk(folder, "ns", disk_nbytes, record_nbytes=SHAPE.nbytes)
    quota = 4 * SHAPE.nbytes
    file = folder / "ns/standing"
    given: dict[str, Any] = {"ingestion": ingestion, "pin_quota_nbytes": quota, "tier_deadline_s": WAIT_S}
    store = Store(16 * SHAPE.nbytes, Lru(), [disk], standing=file, **given)
    store.open()
    try:
        yield store
        store.check()
    finally:
        store.close()


def pins(store: Store) -> dict[str, int]:
    return {pin.request: pin.records for pin in store.state().pins}


def test_pins_and_quotas_are_those_of_the_store_before(tmp_path: Path) -> None:
    with life(tmp_path) as store:
        put(store, KEYS[:3])
        assert store.pin(KEYS[:3], "a") == 3
        assert store.stand(KEYS[:3], SHAPE, "a")
        assert store.set_quota(3 * SHAPE.nbytes, "tenant")
        assert store.set_quota(5 * SHAPE.nbytes)
    with life(tmp_path) as store:
        until(lambda: pins(store) == {"a": 3}, "they are pinned again")
        assert store.quota("tenant")[1] == 3 * SHAPE.nbytes
        assert store.quota("another")[1] == 5 * SHAPE.nbytes
        put(store, OTHERS)
        assert store.holds(KEYS[:3]) == [True] * 3
        assert store.unpin("a") == 3
        store.set_quota(None, "tenant")
        store.set_quota(None)
    with life(tmp_path) as store:
        assert not store._standing.pins
        assert [store.quota(tenant)[1] for tenant in ("tenant", "")] == [0, 0]


def test_what_is_pinned_is_written_though_it_was_wanted_once(tmp_path: Path) -> None:
    with life(tmp_path, ingestion="second_sight") as store:
        put(store, KEYS[:3])
        store.pin(KEYS[:2], "a")
        assert store.stand(KEYS[:2], SHAPE, "a")
    with life(tmp_path) as store:
        until(lambda: pins(store) == {"a": 2}, "they are pinned again")


def test_the_disk_keeps_what_is_pinned_while_others_go(tmp_path: Path) -> None:
    """Sixteen records fit."""
    disk_nbytes = 20 * SHAPE.nbytes
    with life(tmp_path, disk_nbytes) as store:
        put(store, KEYS[:2])
        store.pin(KEYS[:2], "a")
        assert store.stand(KEYS[:2], SHAPE, "a")
        for key in OTHERS:
            put(store, [key])
            assert store.flush(WAIT_S)
        assert not all(store._below.tiers[0].contains(OTHERS))
    with life(tmp_path, disk_nbytes) as store:
        until(lambda: pins(store) == {"a": 2}, "they are pinned again")


def test_a_pin_stands_for_what_is_left_of_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with life(tmp_path) as store:
        put(store, KEYS[:4])
        store.pin(KEYS[:4], "a")
        assert store.stand(KEYS[:4], SHAPE, "a")
        store.clear([KEYS[3]])
        assert [len(pin.keys) for pin in store._standing.pins] == [3]
        store.clear([KEYS[2]], [place for place in store.places if place != MEMORY])
    with life(tmp_path) as store:
        until(lambda: "pin 'a': 2 of 3 records" in caplog.text, "it is told")
        assert pins(store) == {"a": 2}
        store.clear()
        assert not store._standing.pins


def test_a_longer_prompt_of_one_name_takes_the_place_of_its_beginning(tmp_path: Path) -> None:
    file = tmp_path / "standing"
    standing = Standing(file, MOST_NBYTES)
    assert standing.pin("a", SHAPE, KEYS[:2])
    assert standing.pin("b", SHAPE, KEYS[:2])
    assert standing.pin("a", SHAPE, KEYS[:3])
    assert standing.pin("a", SHAPE, KEYS[:1]), "it stands already"
    assert [(pin.name, len(pin.keys)) for pin in Standing(file, MOST_NBYTES).pins] == [("b", 2), ("a", 3)]
    kept = KeptBelow({OTHERS[0]}, standing)
    assert [key in kept for key in (KEYS[2], KEYS[3], OTHERS[0])] == [True, False, True]
    standing.unpin("a")
    assert KEYS[2] not in kept


def test_what_is_too_large_or_cannot_be_written_does_not_stand(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    standing = Standing(tmp_path / "standing", MOST_NBYTES)
    assert standing.pin("a", SHAPE, KEYS[:4])
    assert not standing.pin("b", SHAPE, OTHERS[:5])
    assert [pin.name for pin in Standing(tmp_path / "standing", MOST_NBYTES).pins] == ["a"]
    (tmp_path / "file").touch()
    assert not Standing(tmp_path / "file/standing", MOST_NBYTES).quota("tenant", 1)
    assert "cannot be written" in caplog.text
    assert not Standing().pin("a", SHAPE, KEYS[:1]), "without a disk"


def test_wrong_lines_are_left_out_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "standing"
    standing = Standing(file, MOST_NBYTES)
    standing.pin("a", SHAPE, KEYS[:2])
    standing.quota("tenant", 7)
    quota, pin = file.read_bytes().splitlines()
    wrong = [
        b"",
        b"{",
        pin[: len(pin) // 2],
        b"\xff\xfe",
        pin.replace(b'"keys":["', b'"keys":["AAAA'),
        pin.replace(b'"name":"a"', b'"name":""'),
        pin.replace(b'"name":"a"', b'"name":"a","more":1'),
        quota.replace(b"7", b"-7"),
        quota.replace(b"quota", b"freeze"),
    ]
    assert len({*wrong, pin, quota}) == len(wrong) + 2
    for lines in itertools.chain([wrong], ([line] for line in wrong)):
        caplog.clear()
        file.write_bytes(b"\n".join([pin, *lines, quota]))
        found = Standing(file, MOST_NBYTES)
        assert [pin.name for pin in found.pins] == ["a"]
        assert [(one.tenant, one.nbytes) for one in found.quotas] == [("tenant", 7)]
        assert caplog.text.count("is left out") == len(lines)
    file.unlink()
    file.mkdir()
    assert Standing(file, MOST_NBYTES).pins == ()
    assert "cannot be read" in caplog.text
