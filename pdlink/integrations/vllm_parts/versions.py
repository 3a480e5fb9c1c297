"""The installed vLLM, and the few differences between the supported releases.

The interface of vLLM's connectors changes with almost every release (a table is in docs/vllm.md). The connector
mostly uses parts that are equal from 0.12 to 0.33; this module handles the others, by feature if possible.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import os
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from pdlink.api.session import DEFAULT_TTL_S, AskedSession, usable
from pdlink.content import digest_of
from pdlink.errors import ConfigError, LocalError
from pdlink.integrations.vllm_parts import weights
from pdlink.integrations.vllm_parts.adapters import Adapter
from pdlink.integrations.vllm_parts.cache_groups import by_group, keeps_all, specs_of, transfer_parts
from pdlink.integrations.vllm_parts.contexts import check_ranks
from pdlink.integrations.vllm_parts.layout import UnsupportedCache
from pdlink.integrations.vllm_parts.shards import RankPlace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdlink.config import TiersConfig
    from pdlink.integrations.vllm_parts.adapters import LoadedAdapters
    from pdlink.kv.groups import BlockLists

log = logging.getLogger(__name__)

OLDEST, NEWEST = (0, 12), (0, 33)
RUNNER_V2 = (0, 15)
"""The first version whose model runner V2 calls a connector."""
WORKER_NEWS = (0, 20)
"""The first version whose runners both pass what workers tell the scheduler's half (`build_connector_worker_meta`).
Before, it goes with the statistics."""
HYBRID = (0, 32)
"""The first version whose models with several groups of KV caches are transferred. Earlier ones were not tried; up to
0.29 they could not be told that the KV of such a request does not come."""
TIER = (0, 32)
"""The first version whose OffloadingConnector takes our tier. Earlier ones were not tried."""


class UnsupportedVllm(LocalError):
    """A version of vLLM that the connector does not know."""

    code = "unsupported_vllm"


def check(version: str, *, accept_newer: bool, oldest: tuple[int, int] = OLDEST) -> tuple[int, int]:
    """(major, minor) of a vLLM that can be used. Raises UnsupportedVllm, with the remedy."""
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        raise UnsupportedVllm(f"vLLM {version!r} does not say which version it is")
    found = int(match[1]), int(match[2])
    what = "PDLinkConnector" if oldest == OLDEST else "PDLinkTier"
    known = f"{what} works with vLLM {_text(oldest)} to {_text(NEWEST)}, this is {version}"
    if found < oldest:
        raise UnsupportedVllm(f"{known}; update vLLM")
    if found > NEWEST and not accept_newer:
        raise UnsupportedVllm(f"{known}; update pdlink, or try it with untested_vllm: accept among its settings")
    return found


def warn_untried(version: str) -> None:
    """Say once, at the start of a server behind the window, what is not known of it."""
    if check(version, accept_newer=True) > NEWEST:
        log.warning(
            "vLLM %s: not tried: the contract with its classes, servers, GPUs; expected %s to %s; `make engines "
            "ENGINES=%s` in pdlink's sources tries the contract",
            version,
            _text(OLDEST),
            _text(NEWEST),
            version,
        )


def news_bases() -> tuple[type, ...]:
    """What workers' news derive from, since 0.18."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import base

    found = getattr(base, "KVConnectorWorkerMetadata", None)
    return () if found is None else (found,)


def announces_requests() -> bool:
    """Whether vLLM calls `on_new_request` (since 0.22)."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    return hasattr(KVConnectorBase_V1, "on_new_request")


def preempts_unsaid() -> bool:
    """Whether no worker hears of preemptions before the step that takes their blocks is bound (up to 0.13); nothing
    writes to them before."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    return not hasattr(KVConnectorBase_V1, "handle_preemptions")


def frees_early() -> bool:
    """Whether vLLM gives blocks away that a step under way still writes to (up to 0.23): with its asynchronous
    scheduling a request has ended, or was aborted, before its last step has."""
    from vllm.v1.core.sched.scheduler import Scheduler

    return not hasattr(Scheduler, "_drain_deferred_frees")


def frees_parked() -> bool:
    """Whether vLLM gives the blocks of a request away that is aborted while it waits for KV (up to 0.15): what comes
    would be written over another one's."""
    from vllm.v1.core.sched.scheduler import Scheduler

    return "delay_free_blocks" not in inspect.signature(Scheduler._free_request).parameters


