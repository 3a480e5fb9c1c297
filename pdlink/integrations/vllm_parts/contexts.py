"""Decode context parallelism: ranks of vLLM's that share the tokens of a cache out among them.

D ranks that follow each other in a tensor parallel group keep the same heads. With an interleave of I, token t lies
on rank t // I % D of them, and a block of the block table holds `block_size` tokens on each (vllm/v1/worker/
block_table.py). So D x I tokens are a position of the layout, of which a shard has I: a rank of such a server keeps
these next to each other, and a server without such ranks has those of every shard.

The last position of a prompt travels whole. What is in it behind the prompt's end is nobody's yet: it lies in blocks
of the same request, which writes there before it reads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pdlink.integrations.vllm_parts.cache_groups import specs_of
from pdlink.integrations.vllm_parts.layout import CacheLayout, UnsupportedCache
from pdlink.kv.layout import LayerLayout, Part

if TYPE_CHECKING:
    from pdlink.integrations.vllm_parts.settings import ConnectorSettings


@dataclass(frozen=True, slots=True)
class Contexts:
    """How the tokens travel: in how many parts, dealt out in turn."""

    count: int = 1
    interleave: int = 1
    """Tokens that a part gets at a time."""
    is_ours: bool = False
    """Whether this server's ranks keep a part each; otherwise every rank has all tokens."""

    def part(self, cache: CacheLayout, index: int) -> CacheLayout:
        """Part `index` of a rank's cache, which is that part if ranks keep one each. Raises UnsupportedCache."""
        layout, each = cache.layout, self.interleave
        if self.count == 1:
            return cache
        got = f"context_shards: got {self.count}"
        if not layout.keeps_all or layout.position_tokens > 1:
            raise UnsupportedCache(
                f"{got}, of layers that do not keep every token by itself ({layout.dtype}); expected attention and "
                "latents that keep all; take servers without decode context parallel ranks"
            )
        here, first = (each, 0) if self.is_ours else (self.count * each, index * each)
        if layout.block_tokens % here:
            raise UnsupportedCache(
                f"{got}, with an interleave of {each}, for blocks of {layout.block_tokens} tokens of a kernel; "
                f"expected multiples of {here}; "
                "take a smaller --cp-kv-cache-interleave-size there and context_interleave here"
            )
        layers = tuple(
            LayerLayout(
                tuple(
                    Part(part.region, part.offset + token * layer.token_stride)
                    for part in layer.parts
                    for token in range(first, first + each)
                ),
                layer.block_stride,
                layer.token_stride * here,
                layer.head_stride,
            )
            for layer in layout.layers
        )
        layout = replace(
            layout,
            dtype=f"{layout.dtype} of {self.count} ranks, {each} tokens each",
            block_tokens=layout.block_tokens // here,
            layers=layers,
            position_tokens=self.count * each,
        )
        return replace(cache, layout=layout)


def contexts_of(vllm_config: Any, settings: ConnectorSettings) -> Contexts:
    """As this server and its settings have it. Raises UnsupportedCache if the two differ."""
    parallel = vllm_config.parallel_config
    ranks = int(getattr(parallel, "decode_context_parallel_size", 1))
    count, each = settings.context_shards or ranks, settings.context_interleave
    if ranks > 1:
        interleave = int(parallel.cp_kv_cache_interleave_size)
        for name, value, limit in (
            ("context_shards", count, ranks),
            ("context_interleave", each or interleave, interleave),
        ):
            if value != limit:
                raise UnsupportedCache(
                    f"{name}: got {value} for a server with {ranks} decode context parallel ranks and an interleave "
                    f"of {interleave}; expected {limit}; remove it"
                )
        return Contexts(ranks, interleave, is_ours=True)
    if count == 1 and each is not None:
        raise UnsupportedCache(
            f"context_interleave: got {each} without context_shards; expected servers whose peers have decode "
            "context parallel ranks; set context_shards to their number, or take it out"
        )
    return Contexts(count, each or 1)


def check_ranks(vllm_config: Any, kv_cache_config: Any, *, has_tiers: bool) -> None:
    """Of a server with decode context parallel ranks. Raises UnsupportedCache."""
    parallel = vllm_config.parallel_config
    ranks = parallel.decode_context_parallel_size
    got = f"decode_context_parallel_size: got {ranks}"
    if getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        raise UnsupportedCache(
            f"{got} beside prefill_context_parallel_size: {parallel.prefill_context_parallel_size}; expected 1 of "
            "either; take one out"
        )
    if has_tiers:
        raise UnsupportedCache(f"{got} beside tiers; expected 1; remove tiers")
    if not all(getattr(spec, "dcp_sharded", True) for spec in specs_of(kv_cache_config)):
        raise UnsupportedCache(
            f"{got} for a model with layers whose tokens vLLM does not share out (states, drafts); expected 1; "
            "remove it"
        )
    model = vllm_config.model_config
    if getattr(model, "use_mla", False):
        return
    groups, heads = parallel.tensor_parallel_size // ranks, int(model.get_total_num_kv_heads())
    if groups % heads:
        raise UnsupportedCache(
            f"{got} of {parallel.tensor_parallel_size} tensor parallel ranks for {heads} KV heads; expected ranks "
            f"that have the same head: tensor_parallel_size a multiple of {ranks * heads}"
        )
