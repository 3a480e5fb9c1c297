"""A vLLM server's connector without vLLM: its scheduler's half and its ranks, with real endpoints, a small cache."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from pdlink.integrations.vllm_parts.rank import Rank
from pdlink.integrations.vllm_parts.requests import RequestBook, Scheduled
from pdlink.integrations.vllm_parts.settings import read

NAMES = ["model.layers.0", "model.layers.1"]
BLOCKS, HEADS, TOKENS, SIZE = 8, 2, 4, 8
PROMPT = list(range(14))
SRC, DST = [3, 5, 1, 2], [4, 0, 6, 7]


def rank_of(
    engine: str, rank: int, *, ranks: int, copies: int, number: int, settings: dict[str, Any]
) -> tuple[Rank, dict[str, torch.Tensor]]:
    """An open rank of a server, and its cache, whose content depends on its engine and tensor parallel rank alone."""
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            rank=rank,
            tensor_parallel_size=ranks,
            prefill_context_parallel_size=copies,
            data_parallel_index=number,
        ),
        kv_transfer_config=SimpleNamespace(engine_id=engine),
        model_config=SimpleNamespace(
            served_model_name="m", revision=None, hf_text_config=SimpleNamespace(to_dict=dict)
        ),
        compilation_config=SimpleNamespace(static_forward_context={}),
    )
    spec = SimpleNamespace(head_size=SIZE, dtype="torch.float32", block_size=TOKENS)
    group = SimpleNamespace(kv_cache_spec=spec, layer_names=NAMES)
    cache = SimpleNamespace(kv_cache_groups=[group], num_blocks=BLOCKS)
    random = torch.Generator().manual_seed(100 * number + rank % ranks)
    tensors = {name: torch.rand(BLOCKS, HEADS, TOKENS, 2 * SIZE, generator=random) for name in NAMES}
    made = Rank(config, cache, read({"transport": {"kind": "tcp"}, "control_host": "127.0.0.1"} | settings))
    made.open(tensors)
    return made, tensors


class Server:
    """Of one engine: its scheduler's half, and its ranks."""

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
        self.book = RequestBook(sends=True, receives=True, shares_prefixes=False, engine=number)
        more: dict[str, Any] = {"ranks": ranks, "copies": copies, "number": number, "settings": settings or {}}
        self.ranks = [rank_of(engine, rank, **more) for rank in range(ranks * copies)]
        self.over: set[str] = set()
        self.reported: list[set[str]] = [set() for _ in self.ranks]
        """By rank: requests that have ended there."""

    def step(self, parts: list[Scheduled] | None = None) -> None:
        plan = self.book.step(parts or [], frozenset())
        over, self.over = self.over, set()
        for (rank, _), reported in zip(self.ranks, self.reported, strict=True):
            rank.steps.withdraw(plan)
            rank.steps.begin(plan)
            for name in NAMES if parts else ():
                rank.steps.layer_saved(name)
            rank.steps.end()
            results = rank.steps.results(over)
            assert not results.failed, results.reasons
            reported |= results.received | results.sent

    def addresses(self) -> list[str]:
        return [node.address for rank, _ in self.ranks for node in rank._nodes]

    def close(self) -> None:
        for rank, _ in self.ranks:
            rank.close()
            rank.close()
