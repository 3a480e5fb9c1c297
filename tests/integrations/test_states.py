"""Recurrent states between servers with different numbers of ranks: cut, and joined again."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pdlink.errors import HandshakeRefused
from pdlink.integrations.vllm_parts import states
from pdlink.integrations.vllm_parts.layout import CacheGroups, UnsupportedCache
from pdlink.integrations.vllm_parts.states import RowSegment, StateTensor
from pdlink.protocol.handshake import compare
from pdlink.protocol.messages import MAX_HELLO_NBYTES, VERSION, Envelope, Hello, Identity, encode
from tests.integrations.moved_states import LAYERS, NUM_BLOCKS, Bytes, Pages, move

ROWS, HEADS, SIZE, INNER, ITEM = 3, 4, 8, 16, 2
"""Of the whole model: k - 1, heads, size of one of x, size of a group (Mamba 2), bytes of an element."""
KINDS = [("SD", 4), ("SD", 1), ("DS", 4), ("DS", 1)]
"""Order of a convolution's axes, and groups of the model; the only one is on every rank."""


def inside(order: str, num_groups: int, num_ranks: int) -> tuple[StateTensor, ...]:
    """Of a rank: x|B|C beside [heads, x, group]."""
    heads, groups = HEADS // num_ranks, max(1, num_groups // num_ranks)
    widths = [(heads * SIZE, heads), *[(groups * INNER, groups if groups > 1 or num_groups > 1 else 0)] * 2]
    rows, item = (ROWS, ITEM) if order == "SD" else (1, ITEM * ROWS)
    convolution = StateTensor(order, 0, rows, tuple(RowSegment(width * item, pieces) for width, pieces in widths))
    begin, nbytes = sum(width for width, _ in widths) * ROWS * ITEM, heads * SIZE * INNER * ITEM
    return convolution, StateTensor("recurrent", begin, 1, (RowSegment(nbytes, heads),))


