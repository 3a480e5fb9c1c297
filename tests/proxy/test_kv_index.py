"""Which worker has which prefix, by its events."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest

from pdlink._index import Events, words_of_json
from pdlink_proxy.kv_index import MAX_SIZES, KVIndex
from tests.proxy.events.types import judge

if TYPE_CHECKING:
    from pdlink_proxy.fleet import Tokens

ONE, TWO = 1, 2
GPU = {"medium": "GPU", "lora_id": None, "lora_name": None}


def stored(
    ids: list[int | bytes], parent: int | bytes | None, tokens: list[int], **more: object
) -> dict[str, object]:
    """An event of vLLM 0.32."""
    return {
        "type": "BlockStored",
        "block_hashes": ids,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": len(tokens) // len(ids),
        **GPU,
        **more,
    }


def removed(*ids: int | bytes, medium: str | None = "GPU") -> dict[str, object]:
    return {"type": "BlockRemoved", "block_hashes": list(ids), "medium": medium}


def batch(*events: object) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events), 0])


def apply(index: KVIndex, publisher: int, model: str, data: bytes, scope: str = "") -> None:
    events = Events(data)
    while index.apply(publisher, model, events, scope):
        pass


def ids(*tokens: int) -> Tokens:
    return np.array(tokens, np.uint32)


def tokens_in(index: KVIndex, model: str, extra: tuple[str, ...], tokens: Tokens) -> dict[int, int]:
    """Leading tokens by number of the publisher, whatever the medium."""
    for number in range(9):
        index.assign(number, [number], shared=False)
    return {number: num for number, num, _ in index.held(model, extra, tokens).shares}


WEIGHTS = (0.0, 1.0, 1e4, 1e8)
"""Loading that says how many tokens are in which medium."""


def by_medium(index: KVIndex, tokens: Tokens) -> dict[int, list[int]]:
    """The same with each medium's, of an index with `WEIGHTS`."""
    found = {}
    for number in range(9):
        index.assign(number, [number], shared=False)
    for number, num, loading in index.held("m", (), tokens).shares:
        below = [int(loading) // 10**power % 10**4 for power in (0, 4, 8)]
        found[number] = [num - sum(below), *below]
    return found


def test_a_prefix_is_found_at_each_worker_as_far_as_it_has_it() -> None:
    index = KVIndex()
    apply(index, ONE, "m", batch(stored([10, 11], None, [1, 2, 3, 4]), stored([12], 11, [5, 6])))
    apply(index, TWO, "m", batch(stored([b"x" * 32], None, [1, 2])))
    assert tokens_in(index, "m", (), ids(1, 2, 3, 4, 5, 6, 7)) == {1: 6, 2: 2}
    assert tokens_in(index, "m", (), ids(1, 2, 9, 9)) == {1: 2, 2: 2}
    assert tokens_in(index, "m", (), ids(9, 2, 3, 4)) == {}
    assert tokens_in(index, "other", (), ids(1, 2, 3, 4)) == {}
    apply(index, ONE, "m", batch(removed(11)))
    assert tokens_in(index, "m", (), ids(1, 2, 3, 4, 5, 6)) == {1: 2, 2: 2}
    index.forget(ONE)
    assert tokens_in(index, "m", (), ids(1, 2, 3, 4)) == {2: 2}
    apply(index, TWO, "m", batch({"type": "AllBlocksCleared"}))
    assert len(index) == 0


def test_of_a_publisher_with_several_models_only_blocks_of_this_one_are_taken() -> None:
    """It says of first blocks whose they are; what follows a block that was not taken is not taken either."""
    index = KVIndex()
    mine, other = {"model": "m", "scope": "a"}, {"model": "m", "scope": "b"}
    both = batch(
        stored([1], None, [1, 2], **mine),
        stored([2], 1, [3, 4]),
        stored([3], None, [5, 6], **other),
        stored([4], 3, [7, 8]),
    )
    apply(index, ONE, "m", both, "a")
    apply(index, TWO, "m", both)  # nobody said what it calls the model: its name tells
    assert tokens_in(index, "m", (), ids(1, 2, 3, 4)) == {1: 4, 2: 4}
    assert tokens_in(index, "m", (), ids(5, 6, 7, 8)) == {2: 4}
    apply(index, TWO, "n", batch(stored([9], None, [9, 9], **mine)))
    assert tokens_in(index, "n", (), ids(9, 9)) == {}


def test_blocks_of_other_sizes_are_compared_with_one_prompt() -> None:
    index = KVIndex()
    apply(index, ONE, "m", batch(stored([1], None, [1, 2, 3])))
    apply(index, TWO, "m", batch(stored([1, 2], None, [1, 2, 3, 4])))
    assert tokens_in(index, "m", (), ids(1, 2, 3, 4)) == {1: 3, 2: 4}


def test_events_of_older_sglang_are_arrays() -> None:
    index = KVIndex()
    apply(index, ONE, "m", batch(["BlockStored", [7, -9], None, [1, 2, 3, 4], 2, None, "GPU"]))
    assert tokens_in(index, "m", (), ids(1, 2, 3, 4)) == {1: 4}
    apply(index, ONE, "m", batch(["BlockRemoved", [-9], "GPU"]))
    assert tokens_in(index, "m", (), ids(1, 2, 3, 4)) == {1: 2}
    apply(index, ONE, "m", batch(["AllBlocksCleared"]))
    assert len(index) == 0


def test_pairs_of_tokens_with_their_next_one_stand_for_the_tokens() -> None:
    """As SGLang with EAGLE tells them."""
    index, event = KVIndex(), stored([10, 11], None, [1, 2, 3, 4])
    apply(index, ONE, "m", batch({**event, "token_ids": [[1, 2], [2, 300], [300, 4], [4, 5]]}))
    assert tokens_in(index, "m", (), ids(1, 2, 300, 4)) == {1: 4}
    with pytest.raises(ValueError, match="MessagePack"):
        apply(index, ONE, "m", batch({**event, "token_ids": [[1, 2], [2, 300], [300, 4], [4, 5, 6]]}))


def test_a_block_in_two_media_is_there_until_both_have_dropped_it() -> None:
    index = KVIndex()
    apply(index, ONE, "m", batch(stored([1], None, [1, 2]), stored([1], None, [1, 2], medium="CPU"), removed(1)))
    assert tokens_in(index, "m", (), ids(1, 2)) == {1: 2}
    apply(index, ONE, "m", batch(removed(1, medium="CPU")))
    assert tokens_in(index, "m", (), ids(1, 2)) == {}


def test_a_block_counts_until_its_last_copy_goes() -> None:
    """vLLM computes the last block of a prompt again although it has it, and drops each copy by itself."""
    index = KVIndex()
    chain = stored([1, 2], None, [1, 2, 3, 4]), stored([2], 1, [3, 4])
    apply(index, ONE, "m", batch(*chain, stored([3], 2, [5, 6]), removed(2)))
    assert tokens_in(index, "m", (), ids(1, 2, 3, 4, 5, 6)) == {1: 6}
    apply(index, ONE, "m", batch(removed(2)))
    assert tokens_in(index, "m", (), ids(1, 2, 3, 4, 5, 6)) == {1: 2}


def test_hits_that_vllm_tells_again_add_no_copy() -> None:
    """As it does for requests with kv_cache_report_mode "full": always from the prompt's first block on."""
    index = KVIndex()
    apply(index, ONE, "m", batch(*[stored([1, 2], None, [1, 2, 3, 4])] * 3, removed(2)))
    assert tokens_in(index, "m", (), ids(1, 2, 3, 4)) == {1: 2}
    apply(index, ONE, "m", batch(removed(1)))
    assert len(index) == 0


def test_a_prefix_that_two_names_mean_is_there_until_both_have_gone() -> None:
    index = KVIndex()
    apply(index, ONE, "m", batch(stored([1], None, [1, 2]), stored([2], None, [1, 2]), removed(1)))
    assert tokens_in(index, "m", (), ids(1, 2)) == {1: 2}
    apply(index, ONE, "m", batch(removed(2)))
    assert tokens_in(index, "m", (), ids(1, 2)) == {}
    assert len(index) == 0


def test_each_token_counts_in_its_quickest_medium() -> None:
    index = KVIndex(loading=WEIGHTS)
    names = ("GPU", "CPU", "CPU_PINNED", "STORAGE", "DISK", "EXTERNAL")
    media: list[dict[str, object]] = [{"medium": name} for name in names]
    media.append({"medium": "STORAGE", "locality": "REMOTE"})
    for at, more in enumerate(media):
        apply(index, ONE, "m", batch(stored([at + 1], at or None, [at, at], **more)))
    prompt = ids(*[at for at in range(len(media)) for _ in range(2)])
    assert by_medium(index, prompt) == {1: [2, 4, 4, 4]}
    apply(index, ONE, "m", batch(stored([4], 3, [3, 3]), stored([1], None, [0, 0], medium="CPU"), removed(1)))
    assert by_medium(index, prompt) == {1: [2, 6, 2, 4]}


def test_blocks_after_an_unknown_one_are_not_noted() -> None:
    index = KVIndex()
    apply(index, ONE, "m", batch(stored([2], 1, [3, 4])))
    assert len(index) == 0


@pytest.mark.parametrize("block_size", [-1, 0, 1 << 21, (1 << 64) - 1])
def test_a_block_size_that_no_engine_has_is_not_noted(block_size: int) -> None:
    index = KVIndex(100)
    apply(index, ONE, "m", batch(stored([1], None, [1, 2], block_size=block_size)))
    apply(index, ONE, "m", batch(stored([2], None, [1, 2])))
    assert tokens_in(index, "m", (), ids(1, 2, 3)) == {1: 2}


def test_salts_and_adapters_share_no_prefix_with_others() -> None:
    index = KVIndex()
    apply(index, ONE, "m", batch(stored([1, 2], None, [1, 2, 3, 4], extra_keys=[["salt"], None])))
    adapted = {"lora_name": "a", "extra_keys": [["a"], ["a"]]}
    apply(index, TWO, "m", batch(stored([1, 2], None, [1, 2, 3, 4], **adapted), stored([3], 2, [5, 6], **adapted)))
    assert tokens_in(index, "m", (), ids(1, 2, 3, 4)) == {}
    assert tokens_in(index, "m", ("salt",), ids(1, 2, 3, 4)) == {1: 4}
    assert tokens_in(index, "m", ("a",), ids(1, 2, 3, 4)) == {2: 4}


def test_blocks_with_images_are_not_noted() -> None:
    index = KVIndex()
    apply(index, ONE, "m", batch(stored([1], None, [1, 2]), stored([2], 1, [3, 4], extra_keys=[[["image", 0]]])))
    assert tokens_in(index, "m", (), ids(1, 2, 3, 4)) == {1: 2}


def test_of_several_groups_of_layers_the_first_with_whole_prefixes_counts() -> None:
    index = KVIndex()
    window = stored([1], None, [9, 9], group_idx=0, kv_cache_spec_kind="sliding_window")
    whole = stored([1], None, [1, 2], group_idx=1, kv_cache_spec_kind="full_attention")
    another = stored([2], None, [8, 8], group_idx=2, kv_cache_spec_kind="full_attention")
    apply(index, ONE, "m", batch(window, whole, removed(1) | {"group_idx": 0}, another))
    assert tokens_in(index, "m", (), ids(1, 2)) == {1: 2}
    assert tokens_in(index, "m", (), ids(8, 8)) == {}
    assert tokens_in(index, "m", (), ids(9, 9)) == {}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode([1.0, "events"]),
        batch({"type": "Unheard"}),
        batch(stored([1], None, [-1, 2])),
        batch(stored([1], None, [1 << 32, 2])),
        batch(stored(["name"], None, [1, 2])),  # type: ignore[list-item]
        batch(stored([1], None, [1, 2]) | {"token_ids": {"1": 2}}),
        batch(stored([1], None, [1, 2]) | {"parent_block_hash": 1.5}),
        batch(stored([1], None, [1, 2]), ["BlockRemoved", 5, None]),
    ],
)
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=": "):
        apply(KVIndex(), ONE, "m", data)


