"""`pdlink config from`: configurations of other systems, of the kinds that people post, through the command."""

from __future__ import annotations

import json
import logging
import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from pdlink import cli
from pdlink.commands import moving
from pdlink.config import ProxyConfig, StoreConfig, WorkerConfig, load, settings_of
from pdlink.config.foreign import hicache, lmcache, sglang_router, vllm
from pdlink.config.foreign.applying import move
from pdlink.config.tiers import OF_A_WORKER
from pdlink.errors import ConfigError
from pdlink.integrations.sglang_parts.settings import read_storage
from pdlink.integrations.vllm_parts.settings import read


def as_worker(text: str) -> dict[str, Any]:
    """LMCache's result, which a worker takes, and but for what is a worker's own a store, too."""
    settings: dict[str, Any] = yaml.safe_load(text) or {}
    WorkerConfig.model_validate(settings)
    tiers = settings.pop("tiers", {})
    StoreConfig.model_validate({"tiers": {key: value for key, value in tiers.items() if key not in OF_A_WORKER}})
    read({"tiers": tiers})
    return settings | {f"tiers.{key}": value for key, value in tiers.items()}


def words_without_comments(text: str) -> list[str]:
    return shlex.split(text, comments=True)


def as_vllm(text: str) -> dict[str, Any]:
    flag, value = words_without_comments(text)
    assert flag == "--kv-transfer-config"
    given: dict[str, Any] = json.loads(value)
    read(given["kv_connector_extra_config"])
    assert given["kv_connector_module_path"] == "pdlink.integrations.vllm"
    return given | {f"tiers.{key}": held for key, held in given["kv_connector_extra_config"].get("tiers", {}).items()}


def as_hicache(text: str) -> dict[str, Any]:
    words = words_without_comments(text)
    extra = json.loads(words[words.index(hicache.EXTRA) + 1])
    taken = {key: value for key, value in extra.items() if key not in ("prefetch_threshold", "tp_lcm_size")}
    read_storage(taken)
    assert words[words.index(hicache.BACKEND) + 1] == "dynamic"
    return {"words": words, **extra, **{f"tiers.{key}": held for key, held in extra.get("tiers", {}).items()}}


def as_proxy(text: str) -> dict[str, Any]:
    settings = yaml.safe_load(text)
    ProxyConfig.model_validate(settings)
    return dict(settings)


CHECKS: Mapping[str, Callable[[str], dict[str, Any]]] = {
    "lmcache": as_worker,
    "vllm": as_vllm,
    "hicache": as_hicache,
    "sglang-router": as_proxy,
}