def hybrid_bases(version: str) -> tuple[type, ...]:
    """What a connector derives from to keep vLLM's hybrid cache manager on: without it every layer keeps all tokens,
    and models with recurrent layers do not start."""
    if check(version, accept_newer=True) < HYBRID:
        return ()
    from vllm.distributed.kv_transfer.kv_connector.v1.base import SupportsHMA

    return (SupportsHMA,)


def prompt_of(request: Any) -> Sequence[int]:
    """A token id for each token of a prompt. Where it was given as embeddings these say nothing: see `Embeddings`."""
    tokens: Sequence[int] = request.prompt_token_ids
    if request.prompt_embeds is not None:
        tokens = request.all_token_ids[: request.num_prompt_tokens]
    return tokens


def leave_last_token(request: Any) -> None:
    """Let vLLM compute all but the last token of this prompt, which decode computes: it needs the state before it.

    What vLLM then samples is nobody's answer. NixlConnector does the same (0.32). Before the request is queued.
    """
    for name in ("prompt_token_ids", "prompt_embeds", "prompt_is_token_ids"):  # what it has, a part for each token
        given = getattr(request, name, None)
        if given is not None:
            setattr(request, name, given[:-1])
    del request._all_token_ids[-1:]
    request.num_prompt_tokens -= 1
    request.max_tokens = 1  # a second token would change the state


def scheduled(output: Any, kv_cache_config: Any) -> list[tuple[str, BlockLists, bool, int, int]]:
    """(request id, blocks `by_group`, whether those are all, tokens computed before, tokens computed now) of a step.

    Model runner V2 lists resumed requests among the new ones, V1 among the cached ones with their ids in a set.
    """
    counts = output.num_scheduled_tokens
    parts = [
        (new.req_id, by_group(kv_cache_config, new.block_ids), True, new.num_computed_tokens, counts[new.req_id])
        for new in output.scheduled_new_reqs
    ]
    cached = output.scheduled_cached_reqs
    for index, request_id in enumerate(cached.req_ids):
        parts.append(
            (
                request_id,
                by_group(kv_cache_config, cached.new_block_ids[index]),
                request_id in cached.resumed_req_ids,
                cached.num_computed_tokens[index],
                counts[request_id],
            )
        )
    return parts


class PromptIdentity(NamedTuple):
    """What the KV of a prompt depends on beside its tokens."""

    salt: str
    lora: str
    media: tuple[tuple[int, str], ...]
    """(First placeholder token, content hash), ascending."""
    adapter: Adapter | None = None
    """The content that `lora` names, which the workers hold against what they have loaded."""

    @property
    def words(self) -> list[str]:
        words = [f"lora {self.lora}"] if self.lora else []
        words += [f"salt {self.salt}"] if self.salt else []
        return words + [f"media {content}" for _, content in self.media]


def identity(request: Any) -> PromptIdentity:
    adapter = request.lora_request
    media = sorted((feature.mm_position.offset, feature.identifier) for feature in request.mm_features or ())
    lora, named = "", None
    if adapter is not None:
        content = content_at(getattr(adapter, "lora_path", ""))
        lora, named = f"{adapter.lora_name} {content}", Adapter(int(adapter.lora_int_id), content)
    return PromptIdentity(request.cache_salt or "", lora, tuple(media), named)


def session_of(request: Any) -> AskedSession | None:
    """Of an agent: as the proxy names it, or from 0.33 on the client."""
    params = request.kv_transfer_params or {}
    name = params.get("session_id") or getattr(request, "session_id", None)
    ttl_s, owner = params.get("session_ttl_s") or DEFAULT_TTL_S, params.get("session_owner") or ""
    if not (isinstance(name, str) and isinstance(ttl_s, int | float) and isinstance(owner, str)):
        return None
    return usable(AskedSession(name, ttl_s, owner))


