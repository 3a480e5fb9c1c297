"""The native index of where prompts were sent, beside one that is written as it reads (`csrc/index/guesses.h`)."""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest

from pdlink._index import Columns, Guesses, WorkerLoad, keys_of

NUM = 20


class Plain:
    """The same with a dictionary for each worker."""

    def __init__(self, max_keys: int) -> None:
        self._max_keys = max_keys
        self.of: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(NUM)]

    def note(self, worker: int, keys: list[int], most: int) -> int:
        held, had = self.of[worker], 0
        for key in reversed(keys):
            had += key in held
            held[key] = None
            held.move_to_end(key)
        while len(held) > most:
            held.popitem(last=False)
        while self.num_keys > self._max_keys:
            longest = max(self.of, key=len)
            for _ in range((len(longest) + 1) // 2):
                longest.popitem(last=False)
        return had

    def leading(self, worker: int, keys: list[int]) -> int:
        return next((at for at, key in enumerate(keys) if key not in self.of[worker]), len(keys))

    @property
    def num_keys(self) -> int:
        return sum(map(len, self.of))


@pytest.mark.parametrize(("max_keys", "most"), [(200, 100), (10_000, 100), (10_000, 12)])
@pytest.mark.parametrize("seed", range(4))
def test_every_worker_is_found_with_the_longest_beginning_that_it_was_sent(
    max_keys: int, most: int, seed: int
) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    guesses, plain, works = Guesses(max_keys), Plain(max_keys), [WorkerLoad(allowed=False) for _ in range(NUM)]
    for _ in range(600):
        first = rng.choice((0, 0, 0, 2**64 - 40, 1000, 2000))
        keys = [first + at for at in range(rng.randrange(40))]
        worker = rng.randrange(NUM)
        if rng.random() < 0.05:
            guesses.forget(works[worker].number)
            plain.of[worker].clear()
        else:
            assert guesses.note(works[worker].number, keys, most) == plain.note(worker, keys, most)
        assert guesses.num_keys == plain.num_keys <= max_keys
        rows = rng.sample(range(NUM), rng.randrange(1, NUM + 1))
        found = Columns([works[row] for row in rows], {}).cached(guesses, keys, 100, 3000, None)
        assert found == [min(3000, 100 * plain.leading(row, keys)) for row in rows]


def test_a_worker_that_was_forgotten_or_never_sent_anything_has_nothing() -> None:
    guesses, works = Guesses(100), [WorkerLoad(allowed=False) for _ in range(3)]
    guesses.note(works[1].number, [1, 2], 10)
    guesses.forget(works[1].number)
    guesses.forget(works[2].number + 1000)
    assert Columns(works, {}).cached(guesses, [1, 2], 100, 200, None) == [0, 0, 0]
    assert guesses.num_keys == 0


def test_keys_are_the_same_for_the_same_beginning_only() -> None:
    data = bytes(range(256)) * 40
    keys = keys_of(1, data, 1024)
    assert len(keys) == len(set(keys)) == 10
    assert keys_of(1, data[:-1], 1024) == keys[:9]
    other = keys_of(1, data[:5000] + b"x" + data[5001:], 1024)
    assert other[:4] == keys[:4]
    assert not set(other[4:]) & set(keys)
    assert not set(keys_of(2, data, 1024)) & set(keys)
    assert keys_of(1, data * 100, 1024)[:10] == keys, "long data are read while other threads run"
    assert keys_of(1, b"", 1024) == keys_of(1, b"x" * 1023, 1024) == []
    for nbytes in (4, 36, 64, 1028):
        changed = [data[:at] + b"\xff" + data[at + 1 : nbytes] for at in range(nbytes) if data[at] != 0xFF]
        assert len({tuple(keys_of(1, each, nbytes)) for each in changed}) == len(changed), "each byte counts"
    for nbytes in (0, 6):
        with pytest.raises(ValueError, match="piece_nbytes: expected a multiple of 4"):
            keys_of(1, data, nbytes)
