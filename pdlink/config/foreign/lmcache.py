"""LMCache's settings (0.3 to 0.5), of its file or its LMCACHE_ variables.

Keys as in its own documentation of settings; older names that people still post are beside the newer ones.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from .applying import Vocabulary
from .verdicts import NoCounterpart, NotNeeded, OurSettings, directories, gib, is_off, lacking, no_room, same

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .verdicts import Rule, Verdict

VARIABLES = "LMCACHE_"
"""Of the environment."""

_THROUGH_MEMORY = "records pass through memory on their way to other tiers; its room is tiers.max_local_cpu_size"
EVICTION = NotNeeded("memory goes by LRU or S3-FIFO, whichever finds more of late")
_BLENDING = lacking("blending changes the KV; only equal prefixes are reused")
_SCHEMES = ("redis", "rediss", "valkey", "valkeys", "unix", "s3", "gs", "az", "abfs")

_OF_AWS = re.compile(r"(?P<bucket>.+)\.s3(?:express-[\w-]+)?\.(?P<region>[\w-]+)\.amazonaws\.com")
"""LMCache names a bucket by its host."""


def _memory(value: Any) -> Verdict:
    return NoCounterpart(_THROUGH_MEMORY) if no_room(value) else gib("tiers.max_local_cpu_size")(value)


def _disk_room(value: Any) -> Verdict:
    return NotNeeded("off here, too") if no_room(value) else gib("tiers.max_local_disk_size")(value)


def _remote(value: Any) -> Verdict:
    if is_off(value):
        return NotNeeded("off here, too")
    try:
        parts = urlsplit(str(value))
    except ValueError:
        return NoCounterpart("no URL")
    if parts.scheme in ("file", "fs") and parts.path:
        return OurSettings({"tiers.remote_url": f"file://{parts.path}"}, "a directory that nodes mount")
    if parts.scheme == "s3" and (host := _OF_AWS.fullmatch(parts.netloc)) is not None:
        url = f"s3://{host['bucket']}{parts.path}?region={host['region']}"
        return OurSettings({"tiers.remote_url": url}, "credentials are looked for where the provider's tools do")
    if parts.scheme in _SCHEMES:
        return OurSettings({"tiers.remote_url": str(value)})
    return NoCounterpart("its protocol is not spoken; use redis://, s3:// or file:// in tiers.remote_url")


def _serde(value: Any) -> Verdict:
    if is_off(value) or str(value).lower() == "naive":
        return NotNeeded("records are kept as they are; tiers.codec packs them without loss")
    return NoCounterpart("it changes the KV; tiers.codec packs records without loss")


def _role(value: Any) -> Verdict:
    role = {"sender": "prefill", "receiver": "decode", "both": "both"}.get(str(value).lower())
    return OurSettings({"role": role}) if role else NoCounterpart("role must be prefill, decode or both")


def _numa(value: Any) -> Verdict:
    if str(value).lower() == "manual":
        return NoCounterpart("name the node in tiers.numa_node")
    return NotNeeded("memory is taken on the NUMA node of the worker's GPU")


def _peers(value: Any) -> Verdict:
    if is_off(value):
        return NotNeeded("off here, too")
    return OurSettings({"tiers.peer_port": 0}, "lends its memory; list the others in tiers.peers")


def _device(value: Any) -> Verdict:
    return directories(value) if "file://" in str(value) else NotNeeded("memory is always the first tier")


def _cpu(value: Any) -> Verdict:
    return NoCounterpart(_THROUGH_MEMORY) if is_off(value) else NotNeeded("memory is always the first tier")


def _events(value: Any) -> Verdict:
    if is_off(value):
        return NotNeeded("off here, too")
    return OurSettings(
        {"kv_events.endpoint": "tcp://127.0.0.1:0"}, "of pdlink's own workers; vLLM has --kv-events-config"
    )


RULES: dict[str, Rule] = {
    "chunk_size": "tiers.chunk_size",
    "local_cpu": _cpu,
    "local_device": _device,
    "max_local_cpu_size": _memory,
    "max_local_cache_size": _memory,
    "reserve_local_cpu_size": gib("tiers.reserve_local_cpu_size"),
    "local_disk": directories,
    "local_disk_path": directories,
    "max_local_disk_size": _disk_room,
    "local_disk_path_sharding": NotNeeded("with several directories each record is in one of them"),
    "remote_url": _remote,
    "remote_serde": _serde,
    "save_decode_cache": "tiers.save_decode_cache",
    "save_unfull_chunk": lacking("such a chunk is found by one prompt only; a smaller tiers.chunk_size keeps more"),
    "cache_policy": EVICTION,
    "priority_limit": lambda value: (
        NotNeeded("off here, too") if value in (None, "") else OurSettings({"tiers.priority_limit": value})
    ),
    "numa_mode": _numa,
    "pd_role": _role,
    "nixl_role": _role,
    "enable_p2p": _peers,
    "enable_kv_events": _events,
    "extra_config": NotNeeded("empty"),
    "config_file": NotNeeded("read with `pdlink config from lmcache FILE`"),
    "log_level": NotNeeded("log.level, or the engine's own"),
    **same(
        NotNeeded("KV is loaded and stored layer by layer in any case"),
        "use_layerwise pipelined_backend enable_async_loading use_gpu_connector_v3",
    ),
    **same(NotNeeded("keys are chained BLAKE3 hashes, equal in all processes"), "pre_caching_hash_algorithm"),
    **same(
        NotNeeded("memory is taken ahead of need, in huge pages where there are some"),
        "enable_lazy_memory_allocator lazy_memory_initial_ratio lazy_memory_expand_trigger_ratio"
        " lazy_memory_step_ratio lazy_memory_safe_size local_cpu_use_hugepages",
    ),
    **same(
        NotNeeded("a tier that does not answer in time is a miss; timeout_s stands in its URL"),
        "blocking_timeout_secs lookup_timeout_ms error_handling",
    ),
    **same(
        NotNeeded("each worker looks up by itself, while the request queues"),
        "lookup_server_worker_ids enable_scheduler_bypass_lookup lookup_url distributed_url",
    ),
    **same(NotNeeded("tiers.load_if_faster decides by measured pace"), "min_retrieve_tokens hit_miss_ratio"),
    **same(NotNeeded("all tiers are asked, the nearest first"), "retrieve_locations pd_retrieve_locations"),
    **same(
        NotNeeded("nothing is registered: workers publish KV events, and answer `pdlink cache`"),
        "enable_controller lmcache_instance_id controller_url controller_pull_url controller_reply_url"
        " lmcache_worker_port lmcache_worker_ports lmcache_worker_ids lmcache_worker_heartbeat_time"
        " lmcache_worker_heartbeat_delay_time internal_api_server_enabled internal_api_server_host"
        " internal_api_server_port_start internal_api_server_include_index_list"
        " internal_api_server_socket_path_prefix",
    ),
    **same(
        NotNeeded("prefill writes into the blocks that decode has reserved, over the best way both sides have"),
        "enable_pd enable_xpyd enable_nixl pd_buffer_size pd_buffer_device pd_backend_mode pd_bidirectional"
        " pd_allocation_timeout_sec pd_shutdown_timeout_sec pd_condition_poll_interval_sec pd_max_prefill_len"
        " transfer_channel nixl_backends nixl_buffer_size nixl_buffer_device nixl_enable_gc",
    ),
    **same(
        NotNeeded("the proxy names both workers to each other; `listen` is where they are reached"),
        "pd_peer_host pd_peer_init_port pd_peer_alloc_port pd_peer_query_port pd_proxy_host pd_proxy_port"
        " pd_skip_proxy_notification nixl_peer_host nixl_peer_init_port nixl_peer_alloc_port nixl_proxy_host"
        " nixl_proxy_port nixl_receiver_host nixl_receiver_port nixl_peer_port p2p_host p2p_init_ports"
        " p2p_lookup_ports peer_init_ports peer_lookup_ports",
    ),
    **same(
        NotNeeded("leases and pins end with the process that holds them"), "pin_timeout_sec pin_check_interval_sec"
    ),
    **same(
        NotNeeded("of LMCache's process alone"),
        "py_enable_gc use_experimental track_usage debug script_allowed_imports enable_chunk_statistics"
        " chunk_statistics_auto_start_statistics chunk_statistics_auto_exit_timeout_hours"
        " chunk_statistics_auto_exit_target_unique_chunks chunk_statistics_strategy cost_aware_half_life_seconds"
        " cost_aware_ewma_alpha discard_partial_chunks skip_last_n_tokens use_native lmcache_rpc_port",
    ),
    **same(
        _BLENDING,
        "enable_blending blend_recompute_ratio blend_recompute_ratios blend_thresholds blend_check_layers"
        " blend_min_tokens blend_special_str",
    ),
    **same(
        lacking("GPUDirect Storage and CXL are not here; a disk is tiers.local_disk"),
        "gds_path gds_path_sharding gds_buffer_size use_gds gds_backend weka_path cufile_buffer_size maru_path"
        " maru_pool_size",
    ),
    **same(
        lacking("a tier of your own is path.to.module:name in tiers.remote_url"),
        "storage_plugins remote_storage_plugins runtime_plugin_locations external_backends plugin_locations"
        " external_lookup_client audit_actual_remote_url",
    ),
    **same(
        lacking("only KV is kept, no hidden states"),
        "enable_hidden_state_cache max_hidden_state_cpu_size hidden_state_layers hidden_states_retrieve_mode",
    ),
    **same(lacking("tiers.ingestion says which records go below memory"), "store_location pd_store_location"),
    **same(lacking("settings come from a file, the environment and flags"), "remote_config_url app_id"),
    **same(
        NoCounterpart("start `pdlink store`, and name its Unix socket in tiers.store"),
        "mp_host mp_port mp.host mp.port",
    ),
    **same(NotNeeded("the link to `pdlink store` has its own"), "mp.mq_timeout mp.heartbeat_interval"),
}


def _plain(key: str) -> str:
    return key.removeprefix(VARIABLES).lower() if key.startswith(VARIABLES) else key


def _otherwise(key: str, _: Any) -> Verdict | None:
    if key.startswith("extra_config."):
        return NoCounterpart("options of a tier stand in its URL, in tiers.remote_url")
    return None


LMCACHE = Vocabulary(
    "LMCache",
    RULES,
    _plain,
    _otherwise,
    (("tiers.local_disk", "tiers.max_local_disk_size"),),
)


def flat(given: Mapping[str, Any]) -> dict[str, Any]:
    """Its one section, `extra_config`, in keys with a dot. In a variable it is JSON."""
    found: dict[str, Any] = {}
    for key, value in given.items():
        held = value
        if _plain(key) == "extra_config" and isinstance(value, str):
            try:
                held = json.loads(value)
            except ValueError:
                held = value
        if _plain(key) == "extra_config" and isinstance(held, dict) and held:
            found |= {f"{key}.{name}": each for name, each in held.items()}
        else:
            found[key] = value
    return found
