"""What is inside of recurrent states, against vLLM's own layers: their shapes, and its loaders of weights, which say
what a rank has of each channel."""

from __future__ import annotations

import ast
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("vllm.v1.request", exc_type=ImportError)

import torch  # noqa: E402
import vllm  # noqa: E402
from vllm.model_executor.layers.mamba import mamba_utils  # noqa: E402
from vllm.model_executor.layers.mamba.gdn import kimi_gdn_linear_attn, olmo_gdn_linear_attn  # noqa: E402
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention  # noqa: E402
from vllm.model_executor.layers.mamba.linear.minimax_linear_attn import MiniMaxText01LinearAttention  # noqa: E402
from vllm.model_executor.layers.mamba.mamba_mixer import MambaMixer  # noqa: E402
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2, mamba_v2_sharded_weight_loader  # noqa: E402
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator as Shapes  # noqa: E402
from vllm.model_executor.layers.mamba.short_conv import ShortConv  # noqa: E402
from vllm.v1.kv_cache_interface import MambaSpec  # noqa: E402

from pdlink.integrations.vllm_parts import states, versions  # noqa: E402
from pdlink.integrations.vllm_parts.cache_groups import transfer_parts  # noqa: E402
from tests.integrations.moved_states import LAYERS, Pages, move  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(
        versions.check(vllm.__version__, accept_newer=True) < versions.HYBRID, reason="transfers no states"
    ),
]

KERNEL = 4
Channels = torch.Tensor
"""[dim of a rank]: which of the model's channels each of its own is."""


@dataclass(frozen=True)
class Kind:
    layer: type
    shapes: Callable[[int], Any]
    """By number of ranks."""
    channels: Callable[[int, int], Channels]
    """Of the convolution, by rank and number of ranks."""
    num_heads: int
    """Of the recurrent state, of the model; 0: there is none."""


def loaded(loader: Any, dims: list[int], num_ranks: int, width: int, *shards: int) -> Channels:
    """What a loader of vLLM's puts into a rank's convolution, where the model's channels are numbered."""
    weight = torch.full((width, 1, 1), -1.0)
    numbers = torch.arange(float(sum(dims))).view(-1, 1, 1)
    if not shards:
        loader(weight, numbers)
    for shard, part in zip(shards, torch.split(numbers, dims), strict=False):
        loader(weight, part, shard)
    assert (weight >= 0).all(), "every channel of the rank is one of the model's"
    return weight.flatten().long()


def mamba2(num_groups: int) -> Kind:
    heads, size, state = 8, 16, 32
    inner = heads * size

    def shapes(num_ranks: int) -> Any:
        return Shapes.mamba2_state_shape(num_ranks, inner, num_groups, heads, size, state, KERNEL)

    def channels(rank: int, num_ranks: int) -> Channels:
        extra = Shapes.extra_groups_for_head_shards(num_groups, num_ranks)
        groups = ((num_groups + extra) * state, extra * state, num_groups == 1)
        loader = mamba_v2_sharded_weight_loader([(inner, 0, False), groups, groups], num_ranks, rank)
        width = (inner + 2 * (num_groups + extra) * state) // num_ranks
        return loaded(loader, [inner, num_groups * state, num_groups * state], num_ranks, width)

    return Kind(MambaMixer2, shapes, channels, heads)


def delta(layer: type, make: Any, key_heads: int) -> Kind:
    heads, size = 8, 16
    dims = [key_heads * size, key_heads * size, heads * size]

    def shapes(num_ranks: int) -> Any:
        if layer is kimi_gdn_linear_attn.KimiGatedDeltaNetAttention:
            return Shapes.kda_state_shape(num_ranks, heads, size, conv_kernel_size=KERNEL)
        return Shapes.gated_delta_net_state_shape(num_ranks, key_heads, heads, size, size, KERNEL)

    def channels(rank: int, num_ranks: int) -> Channels:
        width = sum(dims) // num_ranks
        if make is mamba_v2_sharded_weight_loader:
            return loaded(make([(dim, 0, False) for dim in dims], num_ranks, rank), dims, num_ranks, width)
        return loaded(make(dims, num_ranks, rank), dims, num_ranks, width, 0, 1, 2)

    return Kind(layer, shapes, channels, heads)