def check_config(
    vllm_config: Any, kv_cache_config: Any, version: tuple[int, int], *, tiers: TiersConfig | None
) -> None:
    """Raises UnsupportedCache for what is not transferred or kept yet, so that the server does not start.

    tiers: of a server that keeps KV in a store.
    """
    if getattr(getattr(vllm_config, "cache_config", None), "calculate_kv_scales", False):  # vLLM up to 0.26
        raise UnsupportedCache(
            "calculate_kv_scales: got true; expected scales that are the same in every server, and here each "
            "makes its own from its first prompts; take scales from the checkpoint"
        )
    if getattr(kv_cache_config, "hisparse_host_num_blocks", None):
        raise UnsupportedCache(
            f"hisparse_host_num_blocks: got {kv_cache_config.hisparse_host_num_blocks}; expected no pool of blocks "
            "on the host beside the GPU's; take HiSparseConnector out of MultiConnector"
        )
    if version < RUNNER_V2:
        _check_runner(version)
    groups = len(transfer_parts(kv_cache_config))
    if groups > 1:
        what = f"the model has {groups} groups of KV caches"
        remedy = "sliding windows can be kept like full attention: --disable-hybrid-kv-cache-manager"
        if version < HYBRID:
            raise UnsupportedCache(f"{what}, which are transferred from vLLM {_text(HYBRID)} on; {remedy}")
    if tiers is not None and tiers.max_local_cpu_size:
        _check_tiers(kv_cache_config, version, tiers)
    decode = getattr(vllm_config.parallel_config, "decode_context_parallel_size", 1)
    if decode == 1:
        _check_prefill_contexts(vllm_config, version, tiers)
        return
    if version < HYBRID:
        raise UnsupportedCache(
            f"decode_context_parallel_size: got {decode} with vLLM {_text(version)}; "
            f"expected {_text(HYBRID)} and later"
        )
    check_ranks(vllm_config, kv_cache_config, has_tiers=tiers is not None)


def _check_runner(version: tuple[int, int]) -> None:
    """Raises UnsupportedCache."""
    from vllm import envs

    if envs.VLLM_USE_V2_MODEL_RUNNER:
        raise UnsupportedCache(
            f"VLLM_USE_V2_MODEL_RUNNER: got 1 with vLLM {_text(version)}, whose model runner V2 calls no connector; "
            f"expected 0, or vLLM {_text(RUNNER_V2)}; take it out of the environment"
        )


def _check_prefill_contexts(vllm_config: Any, version: tuple[int, int], tiers: TiersConfig | None) -> None:
    """Raises UnsupportedCache.

    Without decode context parallelism every rank of vLLM's prefill context parallelism keeps all of the KV since 0.32
    (`_gather_prefill_cache_inputs`), so that one of them can send it. What is received or loaded would have to be
    written on all.
    """
    parallel = vllm_config.parallel_config
    prefill = getattr(parallel, "prefill_context_parallel_size", 1)
    if prefill == 1:
        return
    what = f"prefill_context_parallel_size: got {prefill}"
    if version < HYBRID:
        raise UnsupportedCache(
            f"{what} with vLLM {_text(version)}; expected {_text(HYBRID)}, where every rank keeps all KV"
        )
    if vllm_config.kv_transfer_config.is_kv_consumer:
        raise UnsupportedCache(
            f"{what} for a server that receives KV; expected 1; take kv_role: kv_producer, or 1 rank"
        )
    if tiers is not None:
        raise UnsupportedCache(f"{what} beside tiers; expected 1; remove tiers")


def _check_tiers(kv_cache_config: Any, version: tuple[int, int], tiers: TiersConfig) -> None:
    """What a store cannot keep of layers that do not keep all tokens. Raises UnsupportedCache."""
    if keeps_all(kv_cache_config):
        return
    if version < HYBRID:
        raise UnsupportedCache(
            f"tiers keep KV of models with sliding windows or recurrent layers from vLLM {_text(HYBRID)} on; take "
            "tiers out, or let vLLM keep windows like full attention: --disable-hybrid-kv-cache-manager"
        )
    if tiers.save_decode_cache:
        raise UnsupportedCache(
            "tiers.save_decode_cache: got true for a model with sliding windows or recurrent layers, of which there "
            "is too little left at the end of an answer; expected false; remove it"
        )
    for spec in specs_of(kv_cache_config):
        if not hasattr(spec, "shapes"):
            continue
        if getattr(spec, "mamba_cache_mode", "none") == "none":
            raise UnsupportedCache(
                "tiers: got recurrent layers whose states vLLM does not keep at boundaries of blocks; expected "
                "servers with --enable-prefix-caching, where it ends steps there; turn it on, or remove tiers"
            )
        if spec.block_size % tiers.chunk_size:
            raise UnsupportedCache(
                f"tiers.chunk_size: got {tiers.chunk_size}; expected divisors of {spec.block_size}, the tokens of a "
                f"block of this model: its recurrent states are known where blocks end; set {spec.block_size}"
            )


def model_name(vllm_config: Any) -> str:
    """What the server calls its model: its path may differ between hosts."""
    served = vllm_config.model_config.served_model_name
    return str(served[0] if isinstance(served, list) else served or vllm_config.model_config.model)


def model_shape(vllm_config: Any) -> dict[str, Any]:
    """What makes the KV of two models of one name incomparable."""
    shape = vllm_config.model_config.hf_text_config.to_dict()
    return {key: value for key, value in shape.items() if not key.startswith("_") and key != "transformers_version"}