def any_event(rng: random.Random) -> object:
    """An honest one, or one with a field of another kind."""
    if rng.random() < 0.1:
        return rng.choice(
            [{"type": "AllBlocksCleared"}, ["AllBlocksCleared", 3], {"type": "AllBlocksCleared", "x": []}]
        )
    some: list[int | bytes] = [rng.randrange(9), rng.getrandbits(64), -rng.getrandbits(63), rng.randbytes(32)]
    names = rng.choices(some, k=2)
    text = rng.choice([None, "GPU", "CPU", "sliding_window", "a" * 40])
    more: dict[str, object] = {
        "medium": text,
        "lora_name": text,
        "extra_keys": rng.choice([None, [], [["a"], None], [[["image", 0]], [1.5, b"x"]], [{"a": 1}, 7]]),
        "group_idx": rng.choice([None, 0, -1]),
        "kv_cache_spec_kind": rng.choice([None, "full_attention", text]),
        "model": rng.choice([None, "m", "n"]),
        "cache_salt": text,
        "locality": rng.choice([None, "REMOTE"]),
        "further": {"a": [1, {"b": None}]},
    }
    for name in rng.sample(sorted(more), rng.randrange(len(more))):
        del more[name]
    event = stored(names, rng.choice([None, names[0]]), [1, 2, 300, 70_000]) | more
    if rng.random() < 0.3:
        event = {"type": "BlockRemoved", "block_hashes": names} | more
    if rng.random() < 0.3:
        event[rng.choice([*event])] = rng.choice([None, 5, 1.5, True, "x", b"x", [], [3], [[1, 2]], {}, 2**40])
    if rng.random() < 0.2:
        del event[rng.choice([*event])]
    return [*event.values()] if rng.random() < 0.3 else event


