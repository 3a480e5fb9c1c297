"""The keyed hash against published vectors, for every instruction set this CPU can run.

Vectors: test_vectors.json of the BLAKE3 repository (github.com/BLAKE3-team/BLAKE3), first 32 bytes. The input of
length n is 0, 1, ..., 250, 0, 1, ...
"""

from __future__ import annotations

import numpy as np
import pytest

from pdlink import _keys

KEY = b"whats the Elvish word for friend"
CONTEXT = "BLAKE3 2019-12-27 16:29:52 test vectors context"
KEYED = {
    1024: "75c46f6f3d9eb4f55ecaaee480db732e6c2105546f1e675003687c31719c7ba4",
    2048: "879cf1fa2ea0e79126cb1063617a05b6ad9d0b696d0d757cf053439f60a99dd1",
    3072: "044a0e7b172a312dc02a4c9a818c036ffa2776368d7f528268d2e6b5df191770",
    4096: "befc660aea2f1718884cd8deb9902811d332f4fc4a38cf7c7300d597a081bfc0",
    5120: "2c493e48e9b9bf31e0553a22b23503c0a3388f035cece68eb438d22fa1943e20",
    7168: "b42835e40e9d4a7f42ad8cc04f85a963a76e18198377ed84adddeaecacc6f3fc",
}
DERIVED = {
    0: "2cc39783c223154fea8dfb7c1b1660f2ac2dcbd1c1de8277b0b0dd39b7e50d7d",
    1: "b3e2e340a117a499c6cf2398a19ee0d29cca2bb7404c73063382693bf66cb06c",
    1023: "74a16c1c3d44368a86e1ca6df64be6a2f64cce8f09220787450722d85725dea5",
    1025: "effaa245f065fbf82ac186839a249707c3bddf6d3fdda22d1b95a3c970379bcb",
    3073: "72613c9ec9ff7e40f8f5c173784c532ad852e827dba2bf85b2ab4b76f7079081",
}


def pattern(nbytes: int) -> bytes:
    return bytes(i % 251 for i in range(nbytes))


def test_the_portable_kind_is_always_there_and_last() -> None:
    assert _keys.kinds()[-1] == "portable"


@pytest.mark.parametrize("kind", ["", *_keys.kinds()])
@pytest.mark.parametrize("nbytes", KEYED)
def test_a_chunk_has_the_published_keyed_digest(nbytes: int, kind: str) -> None:
    words = np.frombuffer(pattern(nbytes), dtype=np.uint32)
    assert _keys.chain(KEY, words, len(words), kind).hex() == KEYED[nbytes]
    assert _keys.chain(KEY, words.tolist(), len(words), kind).hex() == KEYED[nbytes]


@pytest.mark.parametrize("nbytes", DERIVED)
def test_derived_keys_are_the_published_ones(nbytes: int) -> None:
    assert _keys.derive(CONTEXT, pattern(nbytes)).hex() == DERIVED[nbytes]


@pytest.mark.parametrize("kind", _keys.kinds())
def test_every_kind_gives_the_same_chain_for_chunks_of_any_length(kind: str) -> None:
    rng = np.random.default_rng(5)
    for chunk_tokens in (*range(2, 40), 255, 256, 257, 511, 700, 1500):
        words = rng.integers(0, 2**32, 3 * chunk_tokens + 1, dtype=np.uint32)
        keys = _keys.chain(KEY, words, chunk_tokens, kind)
        assert len(keys) == 3 * 32
        assert keys == _keys.chain(KEY, words, chunk_tokens, "portable")


def test_foreign_integers_count_by_their_value_and_what_is_no_integer_is_refused() -> None:
    words = np.arange(8, dtype=np.int64)
    assert _keys.chain(KEY, words, 4) == _keys.chain(KEY, list(range(8)), 4)  # type: ignore[arg-type]
    assert _keys.chain(KEY, words.astype(np.uint32)[::2], 4) == _keys.chain(KEY, [0, 2, 4, 6], 4)
    for wrong in ([1.0], ["1"], 7):
        with pytest.raises(TypeError):
            _keys.chain(KEY, wrong, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize(("root", "chunk_tokens", "kind"), [(b"short", 1, ""), (KEY, 0, ""), (KEY, 1, "mmx")])
def test_a_root_of_another_length_and_impossible_numbers_are_refused(
    root: bytes, chunk_tokens: int, kind: str
) -> None:
    with pytest.raises(ValueError, match="root|chunk_tokens|mmx"):
        _keys.chain(root, [1], chunk_tokens, kind)
