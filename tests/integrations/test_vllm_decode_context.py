"""Decode context parallelism as vLLM has it: which rank keeps which token, and how its scheduler counts blocks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("vllm.v1.request", exc_type=ImportError)

import torch  # noqa: E402
import vllm  # noqa: E402
from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.distributed import parallel_state  # noqa: E402
from vllm.v1.core import kv_cache_utils  # noqa: E402
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, MLAAttentionSpec  # noqa: E402
from vllm.v1.worker import block_table as runner_v1  # noqa: E402
from vllm.v1.worker.gpu import block_table as runner_v2  # noqa: E402

from pdlink.integrations.vllm_parts import versions  # noqa: E402
from pdlink.integrations.vllm_parts.contexts import Contexts, contexts_of  # noqa: E402
from pdlink.integrations.vllm_parts.layout import ROWS, GroupKind, LayerView, UnsupportedCache, describe  # noqa: E402
from pdlink.integrations.vllm_parts.settings import read  # noqa: E402
from tests.integrations.context_slots import slot_of  # noqa: E402

VERSION = versions.check(vllm.__version__, accept_newer=True)
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(VERSION < versions.HYBRID, reason="refused by name"),
]
TABLE = [5, 2, 9, 7, 1, 8, 3, 4, 6, 0]
TOKENS, BLOCK_TOKENS = 120, 16


class Pointer(NamedTuple):
    """What a kernel adds offsets to."""

    memory: Any
    offset: Any = 0

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.offset + offset)


class Language:
    """So much of Triton's as the two kernels take, one program at a time, on tensors."""

    constexpr, int32, int64 = int, torch.int32, torch.int64

    def __init__(self, *program: int, of: tuple[int, ...]) -> None:
        self._program, self._of = program, of

    def program_id(self, axis: int) -> int:
        return self._program[axis]

    def num_programs(self, axis: int) -> int:
        return self._of[axis]

    def arange(self, start: int, end: int) -> torch.Tensor:
        return torch.arange(start, end)

    def where(self, condition: Any, one: Any, other: Any) -> torch.Tensor:
        return torch.where(torch.as_tensor(condition), torch.as_tensor(one), torch.as_tensor(other))

    def load(self, pointer: Pointer, mask: Any = None, other: int = 0) -> torch.Tensor:
        at = torch.as_tensor(pointer.offset)
        if mask is None:
            return torch.as_tensor(pointer.memory[at])
        return torch.where(mask, pointer.memory[torch.where(mask, at, 0)], other)

    def store(self, pointer: Pointer, value: Any, mask: torch.Tensor) -> None:
        pointer.memory[pointer.offset[mask]] = torch.as_tensor(value).expand(mask.shape)[mask]


def slots_v1(monkeypatch: pytest.MonkeyPatch, rank: int, ranks: int, interleave: int) -> list[int]:
    kernel = runner_v1.ComputeSlotMappingKernel.kernel
    monkeypatch.setattr(runner_v1, "tl", Language(0, of=(2,)))
    found = torch.full((TOKENS,), -7)
    getattr(kernel, "fn", kernel)(
        TOKENS,
        TOKENS,
        Pointer(torch.tensor([0, TOKENS])),
        Pointer(torch.arange(TOKENS)),
        Pointer(torch.tensor(TABLE)),
        len(TABLE),
        Pointer(found),
        BLOCK_TOKENS,
        ranks,
        rank,
        interleave,
        -1,
        64,
    )
    return found.tolist()


def slots_v2(monkeypatch: pytest.MonkeyPatch, rank: int, ranks: int, interleave: int) -> list[int]:
    kernel = runner_v2._compute_slot_mappings_kernel
    monkeypatch.setattr(runner_v2, "tl", Language(0, 0, of=(1, 2)))
    monkeypatch.setattr(runner_v2, "_load_ptr", lambda pointer, _: Pointer(pointer.memory[pointer.offset]))
    found = torch.full((TOKENS,), -7)
    getattr(kernel, "fn", kernel)(
        TOKENS,
        Pointer(torch.tensor([0])),
        Pointer(torch.tensor([0, TOKENS])),
        Pointer(torch.arange(TOKENS)),
        Pointer([torch.tensor(TABLE)]),
        Pointer(torch.tensor([len(TABLE)])),
        Pointer(torch.tensor([BLOCK_TOKENS])),
        Pointer(torch.tensor([True])),
        Pointer(torch.tensor([True])),
        Pointer(found),
        TOKENS,
        rank,
        ranks,
        interleave,
        -1,
        64,
    )
    return found.tolist()