POSTED: dict[str, tuple[str, str, dict[str, Any], dict[str, str]]] = {
    # The system, its configuration, what is there of our settings, and what is said of some keys.
    "memory and a disk with file:// and a policy in capitals": (
        "lmcache",
        "chunk_size: 256\nlocal_cpu: True\nmax_local_cpu_size: 20\nlocal_disk: file:///mnt/nvme/kv/\n"
        "max_local_disk_size: 500\ncache_policy: LRU\n",
        {
            "tiers.max_local_cpu_size": 20,
            "tiers.local_disk": "/mnt/nvme/kv/",
            "tiers.max_local_disk_size": 500,
        },
        {"local_cpu": "first tier", "cache_policy": "finds more"},
    ),
    "JSON, with several disks": (
        "lmcache",
        '{"local_disk": "file:///a,/b", "max_local_disk_size": 10.5, "local_disk_path_sharding": "by_gpu"}',
        {"tiers.local_disk": ["/a", "/b"]},
        {},
    ),
    "a disk without a size": (
        "lmcache",
        "local_disk: /kv\nmax_local_disk_size: 0.0\n",
        {},
        {"local_disk": "needs tiers.max_local_disk_size", "max_local_disk_size": "off here, too"},
    ),
    "Redis with naive records": (
        "lmcache",
        "remote_url: redis://user:secret@10.0.0.5:6379\nremote_serde: naive\nblocking_timeout_secs: 5\n",
        {"tiers.remote_url": "redis://user:secret@10.0.0.5:6379"},
        {"remote_serde": "kept as they are"},
    ),
    "its own server, and records that change the KV": (
        "lmcache",
        "remote_url: lm://10.0.0.5:65432\nremote_serde: cachegen\n",
        {},
        {"remote_url": "protocol", "remote_serde": "changes the KV"},
    ),
    "a bucket by its host, with a key that must not be shown": (
        "lmcache",
        "local_cpu: False\nremote_url: s3://kv.s3express-use1-az4.us-east-1.amazonaws.com\n"
        "extra_config: {s3_num_io_threads: 64, aws_secret_access_key: hush}\n",
        {"tiers.remote_url": "s3://kv?region=us-east-1"},
        {"local_cpu": "pass through memory", "extra_config.s3_num_io_threads": "options of a tier"},
    ),
    "a shared directory": (
        "lmcache",
        "remote_url: fs://host:0/mnt/shared\nsave_decode_cache: true\n",
        {"tiers.remote_url": "file:///mnt/shared", "tiers.save_decode_cache": True},
        {},
    ),
    "prefill of P/D": (
        "lmcache",
        "enable_pd: true\npd_role: sender\npd_proxy_host: localhost\npd_proxy_port: 7500\n"
        "pd_buffer_size: 1073741824\npd_buffer_device: cuda\ntransfer_channel: nixl\n",
        {"role": "prefill"},
        {"pd_proxy_host": "proxy names both workers"},
    ),
    "peers and a controller": (
        "lmcache",
        "enable_p2p: true\np2p_host: 10.0.0.1\np2p_init_ports: [8200]\np2p_lookup_ports: [8201]\n"
        "enable_controller: true\nlmcache_instance_id: a\ncontroller_pull_url: localhost:8300\n"
        "transfer_channel: nixl\nextra_config: {p2p_socket_recv_timeout_ms: 30000}\n",
        {"tiers.peer_port": 0},
        {"extra_config.p2p_socket_recv_timeout_ms": "options of a tier", "p2p_host": "listen"},
    ),
    "blending and unfull chunks": (
        "lmcache",
        "enable_blending: true\nblend_check_layers: 1\nsave_unfull_chunk: True\nuse_layerwise: true\n",
        {},
        {"enable_blending": "changes the KV", "save_unfull_chunk": "one prompt", "use_layerwise": "layer by layer"},
    ),
    "what a log printed": (
        "lmcache",
        "{'chunk_size': 256, 'local_cpu': True, 'max_local_cpu_size': '400.0 GB', 'local_disk': None, "
        "'max_local_disk_size': '0.0 GB', 'remote_url': None, 'enable_nixl': False, 'weka_path': None, "
        "'gds_path': None, 'extra_config': None, 'cache_policy': 'LFU'}",
        {"tiers.max_local_cpu_size": 400},
        {"gds_path": "off here, too"},
    ),
    "no memory, a policy, a misspelt key": (
        "lmcache",
        "max_local_cpu_size: 0\ncache_policy: cost_aware\nchunk_sise: 16\n",
        {},
        {"max_local_cpu_size": "pass through memory", "cache_policy": "S3-FIFO", "chunk_sise": "chunk_size"},
    ),
    "NIXL's connector": (
        "vllm",
        '{"kv_connector": "NixlConnector", "kv_role": "kv_producer", "kv_buffer_device": "cuda", '
        '"kv_connector_extra_config": {"backends": ["UCX"], "kv_lease_duration": 60}}',
        {"kv_connector": "PDLinkConnector", "kv_role": "kv_producer"},
        {"kv_connector_extra_config.kv_lease_duration": "leases"},
    ),
    "NCCL between two servers": (
        "vllm",
        '{"kv_connector": "P2pNcclConnector", "kv_role": "kv_consumer", "kv_buffer_size": "8e9", "kv_port": "22001", '
        '"kv_connector_extra_config": {"proxy_ip": "10.0.0.1", "proxy_port": "30001", "http_port": "20002"}}',
        {"kv_connector": "PDLinkConnector", "kv_role": "kv_consumer"},
        {"kv_port": "listen"},
    ),
    "offloading with tiers below": (
        "vllm",
        '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"spec_name": '
        '"TieringOffloadingSpec", "cpu_bytes_to_use": 10737418240, "eviction_policy": "arc", "block_size": 64, '
        '"secondary_tiers": [{"type": "fs", "root_dir": "/mnt/kv", "n_read_threads": 8}, {"type": "obj"}]}}',
        {"tiers.max_local_cpu_size": 10, "tiers.chunk_size": 64, "tiers.remote_url": "file:///mnt/kv"},
        {
            "kv_connector_extra_config.eviction_policy": "S3-FIFO",
            r"kv_connector_extra_config.secondary_tiers[1].type": "s3://",
        },
    ),
    "a disk below SimpleCPUOffload": (
        "vllm",
        '{"kv_connector": "SimpleCPUOffloadConnector", "kv_role": "kv_both", "kv_connector_extra_config": '
        '{"cpu_bytes_to_use": 4294967296, "kv_offload_backend": "disk", "disk_path": "/kv", '
        '"disk_capacity_bytes": 107374182400}}',
        {"tiers.max_local_cpu_size": 4, "tiers.local_disk": "/kv", "tiers.max_local_disk_size": 100},
        {},
    ),
    "two connectors in one": (
        "vllm",
        '{"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute", '
        '"kv_connector_extra_config": {"connectors": [{"kv_connector": "NixlConnector", "kv_role": "kv_both"}, '
        '{"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both", "kv_connector_extra_config": '
        '{"lmcache.max_local_cpu_size": 8, "lmcache.cache_policy": "LRU", "discard_partial_chunks": false}}]}}',
        {"kv_load_failure_policy": "recompute", "tiers.max_local_cpu_size": 8},
        {r"kv_connector_extra_config.connectors[1].kv_connector": "kv_connector says the same"},
    ),
    "a connector that is no transfer": (
        "vllm",
        '{"kv_connector": "DecodeBenchConnector", "kv_role": "kv_both", '
        '"kv_connector_extra_config": {"fill_mean": 1}}',
        {"kv_connector": "PDLinkConnector"},
        {"kv_connector": "MultiConnector"},
    ),
    "HiCache over Mooncake": (
        "hicache",
        "python -m sglang.launch_server --model-path /m --page-size 64 --enable-hierarchical-cache --hicache-ratio 2 "
        "--hicache-mem-layout page_first --hicache-storage-backend mooncake --hicache-storage-backend-extra-config "
        """'{"master_server_address": "10.0.0.1:50051", "global_segment_size": "4gb", "prefetch_threshold": 128}'""",
        {"tiers.max_local_cpu_size": 4, "prefetch_threshold": 128},
        {"--hicache-storage-backend-extra-config.master_server_address": "pdlink store"},
    ),
    "HiCache with files, flags with =, in P/D": (
        "hicache",
        "--enable-hierarchical-cache --hicache-size=100 --hicache-write-policy=write_back --trust-remote-code "
        "--hicache-storage-backend=file --hicache-mem-layout=page_first_kv_split --hicache-sizee 1 "
        "--disaggregation-transfer-backend mooncake --tp-size 2 --hicache-storage-backend-extra-config @kv.toml",
        {"class_name": "PDLinkHiCache"},
        {
            "--hicache-mem-layout": "page_head",
            "--hicache-sizee": "--hicache-size",
            "--hicache-storage-backend-extra-config": "names a file",
        },
    ),
    "a router before two pools": (
        "sglang-router",
        "python -m sglang_router.launch_router --pd-disaggregation --prefill http://10.0.0.1:30000 8998 --prefill "
        "http://10.0.0.2:30000 none --decode http://10.0.0.3:30000 --policy cache_aware --decode-policy round_robin "
        "--host :: --port 8000 --max-payload-size 1000000 --log-level warn",
        {
            "prefill": ["http://10.0.0.1:30000", "http://10.0.0.2:30000"],
            "decode": ["http://10.0.0.3:30000"],
            "policy": {"prefill": "cost", "decode": "round_robin"},
            "listen": "[::]:8000",
            "max_body_nbytes": 1000000,
            "log": {"level": "warning"},
        },
        {"--pd-disaggregation": "two pools"},
    ),
    "a router that discovers pods, and knows keys": (
        "sglang-router",
        "--worker-urls http://a:1 http://b:2 --service-discovery --selector app=x role=y --api-key hush "
        "--disable-retries --disable-circuit-breaker --queue-timeout-secs 30 --prometheus-port 29000 --policy random",
        {"both": ["http://a:1", "http://b:2"], "retries": 0, "eject_share": 0, "queue_timeout_s": 30},
        {"--selector": "kubernetes:", "--api-key": "worker_key_file", "--prometheus-port": "/metrics"},
    ),
}


