"""Small models, a listener that writes everything down, and an engine driven step by step."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from pdlink.config import EngineConfig, ModelConfig
from pdlink.engine import tiny
from pdlink.engine.engine import Engine
from pdlink.engine.forward import LoadedModel, PagedCache
from pdlink.engine.models import load_model
from pdlink.engine.request import GenerationRequest, SamplingParams, TokenOutput
from pdlink.memory.blocks import BlockPool

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdlink.errors import PdlinkError

BLOCK = 8
NUM_LAYERS = 3
MAX_TOKENS = 512


@cache
def small_model() -> LoadedModel:
    return load_model(ModelConfig(num_layers=NUM_LAYERS, max_tokens=MAX_TOKENS))


@cache
def oracle_model() -> Any:
    """The same weights in transformers' own hands: no paged attention, no cache of ours."""
    return tiny.build_model(seed=0, num_layers=NUM_LAYERS, max_tokens=MAX_TOKENS, dtype=torch.float32)


@cache
def oracle(prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    """Greedy continuation by transformers' generate."""
    ids = torch.tensor([prompt])
    out = oracle_model().generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False, use_cache=False
    )
    return [int(token) for token in out[0, len(prompt) :]]


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(1000 * length + seed)
    return tuple(torch.randint(32, 127, (length,), generator=generator).tolist())


@dataclass
class Recorder:
    """EngineListener and KVListener that holds the engine to its promises and keeps what it said."""

    pool: BlockPool
    tables: dict[str, tuple[int, ...]] = field(default_factory=dict)
    cached: dict[str, int] = field(default_factory=dict)
    external: dict[str, int] = field(default_factory=dict)
    prefilling_said: list[bool] = field(default_factory=list)
    layers: list[tuple[int, tuple[tuple[str, int, int], ...]]] = field(default_factory=list)
    outputs: dict[str, list[TokenOutput]] = field(default_factory=dict)
    errors: dict[str, PdlinkError | None] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    """Request ids in order of admission."""
    on_ended: Callable[[str], None] | None = None
    on_layer_needed: Callable[[str, int, float], bool] | None = None

    def admitted(self, request_id: str, blocks: Sequence[int], num_cached_tokens: int, external_tokens: int) -> None:
        assert request_id not in self.errors
        self.tables[request_id] = tuple(blocks)
        self.cached[request_id], self.external[request_id] = num_cached_tokens, external_tokens
        self.order.append(request_id)

    def prefilling(self, on: bool) -> None:
        assert on != (self.prefilling_said or [False])[-1]
        self.prefilling_said.append(on)

    def layer_written(self, layer: int, spans: Sequence[tuple[str, int, int]]) -> None:
        assert self.prefilling_said[-1]
        self.layers.append((layer, tuple(spans)))

    def layer_needed(self, request_id: str, layer: int, timeout_s: float) -> bool:
        assert self.on_layer_needed is not None, "nothing was said to arrive layer by layer"
        return self.on_layer_needed(request_id, layer, timeout_s)

    def output(self, output: TokenOutput) -> None:
        assert output.request_id in self.tables, "output before admission"
        assert output.request_id not in self.errors, "output after the end"
        outputs = self.outputs.setdefault(output.request_id, [])
        assert output.index == len(outputs)
        assert not outputs or outputs[-1].finish_reason is None, "output after the last"
        outputs.append(output)

    def ended(self, request_id: str, error: PdlinkError | None) -> None:
        assert request_id not in self.errors, f"{request_id} ended twice"
        self.errors[request_id] = error
        if self.on_ended is not None:
            self.on_ended(request_id)

    def tokens(self, request_id: str) -> list[int]:
        return [output.token_id for output in self.outputs.get(request_id, [])]

    def text(self, request_id: str) -> str:
        return "".join(output.text for output in self.outputs.get(request_id, []))

    def written(self, request_id: str) -> list[tuple[int, int, int]]:
        """(layer, start, end) that were reported for a request, in order."""
        return [
            (layer, start, end) for layer, spans in self.layers for name, start, end in spans if name == request_id
        ]


@dataclass
class Rig:
    engine: Engine
    pool: BlockPool
    cache: PagedCache
    heard: Recorder

    def submit(
        self,
        request_id: str,
        prompt: Sequence[int],
        max_tokens: int = 8,
        *,
        external: int = 0,
        salt: str = "",
        **sampling: Any,
    ) -> None:
        """external: so many tokens of the prompt come from elsewhere."""
        params = SamplingParams(max_tokens=max_tokens, **sampling)
        request = GenerationRequest(request_id, tuple(prompt), params, external_tokens=external, salt=salt)
        self.engine.submit(request)

    def run(self) -> None:
        """Step until there is nothing to do."""
        for _ in range(10_000):
            if not self.engine.step():
                self.pool.check()
                return
        raise AssertionError("the engine found something to do for 10,000 steps")

    def generate(
        self, prompt: Sequence[int], max_tokens: int = 8, request_id: str = "r", **options: Any
    ) -> list[int]:
        self.submit(request_id, prompt, max_tokens, **options)
        self.run()
        assert self.heard.errors[request_id] is None
        return self.heard.tokens(request_id)


def rig(
    *,
    num_blocks: int = 64,
    share_prefixes: bool = False,
    order: str = "LPBTH",
    model: LoadedModel | None = None,
    max_batched_tokens: int = 512,
    max_running: int = 64,
    max_waiting: int = 256,
    threads: int = 1,
    kernels: bool | None = None,
) -> Rig:
    model = model or small_model()
    pool = BlockPool(num_blocks)
    paged = PagedCache(model, num_blocks=num_blocks, block_tokens=BLOCK, order=order, kernels=kernels)
    heard = Recorder(pool)
    config = EngineConfig(
        max_batched_tokens=max_batched_tokens, max_running=max_running, max_waiting=max_waiting, threads=threads
    )
    engine = Engine(
        model,
        pool,
        paged,
        config,
        heard,
        heard,
        share_prefixes=share_prefixes,
    )
    return Rig(engine, pool, paged, heard)
