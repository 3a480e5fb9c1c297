"""Equal keys mean equal KV, in every process."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdlink.kv.hashing import KEY_NBYTES, chain, namespace

BASE = {"model": "m", "revision": "r", "dtype": "float32", "layout": "", "lora": "", "salt": ""}


def test_every_field_of_the_namespace_counts_and_none_runs_into_the_next() -> None:
    seen = {namespace(**BASE)}
    for field in BASE:
        seen.add(namespace(**{**BASE, field: "other"}))
    seen.add(namespace(**BASE, media=("a",)))
    seen.add(namespace(**BASE, media=("a", "")))
    seen.add(namespace(**{**BASE, "model": "mr", "revision": ""}))
    seen.add(namespace(**{**BASE, "model": "", "revision": "mr"}))
    assert len(seen) == 1 + len(BASE) + 4


@given(tokens=st.lists(st.integers(0, 2**32 - 1), max_size=40), block=st.integers(1, 9), cut=st.integers(0, 40))
def test_chain_can_be_continued_block_by_block(tokens: list[int], block: int, cut: int) -> None:
    whole = chain(b"seed", tokens, block)
    assert len(whole) == len(tokens) // block
    cut = min(cut, len(whole))
    seed = whole[cut - 1] if cut else b"seed"
    assert whole[:cut] + chain(seed, tokens[cut * block :], block) == whole


@given(tokens=st.lists(st.integers(0, 9), min_size=12, max_size=12), at=st.integers(0, 11))
def test_a_changed_token_changes_its_block_and_all_later_ones(tokens: list[int], at: int) -> None:
    changed = [*tokens[:at], tokens[at] + 1, *tokens[at + 1 :]]
    for index, (a, b) in enumerate(zip(chain(b"s", tokens, 3), chain(b"s", changed, 3), strict=True)):
        assert (a == b) == (index < at // 3)


def test_equal_blocks_at_different_positions_differ() -> None:
    keys = chain(b"s", [1, 2] * 8, 2)
    assert len(set(keys)) == 8
    assert {len(key) for key in keys} == {KEY_NBYTES}


def test_keys_are_equal_in_another_process_with_another_hash_seed() -> None:
    code = (
        "from pdlink.kv.hashing import chain, namespace;"
        "n = namespace(model='m', revision='r', dtype='float32', salt='s', media=['i']);"
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
    seed = namespace(model="m", revision="r", dtype="float32", salt="s", media=["i"])
    assert answers == {chain(seed, range(70000, 70032), 16)[-1].hex()}


def test_keys_do_not_change_from_one_release_to_the_next() -> None:
    """Keys name blocks on disks and in remote stores; a change here must be meant."""
    seed = namespace(model="m", revision="r", dtype="float32")
    assert seed.hex()[:16] == "a0839c37c0da1648"
    assert chain(seed, [1, 2, 3, 4], 2)[1].hex()[:16] == "9e81b7d8766a2a4b"


@pytest.mark.parametrize("token", [-1, 2**32])
def test_token_that_does_not_fit_is_an_error(token: int) -> None:
    with pytest.raises(OverflowError):
        chain(b"s", [token], 1)
