"""Transfers of caches with several groups of layers: what each group keeps arrives, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

import pdlink
from pdlink.config import TransportConfig
from pdlink.errors import InvalidRequest, TransferFailed
from pdlink.kv.groups import KVGroups
from pdlink.kv.layout import KVLayout, LayerLayout, Part
from pdlink.memory.buffers import HostBuffer
from tests.loopback import LoopbackHub, LoopbackTransport
from tests.waiting import WAIT_S

from .conftest import TIMEOUTS

NUM_BLOCKS, PAGE_NBYTES, LAYERS, STATE_NBYTES = 24, 64, 2, 50
WINDOW, STEP, TOKENS = 5, 4, 22
Bytes = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]


def _group(
    region: int, head_nbytes: int, block_tokens: int, *, token_stride: int, page_nbytes: int = PAGE_NBYTES
) -> KVLayout:
    layers = tuple(
        LayerLayout((Part(region, layer * NUM_BLOCKS * page_nbytes),), page_nbytes, token_stride, head_nbytes)
        for layer in range(LAYERS)
    )
    return KVLayout("u8", block_tokens, NUM_BLOCKS, 1, head_nbytes, layers)


def groups(block_tokens: int, step: int, position_tokens: int, *, overlaid: bool) -> KVGroups:
    """Full attention, a window, a recurrent state; over each other as in vLLM, or in memory of their own.

    step: tokens of a window's block. position_tokens: of the window.
    """
    full = _group(0, 8, block_tokens, token_stride=8)
    nbytes = 16 * position_tokens
    window = _group(0 if overlaid else 1, nbytes, step // position_tokens, token_stride=nbytes, page_nbytes=16 * step)
    window = replace(window, window=WINDOW, window_step=step, position_tokens=position_tokens)
    state = replace(_group(0 if overlaid else 2, STATE_NBYTES, 1000, token_stride=0), state=True)
    return KVGroups((full, window, state))


SRC = ((0, 1, 2, 3, 4, 5), (23, 23, 6, 7, 8, 9), (10,))
"""From token 0 on. A window's first blocks are given up while a prompt is computed."""
DST = ((11, 13, 12), (14, 15), (17,))
"""Of what is needed: tokens 0, 16 and the last one."""


def memory(node: pdlink.Node) -> list[HostBuffer]:
    return cast("list[HostBuffer]", node.buffers)


