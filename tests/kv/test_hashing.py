"""Equal keys mean equal KV, in every process."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdlink.kv.hashing import KEY_NBYTES, Chain, Origin, beside, chain, named, namespace

BASE: dict[str, Any] = {"model": "m", "revision": "r", "dtype": "float32", "layout": "", "lora": "", "salt": ""}
SEED = bytes(KEY_NBYTES)
PUBLISHED_KEY = b"whats the Elvish word for friend"
KEYED = {
    1024: "75c46f6f3d9eb4f55ecaaee480db732e6c2105546f1e675003687c31719c7ba4",
    2048: "879cf1fa2ea0e79126cb1063617a05b6ad9d0b696d0d757cf053439f60a99dd1",
    5120: "2c493e48e9b9bf31e0553a22b23503c0a3388f035cece68eb438d22fa1943e20",
    7168: "b42835e40e9d4a7f42ad8cc04f85a963a76e18198377ed84adddeaecacc6f3fc",
}
"""Of inputs 0, 1, ..., 250, 0, 1, ... of these lengths: test_vectors.json of github.com/BLAKE3-team/BLAKE3."""


def test_every_field_of_the_namespace_counts_and_none_runs_into_the_next() -> None:
    seen = {namespace(Origin(**BASE))}
    for field in BASE:
        seen.add(namespace(Origin(**{**BASE, field: "other"})))
    seen.add(namespace(Origin(**BASE, chunk_tokens=256)))
    seen.add(namespace(Origin(**{**BASE, "model": "mr", "revision": ""})))
    seen.add(namespace(Origin(**{**BASE, "model": "", "revision": "mr"})))
    assert len(seen) == 1 + len(BASE) + 3


@given(tokens=st.lists(st.integers(0, 2**32 - 1), max_size=40), block=st.integers(1, 9), cut=st.integers(0, 40))
def test_chain_can_be_continued_block_by_block(tokens: list[int], block: int, cut: int) -> None:
    whole = chain(SEED, tokens, block)
    assert len(whole) == len(tokens) // block
    cut = min(cut, len(whole))
    seed = whole[cut - 1] if cut else SEED
    assert whole[:cut] + chain(seed, tokens[cut * block :], block) == whole


@given(
    tokens=st.lists(st.integers(0, 2**32 - 1), max_size=40),
    block=st.integers(1, 9),
    chunk=st.integers(1, 9),
    cuts=st.lists(st.integers(0, 40), max_size=4),
)
def test_one_pass_over_the_tokens_names_blocks_and_chunks_however_they_come(
    tokens: list[int], block: int, chunk: int, cuts: list[int]
) -> None:
    whole, by_parts = Chain(SEED, block, chunk), Chain(SEED, block, chunk)
    for cut in sorted(cuts):
        by_parts.extend(tokens[:cut])
    assert whole.chunks_of(tokens) == by_parts.chunks_of(tokens) == chain(SEED, tokens, chunk)
    assert whole.blocks == by_parts.blocks
    assert len(whole.blocks) == len(tokens) // block
    assert len({*whole.blocks, *whole.chunks_of(tokens)}) == len(tokens) // block + len(tokens) // chunk


def test_a_changed_token_changes_its_block_and_all_later_ones_of_a_pass() -> None:
    plain, changed = Chain(SEED, 2, 6), Chain(SEED, 2, 6)
    plain.extend([1] * 12)
    changed.extend([1] * 7 + [2] + [1] * 4)
    assert [a == b for a, b in zip(plain.blocks, changed.blocks, strict=True)] == [True] * 3 + [False] * 3


def test_other_groups_of_layers_have_keys_of_their_own_from_the_same_hash() -> None:
    keys, other = chain(SEED, range(8), 2), namespace(Origin(**{**BASE, "layout": "other"}))
    beside_it = beside(keys, other)
    assert len({*keys, *beside_it, *beside(keys, namespace(Origin(**BASE)))}) == 12
    assert beside(keys[:2], other) == beside_it[:2]


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
        "from pdlink.kv.hashing import Origin, chain, namespace;"
        "n = namespace(Origin(model='m', revision='r', dtype='float32', salt='s'));"
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
    seed = namespace(Origin(model="m", revision="r", dtype="float32", salt="s"))
    assert answers == {chain(seed, range(70000, 70032), 16)[-1].hex()}


def test_keys_do_not_change_from_one_release_to_the_next() -> None:
    """Keys name blocks on disks and in remote stores; a change here must be meant."""
    seed = namespace(Origin(model="m", revision="r", dtype="float32"))
    assert seed.hex()[:16] == "a08bcbf7471bc435"
    assert chain(seed, [1, 2, 3, 4], 2)[1].hex()[:16] == "5c3f8d931d80a8ea"
    full = namespace(
        Origin(model="m", revision="r", dtype="float32", layout="l", chunk_tokens=16, lora="a", salt="s")
    )
    assert chain(full, [0, 1, 2**32 - 1, 5], 2)[1].hex()[:16] == "72c8fc8b7dd1e2b3"
    assert chain(full, [7] * 12, 3, media=[(4, "a"), (5, "b")])[-1].hex()[:16] == "bc8a865c82818fc9"
    assert beside(chain(full, [7] * 3, 3), seed)[0].hex()[:16] == "87c7ed7ecc0386d9"
    assert named(full, ["x"])[0].hex()[:16] == "4021d0d6d37207e4"


@pytest.mark.parametrize("nbytes", KEYED)
def test_the_key_of_a_chunk_is_the_published_keyed_digest_of_its_ids(nbytes: int) -> None:
    words = np.frombuffer(bytes(i % 251 for i in range(nbytes)), dtype=np.uint32)
    for ids in (words, words.tolist(), np.repeat(words, 2)[::2]):
        assert [key.hex() for key in chain(PUBLISHED_KEY, ids, len(words))] == [KEYED[nbytes]]


@pytest.mark.parametrize("token", [-1, 2**32])
def test_token_that_does_not_fit_is_an_error(token: int) -> None:
    with pytest.raises(OverflowError):
        chain(SEED, [token], 1)


def test_foreign_integers_count_by_their_value_and_what_is_no_integer_is_refused() -> None:
    words = np.arange(8, dtype=np.int64)
    assert chain(SEED, words, 4) == chain(SEED, list(range(8)), 4)  # type: ignore[arg-type]
    for wrong in ([1.0], ["1"], np.zeros(1), 7):
        with pytest.raises(TypeError):
            chain(SEED, wrong, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize(("seed", "chunk_tokens", "field"), [(b"short", 1, "seed"), (SEED, 0, "chunk_tokens")])
def test_a_seed_of_another_length_and_chunks_of_no_tokens_are_refused(
    seed: bytes, chunk_tokens: int, field: str
) -> None:
    with pytest.raises(ValueError, match=field):
        chain(seed, [1], chunk_tokens)
