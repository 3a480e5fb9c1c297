"""vLLM's groups of KV caches as ours: which layers share lists of blocks, and what the inside of a block is like."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pdlink.integrations.vllm_parts.layout import COLUMNS, PACKED, ROWS, STATE, GroupKind, UnsupportedCache
from pdlink.integrations.vllm_parts.states import inside_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdlink.kv.groups import BlockLists


def transfer_groups(kv_cache_config: Any) -> tuple[int, ...]:
    """Groups whose blocks take part in transfers (asked for since 0.32)."""
    every = range(len(kv_cache_config.kv_cache_groups))
    return tuple(getattr(kv_cache_config, "transfer_group_ids", every))


def transfer_parts(kv_cache_config: Any) -> list[tuple[int, tuple[str, ...]]]:
    """Layers that are a group of ours: vLLM's group, whose lists of blocks they have, and their names.

    A group of vLLM's whose layers keep records of different sizes, such as latents and an indexer's keys, is several.
    """
    parts: list[tuple[int, tuple[str, ...]]] = []
    for index in transfer_groups(kv_cache_config):
        group = kv_cache_config.kv_cache_groups[index]
        specs = getattr(getattr(group, "kv_cache_spec", None), "kv_cache_specs", None)
        if not specs:
            parts.append((index, tuple(getattr(group, "layer_names", ()))))
            continue
        sizes: dict[tuple[str, ...], list[str]] = {}
        for name, spec in specs.items():
            key = tuple(f"{getattr(spec, field, None)}" for field in _SIZES)
            sizes.setdefault(key, []).append(name)
        parts += [(index, tuple(names)) for names in sizes.values()]
    return parts


_SIZES = (
    "tokens_per_state",
    "num_kv_heads",
    "head_size",
    "head_size_v",
    "dtype",
    "num_head_slots",
    "state_content_bytes",
    "shapes",
    "dtypes",
)


def by_group(kv_cache_config: Any, block_ids: Sequence[Sequence[int]] | None) -> BlockLists:
    """Blocks as pdlink takes them: a list for each group that is transferred. None stands for no blocks."""
    parts = transfer_parts(kv_cache_config)
    return tuple(tuple(block_ids[index]) if block_ids else () for index, _ in parts)


def keeps_all(kv_cache_config: Any) -> bool:
    """Whether all tokens of a prompt are in the blocks of all groups that are transferred."""
    return not any(hasattr(spec, "shapes") or is_ring(spec) or window_of(spec) for spec in specs_of(kv_cache_config))


def is_plain(kv_cache_config: Any) -> bool:
    """Whether all layers share one list of blocks, in which all tokens are."""
    parts = transfer_parts(kv_cache_config)
    return len(parts) == 1 == len(kv_cache_config.kv_cache_groups) and keeps_all(kv_cache_config)


def are_zeroed(kv_cache_config: Any) -> bool:
    """Whether vLLM zeroes blocks before it gives them to a request: states, caches of several precisions."""
    return bool(getattr(kv_cache_config, "needs_kv_cache_zeroing", False))


def window_of(spec: Any) -> int:
    """Tokens that the manager of a group of this kind keeps for the next one, that one included; 0: all.

    Full attention may have a window that only its kernel knows; all of its blocks are kept.
    """
    if not any(base.__name__ == "SlidingWindowSpec" for base in type(spec).__mro__):
        return 0
    return int(spec.sliding_window) + int(getattr(spec, "extra_retained_tokens", 0))


def is_ring(spec: Any) -> bool:
    """Whether a request has one block of this kind, with what of its last tokens is not compressed yet."""
    return any(base.__name__ == "CircularBufferSpec" for base in type(spec).__mro__)


def specs_of(kv_cache_config: Any) -> list[Any]:
    """Of all layers that are transferred, or one for each group where all of its layers are alike."""
    groups = [kv_cache_config.kv_cache_groups[index].kv_cache_spec for index in transfer_groups(kv_cache_config)]
    return [one for group in groups for one in (getattr(group, "kv_cache_specs", None) or {"": group}).values()]


def kinds(vllm_config: Any, kv_cache_config: Any, layer_names: list[str]) -> list[GroupKind]:
    """Of each of `transfer_parts`. Raises UnsupportedCache.

    layer_names: of all tensors. Those in no group share the cache of another layer.
    """
    layers = vllm_config.compilation_config.static_forward_context
    parts = transfer_parts(kv_cache_config)
    is_only = len(parts) == 1 == len(kv_cache_config.kv_cache_groups)
    found = []
    for index, mine in parts:
        group = kv_cache_config.kv_cache_groups[index]
        names = layer_names if is_only else [name for name in layer_names if name in mine]
        spec = group.kv_cache_spec
        specs = getattr(spec, "kv_cache_specs", None)
        if specs and mine:
            if len({window_of(specs[name]) for name in mine}) > 1:
                raise UnsupportedCache("layers of one group with different windows cannot be transferred")
            spec = specs[mine[0]]
        found.append(_kind(spec, tuple(names), [layers.get(name) for name in names]))
    return found


def _kind(spec: Any, names: tuple[str, ...], layers: list[Any]) -> GroupKind:
    if hasattr(spec, "shapes") and hasattr(spec, "dtypes"):
        what = f"{[*spec.shapes]} {[f'{dtype}'.removeprefix('torch.') for dtype in spec.dtypes]}"
        return GroupKind(names, STATE, dtype=what, block_tokens=spec.block_size, inside=inside_of(spec, layers))
    bases = {base.__name__ for base in type(spec).__mro__}
    if bases & _NOT_BY_TOKENS or not hasattr(spec, "head_size"):
        raise UnsupportedCache(f"KV caches of kind {type(spec).__name__} cannot be transferred")
    if getattr(spec, "bounded_replay", False):
        raise UnsupportedCache(
            "a window that vLLM computes again after a hit of its prefix cache (swa_bounded_replay) cannot be "
            "transferred; start both servers with --no-swa-bounded-replay"
        )
    entry_tokens = getattr(spec, "tokens_per_state", 1)
    if not isinstance(entry_tokens, int):
        raise UnsupportedCache(f"KV caches with {entry_tokens} tokens to an entry cannot be transferred")
    if is_ring(spec):
        what = f"ring of {spec.block_size} x {spec.num_kv_heads} x {spec.head_size} {spec.dtype}"
        return GroupKind(names, STATE, dtype=what, block_tokens=_ONE_BLOCK)
    forms = {cache_form(layer, spec) for layer in layers}
    if len(forms) != 1:
        raise UnsupportedCache(f"layers with blocks of different forms cannot be transferred: {sorted(forms)}")
    form, inside = forms.pop()
    return GroupKind(
        names,
        form,
        latent="MLA" in type(spec).__name__,
        head_size=spec.head_size,
        dtype=f"{spec.dtype} {inside}".removeprefix("torch.").rstrip(),
        block_tokens=spec.block_size,
        window=window_of(spec),
        entry_tokens=entry_tokens,
    )


_ONE_BLOCK = 2**40
"""Tokens to the only block of a request: more than any request has."""

_NOT_BY_TOKENS = {
    "ChunkedLocalAttentionSpec",
    "CrossAttentionSpec",
    "EncoderOnlyAttentionSpec",
    "RSWASpec",
    "SinkFullAttentionSpec",
}
"""Kinds of caches that do not keep all tokens, or the last ones, in blocks in their order."""


def cache_form(layer: Any, spec: Any = None) -> tuple[str, str]:
    """How an attention layer of vLLM lays out the inside of a block (`layout.COLUMNS`, `PACKED` or `ROWS`), and of
    PACKED whose kernels do: another one's blocks are others.

    CPU_ATTN names its kernel in `isa` before the cache is registered: until 0.28 that of the layer's implementation,
    since 0.29 that of the layer. A backend that is not known, or gives a page other head slots than the model has KV
    heads, is not taken for one that keeps each token's bytes together: whole blocks are right whatever is in them.
    """
    isa = getattr(layer, "isa", None) or getattr(getattr(layer, "impl", None), "isa", None)
    if isa is not None:
        return (COLUMNS, "") if isa in ("vec", "vec16") else (PACKED, f"{isa}")
    backend = getattr(layer, "attn_backend", None)
    if backend is None and hasattr(layer, "get_attn_backend"):
        backend = layer.get_attn_backend()
    name = "" if backend is None else f"{backend.get_name()}"
    if getattr(spec, "num_head_slots", None) is not None or (name and name not in _BY_TOKENS):
        return PACKED, name
    return ROWS, ""


_BY_TOKENS = {
    "CPU_MLA",
    "CUTLASS_MLA",
    "FLASHINFER",
    "FLASHINFER_MLA",
    "FLASHINFER_MLA_SPARSE",
    "FLASHMLA",
    "FLASHMLA_SPARSE",
    "FLASH_ATTN",
    "FLASH_ATTN_DIFFKV",
    "FLASH_ATTN_MLA",
    "FLASH_ATTN_MLA_SPARSE",
    "FLEX_ATTENTION",
    "ROCM_AITER_UNIFIED_ATTN",
    "TREE_ATTN",
    "TRITON_ATTN",
    "TRITON_ATTN_DIFFKV",
    "TRITON_MLA",
    "TURBOQUANT",
}
"""Backends whose bytes of a token in a head stand together, scales of their own included (0.32, from its sources).
Those of DeepSeek's indexers keep the scales of a block behind all of its keys, and FlashInfer's NVFP4 those of K and
of V likewise: a token's row of such a tensor holds bytes of other tokens."""
