"""Recurrent states in memory as vLLM keeps them, and what moves them: the parts of two ranks' layouts, in turn."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pdlink import _copy
from pdlink.integrations.vllm_parts import states
from pdlink.integrations.vllm_parts.layout import STATE, CacheGroups, GroupKind, LayerView, describe
from pdlink.kv.plan import bind, template

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdlink.integrations.vllm_parts.layout import CacheLayout
    from pdlink.integrations.vllm_parts.states import StateTensor

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]
NUM_BLOCKS, LAYERS, PADDING, BLOCK_TOKENS = 4, 2, 16, 100


class Pages:
    """The states of one rank, of two layers in one region: pages of NUM_BLOCKS blocks, padded."""

    def __init__(self, nbytes: int, inside: Sequence[StateTensor]) -> None:
        self.nbytes, page = nbytes, nbytes + PADDING
        self.memory: Bytes = np.full(LAYERS * NUM_BLOCKS * page, 0xEE, np.uint8)
        views = [
            LayerView(f"{at}", (NUM_BLOCKS, 1, 1, nbytes), (page, nbytes, nbytes, 1), 1, 0, at * NUM_BLOCKS * page)
            for at in range(LAYERS)
        ]
        names = tuple(view.name for view in views)
        kind = GroupKind(names, STATE, dtype="u8", block_tokens=BLOCK_TOKENS, inside=tuple(inside))
        self.cache = describe(views, kind)

    def state(self, layer: int, block: int) -> Bytes:
        return self.memory.reshape(LAYERS, NUM_BLOCKS, -1)[layer, block, : self.nbytes]

    def shard(self, index: int, count: int) -> list[CacheLayout]:
        return states.shard(self.cache, index, count, opened=True)


def move(src: Pages, dst: Pages, block: int, to: int, src_shard: tuple[int, int], dst_shard: tuple[int, int]) -> int:
    """As one transfer of a shard, given as (index, count) of a rank's. Returns the number of copies."""
    parts = [CacheGroups.of(side.shard(*which), NUM_BLOCKS) for side, which in ((src, src_shard), (dst, dst_shard))]
    for part in parts:
        part.groups.check("own")
        for layout in part.groups.layouts:
            layout.check_writable("own")
    num_runs = 0
    for ours, theirs in zip(parts[0].groups.layouts, parts[1].groups.layouts, strict=True):
        first, end = ours.needed(0, BLOCK_TOKENS - 1)
        plan = bind(template(ours, theirs), [block], [to], first, end)
        num_runs += plan.num_runs
        for layer in range(len(ours.layers)):
            for run_list in plan.run_lists(layer):
                runs = run_list.runs + np.array([run_list.src_base, run_list.dst_base, 0])
                _copy.memcpy_runs(dst.memory, src.memory, runs)
    return num_runs