@pytest.mark.parametrize("seed", range(4))
def test_events_are_taken_where_msgspec_takes_them(seed: int) -> None:
    rng, taken = random.Random(seed), Counter[bool]()
    for number in range(3000):
        data = bytearray(batch(*[any_event(rng) for _ in range(rng.randrange(3))]))
        if rng.random() < 0.5:
            for _ in range(rng.randrange(1, 3)):
                at = rng.randrange(len(data))
                data[at : at + rng.randrange(3)] = rng.randbytes(rng.randrange(3))
        try:
            judge(bytes(data), "m")
        except UnicodeDecodeError:  # no text of ours
            expected = None
        except ValueError:
            expected = False
        else:
            expected = True
        try:
            apply(KVIndex(1000), ONE, "m", bytes(data))
        except ValueError:
            got = False
        else:
            got = True
        assert expected in (got, None), (seed, number, data.hex())
        taken[got] += 1
    assert min(taken.values()) > 500, taken


@pytest.mark.parametrize("spoil", ["block_hashes", "parent_block_hash", "token_ids"])
@pytest.mark.parametrize(
    "more",
    [
        {"model": "n"},
        {"scope": "b"},
        {"kv_cache_spec_kind": "sliding_window"},
        {"block_size": 0},
        {"block_size": 2**30},
        {"group_idx": 1},
        {"extra_keys": [[["image", 0]]]},
    ],
)
def test_an_event_that_concerns_nobody_may_have_other_names_and_tokens(more: dict[str, object], spoil: str) -> None:
    index, whole = KVIndex(), stored([1], None, [1, 2], group_idx=0)
    other = stored([2], 1, [3, 4], group_idx=0) | {spoil: ["text", -1]}
    gone = removed(1) | {"group_idx": 1, "block_hashes": ["text"]}
    apply(index, ONE, "m", batch(whole, other | more, gone, stored([3], 1, [5, 6], group_idx=0)), "a")
    assert tokens_in(index, "m", (), ids(1, 2, 5, 6)) == {ONE: 4}
    with pytest.raises(ValueError, match=f"^{spoil}: "):
        apply(index, ONE, "m", batch(other), "a")