def heads(vllm_config: Any, num_mine: int) -> tuple[range | None, int | None]:
    """Which KV heads this rank has, of how many; None of a latent cache, which has one that all ranks have.

    Ranks beyond the number of heads share them.
    """
    model, mine = vllm_config.model_config, place(vllm_config)
    if getattr(model, "use_mla", False):
        return None, None
    total = int(model.get_total_num_kv_heads())
    first = mine.rank * total // mine.num_ranks
    return range(first, first + num_mine), total


def sends_alike(vllm_config: Any) -> bool:
    """Whether this server only sends, and all ranks of a stage have the same KV."""
    is_latent = bool(getattr(vllm_config.model_config, "use_mla", False))
    return is_latent and not vllm_config.kv_transfer_config.is_kv_consumer


def place(vllm_config: Any) -> RankPlace:
    """Of this process among the ranks of its engine: a stage's ranks follow each other, copy by copy."""
    parallel = vllm_config.parallel_config
    num_contexts = getattr(parallel, "decode_context_parallel_size", 1)
    num_ranks = parallel.tensor_parallel_size
    num_stages = getattr(parallel, "pipeline_parallel_size", 1)
    num_copies = getattr(parallel, "prefill_context_parallel_size", 1)
    before, rank = divmod(parallel.rank, num_ranks)
    stage, copy = divmod(before, num_copies)
    group, context = divmod(rank, num_contexts)
    return RankPlace(
        stage % num_stages, num_stages, group, num_ranks // num_contexts, copy, num_copies, context, num_contexts
    )


def stage_of(vllm_config: Any, name: str, num_stages: int) -> int:
    """In which of so many stages vLLM has a layer. A model's own drafts come after its last layer, in the last stage.

    Raises UnsupportedCache for a layer without a number, for those of a draft model, and for stages that
    VLLM_PP_LAYER_PARTITION does not describe.
    """
    from vllm.distributed.utils import get_pp_indices

    numbers = [int(word) for word in name.split(".") if word.isdigit()]
    if len(numbers) != 1 or name.startswith("draft"):
        raise UnsupportedCache(
            f"stages: got {num_stages} for layer {name}, whose stage is not known; "
            f"use the same number of pipeline stages on both servers"
        )
    num_layers = int(vllm_config.model_config.get_total_num_hidden_layers())
    try:
        ends = [get_pp_indices(num_layers, stage, num_stages)[1] for stage in range(num_stages)]
    except ValueError as error:
        raise UnsupportedCache(f"stages: got {num_stages}; vLLM says: {error}") from None
    return next((stage for stage, end in enumerate(ends) if numbers[0] < end), num_stages - 1)


def precision(vllm_config: Any) -> str:
    """What the bytes of KV depend on beside the model's files: how it is computed and kept."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    return f"{model.dtype} {model.quantization} {cache.cache_dtype}"


def sleeps(vllm_config: Any) -> bool:
    """Whether this server can be put to sleep, which takes the memory of its cache away until it wakes up."""
    return bool(getattr(vllm_config.model_config, "enable_sleep_mode", False))


def is_on_cpu(vllm_config: Any) -> bool:
    """Whether this server computes on CPUs."""
    return bool(vllm_config.device_config.device_type == "cpu")


def buffer_device(vllm_config: Any) -> str:
    """`kv_buffer_device`: by default the platform's device, in older versions cuda."""
    return str(getattr(vllm_config.kv_transfer_config, "kv_buffer_device", ""))


def data_parallel_index(vllm_config: Any) -> int:
    """Which of a server's data-parallel engines this is. Models without experts hide it from `data_parallel_rank`."""
    parallel = vllm_config.parallel_config
    return int(getattr(parallel, "data_parallel_index", 0) or getattr(parallel, "data_parallel_rank", 0))


def engine_of_port(vllm_config: Any) -> int:
    """Which of the data-parallel engines behind one HTTP port this is, as the header X-data-parallel-rank counts
    them; 0 of an engine that has the port alone."""
    parallel = vllm_config.parallel_config
    if getattr(parallel, "data_parallel_external_lb", False):
        return 0
    if getattr(parallel, "data_parallel_hybrid_lb", False):  # each host has a port for its own engines
        return int(parallel.data_parallel_rank_local or 0)
    return data_parallel_index(vllm_config)


