"""Flags of an SGLang server that concern HiCache (0.5): what keeps its pages below the host is replaced."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from .applying import Vocabulary
from .flags import taken_apart, value_of
from .verdicts import EnginesOwn, NoCounterpart, NotNeeded, gib, same

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .verdicts import Rule, Verdict

BACKEND, EXTRA = "--hicache-storage-backend", "--hicache-storage-backend-extra-config"
OURS = {
    "backend_name": "pdlink",
    "module_path": "pdlink.integrations.sglang",
    "class_name": "PDLinkHiCache",
    "interface_v1": 1,
}
"""What SGLang must be told to find us."""
LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")


def _layout(value: Any) -> Verdict:
    if value in LAYOUTS:
        return EnginesOwn()
    return NoCounterpart(f"pdlink copies {', '.join(LAYOUTS)}")


def _extra(value: Any) -> Verdict:
    if str(value).startswith("@"):
        return NoCounterpart("it names a file; put the JSON that is in it here")
    return NotNeeded("empty") if value == "{}" else NoCounterpart("no JSON object")


_LINKER = NoCounterpart("takes the place of HiCache; docs/sglang.md has the flags for pdlink's linker")

RULES: dict[str, Rule] = {
    BACKEND: EnginesOwn("dynamic", "pdlink's storage in its place"),
    EXTRA: _extra,
    "--hicache-mem-layout": _layout,
    "--disaggregation-transfer-backend": EnginesOwn("pdlink", "pdlink in its place"),
    "--disaggregation-ib-device": NoCounterpart("PDLINK_TRANSPORT__UCX__DEVICES in the server's environment"),
    **same(
        EnginesOwn(),
        "--enable-hierarchical-cache --enable-hicache --hicache-ratio --hicache-size --hicache-write-policy"
        " --hicache-host-memory-mode --hicache-host-memory-fraction --hicache-io-backend"
        " --hicache-storage-prefetch-policy --hicache-storage-prefetch-retry-poll-interval"
        " --hicache-storage-prefetch-retry-max-attempts",
    ),
    **same(
        NotNeeded("HiCache keeps the pages then; `pdlink config from lmcache FILE` reads its file"),
        "--enable-lmcache --lmcache-config-file",
    ),
    **same(
        _LINKER,
        "--enable-unified-cache-external-linker --unified-cache-external-linker-backend"
        " --unified-cache-external-linker-config --enable-linker-mla-dedup",
    ),
    **same(_LINKER._replace(why="takes the place of HiCache"), "--enable-flexkv --flexkv-config-file"),
    # Below: keys of the extra config.
    **same(
        EnginesOwn(),
        "prefetch_threshold prefetch_timeout_base prefetch_timeout_per_ki_token hicache_storage_pass_prefix_keys"
        " tp_lcm_size allocator enable_storage_metrics",
    ),
    **same(NotNeeded("pdlink's class stands there"), "backend_name module_path class_name interface_v1"),
    "global_segment_size": gib("tiers.max_local_cpu_size"),
    **same(
        NotNeeded("a server maps the memory of its store, and copies itself"),
        "local_buffer_size protocol device_name local_hostname check_server standalone_storage",
    ),
    **same(
        NoCounterpart("start `pdlink store` on each host, and list those of other hosts in its tiers.peers"),
        "master_server_address metadata_server master_metrics_port metadata_server_url",
    ),
    **same(
        NoCounterpart("a directory is tiers.local_disk with tiers.max_local_disk_size; a mount tiers.remote_url"),
        "file_path_prefix file_size numjobs entries plugin nixl_path hicache_storage_path",
    ),
}


def _plain(key: str) -> str:
    if key.startswith(f"{EXTRA}."):
        return key.removeprefix(f"{EXTRA}.")
    return key.replace("_", "-") if key.startswith("--") else key


def _otherwise(key: str, _: Any) -> Verdict | None:
    return EnginesOwn(why="SGLang's own; stays") if key.startswith("-") and "hicache" not in key else None


HICACHE = Vocabulary("HiCache", RULES, _plain, _otherwise)


def flat(words: Sequence[str]) -> dict[str, Any]:
    """Every flag, and every key of the extra config below its flag."""
    found: dict[str, Any] = {}
    for name, times in taken_apart(words).flags.items():
        value = value_of(times)
        try:
            held = json.loads(value) if _plain(name) == EXTRA and isinstance(value, str) else None
        except ValueError:
            held = None
        if isinstance(held, dict) and held:
            found |= {f"{EXTRA}.{key}": each for key, each in held.items()}
        else:
            found[name] = value
    return found
