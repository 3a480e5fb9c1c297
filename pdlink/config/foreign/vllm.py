"""The JSON of vLLM's --kv-transfer-config (0.10 to 0.33), with the extra keys of its connectors."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from . import lmcache
from .applying import Vocabulary, judge
from .verdicts import (
    EnginesOwn,
    NoCounterpart,
    NotNeeded,
    OurSettings,
    directories,
    is_off,
    lacking,
    nbytes_as_gib,
    same,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from .verdicts import Rule, Verdict

_CONNECTOR = EnginesOwn("PDLinkConnector", "PDLinkConnector in its place")
_UNLIKE = "what it does is not what a KV transfer does; leave it beside pdlink in a MultiConnector"
_CONNECTORS = {
    **same(
        _CONNECTOR,
        "PDLinkConnector NixlConnector NixlPullConnector NixlPushConnector P2pNcclConnector PyNcclConnector"
        " MooncakeConnector MooncakeConnectorV1 MooncakeLayerwiseConnector MoRIIOConnector LMCacheConnector"
        " LMCacheConnectorV1 LMCacheMPConnector OffloadingConnector SimpleCPUOffloadConnector"
        " MooncakeStoreConnector FlexKVConnectorV1 HF3FSKVConnector ExampleConnector SharedStorageConnector"
        " DynamoConnector MultiConnector AIBrixOffloadingConnector",
    ),
    **same(NoCounterpart(_UNLIKE), "HiSparseConnector ExampleHiddenStatesConnector DecodeBenchConnector"),
}


def _connector(value: Any) -> Verdict:
    found = _CONNECTORS.get(str(value), _CONNECTOR)
    assert isinstance(found, EnginesOwn | NoCounterpart)
    return found


def _prompt_only(value: Any) -> Verdict:
    if is_off(value):
        return OurSettings({"tiers.save_decode_cache": True})
    return NotNeeded("answers are kept with tiers.save_decode_cache only")


def _shared(value: Any) -> Verdict:
    if isinstance(value, str) and value.startswith("/"):
        return OurSettings({"tiers.remote_url": f"file://{value}"}, "a directory that nodes mount")
    return NoCounterpart("tiers.remote_url must be file:///DIRECTORY")


def _tier(value: Any) -> Verdict:
    if value == "fs":
        return NotNeeded("its directory says it")
    return NoCounterpart("tiers.remote_url takes redis://, s3:// and file://; tiers.peers lists other nodes")


RULES: dict[str, Rule] = {
    "kv_connector": _connector,
    "kv_role": EnginesOwn(),
    "engine_id": EnginesOwn(),
    "kv_load_failure_policy": EnginesOwn(),
    "kv_connector_module_path": NotNeeded("the module of PDLinkConnector stands there"),
    "kv_connector_extra_config": NotNeeded("empty"),
    "connectors": NotNeeded("empty"),
    "spec_name": NotNeeded("tiers are opened by their settings"),
    "spec_module_path": lacking("a tier of your own is path.to.module:name in tiers.remote_url"),
    "cache_policy_module_path": lmcache.EVICTION,
    "cpu_bytes_to_use": nbytes_as_gib("tiers.max_local_cpu_size", "of each rank; divide it by their number"),
    "cpu_bytes_to_use_per_rank": nbytes_as_gib("tiers.max_local_cpu_size"),
    "num_cpu_blocks": NoCounterpart("give tiers.max_local_cpu_size in GiB"),
    "eviction_policy": lmcache.EVICTION,
    "block_size": "tiers.chunk_size",
    "blocks_per_chunk": NoCounterpart("give tiers.chunk_size in tokens: blocks times the block size"),
    "offload_prompt_only": _prompt_only,
    "store_threshold": lacking("tiers.ingestion: second_sight does that for what is below memory"),
    "disk_path": directories,
    "disk_capacity_bytes": nbytes_as_gib("tiers.max_local_disk_size"),
    "shared_storage_path": _shared,
    "secondary_tiers": NotNeeded("empty"),
    "secondary_tiers.type": _tier,
    "secondary_tiers.root_dir": _shared,
    "secondary_tiers.module_path": lacking("a tier of your own is path.to.module:name in tiers.remote_url"),
    **same(
        NoCounterpart("name the other nodes in tiers.peers, and this one's port in tiers.peer_port"),
        "secondary_tiers.host secondary_tiers.port",
    ),
    **same(
        NotNeeded("`listen` is where others reach a server, and `pdlink vllm` sets it; the proxy knows all"),
        "kv_ip kv_port kv_rank kv_parallel_size proxy_ip proxy_port proxy_ping_port http_ip http_port handshake_port"
        " notify_port host_ip bootstrap_server_address lookup_rpc_port mooncake_rpc_port kv_producers_size"
        " tensor_parallel_multiplier",
    ),
    **same(
        NotNeeded("prefill writes into the blocks that decode has reserved, over the best way both sides have"),
        "kv_buffer_device kv_buffer_size backends backend num_threads num_workers mooncake_protocol read_mode"
        " send_type nccl_num_channels mem_pool_size_gb qp_per_transfer post_batch_size custom_mem_pool"
        " bidirectional_kv_xfer push_registration_timeout preferred_segment",
    ),
    **same(NotNeeded("layouts may differ between both sides"), "enable_permute_local_kv enable_cross_layers_blocks"),
    **same(
        NotNeeded("leases are renewed while their process is alive; timeouts.peer_s is the one deadline"),
        "kv_lease_duration decoder_kv_blocks_ttl engine_ttl transfer_timeout defer_timeout recv_abort_timeout",
    ),
    **same(
        NotNeeded("look-ups, loads and stores are asynchronous, and wait for nobody"),
        "load_async lookup_async enable_lookup lazy_offload backpressure disk_buffer_slots use_page_cache"
        " max_tracker_size secondary_tiers.n_read_threads secondary_tiers.n_write_threads"
        " secondary_tiers.io_threads kv_offload_backend",
    ),
    **same(
        NotNeeded("records fit all ranks, stages and block sizes; tiers publish events themselves"),
        "canonical_layout store_tp_size prefill_tp_sizes enable_store_tp_lcm enable_group_semantics"
        " self_describing_kv_events secondary_tiers.enable_kv_events secondary_tiers.locality enable_telemetry",
    ),
    **same(NotNeeded("the handshake always compares both sides"), "enforce_handshake_compat"),
    **same(NotNeeded("tiers.load_if_faster decides by measured pace"), "kv_recompute_threshold"),
    **same(
        lacking("3FS is not spoken; mount it, and name it in tiers.remote_url as file:///DIRECTORY"),
        "hf3fs_storage_path hf3fs_metadata_server_url hf3fs_file_size hf3fs_client_numjobs"
        " hf3fs_max_device_buffer_count",
    ),
    **same(NoCounterpart(_UNLIKE), "host_pool_gib fill_mean fill_std"),
    **same(NoCounterpart("keys are made of the model and its weights; a name apart is cache_salt"), "cache_prefix"),
    **same(
        NoCounterpart("buckets are s3://BUCKET in tiers.remote_url"),
        "secondary_tiers.store_config secondary_tiers.prefix",
    ),
}


def _plain(key: str) -> str:
    return re.sub(
        r"kv_connector_extra_config\.|connectors\[\d+\]\.", "", re.sub(r"(secondary_tiers)\[\d+\]", r"\1", key)
    )


def _otherwise(key: str, value: Any) -> Verdict | None:
    """Keys of LMCache, with its prefix or without."""
    plain = key.removeprefix("lmcache.")
    if plain == key and key not in lmcache.RULES:
        return None
    verdict = judge(lmcache.LMCACHE, plain, value)
    if isinstance(verdict, OurSettings) and not all(setting.startswith("tiers.") for setting in verdict.settings):
        return NotNeeded("vLLM's own flags say it")
    return verdict


VLLM = Vocabulary("vLLM's connectors", RULES, _plain, _otherwise, lmcache.LMCACHE.pairs)


def flat(given: Mapping[str, Any]) -> dict[str, Any]:
    """Every key with its place: kv_connector_extra_config.connectors[0].kv_role."""
    return dict(_leaves(given, ""))


def _leaves(given: Mapping[str, Any], above: str) -> Iterator[tuple[str, Any]]:
    for key, value in given.items():
        name = str(key)
        if name == "kv_connector_extra_config" and isinstance(value, dict) and value:
            yield from _leaves(value, f"{above}{name}.")
        elif name in ("connectors", "secondary_tiers") and isinstance(value, list) and value:
            for place, each in enumerate(value):
                if isinstance(each, dict):
                    yield from _leaves(each, f"{above}{name}[{place}].")
                else:
                    yield f"{above}{name}[{place}]", each
        else:
            yield above + name, value