def test_what_is_wrong_in_an_event_is_told_by_its_field() -> None:
    event = stored([1], None, [1, 2])
    for name in ("block_hashes", "parent_block_hash", "token_ids", "block_size", "model", "extra_keys", "group_idx"):
        with pytest.raises(ValueError, match=f"^{name}: "):
            apply(KVIndex(), ONE, "m", batch({**event, name: 1.5}))
    for token in (-1, 2**32, [-1, 2]):
        with pytest.raises(ValueError, match="^token_ids: a token id: expected 0 to 4294967295"):
            apply(KVIndex(), ONE, "m", batch({**event, "token_ids": [token, 2]}))
    del event["block_size"]
    with pytest.raises(ValueError, match=r"^block_size: missing"):
        apply(KVIndex(), ONE, "m", batch(event))


def test_no_tokens_of_a_prompt_are_the_salt_of_another() -> None:
    """A name is told apart from tokens that are its bytes: as a text, its length, and what it says."""
    index, salt = KVIndex(), [1, 2, 0x6261]
    apply(index, ONE, "m", batch(stored([1], None, salt), stored([2], None, [7, 8, 9], cache_salt="ab")))
    assert tokens_in(index, "m", ("ab",), ids(7, 8, 9)) == {ONE: 3}
    assert tokens_in(index, "m", (), ids(*salt, 7, 8, 9)) == {ONE: 3}


def test_more_blocks_than_the_limit_are_not_noted() -> None:
    index = KVIndex(max_blocks=2)
    apply(index, ONE, "m", batch(stored([1, 2, 3], None, [1, 2, 3])))
    assert tokens_in(index, "m", (), ids(1, 2, 3)) == {1: 2}