@pytest.mark.parametrize("name", POSTED)
def test_a_posted_configuration_becomes_settings_that_are_accepted(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    system, text, settings, said = POSTED[name]
    given = text
    if system == "lmcache":
        (tmp_path / "given").write_text(text)
        given = str(tmp_path / "given")
    assert cli.main(["config", "from", system, given]) == 0
    printed = capsys.readouterr().out
    found = CHECKS[system](printed)
    assert settings == {key: found.get(key) for key in settings}
    lines = [line.removeprefix("#   ") for line in printed.splitlines() if line.startswith("#   ")]
    for key, why in said.items():
        (line,) = [line for line in lines if line.startswith((f"{key}:", f"'{key}'"))]
        assert re.search(re.sub(r"([\[\]])", r"\\\1", why), line)
    assert "hush" not in printed


def test_variables_of_lmcache_are_read_and_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("LMCACHE_LOCAL_DISK", "file:///kv")
    monkeypatch.setenv("LMCACHE_MAX_LOCAL_DISK_SIZE", "5")
    monkeypatch.setenv("LMCACHE_EXTRA_CONFIG", '{"use_odirect": true}')
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", "/etc/lmcache.yaml")
    assert cli.main(["config", "from", "lmcache", "env"]) == 0
    printed = capsys.readouterr().out
    assert as_worker(printed) == {"tiers.local_disk": "/kv", "tiers.max_local_disk_size": 5}
    assert "LMCACHE_EXTRA_CONFIG.use_odirect: " in printed
    assert "LMCACHE_CONFIG_FILE: " in printed
    with caplog.at_level(logging.WARNING):
        load(WorkerConfig)
    (line,) = [record.getMessage() for record in caplog.records if "LMCACHE_LOCAL_DISK" in record.getMessage()]
    assert "LMCACHE_CONFIG_FILE" in line
    assert "pdlink config from lmcache env" in line


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["lmcache"], "FILE or env"),
        (["lmcache", "/nowhere/lmcache.yaml"], "cannot read"),
        (["lmcache", "env"], "LMCACHE_"),
        (["vllm", "{"], "not valid YAML"),
        (["vllm", "[1]"], "must hold keys"),
        (["hicache", "--x 'y"], "not a command line"),
    ],
)
def test_what_cannot_be_read_is_told_in_a_line(
    words: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["config", "from", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert named in line


def test_a_file_of_lmcache_in_place_of_ours_is_recognised(tmp_path: Path) -> None:
    (tmp_path / "lmcache.yaml").write_text("chunk_size: 256\nlocal_cpu: true\n")
    with pytest.raises(ConfigError, match="holds LMCache's settings; use `pdlink config from lmcache"):
        load(WorkerConfig, tmp_path / "lmcache.yaml")


def test_keys_of_another_connector_in_ours_are_told_by_what_to_write() -> None:
    with pytest.raises(ConfigError) as raised:
        read(
            {
                "cpu_bytes_to_use": 4 << 30,
                "lmcache.chunk_size": 128,
                "remote_url": "redis://me:hush@h",
                "backends": ["UCX"],
                "layerwize": True,
            }
        )
    text = str(raised.value)
    assert "remote_url is of vLLM's connectors; write tiers.remote_url;" in text
    assert "hush" not in text
    assert "write tiers.max_local_cpu_size: 4.0" in text
    assert "write tiers.chunk_size: 128" in text
    assert "backends is of vLLM's connectors" in text
    assert "did you mean 'layerwise'?" in text
    with pytest.raises(ConfigError, match="master_server_address is of HiCache: start `pdlink store`"):
        read_storage({"interface_v1": 1, "master_server_address": "10.0.0.1:50051"})
    with pytest.raises(ConfigError, match="did you mean 'tiers.local_disk'"):
        read({"tiers": {"local_dsk": "/kv"}})


def test_a_spelling_of_another_system_is_refused_before_it_is_used() -> None:
    given = {"tiers.local_disk": "file:///mnt/kv", "tiers.max_local_disk_size": 1}
    with pytest.raises(ConfigError, match="write '/mnt/kv'"):
        load(StoreConfig, environment={}, flags=given)


def test_settings_that_a_reason_names_are_there() -> None:
    known = {*settings_of(WorkerConfig), *settings_of(ProxyConfig)}
    sections = "|".join({dotted.partition(".")[0] for dotted in known if "." in dotted})
    for path in Path(lmcache.__file__).parent.glob("*.py"):
        named = re.findall(rf"(?<![\w.])(?:{sections})\.[a-z_]+(?:\.[a-z_]+)*", path.read_text())
        assert set(named) <= known, path.name


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["file:///x", "redis://h"]),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text(max_size=5), below, max_size=3),
    max_leaves=5,
)
SYSTEMS = (
    ("lmcache", lmcache.RULES, lmcache.flat),
    ("vllm", {**vllm.RULES, "lmcache.chunk_size": ""}, vllm.flat),
)