class Ends:
    """A pair of nodes; the first one's pages are random."""

    def __init__(
        self,
        transport: str,
        *,
        overlaid: bool = True,
        steps: tuple[int, int] = (STEP, STEP),
        position_tokens: int = 1,
    ) -> None:
        """steps: tokens of a window's block, on each side."""
        hub = LoopbackHub()

        def node(name: str, block_tokens: int, step: int) -> pdlink.Node:
            """With checksums of all that is sent."""
            kind = "auto" if transport == "loopback" else transport
            return pdlink.Node(
                name,
                groups(block_tokens, step, position_tokens, overlaid=overlaid),
                transport=TransportConfig(kind=kind, verify="all"),
                transports=[LoopbackTransport(hub)] if transport == "loopback" else None,
                deadlines=TIMEOUTS,
            )

        self.prefill, self.decode = node("prefill", 4, steps[0]), node("decode", 8, steps[1])
        rng = np.random.default_rng(1)
        for buffer in memory(self.prefill):
            buffer.array[:] = rng.integers(1, 255, buffer.nbytes, np.uint8)
        for buffer in memory(self.decode):
            buffer.array[:] = 0

    def close(self) -> None:
        self.prefill.close()
        self.decode.close()

    def rows(self, node: pdlink.Node, layer: int, table: tuple[int, ...], start: int) -> Bytes:
        """What the layer has of the prompt from token `start` on, which is in the table's first block."""
        layout = node.groups.layouts[node.groups.group_of[layer]]
        pages: Bytes = node.pages(layer)
        if layout.state:
            return cast("Bytes", pages[table[0], 0, 0])
        first = start // layout.block_tokens
        return np.stack(
            [
                pages[table[token // layout.block_tokens - first], token % layout.block_tokens, 0]
                for token in range(start, TOKENS)
            ]
        )


@pytest.fixture(params=["loopback", "tcp", "ucx"])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    ends = Ends(request.param)
    yield ends
    ends.close()


def compute(outgoing: pdlink.Outgoing, chunks: tuple[int, ...] = (7, TOKENS)) -> None:
    start = 0
    for end in chunks:
        for layer in range(3 * LAYERS):
            outgoing.layer_ready(layer, start, end)
        start = end
    outgoing.finish(42)


def test_every_group_sends_what_it_keeps_and_touches_nothing_else(ends: Ends) -> None:
    before = [buffer.array.copy() for buffer in memory(ends.decode)]
    outgoing = ends.prefill.send("t", SRC, TOKENS)
    with ends.decode.receive("t", ends.prefill.address, DST, range(TOKENS)) as incoming:
        compute(outgoing)
        assert incoming.wait(WAIT_S) == 42
    for layer in range(3 * LAYERS):
        group, start = layer // LAYERS, (0, 16, TOKENS - 1)[layer // LAYERS]
        mine = SRC[group][start // ends.prefill.groups.layouts[group].block_tokens :]
        np.testing.assert_array_equal(
            ends.rows(ends.decode, layer, DST[group], start), ends.rows(ends.prefill, layer, mine, start)
        )
    pages = memory(ends.decode)[0].array[: LAYERS * NUM_BLOCKS * PAGE_NBYTES].reshape(LAYERS, NUM_BLOCKS, PAGE_NBYTES)
    was = before[0][: pages.size].reshape(pages.shape)
    others = [block for block in range(NUM_BLOCKS) if not any(block in table for table in DST)]
    np.testing.assert_array_equal(pages[:, others], was[:, others])
    np.testing.assert_array_equal(pages[:, 17, STATE_NBYTES:], was[:, 17, STATE_NBYTES:])
    needed = LAYERS * (TOKENS * 8 + (TOKENS - 16) * 16 + STATE_NBYTES)
    assert outgoing.nbytes == needed == ends.decode.groups.nbytes_of(ends.decode.groups.needed(0, TOKENS))


def test_groups_with_memory_of_their_own_are_guarded_apart() -> None:
    ends = Ends("tcp", overlaid=False)
    try:
        outgoing = ends.prefill.send("t", SRC, TOKENS)
        same = ((0, 1, 2), (0, 1), (0,))
        incoming = ends.decode.receive("t", ends.prefill.address, same, range(TOKENS))
        compute(outgoing)
        assert incoming.wait(WAIT_S) == 42
        for layer in range(3 * LAYERS):
            group, start = layer // LAYERS, (0, 16, TOKENS - 1)[layer // LAYERS]
            mine = SRC[group][start // ends.prefill.groups.layouts[group].block_tokens :]
            np.testing.assert_array_equal(
                ends.rows(ends.decode, layer, same[group], start), ends.rows(ends.prefill, layer, mine, start)
            )
    finally:
        ends.close()


def test_a_part_of_a_prompt_is_refused_where_a_group_does_not_keep_all(ends: Ends) -> None:
    """The state is that of the whole prompt, and what a window has left behind is somebody else's by now."""
    outgoing = ends.prefill.send("t", SRC, TOKENS)
    tables = ends.decode.groups.part(((11, 13, 12), (0, 1, 2, 3, 14, 15), (17,)), 0, TOKENS - 1)
    with ends.decode.receive("t", ends.prefill.address, tables, range(TOKENS - 1)) as incoming:
        with pytest.raises(TransferFailed, match="windows and states are those of 22"):
            incoming.wait(WAIT_S)
        with pytest.raises(TransferFailed):
            outgoing.wait(WAIT_S)


def test_blocks_are_taken_by_group(ends: Ends) -> None:
    blocks: Any
    for blocks, message in (
        ((1, 2, 3), "one list of integers for each group"),
        (DST[:2], "got 2 lists; expected 3"),
        ((*DST[:2], (17, 18)), r"2 blocks of group 2; tokens \[21, 22\) take 1"),
        ((DST[0], (14,), DST[2]), r"1 blocks of group 1; tokens \[16, 22\) take 2"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            ends.decode.receive(f"t-{message}", ends.prefill.address, blocks, range(TOKENS))


def test_windows_are_sent_between_blocks_of_other_sizes() -> None:
    """Where prefill's are a multiple of decode's, it has what decode's first block begins with; else it may not."""
    ends = Ends("tcp", overlaid=False, steps=(8, 4))
    try:
        src, dst = ((0, 1, 2, 3, 4, 5), (23, 6, 7), (10,)), ((11, 13, 12), (14, 15), (17,))
        outgoing = ends.prefill.send("t", src, TOKENS)
        with ends.decode.receive("t", ends.prefill.address, dst, range(TOKENS)) as incoming:
            compute(outgoing)
            assert incoming.wait(WAIT_S) == 42
        for layer in range(LAYERS, 2 * LAYERS):
            np.testing.assert_array_equal(
                ends.rows(ends.decode, layer, dst[1], 16), ends.rows(ends.prefill, layer, src[1][2:], 16)
            )
        back = ends.decode.send("u", ((0, 1, 2), (0, 0, 0, 0, 14, 15), (17,)), TOKENS)
        with ends.prefill.receive(
            "u", ends.decode.address, ((0, 1, 2, 3, 4, 5), (7,), (10,)), range(TOKENS)
        ) as incoming:
            with pytest.raises(TransferFailed, match="window_blocks"):
                incoming.wait(WAIT_S)
            with pytest.raises(TransferFailed, match="window_blocks"):
                back.wait(WAIT_S)
    finally:
        ends.close()


@pytest.mark.parametrize("transport", ["loopback", "tcp"])
def test_blocks_that_only_a_kernel_can_read_travel_whole_beside_tokens(transport: str) -> None:
    """A window in whole blocks of four tokens, beside full attention by tokens and a state; in three chunks."""
    ends = Ends(transport, overlaid=False, position_tokens=STEP)
    try:
        src, dst = ((0, 1, 2, 3, 4, 5), (23, 23, 6, 7, 8, 9), (10,)), ((11, 13, 12), (14, 15), (17,))
        outgoing = ends.prefill.send("t", src, TOKENS)
        with ends.decode.receive("t", ends.prefill.address, dst, range(TOKENS)) as incoming:
            compute(outgoing, (7, 18, TOKENS))
            assert incoming.wait(WAIT_S) == 42
        for layer in range(LAYERS, 2 * LAYERS):
            np.testing.assert_array_equal(
                ends.decode.pages(layer)[list(dst[1])], ends.prefill.pages(layer)[list(src[1][4:])]
            )
        assert outgoing.nbytes == LAYERS * (TOKENS * 8 + 2 * PAGE_NBYTES + STATE_NBYTES)
    finally:
        ends.close()
