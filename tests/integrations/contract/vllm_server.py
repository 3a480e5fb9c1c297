"""vLLM's own scheduler and the way its runners call a connector, with PDLinkConnector at both ends and no model.

A step is vLLM's: its Scheduler or AsyncScheduler plans, its runners' own code (`KVConnectorModelRunnerMixin` of V1,
`ActiveKVConnector` of V2) calls the worker's connector. What is made up is the model: it writes, for each token of a
request, a number that only this token of this request has, and before that it checks that all tokens which vLLM takes
for computed are in the request's blocks. So a promise that was not kept is seen in the step that reads it.

It needs vLLM's Python files alone: no device, no compiled module.
"""

from __future__ import annotations

import inspect
import json
import os
import time
from collections import deque
from contextlib import ExitStack, contextmanager
from dataclasses import MISSING, dataclass, field, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from vllm.config import KVEventsConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.model_executor.models.registry import ModelRegistry
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BLOCK, HEADS, SIZE, NUM_BLOCKS = 16, 2, 4, 32
NAMES = ["model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn"]
OURS = "PDLinkConnector"
WAIT_S = 60.0
HAS_V2 = find_spec("vllm.v1.worker.gpu.kv_connector") is not None
"""Before 0.15 model runner V2 knows no connector."""
_STEP_TOKENS = 64
"""A longer prompt is computed in several steps."""