def by_channels(rank: int, num_ranks: int) -> Channels:
    """As `ColumnParallelLinear` divides."""
    return torch.arange(128).chunk(num_ranks)[rank]


KINDS = {
    "Mamba 1": Kind(MambaMixer, lambda ranks: Shapes.mamba1_state_shape(ranks, 128, 16, KERNEL), by_channels, 128),
    "Mamba 2, one group": mamba2(1),
    "Mamba 2, a group a head": mamba2(8),
    "Qwen3-Next": delta(QwenGatedDeltaNetAttention, mamba_v2_sharded_weight_loader, 4),
    "Olmo Hybrid": delta(
        olmo_gdn_linear_attn.OlmoHybridGatedDeltaNetAttention,
        olmo_gdn_linear_attn._make_fused_conv1d_weight_loader,
        8,
    ),
    "Kimi Linear": delta(
        kimi_gdn_linear_attn.KimiGatedDeltaNetAttention, kimi_gdn_linear_attn._make_fused_conv1d_weight_loader, 8
    ),
    "LFM2": Kind(ShortConv, lambda ranks: Shapes.short_conv_state_shape(ranks, 128, KERNEL), by_channels, 0),
    "MiniMax-01": Kind(
        MiniMaxText01LinearAttention, lambda ranks: Shapes.linear_attention_state_shape(8, ranks, 16), by_channels, 8
    ),
}


def spec_of(kind: Kind, num_ranks: int, **more: Any) -> MambaSpec:
    shapes = tuple(kind.shapes(num_ranks))
    dtypes = (torch.bfloat16, torch.float32)[-len(shapes) :] if kind.num_heads else (torch.bfloat16,)
    return MambaSpec(block_size=100, shapes=shapes, dtypes=dtypes, **more)


def pages(kind: Kind, rank: int, num_ranks: int, block: int | None = None) -> Pages:
    """Of a rank, with a state of the model in this block, and as vLLM unpacks a page."""
    spec = spec_of(kind, num_ranks)
    layers: list[Any] = [object.__new__(kind.layer) for _ in range(LAYERS)]
    made = Pages(spec.real_page_size_bytes, states.inside_of(spec, layers))
    for layer in range(LAYERS) if block is not None else ():
        page = torch.from_numpy(made.state(layer, block or 0))
        begin = 0
        for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True):
            nbytes = int(np.prod(shape)) * dtype.itemsize
            tensor = page[begin : begin + nbytes].view(dtype).view(shape)
            begin += nbytes
            if kind.num_heads and tensor.dtype == torch.float32:
                heads = torch.arange(float(kind.num_heads)).chunk(num_ranks)[rank]
                inner = torch.arange(float(tensor[0].numel())).view(1, *tensor.shape[1:]) / 65536
                tensor.copy_((1 + layer + heads).view(-1, *[1] * inner[0].ndim) + inner)
            else:
                tensor = tensor if mamba_utils.is_conv_state_dim_first() else tensor.T
                numbers = kind.channels(rank, num_ranks) * KERNEL + layer
                raw = numbers[:, None] + torch.arange(tensor.shape[1])[None]
                tensor.copy_(raw.to(torch.int16).view(torch.bfloat16))
    return made