def content(order: str, num_groups: int, rank: int, num_ranks: int, seed: int) -> Bytes:
    """A rank's part of a state that is the same for every number of ranks: cut by numpy, element by element."""
    random = np.random.default_rng(seed)

    def numbers(*shape: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint16]]:
        return random.integers(0, 2**16, shape, np.uint16)

    x, b, c = numbers(ROWS, HEADS, SIZE), numbers(ROWS, num_groups, INNER), numbers(ROWS, num_groups, INNER)
    recurrent = numbers(HEADS, SIZE, INNER)
    mine = slice(rank * HEADS // num_ranks, (rank + 1) * HEADS // num_ranks)
    groups = mine if num_groups == HEADS else slice(0, 1)
    rows = np.concatenate([each.reshape(ROWS, -1) for each in (x[:, mine], b[:, groups], c[:, groups])], axis=1)
    rows = rows if order == "SD" else rows.T
    flat = np.concatenate([rows.reshape(-1), recurrent[mine].reshape(-1)])
    return flat.view(np.uint8).reshape(-1)


def pages(order: str, num_groups: int, rank: int, num_ranks: int, block: int | None = None) -> Pages:
    """Of a rank, with a state of both layers in this block."""
    states = [content(order, num_groups, rank, num_ranks, layer) for layer in range(LAYERS)]
    made = Pages(len(states[0]), inside(order, num_groups, num_ranks))
    for layer, state in enumerate(states):
        if block is not None:
            made.state(layer, block)[:] = state
    return made


@pytest.mark.parametrize(("order", "num_groups"), KINDS)
@pytest.mark.parametrize(("num_src", "num_dst"), [(1, 2), (2, 1), (1, 4), (4, 1), (2, 4), (4, 2), (2, 2)])
def test_ranks_of_another_number_get_their_parts(order: str, num_groups: int, num_src: int, num_dst: int) -> None:
    count = max(num_src, num_dst)
    sources = [pages(order, num_groups, rank, num_src, 1) for rank in range(num_src)]
    sinks = [pages(order, num_groups, rank, num_dst) for rank in range(num_dst)]
    for shard in range(count):
        (sender, at), (receiver, to) = divmod(shard, count // num_src), divmod(shard, count // num_dst)
        move(sources[sender], sinks[receiver], 1, 2, (at, count // num_src), (to, count // num_dst))
    for rank, sink in enumerate(sinks):
        wanted = pages(order, num_groups, rank, num_dst, 2)
        assert np.array_equal(sink.memory, wanted.memory), "the states, and nothing else"


def test_ranks_of_one_number_move_a_state_as_one_run() -> None:
    """Or as one for each of its tensors, where the peer might have had more ranks."""
    src, dst = pages("SD", 4, 0, 2, 0), pages("SD", 4, 0, 2)
    (whole,) = states.shard(src.cache, 0, 1, opened=False)
    assert whole is src.cache
    assert move(src, dst, 0, 3, (0, 1), (0, 1)) == 2 * LAYERS


def test_the_parts_of_a_state_share_its_blocks() -> None:
    only, parts = pages("SD", 4, 0, 1).cache, pages("SD", 4, 0, 1).shard(1, 2)
    alone = CacheGroups.of(parts, NUM_BLOCKS)
    assert alone.kernel_blocks(((3, 1),)) == [[3, 1], [3, 1]]
    assert alone.kernel_blocks(((),)) == [[], []], "a step without new blocks"
    beside = CacheGroups.of([only, *parts, only], NUM_BLOCKS)
    assert beside.lists == (0, 1, 1, 2)
    assert beside.kernel_blocks(((3,), (1,), (0,))) == [[3], [1], [1], [0]]
    assert beside.planes == {"0": (0, 2, 4, 6), "1": (1, 3, 5, 7)}
    assert CacheGroups.of([only, only], NUM_BLOCKS).kernel_blocks(((3,), (1,))) == ((3,), (1,))
    assert not alone.groups.overlaid, "a block may be named for both"


def test_what_is_not_divisible_or_not_known_is_refused_by_name() -> None:
    made = pages("SD", 4, 0, 1)
    with pytest.raises(UnsupportedCache, match="shards: got 3 of a rank's recurrent state .*4 heads"):
        made.shard(0, 3)
    unknown = Pages(50, ())
    with pytest.raises(UnsupportedCache, match="shards: got 2 .* inside is not known .* as many ranks"):
        unknown.shard(0, 2)
    assert unknown.shard(0, 1) == [unknown.cache], "ranks of one number need not know"


def identity(cache: CacheGroups) -> Identity:
    first, *others = cache.groups.layouts
    return Identity(VERSION, "m", "main", 2, first, "h", other_layouts=tuple(others))


def test_a_handshake_names_states_that_lie_otherwise() -> None:
    whole = pages("SD", 4, 0, 1)
    ours = identity(CacheGroups.of(whole.shard(0, 2), NUM_BLOCKS))
    compare(ours, identity(CacheGroups.of(pages("SD", 4, 1, 2).shard(0, 1), NUM_BLOCKS)))
    for other in (pages("DS", 4, 1, 2).shard(0, 1), pages("SD", 1, 1, 2).shard(0, 1)):
        with pytest.raises(HandshakeRefused) as refused:
            compare(ours, identity(CacheGroups.of(other, NUM_BLOCKS)))
        assert refused.value.factor == "dtype"
        assert "SD 3 x [32, 64, 64] bytes" in str(refused.value)
    with pytest.raises(HandshakeRefused, match="groups of layers"):
        compare(ours, identity(CacheGroups.of([whole.cache], NUM_BLOCKS)))


def test_a_handshake_takes_the_layouts_of_models_with_many_small_groups() -> None:
    """54 layers of Mamba 2 whose x is 114 times as wide as the groups of 64, as in Zamba 2."""
    x, size, item = 7168, 64, 2
    segments = (RowSegment(x * item, 112), RowSegment(size * item, 0), RowSegment(size * item, 0))
    convolution = StateTensor("bfloat16 convolution SD", 0, 3, segments)
    layout = convolution.part_of(Pages(50, ()).cache, 0, 1, first=True).layout
    layers = tuple(layout.layers[at % LAYERS] for at in range(54))
    hello = Hello("prefill", Identity(VERSION, "m" * 200, "main", 1, replace(layout, layers=layers), "h" * 80))
    assert len(layout.layers[0].parts) == 114
    assert len(encode(Envelope(VERSION, "prefill", "e" * 16, "", 1, 0, (hello,)))) < MAX_HELLO_NBYTES
