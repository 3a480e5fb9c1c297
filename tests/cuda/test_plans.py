"""Pushes by strides and pairs of blocks against the runs of the same plan, on the double: random layouts.

Runs and pairs share no arithmetic behind `bind`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pdlink.cuda.driver import Device
from pdlink.kv.groups import KVGroups
from pdlink.kv.layout import KVLayout, LayerLayout, Part
from pdlink.kv.plan import bind, template
from tests.conformance.transports.side import PATIENCE_S, Side, join
from tests.cuda import double as double_module
from tests.cuda.double import DoubleTransport, block_plan
from tests.cuda.fake import COMPILER, Fake, fake
from tests.cuda.test_late_events import Nodes
from tests.kv.test_plan import ORDERS, dense, heads_of, pick
from tests.node.conftest import DST, LAYERS, SRC, TOKENS, groups
from tests.waiting import WAIT_S

LAUNCH_NBYTES = 2048
POOL_NBYTES = 1 << 16


def _apart(layout: KVLayout) -> KVLayout:
    """Layers in the reverse order, and two kinds of them: those of a second region begin elsewhere."""
    layers = [
        replace(layer, parts=tuple(Part(index % 2, part.offset + index) for part in layer.parts))
        for index, layer in enumerate(reversed(layout.layers))
    ]
    return replace(layout, layers=tuple(layers))


def _random_layout(rng: random.Random, heads: int, parts: int) -> KVLayout:
    block_tokens = rng.choice([1, 2, 3, 4, 8, 16])
    layout = dense(
        rng.choice(ORDERS),
        block_tokens=block_tokens,
        num_blocks=48 // block_tokens,
        num_heads=heads * rng.choice([1, 2]),
        num_layers=3,
        num_parts=parts,
    )
    layout = heads_of(layout, rng.randrange(layout.num_heads - heads + 1), heads)
    return _apart(layout) if rng.random() < 0.3 else layout


@pytest.fixture(params=[LAUNCH_NBYTES, 1 << 20])
def pair(double: Fake, request: pytest.FixtureRequest) -> Iterator[tuple[Side, Side]]:
    writer, owner = (Side(DoubleTransport(request.param)) for _ in range(2))
    for seed, side in enumerate((writer, owner)):
        for region in range(2):
            side.add_buffer(POOL_NBYTES, 2 * seed + region)
    join(writer, owner)
    with closing(writer), closing(owner):
        yield writer, owner


def test_pairs_move_the_same_bytes_as_runs(pair: tuple[Side, Side]) -> None:
    writer, owner = pair
    for seed in range(150):
        rng = random.Random(seed)
        heads, parts = rng.randint(1, 3), rng.choice([1, 2, 2, 3])
        src, dst = _random_layout(rng, heads, parts), _random_layout(rng, heads, parts)
        start = rng.randrange(40)
        end = rng.randint(start, 40)
        plan = bind(template(src, dst), pick(rng, src, start, end), pick(rng, dst, start, end), start, end)
        first = rng.randrange(3)
        layers = range(first, rng.randint(first, 3))
        expected = [buffer.array.copy() for buffer in owner.buffers]
        for one in plan.run_lists(layers.start, len(layers)):
            for at, to, nbytes in (one.runs + (one.src_base, one.dst_base, 0)).tolist():
                expected[one.dst_region][to : to + nbytes] = writer.buffers[one.src_region].array[at : at + nbytes]
        ticket = writer.transport.submit_plan("owner", plan, layers, PATIENCE_S)
        assert writer.wait_batch(ticket) == "ok", f"seed {seed}"
        for region, buffer in enumerate(owner.buffers):
            assert np.array_equal(buffer.array, expected[region]), f"seed {seed}, region {region}: {plan}, {layers}"
        assert writer.done(ticket)[0].nbytes == sum(plan.layer_nbytes(layer) for layer in layers)


def _state(block_tokens: int, at: int = 0) -> KVLayout:
    layer = LayerLayout((Part(0, at),), 64, 0, 64)
    return KVLayout("x", block_tokens, POOL_NBYTES // 64, 1, 64, (layer,), state=True)


STATES = {
    "a ring, whose block never ends": (2**40, 2**40, 3, 5),
    "a long model": (131072, 131072, 1000, 5),
    "there": (128000, 128000, 5, 1000),
    "lengths that differ": (131072, 131071, 1000, 5),
    "lengths that differ there": (131071, 131072, 5, 1001),
}


@pytest.mark.parametrize(("of", "to", "src", "dst"), STATES.values(), ids=STATES.keys())
def test_a_state_is_the_place_of_its_block_however_many_tokens_that_stands_for(
    pair: tuple[Side, Side], of: int, to: int, src: int, dst: int
) -> None:
    writer, owner = pair
    plan = bind(template(_state(of), _state(to)), [src], [dst], 99, 100)
    expected = owner.buffers[0].array.copy()
    expected[64 * dst :][:64] = writer.buffers[0].array[64 * src :][:64]
    assert writer.wait_batch(writer.transport.submit_plan("owner", plan, range(1), PATIENCE_S)) == "ok"
    assert np.array_equal(owner.buffers[0].array, expected)


def test_more_of_a_state_than_its_place_is_refused() -> None:
    shape = template(_state(1), _state(1 << 17))
    assert bind(shape, [5], [7], 98, 99).pairs.tolist() == [[5, 7]]
    assert bind(shape, [], [], 98, 98).pairs.tolist() == []
    with pytest.raises(ValueError, match=r"\[98, 100\) of a state"):
        bind(shape, [5, 6], [7], 98, 100).pairs  # noqa: B018


def test_blocks_whose_units_cannot_be_numbered_are_refused_and_never_another_block() -> None:
    """A peer chooses its own size of blocks, and with it the unit."""
    src, dst = (
        KVLayout("x", tokens, 2**20, 1, 64, (LayerLayout((Part(0, 0),), 64 * tokens, 64, 64),))
        for tokens in (2**20, 2**20 - 1)
    )
    last = 2**31 // 2**20 - 1
    assert bind(template(src, src), [last + 1], [0], 0, 1).pairs.tolist() == [[last + 1, 0]]
    assert bind(template(src, dst), [last], [0], 0, 1).pairs.tolist() == [[last * 2**20, 0]]
    with pytest.raises(ValueError, match="beyond"):
        bind(template(src, dst), [last + 1], [0], 0, 1).pairs  # noqa: B018


@pytest.mark.parametrize("per_block", [64, 2**27, 2**40])
def test_a_state_beside_attention_is_pushed_by_nodes(
    device: Device, per_block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_state(block_tokens: int) -> KVGroups:
        layout = groups(block_tokens).layouts[0]
        layer = LayerLayout((Part(0, layout.extent(0)),), 256, 0, 256)
        return KVGroups((layout, KVLayout("s", per_block, 32, 1, 256, (layer,), state=True)))

    monkeypatch.setattr(double_module, "groups", with_state)
    with ExitStack() as made:
        nodes = Nodes(device, made)
        outgoing = nodes.prefill.send("t", [SRC, [17]], TOKENS)
        incoming = nodes.decode.receive("t", nodes.prefill.address, [DST, [18]], range(TOKENS))
        for layer in range(LAYERS + 1):
            outgoing.layer_ready(layer)
        outgoing.finish(42)
        assert incoming.wait(WAIT_S) == 42
        states = []
        for node, block in ((nodes.prefill, 17), (nodes.decode, 18)):
            at = node.groups.layouts[1].layers[0].parts[0].offset + 256 * block
            states.append(node.kv.array[at : at + 256].copy())
        assert np.array_equal(states[0], states[1])


def test_layers_that_lie_evenly_are_one_launch(pair: tuple[Side, Side], double: Fake) -> None:
    writer, _ = pair
    src, dst = dense(), dense("LPBHT")
    plan = bind(template(src, dst), [3], [4], 1, 3)
    double.take_log()
    assert writer.wait_batch(writer.transport.submit_plan("owner", plan, range(2), PATIENCE_S)) == "ok"
    assert [call for call, _ in double.take_log()].count("cuLaunchKernel") == 1


SHAPE = (2, 32, 4, 1024, 128, 64, 4, 1024, 128, 64)
"""Heads, bytes of each; tokens of a block, strides of blocks, tokens and heads, on both sides."""
BIG = 2**62
OUTSIDE = {
    "a unit before the first": ([[-1, 0]], 1, 0, 1, SHAPE, (0, 0, 0, 0)),
    "a unit before the first there": ([[0, -1]], 1, 0, 1, SHAPE, (0, 0, 0, 0)),
    "a block behind the last": ([[256, 0]], 1, 0, 1, SHAPE, (0, 0, 0, 0)),
    "a block behind the last there": ([[0, 256]], 1, 0, 1, SHAPE, (0, 0, 0, 0)),
    "a part behind the last byte": ([[0, 0]], 1, 0, 1, SHAPE, (0, POOL_NBYTES - 400, 0, 0)),
    "a part before the first byte": ([[0, 0]], 1, 0, 1, SHAPE, (0, 0, 0, -1)),
    "a part so far that sums overflow": ([[0, 0]], 1, 0, 1, SHAPE, (0, 0, 0, 2**63 - 1)),
    "no such region": ([[0, 0]], 1, 0, 1, SHAPE, (0, 0, 2, 0)),
    "no such region here": ([[0, 0]], 1, 0, 1, SHAPE, (-1, 0, 0, 0)),
    "more tokens than units": ([[0, 0]], 1, 0, 5, SHAPE, (0, 0, 0, 0)),
    "a skip of a whole unit": ([[0, 0]], 4, 4, 1, SHAPE, (0, 0, 0, 0)),
    "no tokens in a unit": ([[0, 0]], 0, 0, 1, SHAPE, (0, 0, 0, 0)),
    "a stride that goes back": ([[1, 0]], 4, 0, 4, (*SHAPE[:3], -1024, *SHAPE[4:]), (0, 4096, 0, 0)),
    "a stride whose product overflows": ([[1, 3]], 4, 0, 4, (*SHAPE[:7], BIG, *SHAPE[8:]), (0, 0, 0, 0)),
    "heads that overflow": ([[0, 0]], 1, 0, 1, (BIG, *SHAPE[1:]), (0, 0, 0, 0)),
    "a block of no tokens": ([[0, 0]], 1, 0, 1, (*SHAPE[:2], 0, *SHAPE[3:]), (0, 0, 0, 0)),
}


@pytest.mark.parametrize("forged", OUTSIDE.values(), ids=OUTSIDE.keys())
def test_what_is_outside_is_refused_before_anything_moves(
    pair: tuple[Side, Side], double: Fake, forged: tuple[Any, ...]
) -> None:
    """A peer says where its blocks are; the copier believes neither it nor the planner. It is the second layer."""
    writer, owner = pair
    native: Any = writer.transport._engine  # type: ignore[attr-defined]

    def submit(pairs: Any, unit: int, skip: int, tokens: int, shape: Any, part: Any) -> int:
        layers = [(SHAPE, [(0, 0, 0, 0)]), (shape, [part])]
        ticket: int = native.submit_plan(
            "owner", np.array(pairs, np.int32), unit, skip, tokens, layers, PATIENCE_S, []
        )
        return ticket

    assert writer.wait_batch(submit([[0, 0]], 4, 0, 4, SHAPE, (0, 4096, 0, 4096))) == "ok"
    before = owner.snapshot()
    double.take_log()
    with pytest.raises(ValueError, match="plan: "):
        submit(*forged)
    assert "cuLaunchKernel" not in [call for call, _ in double.take_log()]
    assert owner.snapshot() == before
    assert writer.wait_batch(writer.submit_block("owner", 0, 64)) == "ok", "the peer is as it was"


def test_blocks_behind_the_peer_s_memory_are_refused_by_name(pair: tuple[Side, Side]) -> None:
    writer, _ = pair
    plan = block_plan(2 * POOL_NBYTES, 64, [0], [POOL_NBYTES // 64])
    with pytest.raises(ValueError, match="destination block 1024"):
        writer.transport.submit_plan("owner", plan, range(1), PATIENCE_S)


@pytest.mark.parametrize("call", ["cuMemcpyAsync", "cuLaunchKernel"])
def test_a_launch_that_is_refused_leaves_the_owner_s_fence_free(double: Fake, call: str) -> None:
    """With a long list: nothing was launched, so nothing has to be waited for."""
    writer, owner = Side(DoubleTransport()), Side(DoubleTransport())
    with closing(writer), closing(owner):
        for side in (writer, owner):
            side.add_buffer(POOL_NBYTES, seed=0)
        join(writer, owner)
        blocks = list(range(500))
        double.fail(call, 700)
        plan = block_plan(POOL_NBYTES, 64, blocks, blocks)
        assert writer.wait_batch(writer.transport.submit_plan("owner", plan, range(1), PATIENCE_S)) == "peer_failed"
        owner.close_peer("writer")
        owner.wait_closed("writer")


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler for the test double of the driver")
def test_a_part_of_which_one_launch_was_refused_keeps_the_owner_s_fence() -> None:
    """The launch before it may still store there, and nobody will hear of its end."""
    writer, owner = Side(DoubleTransport()), Side(DoubleTransport())
    for side in (writer, owner):
        side.add_buffer(POOL_NBYTES, seed=0)
    join(writer, owner)
    layout = dense(num_layers=3)
    uneven = replace(layout, layers=(layout.layers[0], layout.layers[2], layout.layers[1]))
    fake().fail("cuLaunchKernel", 700, later=1)
    plan = bind(template(layout, uneven), [0], [0], 0, 4)
    assert writer.wait_batch(writer.transport.submit_plan("owner", plan, range(3), PATIENCE_S)) == "peer_failed"
    owner.close_peer("writer")
    assert not owner.closed_within("writer", 0.1)
    for side in (writer, owner):
        side.close()
