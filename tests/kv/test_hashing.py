"""Equal keys mean equal KV, in every process."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdlink.kv.hashing import KEY_NBYTES, chain, namespace

BASE: dict[str, Any] = {"model": "m", "revision": "r", "dtype": "float32", "layout": "", "lora": "", "salt": ""}
SEED = bytes(KEY_NBYTES)


def test_every_field_of_the_namespace_counts_and_none_runs_into_the_next() -> None:
    seen = {namespace(**BASE)}
    for field in BASE:
        seen.add(namespace(**{**BASE, field: "other"}))
    seen.add(namespace(**BASE, chunk_tokens=256))
    seen.add(namespace(**{**BASE, "model": "mr", "revision": ""}))
    seen.add(namespace(**{**BASE, "model": "", "revision": "mr"}))
    assert len(seen) == 1 + len(BASE) + 3


@given(tokens=st.lists(st.integers(0, 2**32 - 1), max_size=40), block=st.integers(1, 9), cut=st.integers(0, 40))
def test_chain_can_be_continued_block_by_block(tokens: list[int], block: int, cut: int) -> None:
    whole = chain(SEED, tokens, block)
    assert len(whole) == len(tokens) // block
    cut = min(cut, len(whole))
    seed = whole[cut - 1] if cut else SEED
    assert whole[:cut] + chain(seed, tokens[cut * block :], block) == whole


@given(tokens=st.lists(st.integers(0, 9), min_size=12, max_size=12), at=st.integers(0, 11))
def test_a_changed_token_changes_its_block_and_all_later_ones(tokens: list[int], at: int) -> None:
    changed = [*tokens[:at], tokens[at] + 1, *tokens[at + 1 :]]
    for index, (a, b) in enumerate(zip(chain(SEED, tokens, 3), chain(SEED, changed, 3), strict=True)):
        assert (a == b) == (index < at // 3)


def test_equal_blocks_at_different_positions_differ() -> None:
    keys = chain(SEED, [1, 2] * 8, 2)
    assert len(set(keys)) == 8
    assert {len(key) for key in keys} == {KEY_NBYTES}


def test_a_medium_changes_the_chunk_it_begins_in_and_all_later_ones() -> None:
    tokens = [7] * 12
    plain = chain(SEED, tokens, 3)
    one = chain(SEED, tokens, 3, media=[(4, "a")])
    assert one[0] == plain[0]
    assert not set(one[1:]) & set(plain)
    assert len(one) == 4
    others = ([(4, "b")], [(3, "a")], [(4, "a"), (5, "b")], [(4, "b"), (5, "a")])
    assert len({tuple(chain(SEED, tokens, 3, media=media)) for media in (*others, [(4, "a")])}) == 5
    assert chain(SEED, tokens[:4], 3, media=[(3, "a"), (100, "b")]) == plain[:1]


def test_keys_are_equal_in_another_process_with_another_hash_seed() -> None:
    code = (
        "from pdlink.kv.hashing import chain, namespace;"
        "n = namespace(model='m', revision='r', dtype='float32', salt='s');"
        "print(chain(n, range(70000, 70032), 16)[-1].hex())"
    )
    answers = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
            timeout=50,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    seed = namespace(model="m", revision="r", dtype="float32", salt="s")
    assert answers == {chain(seed, range(70000, 70032), 16)[-1].hex()}


def test_keys_do_not_change_from_one_release_to_the_next() -> None:
    """Keys name blocks on disks and in remote stores; a change here must be meant."""
    seed = namespace(model="m", revision="r", dtype="float32")
    assert seed.hex()[:16] == "a08bcbf7471bc435"
    assert chain(seed, [1, 2, 3, 4], 2)[1].hex()[:16] == "5c3f8d931d80a8ea"


@pytest.mark.parametrize("token", [-1, 2**32])
def test_token_that_does_not_fit_is_an_error(token: int) -> None:
    with pytest.raises(OverflowError):
        chain(SEED, [token], 1)