def content(vllm_config: Any) -> str:
    """Digest of the files that this server loads: a name that both servers serve says nothing about them.

    Where they are not on this host (another load format than files), of their name and commit. Adapters are not in
    it: requests bring them, and each request's transfer has the adapter in its id (`identity`).
    """
    model_config, load = vllm_config.model_config, vllm_config.load_config
    made_up = str(getattr(load, "load_format", "")) == "dummy"
    folder = getattr(load, "download_dir", None)
    model = _on_this_host(model_config.model, model_config.revision, folder)
    if model is None:
        commit = getattr(model_config.hf_config, "_commit_hash", None) or model_config.revision or "main"
        log.warning(
            "the files of model %r are not here: two servers are compared by this name only", model_config.model
        )
        return hashlib.blake2b(f"{model_config.model} {commit}".encode(), digest_size=16).hexdigest()
    tokenizer = None
    if model_config.tokenizer and model_config.tokenizer != model_config.model:
        revision = getattr(model_config, "tokenizer_revision", None)
        tokenizer = _on_this_host(model_config.tokenizer, revision, folder)
    return digest_of(model, tokenizer, weights=not made_up)


def content_at(place: str) -> str:
    """What tells adapters, or models, of one name apart: their content, or where that is not here, where they come
    from."""
    found = _on_this_host(place, None, None)
    try:
        return place if found is None else digest_of(found)
    except ConfigError as error:  # taken away since; vLLM will say so
        log.warning("%s: %s", place, error)
        return place


def _on_this_host(place: str, revision: str | None, folder: str | None) -> str | None:
    """The directory or file of a model given by its path or by its name on the hub; None if it is not here."""
    if os.path.exists(place):
        return place
    try:
        from huggingface_hub import snapshot_download

        return str(snapshot_download(place, revision=revision, cache_dir=folder, local_files_only=True))
    except (ImportError, OSError, ValueError):  # not downloaded, or no name of the hub
        return None


def recomputes(vllm_config: Any) -> bool:
    """Whether vLLM computes what a load has promised and did not bring; else it fails the request."""
    return getattr(vllm_config.kv_transfer_config, "kv_load_failure_policy", "recompute") == "recompute"  # since 0.13


def in_micro_batches(vllm_config: Any) -> bool:
    """Whether a step's batch may be computed in several parts, in turns (`--enable-dbo`, `--ubatch-size`)."""
    parallel = vllm_config.parallel_config
    return bool(getattr(parallel, "enable_dbo", False)) or getattr(parallel, "ubatch_size", 0) > 1


def ends_unsaid(vllm_config: Any) -> bool:
    """Whether model runner V1 asks this rank for what has ended, and never says that the step has ended (0.32): it
    waits for drafts, which the last pipeline stage alone makes."""
    mine = place(vllm_config)
    return getattr(vllm_config, "speculative_config", None) is not None and mine.stage + 1 < mine.num_stages


def watch_adapters(vllm_config: Any, loaded: LoadedAdapters) -> None:
    """Of a server that has adapters."""
    if getattr(vllm_config, "lora_config", None) is not None:
        from vllm.lora.worker_manager import WorkerLoRAManager

        loaded.watch(WorkerLoRAManager)


def watch_weights(changed: Callable[[str], None], of: str = "connector") -> weights.Sleep:
    """As `weights.watch`, for this process' engine."""
    from vllm.v1.engine.core import EngineCore

    return weights.watch(EngineCore, changed, of)


def unwatch_weights(of: str) -> None:
    from vllm.v1.engine.core import EngineCore

    weights.unwatch(EngineCore, of)


def transfer_results(sent: set[str], received: set[str], failed: set[str]) -> Any:
    """What `get_transfer_results` answers (since 0.30)."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

    return KVConnectorTransferResults(sent, received, failed)


def computed_tokens(request: Any) -> Sequence[int]:
    """Tokens of prompt and answer whose KV is in the blocks of a request that has ended; none of one that was aborted
    or has failed. The last one's KV was not computed."""
    if request.status.name not in ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_REPETITION"):
        return ()
    tokens: list[int] = request.all_token_ids[: request.num_tokens - 1]
    return tokens[: request.num_computed_tokens]


def cache_hit_source(name: str) -> Any:
    """What vLLM calls the place that cached tokens came from: HOST, DISK, P2P and so on, since 0.32."""
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:
        return None
    return CacheHitSource[name]


def share_log() -> None:
    """Let pdlink's log go where vLLM's goes, unless somebody has decided otherwise."""
    ours, theirs = logging.getLogger("pdlink"), logging.getLogger("vllm")
    if not ours.handlers:
        for handler in theirs.handlers:
            ours.addHandler(handler)
        ours.setLevel(theirs.level)
        ours.propagate = not theirs.handlers


def _text(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