@pytest.mark.parametrize("slots", [slots_v1, slots_v2])
@pytest.mark.parametrize(("ranks", "interleave"), [(1, 1), (2, 1), (2, 4), (3, 2), (2, 16), (4, 8)])
def test_ranks_write_where_we_say(
    slots: Callable[..., list[int]], ranks: int, interleave: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both runners of vLLM's: its own kernels, in Python."""
    found = [slots(monkeypatch, rank, ranks, interleave) for rank in range(ranks)]
    for token in range(TOKENS):
        mine, block, offset = slot_of(token, ranks=ranks, interleave=interleave, block_tokens=BLOCK_TOKENS)
        expected = [TABLE[block] * BLOCK_TOKENS + offset if rank == mine else -1 for rank in range(ranks)]
        assert [slots[token] for slots in found] == expected, token


@pytest.mark.parametrize(("ranks", "interleave"), [(2, 1), (2, 4), (4, 16)])
def test_blocks_hold_as_many_tokens_as_vllms_scheduler_counts(ranks: int, interleave: int) -> None:
    """Of a layout of positions, and of vLLM's own specs."""
    sizes: dict[str, Any] = {"block_size": BLOCK_TOKENS, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    view = LayerView("model.0", (8, BLOCK_TOKENS, 8), (BLOCK_TOKENS * 8, 8, 1), 4, 0, 0)
    kind = GroupKind(("model.0",), ROWS, True, 8, "float32", BLOCK_TOKENS)
    layout = Contexts(ranks, interleave, is_ours=True).part(describe([view], kind), 0).layout
    for spec in (FullAttentionSpec(**sizes), MLAAttentionSpec(**sizes)):
        assert spec.dcp_sharded
        tokens = kv_cache_utils.resolve_dcp_kv_block_size(spec, ranks)
        assert layout.block_tokens * layout.position_tokens == tokens
        config = SimpleNamespace(parallel_config=SimpleNamespace(decode_context_parallel_size=ranks))
        for length in (1, tokens - 1, tokens, tokens + 1, 5 * tokens + 3):
            assert layout.blocks_of(*layout.needed(0, length)).stop == spec.max_num_blocks_per_req(config, length)
    states = MambaSpec(block_size=BLOCK_TOKENS, shapes=((4,),), dtypes=(torch.float32,))
    assert not states.dcp_sharded


def test_ranks_of_a_group_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two stages of four tensor parallel ranks, in pairs."""
    made: dict[str, list[list[int]]] = {}

    def init(group_ranks: list[list[int]], *_: object, group_name: str = "", **__: object) -> SimpleNamespace:
        made[group_name] = group_ranks
        return SimpleNamespace(rank_in_group=0, world_size=1)

    world = SimpleNamespace(local_rank=0, device_group=None, rank=0, world_size=8)
    monkeypatch.setattr(parallel_state, "init_model_parallel_group", init)
    monkeypatch.setattr(parallel_state, "get_world_group", lambda: world)
    for name in [name for name, value in vars(parallel_state).items() if name.isupper() and value is None]:
        monkeypatch.setattr(parallel_state, name, None)  # so that what is set below is undone
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: 8)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda *_: 0)
    with set_current_vllm_config(VllmConfig()):
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=4,
            pipeline_model_parallel_size=2,
            decode_context_model_parallel_size=2,
            backend="gloo",
        )
    groups = made["dcp"]
    places = []
    for rank in range(8):
        parallel = ParallelConfig(
            tensor_parallel_size=4, pipeline_parallel_size=2, decode_context_parallel_size=2, rank=rank
        )
        places.append(versions.place(SimpleNamespace(parallel_config=parallel)))
    for group in groups:
        assert [places[rank].context for rank in group] == [0, 1]
        assert len({(places[rank].stage, places[rank].rank) for rank in group}) == 1
    assert sorted(rank for group in groups for rank in group) == list(range(8))


def test_what_vllm_is_told_is_read() -> None:
    parallel = ParallelConfig(tensor_parallel_size=2, decode_context_parallel_size=2, cp_kv_cache_interleave_size=16)
    config: Any = SimpleNamespace(parallel_config=parallel, model_config=SimpleNamespace(use_mla=True))
    assert contexts_of(config, read({})) == Contexts(2, 16, is_ours=True)
    spec = MLAAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=8, dtype=torch.float32)
    cache = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec, layer_names=["model.0"])])
    versions.check_config(config, cache, VERSION, tiers=None)
    states = MambaSpec(block_size=BLOCK_TOKENS, shapes=((4,),), dtypes=(torch.float32,))
    cache.kv_cache_groups.append(SimpleNamespace(kv_cache_spec=states, layer_names=["model.1"]))
    with pytest.raises(UnsupportedCache, match="layers whose tokens vLLM does not share out"):
        versions.check_config(config, cache, VERSION, tiers=None)
