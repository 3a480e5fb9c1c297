"""The index of a disk tier, beside a dict."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import pytest

from pdlink.store.tiers.files import ENTRY, Entries, pack

if TYPE_CHECKING:
    from pdlink.store.tiers.files import EntryArray


def rows_of(pairs: list[tuple[bytes, bytes]]) -> EntryArray:
    return np.frombuffer(b"".join(key + rest for key, rest in pairs), ENTRY)


def rest(number: int) -> bytes:
    return pack(number, 1, number, bytes(16))


@pytest.mark.parametrize("alike", [b"", bytes(31), b"a" * 8])
@pytest.mark.parametrize("seed", range(3))
def test_what_was_loaded_and_what_came_since_is_found_as_in_a_dict(seed: int, alike: bytes) -> None:
    """alike: how keys begin."""
    draw = random.Random(seed)
    keys = list({(alike + draw.randbytes(32))[:32] for _ in range(400)})
    loaded, new = keys[: len(keys) // 2], keys[len(keys) // 2 :]
    entries = Entries(rows_of([(key, rest(number)) for number, key in enumerate(loaded)]))
    expected = {key: rest(number) for number, key in enumerate(loaded)}
    assert entries.superseded == {}
    for number in range(600):
        key = draw.choice(keys)
        if key in expected:
            assert entries.pop(key) == expected.pop(key)
        elif key in new or number % 2:
            entries[key] = expected[key] = rest(1000 + number)
        asked = draw.sample(keys, min(9, len(keys)))
        assert entries.contains(asked) == [one in expected for one in asked]
        assert [entries.get(one) for one in asked] == [expected.get(one) for one in asked] == entries.find(asked)
        assert [one in entries for one in asked] == [one in expected for one in asked]
    assert len(entries) == len(expected)
    assert sorted(entries) == sorted(expected)


def test_the_last_of_several_rows_of_a_key_counts() -> None:
    a, b = bytes(32), b"b" * 32
    entries = Entries(rows_of([(a, rest(1)), (b, rest(2)), (a, rest(3)), (a, rest(4))]))
    assert entries.get(a) == rest(4)
    assert entries.superseded == {a: [rest(1), rest(3)]}
    assert len(entries) == 2
    assert entries.pop(a) == rest(4)
    assert entries.contains([a, b]) == [False, True]


def test_without_rows_nothing_is_there() -> None:
    entries = Entries()
    assert entries.contains([]) == []
    assert entries.contains([bytes(32)]) == [False]
    assert entries.get(bytes(32)) is None
    with pytest.raises(KeyError):
        entries.pop(bytes(32))