class Tiny(torch.nn.Module):
    """Known to vLLM by its class, so that none of its model files, which want kernels, is imported."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()

    def embed_input_ids(self, input_ids: Any) -> Any: ...

    def forward(self, input_ids: Any, positions: Any, **more: Any) -> Any: ...

    def compute_logits(self, hidden_states: Any) -> Any: ...


def _config(
    folder: Path, extra: dict[str, Any], *, role: str, asynchronous: bool, policy: str, connector: str
) -> Any:
    if "TinyForCausalLM" not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model("TinyForCausalLM", Tiny)
    shape = {"hidden_size": HEADS * SIZE, "num_attention_heads": HEADS, "num_hidden_layers": len(NAMES)}
    size = {"vocab_size": 100_000, "max_position_embeddings": 512, "intermediate_size": 16, "torch_dtype": "float32"}
    model = {"architectures": ["TinyForCausalLM"], "model_type": "llama", **shape, **size}
    (folder / "config.json").write_text(json.dumps(model))
    transfer = {
        "kv_connector": connector,
        "kv_connector_module_path": "pdlink.integrations.vllm" if connector == OURS else None,
        "kv_role": role,
        "engine_id": f"engine-{time.monotonic_ns()}",
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": extra,
    }
    given: dict[str, Any] = {
        "model": str(folder),
        "served_model_name": "m",
        "load_format": "dummy",
        "dtype": "float32",
        "max_model_len": 512,
        "block_size": BLOCK,
        "enable_prefix_caching": True,
        "max_num_batched_tokens": _STEP_TOKENS,
        "max_num_seqs": 8,
        "enforce_eager": True,
        "enable_chunked_prefill": True,
        "skip_tokenizer_init": True,
        "async_scheduling": asynchronous,
        "kv_transfer_config": transfer,
        "kv_events_config": KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
    }
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    config = EngineArgs(**given).create_engine_config()
    config.scheduler_config.async_scheduling = asynchronous
    config.cache_config.block_size = BLOCK
    return config


def _cache_config(num_blocks: int) -> KVCacheConfig:
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=HEADS, head_size=SIZE, dtype=torch.float32)
    page = spec.page_size_bytes
    if "shared_by" in {one.name for one in fields(KVCacheTensor)}:  # before 0.32
        tensors = [KVCacheTensor(size=page * num_blocks, shared_by=[name]) for name in NAMES]
    else:
        nbytes = page * num_blocks
        tensors = [KVCacheTensor(size=nbytes * len(NAMES), layers=NAMES, layer_stride=nbytes, block_stride=page)]
    groups = [KVCacheGroupSpec(NAMES, spec)]
    return KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=tensors, kv_cache_groups=groups)


@dataclass
class _Held:
    """What the runner knows of a request."""

    tokens: list[int]
    blocks: list[int] = field(default_factory=list)


class Server:
    """One vLLM server: its scheduler, its runner, a cache of `NUM_BLOCKS` blocks."""

    def __init__(
        self,
        folder: Path,
        extra: dict[str, Any] | None = None,
        *,
        role: str = "kv_both",
        runner: str = "v2",
        asynchronous: bool = False,
        policy: str = "recompute",
        num_blocks: int = NUM_BLOCKS,
        connector: str = OURS,
    ) -> None:
        """extra: `kv_connector_extra_config`. asynchronous: steps are planned before the last one's output is known.

        policy: `kv_load_failure_policy`.
        """
        self.runner, self._depth = runner if HAS_V2 else "v1", 2 if asynchronous else 1
        settings = ({"transport": {"kind": "tcp"}} if connector == OURS else {}) | (extra or {})
        self.config = _config(
            folder, settings, role=role, asynchronous=asynchronous, policy=policy, connector=connector
        )
        if self.runner == "v2":  # here, for a configuration with it wants Triton
            os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
        self.config.cache_config.num_gpu_blocks = num_blocks
        self.cache_config = _cache_config(num_blocks)
        kv_cache_utils.init_none_hash(sha256)
        self._hasher = kv_cache_utils.get_request_block_hasher(BLOCK, sha256)
        given = {
            "vllm_config": self.config,
            "kv_cache_config": self.cache_config,
            "structured_output_manager": StructuredOutputManager(self.config),
            "block_size": BLOCK,
            "hash_block_size": BLOCK,
            "log_stats": True,
        }
        kind = AsyncScheduler if asynchronous else Scheduler
        taken = inspect.signature(Scheduler.__init__).parameters
        self.scheduler = kind(**{name: value for name, value in given.items() if name in taken})
        self.cache = {name: torch.zeros(num_blocks, HEADS, BLOCK, 2 * SIZE) for name in NAMES}
        found = KVConnectorFactory.get_connector_class(self.config.kv_transfer_config)
        self.connector: Any = found(self.config, KVConnectorRole.WORKER, self.cache_config)
        with self._agent():
            self._calls = self._open()
        self._held: dict[str, _Held] = {}
        self._planned: deque[Any] = deque()
        self.said: dict[str, Any] = {}
        """By request, `kv_transfer_params` of its answer."""
        self.outputs: dict[str, list[int]] = {}
        self.ended: dict[str, str] = {}
        """By request, why it has ended, as vLLM says it."""
        self.computed: dict[str, int] = {}
        """By request, tokens of its prompt that steps have computed, repeats included."""
        self.log: list[str] = []
        """Names of the connector's calls, where `watch` was called."""

    # -- a server's life ---------------------------------------------------------------------------------------------

    def _open(self) -> Any:
        if self.runner == "v2":
            from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector

            return ActiveKVConnector(self.config, self.cache)
        self.connector.register_kv_caches(self.cache)
        return None

    @contextmanager
    def _agent(self) -> Iterator[None]:
        """vLLM has one connector in a process; here are several servers."""
        before, kv_transfer_state._KV_CONNECTOR_AGENT = kv_transfer_state._KV_CONNECTOR_AGENT, self.connector
        try:
            yield
        finally:
            kv_transfer_state._KV_CONNECTOR_AGENT = before

    @property
    def address(self) -> str:
        return str(self.connector._rank._nodes[0].address)

    def close(self) -> None:
        self.connector.shutdown()
        self.scheduler.shutdown()

    # -- requests ----------------------------------------------------------------------------------------------------

    def request(
        self,
        name: str,
        prompt: list[int],
        params: dict[str, Any] | None = None,
        *,
        max_tokens: int = 3,
        **sampling: Any,
    ) -> Request:
        extra = {"kv_transfer_params": params} if params else None
        what = SamplingParams(
            max_tokens=max_tokens, temperature=0, ignore_eos=True, detokenize=False, extra_args=extra, **sampling
        )
        given = {"request_id": name, "prompt_token_ids": prompt, "sampling_params": what, "pooling_params": None}
        more = {"eos_token_id": None, "block_hasher": self._hasher}
        taken = inspect.signature(Request.__init__).parameters
        request = Request(**{key: value for key, value in (given | more).items() if key in taken})
        self.scheduler.add_request(request)
        return request

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)

    # -- steps -------------------------------------------------------------------------------------------------------

    def step(self) -> Any:
        """One step of the engine: plan, run the oldest plan, take its output. The plan that ran, if one did."""
        self._planned.append(self.scheduler.schedule())
        if len(self._planned) < self._depth:
            return None
        plan = self._planned.popleft()
        with self._agent(), set_forward_context(None, self.config):
            output = self._run(plan)
        for outputs in self.scheduler.update_from_output(plan, output).values():
            for one in outputs.outputs:
                self.outputs.setdefault(one.request_id, []).extend(one.new_token_ids)
                if one.kv_transfer_params:
                    self.said[one.request_id] = one.kv_transfer_params
                if one.finish_reason is not None:
                    self.ended[one.request_id] = str(one.finish_reason)
        return plan

    def until(self, true: Callable[[], object], *others: Server) -> None:
        """Steps, with those of `others` in turns, until it is so."""
        deadline_s = time.monotonic() + WAIT_S
        while not true():
            for server in (self, *others):
                server.step()
            assert time.monotonic() < deadline_s, (self.scheduler.requests, self.ended)

    def until_idle(self, *others: Server) -> None:
        """Until nobody has a request any more, nor holds a block."""

        def are_idle() -> bool:  # up to 0.21 a server without requests does not ask whether held blocks are free
            schedulers = [server.scheduler for server in (self, *others)]
            return not any(one.has_requests() or one.requests for one in schedulers)

        self.until(are_idle, *others)
        for server in (self, *others):
            for _ in range(server._depth):
                server.step()
            pool = server.scheduler.kv_cache_manager.block_pool
            assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1, "all but the null block"

    def _run(self, plan: Any) -> Any:
        computes = bool(plan.total_num_scheduled_tokens)
        if self.runner == "v2":
            if not computes:
                return self._calls.no_forward(plan) or EMPTY_MODEL_RUNNER_OUTPUT
            self._take(plan)
            self._calls.pre_forward(plan)
            sampled = self._forward(plan)
            self._calls.finish_forward() if hasattr(self._calls, "finish_forward") else None
            whole = "scheduler_output" in inspect.signature(self._calls.post_forward).parameters  # before 0.22
            told = self._calls.post_forward(plan if whole else plan.finished_req_ids)
        else:
            says = hasattr(KVConnectorBase_V1, "handle_preemptions")  # since 0.14
            if says and plan.preempted_req_ids and plan.kv_connector_metadata is not None:
                by_name = "preempted_req_ids" in inspect.signature(KVConnectorBase_V1.handle_preemptions).parameters
                self.connector.handle_preemptions(
                    plan.preempted_req_ids if by_name else plan.kv_connector_metadata  # before 0.19
                )
            if not computes:
                return KVConnectorModelRunnerMixin.kv_connector_no_forward(plan, self.config)
            self._take(plan)
            with KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(plan) as told:
                sampled = self._forward(plan)
        ids = list(sampled)
        index = {name: at for at, name in enumerate(ids)}
        more: dict[str, Any] = {
            "logprobs": None,
            "prompt_logprobs_dict": {},
            "pooler_output": [],
        }  # before 0.14 it wants them
        needed = {one.name for one in fields(ModelRunnerOutput) if one.default is one.default_factory is MISSING}
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index=index,
            sampled_token_ids=list(sampled.values()),
            kv_connector_output=told,
            **{name: value for name, value in more.items() if name in needed},
        )

    # -- the model ---------------------------------------------------------------------------------------------------

    def _take(self, plan: Any) -> None:
        """Block tables, as the plan changes them."""
        for new in plan.scheduled_new_reqs:
            held = self._held.setdefault(new.req_id, _Held(list(new.prompt_token_ids)))
            held.blocks = list(new.block_ids[0])
        cached = plan.scheduled_cached_reqs
        for name, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            held = self._held[name]
            if name in cached.resumed_req_ids:
                held.blocks = []
            held.blocks += blocks[0] if blocks is not None else ()

    def _forward(self, plan: Any) -> dict[str, list[int]]:
        """What is sampled, by request. Layer by layer, as a model with its hooks."""
        starts = {new.req_id: new.num_computed_tokens for new in plan.scheduled_new_reqs}
        cached = plan.scheduled_cached_reqs
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        sampled: dict[str, list[int]] = {}
        for layer, name in enumerate(NAMES):
            for request, count in plan.num_scheduled_tokens.items():
                held, start = self._held[request], starts[request]
                self._check(held, name, layer, start, request)
                for at in range(start, start + count):
                    block, slot = held.blocks[at // BLOCK], at % BLOCK
                    self.cache[name][block, :, slot] = value(held.tokens, at, layer)
            self.connector.save_kv_layer(name, self.cache[name], None)
        for request, count in plan.num_scheduled_tokens.items():
            held, end = self._held[request], starts[request] + count
            self.computed[request] = self.computed.get(request, 0) + count
            sampled[request] = []
            if end >= len(held.tokens):
                held.tokens.append(answer(held.tokens))
                sampled[request] = [held.tokens[-1]]
        return sampled

    def _check(self, held: _Held, name: str, layer: int, end: int, request: str) -> None:
        for at in range(end):
            found = self.cache[name][held.blocks[at // BLOCK], :, at % BLOCK]
            expected = value(held.tokens, at, layer)
            assert bool((found == expected).all()), f"{request}: token {at} of {end} is {found}, expected {expected}"


def value(tokens: list[int], at: int, layer: int) -> float:
    """What the model writes for a token: it depends on all before it. Exact in float32."""
    known = hash(tuple(tokens[: at + 1])) % 1_000_003
    return float(1 + 2 * known + layer)


def answer(tokens: list[int]) -> int:
    return 1 + hash(tuple(tokens)) % 90_000


def tokens_of(prompt: list[int], count: int) -> list[int]:
    """The answer to this prompt."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(answer(tokens))
    return tokens[len(prompt) :]


@contextmanager
def servers(folder: Path, *wanted: dict[str, Any]) -> Iterator[tuple[Server, ...]]:
    """One for each set of arguments, closed at the end."""
    with ExitStack() as made:
        found = []
        for index, arguments in enumerate(wanted):
            place = folder / "model"  # one model, or they are refused
            place.mkdir(exist_ok=True)
            server = Server(place, **{"extra": {"name": f"s{index}"}} | arguments)
            made.callback(server.close)
            found.append(server)
        yield tuple(found)
