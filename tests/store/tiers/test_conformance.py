"""What every tier does, wherever it keeps records."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest

from pdlink.store.tiers.base import DAMAGED, ListingTier, RunTier, Tier

from .harness import ENTRIES, Entry, key, read, record


@pytest.fixture(params=ENTRIES, ids=lambda entry: entry.name)
def entry(request: pytest.FixtureRequest) -> Entry:
    assert isinstance(request.param, Entry)
    return request.param


@pytest.fixture
def tier(entry: Entry, tmp_path: Path) -> Iterator[Tier]:
    tier = entry.open(tmp_path)
    yield tier
    tier.close()


@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 65536, (1 << 20) + 1, 3 << 20])
def test_what_was_put_is_got_byte_for_byte(tier: Tier, nbytes: int) -> None:
    assert tier.put(key(1), record(1, nbytes))
    assert tier.put(key(2), record(2, 100))
    assert read(tier, key(1), 4 << 20) == record(1, nbytes)


@pytest.mark.parametrize("nbytes", [1, 4096, 65536])
def test_a_run_is_put_and_got_as_its_records_alone(tier: Tier, nbytes: int) -> None:
    """One of them is there already, one is not, one has too little memory."""
    if not isinstance(tier, RunTier):
        pytest.skip("moves one record at a time")
    assert tier.put(key(3), record(30, nbytes))
    assert tier.put_run([(key(number), record(number, nbytes)) for number in range(30)]) == [True] * 30
    room = [memoryview(bytearray(nbytes - (number == 5))) for number in range(40)]
    found = tier.get_run([(key(number), into) for number, into in enumerate(room)])
    assert found == [*[nbytes] * 5, None, *[nbytes] * 24, *[None] * 10]
    for number in {*range(30)} - {3, 5}:
        assert room[number] == record(number, nbytes) == read(tier, key(number))
    assert room[3] == record(30, nbytes)
    assert tier.put_run([]) == tier.get_run([]) == []


def test_an_absent_key_is_a_miss(tier: Tier) -> None:
    tier.put(key(1), record(1))
    assert read(tier, key(2)) is None
    assert tier.contains([key(2), key(1), key(3)]) == [False, True, False]
    assert tier.contains([]) == []
    tier.remove(key(2))


def test_a_record_longer_than_the_memory_for_it_is_a_miss_and_stays(tier: Tier) -> None:
    tier.put(key(1), record(1))
    memory = bytearray(b"\xee" * 65536)
    assert tier.get(key(1), memoryview(memory)[:65535]) is None
    assert memory[65535] == 0xEE
    assert tier.get(key(1), memoryview(b"").cast("B")) is None
    assert read(tier, key(1), 65536) == record(1)


def test_a_record_stays_as_it_was_put_first(tier: Tier) -> None:
    for number, nbytes in ((1, 65536), (2, 70000), (3, 65536), (4, 10)):
        assert tier.put(key(1), record(number, nbytes))
        assert read(tier, key(1)) == record(1)


def test_a_removed_record_is_a_miss(tier: Tier) -> None:
    for number in range(3):
        tier.put(key(number), record(number))
    tier.remove(key(1))
    assert tier.contains([key(0), key(1), key(2)]) == [True, False, True]
    assert read(tier, key(1)) is None
    assert tier.put(key(1), record(7))
    assert read(tier, key(1)) == record(7)


def test_a_removed_record_gives_its_room_back(tier: Tier) -> None:
    """Also one that was there twice, and one that is removed twice."""
    if not tier.capacity_nbytes:
        pytest.skip("counts nothing: it has no bound of its own")
    tier.put(key(1), record(1))
    before_nbytes = tier.nbytes
    tier.put(key(2), record(2))
    tier.put(key(2), record(2))
    assert tier.nbytes > before_nbytes
    tier.remove(key(2))
    tier.remove(key(2))
    assert tier.nbytes == before_nbytes


def test_keys_that_begin_alike_are_two_records(tier: Tier) -> None:
    first, second = bytes(31) + b"1", bytes(31) + b"2"
    tier.put(first, record(1))
    assert tier.contains([first, second]) == [True, False]
    assert read(tier, second) is None
    tier.put(second, record(2))
    assert read(tier, first) == record(1)
    assert read(tier, second) == record(2)


def test_a_cleared_tier_holds_nothing_and_can_be_used_again(tier: Tier) -> None:
    for number in range(5):
        tier.put(key(number), record(number))
    tier.clear()
    assert tier.contains([key(number) for number in range(5)]) == [False] * 5
    assert tier.nbytes == 0
    assert tier.put(key(1), record(1))
    assert read(tier, key(1)) == record(1)


def test_a_tier_says_which_records_end_alike(tier: Tier) -> None:
    """Records that are there, and none that was removed."""
    if not isinstance(tier, ListingTier):
        pytest.skip("cannot list")
    ending, other = b"endings!", b"others.."
    mine = [key(number)[:24] + ending for number in range(4)]
    for number, each in enumerate([*mine, key(9)[:24] + other, key(10)]):
        assert tier.put(each, record(number, 3 << 20 if number == 1 else 100))
    tier.remove(mine[0])
    assert sorted(tier.keys_ending(ending)) == sorted(mine[1:])
    assert tier.keys_ending(b"nobody's") == []


def test_a_tier_never_holds_more_than_its_capacity(tier: Tier) -> None:
    """Keys that left are misses; what does not fit at all is refused."""
    if not tier.capacity_nbytes:
        pytest.skip("no bound of its own")
    for number in range(200):
        tier.put(key(number), record(number))
        assert tier.nbytes <= tier.capacity_nbytes
    found = [number for number in range(200) if read(tier, key(number)) is not None]
    assert found
    assert all(read(tier, key(number)) == record(number) for number in found)
    assert not tier.put(key(0), memoryview(bytes(tier.capacity_nbytes + 1)))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda stored: stored[:-1], id="one byte short"),
        pytest.param(lambda stored: stored[: len(stored) // 2], id="half"),
        pytest.param(lambda stored: stored[:7], id="a piece of the header"),
        pytest.param(lambda stored: b"", id="empty"),
        pytest.param(lambda stored: stored[:-100] + bytes([stored[-100] ^ 1]) + stored[-99:], id="one bit"),
        pytest.param(lambda stored: bytes(len(stored)), id="zeros"),
        pytest.param(lambda stored: b"\xff" * len(stored), id="ones"),
        pytest.param(lambda stored: Random(99).randbytes(len(stored)), id="noise"),
    ],
)
def test_damaged_bytes_are_a_miss_and_can_be_put_again(
    entry: Entry, tier: Tier, tmp_path: Path, change: Callable[[bytes], bytes]
) -> None:
    tier.put(key(1), record(1))
    tier.put(key(2), record(2))
    entry.damage(tier, tmp_path, key(1), change)
    assert tier.get(key(1), memoryview(bytearray(1 << 20))) == DAMAGED
    assert read(tier, key(1)) is None
    assert read(tier, key(2)) == record(2)
    assert tier.put(key(1), record(1))
    assert read(tier, key(1)) == record(1)


def test_many_threads_get_whole_records_of_their_key_or_misses(tier: Tier) -> None:
    """Each record of key k is k again and again, so that a mixture of two would show."""
    seed = 3
    print(f"seed {seed}")

    def work(thread: int) -> int:
        draw, hits = Random(seed * 100 + thread), 0
        for _ in range(60):
            number = draw.randrange(12)
            which = key(number)
            match draw.randrange(4):
                case 0:
                    assert tier.put(which, memoryview(which * draw.choice([1, 300, 2048])))
                case 1:
                    tier.remove(which)
                case _:
                    got = read(tier, which)
                    assert got is None or got.tobytes() == which * (len(got) // 32)
                    hits += got is not None
        return hits

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(work, range(8))) > 0


def test_after_close_every_call_is_a_miss(entry: Entry, tmp_path: Path) -> None:
    tier = entry.open(tmp_path)
    tier.put(key(1), record(1))
    tier.close()
    tier.close()
    assert read(tier, key(1)) is None
    assert tier.contains([key(1)]) == [False]
    assert not tier.put(key(2), record(2))
    tier.remove(key(1))
    tier.clear()
    again = entry.open(tmp_path)
    assert read(again, key(1)) == (record(1) if entry.persists else None)
    again.close()
