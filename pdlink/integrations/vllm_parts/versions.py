"""The installed vLLM, and the few differences between the supported releases.

The interface of vLLM's connectors changes with almost every release (a table is in docs/vllm.md). The connector
mostly uses parts that are equal from 0.24 to 0.33; this module handles the others, by feature if possible.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from typing import Any

from pdlink.content import digest_of
from pdlink.errors import ConfigError, LocalError
from pdlink.integrations.vllm_parts.layout import COLUMNS, PACKED, ROWS, UnsupportedCache

log = logging.getLogger(__name__)

OLDEST, NEWEST = (0, 24), (0, 33)


class UnsupportedVllm(LocalError):
    """A version of vLLM that the connector does not know."""

    code = "unsupported_vllm"


def check(version: str, *, accept_newer: bool) -> tuple[int, int]:
    """(major, minor) of a vLLM that can be used. Raises UnsupportedVllm, with the remedy."""
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        raise UnsupportedVllm(f"vLLM {version!r} does not say which version it is")
    found = int(match[1]), int(match[2])
    known = f"PDLinkConnector works with vLLM {_text(OLDEST)} to {_text(NEWEST)}, this is {version}"
    if found < OLDEST:
        raise UnsupportedVllm(f"{known}; update vLLM")
    if found > NEWEST and not accept_newer:
        raise UnsupportedVllm(
            f"{known}; update pdlink, or try it with untested_vllm: accept in kv_connector_extra_config"
        )
    return found


def scheduled(output: Any) -> list[tuple[str, tuple[int, ...], bool, int, int]]:
    """(request id, blocks of group 0, whether those are all, tokens computed before, tokens computed now) of a step.

    Model runner V2 lists resumed requests among the new ones, V1 among the cached ones with their ids in a set.
    """
    counts = output.num_scheduled_tokens
    parts = [
        (new.req_id, tuple(new.block_ids[0]), True, new.num_computed_tokens, counts[new.req_id])
        for new in output.scheduled_new_reqs
    ]
    cached = output.scheduled_cached_reqs
    for index, request_id in enumerate(cached.req_ids):
        blocks = cached.new_block_ids[index]
        parts.append(
            (
                request_id,
                tuple(blocks[0]) if blocks else (),
                request_id in cached.resumed_req_ids,
                cached.num_computed_tokens[index],
                counts[request_id],
            )
        )
    return parts


def identity(request: Any) -> list[str]:
    """What the KV of a prompt depends on beside its tokens."""
    words = []
    if request.lora_request is not None:
        adapter = request.lora_request
        words.append(f"lora {adapter.lora_name} {_adapter(getattr(adapter, 'lora_path', ''))}")
    if request.cache_salt:
        words.append(f"salt {request.cache_salt}")
    words += [f"media {feature.identifier}" for feature in request.mm_features or ()]
    return words


def check_config(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raises UnsupportedCache for what is not transferred yet, so that the server does not start."""
    groups = len(kv_cache_config.kv_cache_groups)
    if groups != 1:
        raise UnsupportedCache(
            f"the model has {groups} groups of KV caches; models that mix kinds of attention are not transferred yet"
        )
    parallel = vllm_config.parallel_config
    for what, size in (
        ("pipeline parallel", parallel.pipeline_parallel_size),
        ("decode context parallel", getattr(parallel, "decode_context_parallel_size", 1)),
    ):
        if size != 1:
            raise UnsupportedCache(f"{what} servers ({size} ranks) cannot transfer KV yet")


def geometry(vllm_config: Any, kv_cache_config: Any, layer_names: list[str]) -> dict[str, Any]:
    """The arguments that `layout.describe` takes beside the tensors. Raises UnsupportedCache."""
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    specs = getattr(spec, "kv_cache_specs", None)
    if specs:  # one spec per layer; their geometry is compared by `describe`
        spec = next(iter(specs.values()))
    head_size = getattr(spec, "head_size", None)
    if head_size is None:
        raise UnsupportedCache(f"KV caches of kind {type(spec).__name__} cannot be transferred")
    layers = vllm_config.compilation_config.static_forward_context
    forms = {cache_form(layers.get(name)) for name in layer_names}
    if len(forms) != 1:
        raise UnsupportedCache(f"layers with blocks of different forms cannot be transferred: {sorted(forms)}")
    return {
        "form": forms.pop(),
        "latent": "MLA" in type(spec).__name__,
        "head_size": head_size,
        "dtype": f"{spec.dtype}".removeprefix("torch."),
    }


def model_name(vllm_config: Any) -> str:
    """What the server calls its model: its path may differ between hosts."""
    served = vllm_config.model_config.served_model_name
    return str(served[0] if isinstance(served, list) else served or vllm_config.model_config.model)


def model_shape(vllm_config: Any) -> dict[str, Any]:
    """What makes the KV of two models of one name incomparable."""
    shape = vllm_config.model_config.hf_text_config.to_dict()
    return {key: value for key, value in shape.items() if not key.startswith("_") and key != "transformers_version"}


def data_parallel_index(vllm_config: Any) -> int:
    """Which of a server's data-parallel engines this is. Models without experts hide it from `data_parallel_rank`."""
    parallel = vllm_config.parallel_config
    return int(getattr(parallel, "data_parallel_index", 0) or getattr(parallel, "data_parallel_rank", 0))


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


def _adapter(place: str) -> str:
    """What tells adapters of one name apart: their content, or where that is not here, where they come from."""
    found = _on_this_host(place, None, None)
    try:
        return place if found is None else digest_of(found)
    except ConfigError as error:  # taken away since; vLLM will say so
        log.warning("adapter %r: %s", place, error)
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


def transfer_groups(kv_cache_config: Any) -> tuple[int, ...]:
    """Groups whose blocks take part in transfers (asked for since 0.32)."""
    return tuple(getattr(kv_cache_config, "transfer_group_ids", (0,)))


def transfer_results(sent: set[str], received: set[str], failed: set[str]) -> Any:
    """What `get_transfer_results` answers (since 0.30)."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

    return KVConnectorTransferResults(sent, received, failed)


def cache_hit_source() -> Any:
    """Under which name vLLM counts tokens that came from another server (since 0.32)."""
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:
        return None
    return CacheHitSource.P2P


def share_log() -> None:
    """Let pdlink's log go where vLLM's goes, unless somebody has decided otherwise."""
    ours, theirs = logging.getLogger("pdlink"), logging.getLogger("vllm")
    if not ours.handlers:
        for handler in theirs.handlers:
            ours.addHandler(handler)
        ours.setLevel(theirs.level)
        ours.propagate = not theirs.handlers


def cache_form(layer: Any) -> str:
    """How an attention layer of vLLM lays out the inside of a block (`layout.COLUMNS`, `PACKED` or `ROWS`).

    CPU_ATTN names its kernel in `isa` before the cache is registered: until 0.28 that of the layer's implementation,
    since 0.29 that of the layer.
    """
    isa = getattr(layer, "isa", None) or getattr(getattr(layer, "impl", None), "isa", None)
    if isa is not None:
        return COLUMNS if isa in ("vec", "vec16") else PACKED
    backend = getattr(layer, "attn_backend", None)
    # A version that names it elsewhere must not be taken for one without: whole blocks are right whatever is in them.
    return PACKED if backend is not None and backend.get_name() == "CPU_ATTN" else ROWS


def _text(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
