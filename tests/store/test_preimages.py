"""What keys are hashes of, on the wire and in a file: nothing is believed that the key does not prove."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from pdlink.kv import hashing
from pdlink.kv.hashing import Origin, Preimage
from pdlink.store import wire
from pdlink.store.preimages import PreimageFile, commits

from .stubs import SHAPE

if TYPE_CHECKING:
    from pathlib import Path

TOKENS = range(40)
ORIGIN = Origin("m", "r", SHAPE.dtype, SHAPE.text, 4, "lora", "salt")
KEYS = hashing.chain(hashing.namespace(ORIGIN), TOKENS, 4)
KNOWN = {
    key: hashing.preimage(KEYS, index, TOKENS, 4, lora="lora", salt="salt", origin=ORIGIN)
    for index, key in enumerate(KEYS)
}


def plain(known: dict[bytes, Preimage]) -> dict[bytes, Preimage]:
    return {key: each._replace(tokens=tuple(each.tokens)) for key, each in known.items()}


def test_what_was_written_is_known_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "preimages"
    first = PreimageFile(path)
    first.rewrite({})
    for key, known in KNOWN.items():
        first.add(key, known)
    second = PreimageFile(path)
    found = second.load()
    assert plain(found) == plain({key: each._replace(origin=each.origin and ORIGIN) for key, each in KNOWN.items()})
    second.rewrite({key: found[key] for key in KEYS[:3]})
    assert list(PreimageFile(path).load()) == KEYS[:3]
    assert path.stat().st_mode & 0o077 == 0
    first.close()
    second.close()


def test_a_damaged_file_says_less_and_nothing_wrong(tmp_path: Path) -> None:
    seed = 20261123
    rng = random.Random(seed)
    path = tmp_path / "preimages"
    file = PreimageFile(path)
    file.rewrite(KNOWN)
    file.close()
    whole, right = path.read_bytes(), plain(PreimageFile(path).load())
    assert len(right) == len(KEYS)
    damaged = 0
    for _ in range(300):
        data = bytearray(whole)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data[: rng.randrange(len(data)) if rng.random() < 0.5 else None])
        found = plain(PreimageFile(path).load())
        assert all(found[key] == right[key] for key in found), f"seed {seed}"
        damaged += len(found) < len(right)
    assert damaged > 250, f"seed {seed}"


def test_the_file_is_written_anew_when_most_of_it_is_of_no_use(tmp_path: Path) -> None:
    file = PreimageFile(tmp_path / "preimages")
    file.rewrite({})
    (key,) = hashing.chain(KEYS[0], range(1 << 16), 1 << 16)
    long = Preimage(KEYS[0], range(1 << 16))
    answers = []
    for _ in range(7):
        file.add(key, long)
        answers.append(file.forget(long))
    assert answers == [False] * 3 + [True] * 4, "256 KiB each, and 1 MiB is let be"
    file.close()


def test_a_file_that_cannot_be_written_costs_the_tokens_and_no_more(tmp_path: Path) -> None:
    file = PreimageFile(tmp_path / "nowhere" / "preimages")
    assert file.load() == {}
    file.rewrite(KNOWN)
    file.add(KEYS[0], KNOWN[KEYS[0]])
    file.close()


def test_no_commit_is_longer_than_a_frame() -> None:
    long = {serial: Preimage(KEYS[0], range(1 << 16)) for serial in range(20)}
    short = {serial: Preimage(KEYS[0], range(1)) for serial in range(40_000)}
    for known in (long, short):
        messages = list(commits(tuple(known), known))
        assert [serial for each in messages for serial in each.serials] == list(known)
        assert all(len(each.known) == len(each.serials) for each in messages)
        assert max(len(wire.frame(each)) for each in messages) < wire.MAX_FRAME_NBYTES
    assert list(commits((1, 2), {})) == [wire.Commit((1, 2))]
