"""The tokens of a cache that ranks of vLLM's share out: as layouts, as settings, and how shards are counted."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from pdlink.errors import LayoutMismatch
from pdlink.integrations.vllm_parts import versions
from pdlink.integrations.vllm_parts.contexts import Contexts, contexts_of
from pdlink.integrations.vllm_parts.layout import (
    ROWS,
    CacheLayout,
    GroupKind,
    LayerView,
    UnsupportedCache,
    describe,
)
from pdlink.integrations.vllm_parts.settings import read
from pdlink.integrations.vllm_parts.shards import RankPlace, shards_of
from pdlink.kv.plan import bind, template
from tests.integrations.context_slots import slot_of

NAMES = ["model.layers.0", "model.layers.1"]
BLOCKS, HEADS, SIZE = 12, 2, 4
TABLE = [7, 3, 9, 1, 11, 0, 8, 4, 6, 2, 10, 5]


class Form(NamedTuple):
    """How a kernel lays a cache out."""

    shape: tuple[str, ...]
    inner: tuple[str, ...]
    """The same axes, as they lie in memory."""
    latent: bool
    heads: int


FORMS = {
    "latents": Form(("B", "N", "C"), ("B", "N", "C"), True, 1),
    "heads outside": Form(("B", "H", "N", "C"), ("B", "H", "N", "C"), False, HEADS),
    "tokens outside": Form(("B", "H", "N", "C"), ("B", "N", "H", "C"), False, HEADS),
}


def made(form: Form, block_tokens: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], LayerView]:
    """Memory, [block, token, head, element] of it, and what a layer says about it; elements are two bytes."""
    sizes = {"B": BLOCKS, "H": form.heads, "N": block_tokens, "C": 2 * SIZE}
    memory = np.zeros(tuple(sizes[axis] for axis in form.inner), np.uint16)
    view = memory.transpose([form.inner.index(axis) for axis in form.shape])
    strides = tuple(stride // view.itemsize for stride in view.strides)
    tokens = view[:, :, None] if form.latent else view.swapaxes(1, 2)
    return memory, tokens, LayerView(NAMES[0], view.shape, strides, view.itemsize, 0, 0)


def described(form: Form, view: LayerView) -> CacheLayout:
    return describe([view], GroupKind((NAMES[0],), ROWS, form.latent, SIZE, "uint16", view.shape[-2]))


class Side:
    """A cache, whole or shared out, of a sequence in the blocks of `TABLE`."""

    def __init__(self, form: Form, block_tokens: int, contexts: Contexts) -> None:
        """block_tokens: on each rank."""
        self.contexts, self.block_tokens = contexts, block_tokens
        self.ranks = [made(form, block_tokens) for _ in range(contexts.count if contexts.is_ours else 1)]
        self.parts = [
            contexts.part(described(form, self.ranks[index if contexts.is_ours else 0][2]), index).layout
            for index in range(contexts.count)
        ]

    def row(self, token: int) -> np.ndarray[Any, Any]:
        """[head, element], to read and to write."""
        ranks, each = (self.contexts.count, self.contexts.interleave) if self.contexts.is_ours else (1, 1)
        rank, block, offset = slot_of(token, ranks=ranks, interleave=each, block_tokens=self.block_tokens)
        row: np.ndarray[Any, Any] = self.ranks[rank][1][TABLE[block], offset]
        return row

    def bytes_of(self, part: int) -> np.ndarray[Any, Any]:
        memory = self.ranks[part if self.contexts.is_ours else 0][0]
        return memory.reshape(-1).view(np.uint8)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize(("ranks", "interleave"), [(2, 1), (2, 4), (4, 1), (3, 2), (2, 16)])
@pytest.mark.parametrize("way", [(False, True), (True, False), (True, True)], ids=["to", "from", "both"])
@pytest.mark.parametrize(("start", "end"), [(0, 1), (0, 95), (0, 96), (0, 97), (96, 151)])
def test_every_token_lands_where_vllm_looks_for_it(
    form: Form, ranks: int, interleave: int, way: tuple[bool, bool], start: int, end: int
) -> None:
    """From a cache in blocks of one size to one in blocks of another, whole or shared out, up to any token."""
    contexts = [Contexts(ranks, interleave, is_ours=shared) for shared in way]
    sizes = [size if shared else 96 for size, shared in zip((16, 48), way, strict=True)]
    src, dst = (Side(form, size, one) for size, one in zip(sizes, contexts, strict=True))
    last = -(-end // (ranks * interleave)) * ranks * interleave
    for token in range(last):
        src.row(token)[:] = token + 1000 * np.arange(1, 1 + form.heads)[:, None] + 10000 * np.arange(2 * SIZE)
    for one, other in zip(src.parts, dst.parts, strict=True):
        assert one.needed(start, end) == other.needed(start, end)
    for part in range(ranks):
        ours, theirs = src.parts[part], dst.parts[part]
        first, until = ours.needed(start, end)
        src_blocks, dst_blocks = (TABLE[layout.blocks_of(first, until)] for layout in (ours, theirs))
        plan = bind(template(ours, theirs), src_blocks, dst_blocks, first, until)
        given, got = src.bytes_of(part), dst.bytes_of(part)
        for run_list in plan.run_lists(0):
            for at, to, nbytes in run_list.runs.tolist():
                at, to = at + run_list.src_base, to + run_list.dst_base
                got[to : to + nbytes] = given[at : at + nbytes]
    for token in range(start, end):
        assert np.array_equal(dst.row(token), src.row(token)), token
    written = sum(np.count_nonzero(memory) for memory, _, _ in dst.ranks)
    assert written == (last - start) * form.heads * 2 * SIZE, "and nothing else is written"


def test_tokens_next_to_each_other_travel_in_one_run() -> None:
    """Between two servers that share alike: whole blocks. To one that has all: as many as are next to each other."""
    form = FORMS["latents"]
    shared, whole = Side(form, 16, Contexts(2, 4, is_ours=True)), Side(form, 32, Contexts(2, 4))
    alike = bind(template(shared.parts[0], shared.parts[0]), [2], [5], 0, 4)
    assert alike.num_runs == 1
    assert bind(template(whole.parts[1], shared.parts[1]), [2], [5], 0, 4).num_runs == 4


def test_caches_that_share_otherwise_are_named() -> None:
    """Also where a position has as many tokens."""
    one, other = (Side(FORMS["latents"], 32, contexts).parts[0] for contexts in (Contexts(2, 4), Contexts(4, 2)))
    assert one.position_tokens == other.position_tokens
    with pytest.raises(
        LayoutMismatch, match="uint16 of 2 ranks, 4 tokens each, destination uint16 of 4 ranks, 2 tok"
    ):
        template(one, other)


def server_with(ranks: int, interleave: int = 1) -> Any:
    parallel = SimpleNamespace(decode_context_parallel_size=ranks, cp_kv_cache_interleave_size=interleave)
    return SimpleNamespace(parallel_config=parallel)


def test_what_a_server_says_of_itself_need_not_be_told() -> None:
    assert contexts_of(server_with(1), read({})) == Contexts(1, 1)
    assert contexts_of(server_with(4, 16), read({})) == Contexts(4, 16, is_ours=True)
    told = read({"context_shards": 4, "context_interleave": 16})
    assert contexts_of(server_with(4, 16), told) == Contexts(4, 16, is_ours=True)
    assert contexts_of(server_with(1, 8), told) == Contexts(4, 16)
    assert contexts_of(server_with(1, 8), read({"context_shards": 4})) == Contexts(4, 1), "whatever vLLM says"


@pytest.mark.parametrize(
    ("ranks", "told", "message"),
    [
        (4, {"context_shards": 2}, "context_shards: got 2 for a server with 4 decode context parallel ranks"),
        (4, {"context_interleave": 2}, "context_interleave: got 2 for a server with 4 .* expected 16"),
        (1, {"context_interleave": 2}, "context_interleave: got 2 without context_shards"),
    ],
)
def test_settings_that_contradict_the_server_are_refused(ranks: int, told: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedCache, match=message):
        contexts_of(server_with(ranks, 16), read(told))


def test_caches_that_cannot_be_shared_out_are_refused() -> None:
    rows = Side(FORMS["latents"], 16, Contexts()).parts[0]
    cache = CacheLayout(rows, {NAMES[0]: (0,)})
    for layout in (replace(rows, window=8), replace(rows, state=True), replace(rows, position_tokens=16)):
        with pytest.raises(UnsupportedCache, match="do not keep every token by itself"):
            Contexts(2).part(replace(cache, layout=layout), 0)
    with pytest.raises(UnsupportedCache, match="blocks of 16 tokens of a kernel; expected multiples of 32"):
        Contexts(2, 16).part(cache, 0)
    with pytest.raises(UnsupportedCache, match="expected multiples of 32"):
        Contexts(2, 32, is_ours=True).part(cache, 0)
    Contexts(2, 16, is_ours=True).part(cache, 0)


@pytest.mark.parametrize(
    ("parallel", "spec", "tiers", "message"),
    [
        ({"prefill_context_parallel_size": 2}, {}, False, "got 2 beside prefill_context_parallel_size: 2"),
        ({}, {}, True, "got 2 beside tiers"),
        ({}, {"dcp_sharded": False}, False, "layers whose tokens vLLM does not share out"),
        ({"tensor_parallel_size": 6}, {}, False, "6 tensor parallel ranks for 2 KV heads; .* a multiple of 4"),
        ({}, {}, False, None),
    ],
)
def test_servers_that_are_not_carried_are_refused_at_start(
    parallel: dict[str, int], spec: dict[str, bool], tiers: bool, message: str | None
) -> None:
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(**{"decode_context_parallel_size": 2, "tensor_parallel_size": 4, **parallel}),
        model_config=SimpleNamespace(get_total_num_kv_heads=lambda: 2),
    )
    cache = SimpleNamespace(
        kv_cache_groups=[SimpleNamespace(kv_cache_spec=SimpleNamespace(**spec), layer_names=NAMES)]
    )
    kept = read({"tiers": {"max_local_cpu_size": 1}}).tiers if tiers else None
    if message is None:
        versions.check_config(config, cache, (0, 32), tiers=kept)
        return
    with pytest.raises(UnsupportedCache, match=message):
        versions.check_config(config, cache, (0, 32), tiers=kept)


def test_shards_are_counted_alike_on_every_rank() -> None:
    """Two parts of heads, each of two parts of tokens, in two stages."""

    def numbers(place: RankPlace, num_stages: int = 2) -> list[int]:
        return [shard.number for shard in shards_of(place, num_stages, 2, 2)]

    assert numbers(RankPlace(0, 1, 0, 1)) == list(range(8))
    assert numbers(RankPlace(0, 1, 1, 2)) == [2, 3, 6, 7]
    assert [numbers(RankPlace(1, 2, 1, 2, context=one, num_contexts=2)) for one in range(2)] == [[6], [7]]
    assert [numbers(RankPlace(0, 1, 0, 1, context=one, num_contexts=2)) for one in range(2)] == [
        [0, 2, 4, 6],
        [1, 3, 5, 7],
    ]
    turns = [shards_of(RankPlace(0, 1, rank, 4), 1, 1, 8, sends_alike=True) for rank in range(4)]
    assert [[(shard.number, shard.context) for shard in mine] for mine in turns] == [
        [(2 * rank, 2 * rank), (2 * rank + 1, 2 * rank + 1)] for rank in range(4)
    ]


def test_ranks_are_counted_as_vllm_counts_them() -> None:
    """Stages, and in each of them ranks that follow each other share tokens out."""
    places = [
        versions.place(
            SimpleNamespace(
                parallel_config=SimpleNamespace(
                    rank=rank, tensor_parallel_size=4, pipeline_parallel_size=2, decode_context_parallel_size=2
                )
            )
        )
        for rank in range(8)
    ]
    assert [place.of_all for place in places] == list(range(8))
    assert {place.num_all for place in places} == {8}
    assert [(place.stage, place.rank, place.context) for place in places[3:6]] == [(0, 1, 1), (1, 0, 0), (1, 0, 1)]