@pytest.fixture(params=["SD", "DS"])
def order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", request.param)
    mamba_utils.get_conv_state_layout.cache_clear()
    yield request.param
    mamba_utils.get_conv_state_layout.cache_clear()


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(("num_src", "num_dst"), [(1, 2), (2, 1), (2, 4), (4, 1)])
def test_ranks_of_another_number_get_what_vllm_gives_them(name: str, num_src: int, num_dst: int, order: str) -> None:
    kind, count = KINDS[name], max(num_src, num_dst)
    sources = [pages(kind, rank, num_src, 1) for rank in range(num_src)]
    sinks = [pages(kind, rank, num_dst) for rank in range(num_dst)]
    for shard in range(count):
        (sender, at), (receiver, to) = divmod(shard, count // num_src), divmod(shard, count // num_dst)
        move(sources[sender], sinks[receiver], 1, 2, (at, count // num_src), (to, count // num_dst))
    for rank, sink in enumerate(sinks):
        assert np.array_equal(sink.memory, pages(kind, rank, num_dst, 2).memory), (rank, order)


def test_a_state_that_all_ranks_have_goes_to_any_number_of_them(order: str) -> None:
    """As of Qwen4's short convolutions of whole tokens."""
    spec = spec_of(KINDS["LFM2"], 1, tp_replicated=True)
    src, dst = (Pages(spec.real_page_size_bytes, states.inside_of(spec, [object()])) for _ in range(2))
    src.state(1, 1)[:] = 7
    move(src, dst, 1, 2, (1, 2), (0, 1))
    assert (dst.state(1, 2) == 7).all()


def test_the_inside_of_further_tensors_and_other_layers_is_not_known(order: str) -> None:
    kind = KINDS["Mamba 2, one group"]
    spec, layer = spec_of(kind, 1), object.__new__(MambaMixer2)
    assert len(states.inside_of(spec, [layer])) == 2
    assert states.inside_of(spec, [object()]) == states.inside_of(spec, []) == ()
    rings = MambaSpec(block_size=100, shapes=(*spec.shapes, (8, 4)), dtypes=(*spec.dtypes, torch.float32))
    assert states.inside_of(rings, [layer]) == ()
    (conv, heads), odd = spec.shapes, [0, 0]
    odd[conv.index(max(conv))] = 1
    grown = tuple(size + more for size, more in zip(conv, odd, strict=True))
    assert states.inside_of(MambaSpec(block_size=100, shapes=(grown, heads), dtypes=spec.dtypes), [layer]) == ()


def test_layers_with_other_states_in_one_group_of_vllm_are_groups_of_ours() -> None:
    import vllm.v1.kv_cache_interface as kv

    specs = {
        "layer.0": spec_of(KINDS["LFM2"], 1, page_size_padded=4096),
        "layer.1": spec_of(KINDS["Mamba 1"], 1, page_size_padded=4096 * 4),
    }
    group = kv.KVCacheGroupSpec(list(specs), kv.UniformTypeKVCacheSpecs(block_size=100, kv_cache_specs=specs))
    cache = kv.KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[group])
    assert transfer_parts(cache) == [(0, ("layer.0",)), (0, ("layer.1",))]


KNOWN_OTHERWISE = {
    "GatedDeltaNetAttention",  # a base of those below it
    "Qwen4ExpPLELayer",  # its state is that of all ranks, and says so
}


def test_every_layer_of_vllm_with_a_state_was_read() -> None:
    """A class that is new in vLLM is refused between servers of other numbers of ranks until it was."""
    bases, found = {"MambaBase"}, set[str]()
    classes = [
        (each.name, {base.id for base in each.bases if isinstance(base, ast.Name)})
        for path in Path(vllm.__file__).parent.rglob("*.py")
        if "MambaBase" in (text := path.read_text()) or "Attention)" in text
        for each in ast.walk(ast.parse(text))
        if isinstance(each, ast.ClassDef)
    ]
    while new := {name for name, parents in classes if parents & bases} - found:
        found |= new
        bases |= new
    assert found - KNOWN_OTHERWISE - {*states._CLASSES} == {
        "BailingMoELinearAttention",
        "MiniMaxText01LinearAttention",
    }, "whose base is known"
    assert {*states._CLASSES} <= found