def test_ids_are_read_from_json_as_a_parser_would() -> None:
    for text in (b"[]", b" [ ] ", b"[0]", b"[1, 2,\n3]\t", b"[4294967295]"):
        assert np.frombuffer(words_of_json(text), np.uint32).tolist() == msgspec.json.decode(text)
    for text in (
        b"",
        b"[",
        b"[1",
        b"[1,",
        b"[1,]",
        b"[,1]",
        b"[1 2]",
        b"[-1]",
        b"[1.5]",
        b"[1]]",
        b"[[1]]",
        b'["1"]',
    ):
        with pytest.raises(ValueError, match="JSON"):
            words_of_json(text)
    with pytest.raises(ValueError, match="JSON"):
        words_of_json(b"[4294967296]")


class _Slow:
    """The same by definition: which tokens each holder has, from the first on, and in how many copies a medium."""

    def __init__(self) -> None:
        self.held: dict[int, dict[int, tuple[tuple[int, ...], Counter[int]]]] = {}

    def stored(
        self, holder: int, medium: int, ids: list[int], parent: int | None, tokens: list[int], size: int
    ) -> None:
        held = self.held.setdefault(holder, {})
        if parent is not None and parent not in held:
            return
        before = held[parent][0] if parent is not None else ()
        for at, name in enumerate(ids):
            before += tuple(tokens[at * size : (at + 1) * size])
            media = held[name][1] if name in held and held[name][0] == before else Counter()
            if parent is not None or not media[medium]:
                media[medium] += 1
            held[name] = before, media

    def removed(self, holder: int, medium: int, ids: list[int]) -> None:
        held = self.held.get(holder, {})
        for name in ids:
            if name in held:
                held[name][1][medium] -= 1
                held[name] = held[name][0], +held[name][1]
                if not held[name][1]:
                    del held[name]

    def lookup(self, tokens: list[int], size: int) -> dict[int, list[int]]:
        found = {}
        for holder, held in self.held.items():
            quickest: dict[tuple[int, ...], int] = {}
            for prefix, media in held.values():
                quickest[prefix] = min(*media, quickest.get(prefix, 3), 3)
            by_medium = [0] * 4
            for end in range(size, len(tokens) + 1, size):
                if (medium := quickest.get(tuple(tokens[:end]))) is None:
                    break
                by_medium[medium] += size
            if any(by_medium):
                found[holder] = by_medium
        return found


@pytest.mark.parametrize("seed", range(40))
def test_the_native_index_agrees_with_a_slow_one(seed: int) -> None:
    rng = random.Random(seed)
    size, media = rng.choice([1, 2, 3, 4]), ("GPU", "CPU", "DISK", "EXTERNAL")
    fast, slow = KVIndex(100_000, WEIGHTS), _Slow()
    # A holder's name of a block is that of its prefix, as in the engines; so one name never means two prefixes. A
    # prefix may have two names.
    names: dict[tuple[object, ...], int] = {}
    for _ in range(400):
        holder, medium = rng.randrange(5), rng.randrange(4)
        tokens = [rng.randrange(2) for _ in range(size * rng.randrange(1, 6))]
        which = rng.choice("aaab")
        ends = range(size, len(tokens) + 1, size)
        blocks = [names.setdefault((which, *tokens[:end]), len(names) + 1) for end in ends]
        skip = rng.randrange(len(blocks))
        parent = blocks[skip - 1] if skip else None
        match rng.random():
            case kind if kind < 0.6:
                of_it = stored([*blocks[skip:]], parent, tokens[skip * size :], medium=media[medium])
                apply(fast, holder, "m", batch(of_it))
                slow.stored(holder, medium, blocks[skip:], parent, tokens[skip * size :], size)
            case kind if kind < 0.98:
                gone = rng.sample(sorted(names.values()), min(len(names), 4))
                apply(fast, holder, "m", batch(removed(*gone, medium=media[medium])))
                slow.removed(holder, medium, gone)
            case _:
                fast.forget(holder)
                slow.held.pop(holder, None)
        wanted = [rng.randrange(2) for _ in range(size * 5)]
        assert by_medium(fast, np.array(wanted, np.uint32)) == slow.lookup(wanted, size), f"seed {seed}"
        assert len(fast) == sum(map(len, slow.held.values()))


def test_block_sizes_of_workers_that_are_gone_leave_room_for_others() -> None:
    index = KVIndex()
    for size in range(1, MAX_SIZES + 1):
        apply(index, ONE, "m", batch(stored([1], None, [7] * size)))
    apply(index, TWO, "m", batch(stored([1], None, [7] * (MAX_SIZES + 1))))
    assert len(index) == MAX_SIZES
    index.forget(ONE)
    assert index.nbytes == 0
    apply(index, TWO, "m", batch(stored([1], None, [7] * (MAX_SIZES + 1))))
    assert tokens_in(index, "m", (), ids(*[7] * 20)) == {2: MAX_SIZES + 1}