@pytest.mark.parametrize(("name", "rules", "flat"), SYSTEMS, ids=[each[0] for each in SYSTEMS])
@given(data=st.data())
def test_every_key_of_any_mapping_is_named_once(name: str, rules: Any, flat: Any, data: st.DataObject) -> None:
    known = st.sampled_from(sorted(rules)).map(lambda key: key.removeprefix("secondary_tiers."))
    keys = known | st.text()
    given = data.draw(st.dictionaries(keys, VALUES, max_size=12))
    if name == "vllm":
        nested = data.draw(st.lists(st.dictionaries(keys, VALUES, max_size=4), max_size=2))
        given |= {"kv_connector_extra_config": {"connectors": nested, **data.draw(st.dictionaries(keys, VALUES))}}
    _named_once(name, flat(given))


FLAGS = (
    ("hicache", hicache.RULES, hicache.flat),
    ("sglang-router", sglang_router.RULES, sglang_router.flat),
)


@pytest.mark.parametrize(("name", "rules", "flat"), FLAGS, ids=[each[0] for each in FLAGS])
@given(data=st.data())
def test_every_flag_of_any_command_line_is_named_once(name: str, rules: Any, flat: Any, data: st.DataObject) -> None:
    known = sorted(key for key in rules if key.startswith("--"))
    flags = st.sampled_from(known) | st.text().map(lambda text: f"--{text}")
    words = st.text() | st.sampled_from(["0", "1", "8000", "http://a:1", "cache_aware", '{"tiers": 1}', "{}"])
    line = data.draw(st.lists(flags | words, max_size=20))
    _named_once(name, flat(line))


def _named_once(name: str, given: dict[str, Any]) -> None:
    system = moving.SYSTEMS[name]
    moved = move(system.vocabulary, given, settings_of(system.kind))
    assert moved.lines.keys() == given.keys()
    report = moving._report(moved.lines)
    assert len([line for line in report if line.startswith("#   ")]) == len(given)
    assert all(line.isprintable() for line in report)
    load(system.kind, environment={}, flags=moved.settings)
    system.write(moved, ["x", *map(str, given)])
