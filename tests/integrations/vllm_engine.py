"""A vLLM server's connector without vLLM: its scheduler's half and its ranks, with real endpoints, a small cache."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from pdlink.integrations.vllm_parts.adapters import LoadedAdapters
from pdlink.integrations.vllm_parts.rank import Rank
from pdlink.integrations.vllm_parts.requests import RequestBook, Scheduled
from pdlink.integrations.vllm_parts.settings import read

if TYPE_CHECKING:
    from collections.abc import Sequence

NAMES = ["model.layers.0", "model.layers.1"]
BLOCKS, HEADS, TOKENS, SIZE = 8, 2, 4, 8
PROMPT = list(range(14))
SRC, DST = [3, 5, 1, 2], [4, 0, 6, 7]
NO_ADAPTERS = LoadedAdapters(str)


class MLASpec(SimpleNamespace):
    """By its name the connector knows latents."""


class Engine:
    """Its scheduler's half, and its ranks, each with the cache that it is given."""

    def __init__(
        self,
        engine: str,
        caches: Sequence[dict[str, torch.Tensor]],
        *,
        block_tokens: int,
        head_size: int,
        parallel: dict[str, int],
        latent: bool = False,
        receives: bool = True,
        settings: dict[str, Any] | None = None,
    ) -> None:
        """caches: of each rank, by layer. parallel: as vLLM's ParallelConfig says, but for the rank."""
        self.names = list(caches[0])
        number = parallel.get("data_parallel_index", 0)
        self.book = RequestBook(sends=True, receives=True, shares_prefixes=False, engine=number)
        kind = MLASpec if latent else SimpleNamespace
        spec = kind(head_size=head_size, dtype="torch.float32", block_size=block_tokens)
        group = SimpleNamespace(kv_cache_spec=spec, layer_names=self.names)
        cache = SimpleNamespace(kv_cache_groups=[group], num_blocks=len(caches[0][self.names[0]]))
        said = read({"transport": {"kind": "tcp"}} | (settings or {}))
        self.ranks: list[tuple[Rank, dict[str, torch.Tensor]]] = []
        for rank, tensors in enumerate(caches):
            config = SimpleNamespace(
                parallel_config=SimpleNamespace(rank=rank, **parallel),
                kv_transfer_config=SimpleNamespace(engine_id=engine, is_kv_consumer=receives),
                model_config=SimpleNamespace(
                    served_model_name="m", revision=None, hf_text_config=SimpleNamespace(to_dict=dict), use_mla=latent
                ),
                compilation_config=SimpleNamespace(static_forward_context={}),
            )
            made = Rank(config, cache, said)
            self.ranks.append((made, tensors))
            made.open(tensors)
        self.over: set[str] = set()
        self.reported: list[set[str]] = [set() for _ in self.ranks]
        """By rank: requests that have ended there."""
        self.reasons: dict[str, str] = {}
        """By request that failed."""

    def step(self, parts: list[Scheduled] | None = None) -> None:
        plan = self.book.step(parts or [], frozenset())
        over, self.over = self.over, set()
        for (rank, _), reported in zip(self.ranks, self.reported, strict=True):
            rank.steps.withdraw(plan)
            rank.steps.begin(plan)
            for name in self.names if parts else ():
                rank.steps.layer_saved(name)
            rank.steps.end()
            results = rank.steps.results(over)
            self.reasons |= results.reasons
            reported |= results.received | results.sent

    def addresses(self) -> list[str]:
        """By shard, as the proxy is told."""
        opened = [
            (shard.number, node.address)
            for rank, _ in self.ranks
            for shard, node in zip(rank._shards, rank._nodes, strict=True)
        ]
        return [address for _, address in sorted(opened)]

    def close(self) -> None:
        for rank, _ in self.ranks:
            rank.close()
            rank.close()


class Server(Engine):
    """One whose caches depend on its engine and tensor parallel rank alone, and whose requests all succeed."""

    def __init__(
        self,
        engine: str,
        *,
        ranks: int = 1,
        copies: int = 1,
        number: int = 0,
        settings: dict[str, Any] | None = None,
    ) -> None:
        """copies: prefill context parallel ranks. number: among the data-parallel engines behind one port."""
        caches = []
        for rank in range(ranks * copies):
            random = torch.Generator().manual_seed(100 * number + rank % ranks)
            caches.append({name: torch.rand(BLOCKS, HEADS, TOKENS, 2 * SIZE, generator=random) for name in NAMES})
        parallel = {
            "tensor_parallel_size": ranks,
            "prefill_context_parallel_size": copies,
            "data_parallel_index": number,
        }
        super().__init__(engine, caches, block_tokens=TOKENS, head_size=SIZE, parallel=parallel, settings=settings)

    def step(self, parts: list[Scheduled] | None = None) -> None:
        super().step(parts)
        assert not self.reasons
