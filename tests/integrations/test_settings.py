"""What may stand in `kv_connector_extra_config`, and which vLLM is accepted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pdlink.config import ProxyConfig, TimeoutConfig
from pdlink.errors import ConfigError
from pdlink.integrations.vllm_parts import versions
from pdlink.integrations.vllm_parts.layout import COLUMNS, PACKED, ROWS, UnsupportedCache
from pdlink.integrations.vllm_parts.settings import read


def test_every_shard_listens_on_a_port_and_with_a_key_of_its_own() -> None:
    settings = read({"control_port": 41000, "security": {"key_file": "/x/{shard}.key", "allow_file": "/x/allow"}})
    assert [settings.of_shard(shard).control_port for shard in range(3)] == [41000, 41001, 41002]
    assert settings.of_shard(2).security.key_file == "/x/2.key"
    assert read({}).of_shard(5).control_port == 0


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"control_prot": 1}, "control_prot"),
        ({"transport": {"kind": "pigeon"}}, "transport.kind"),
        ({"control_host": "192.0.2.1"}, "keys"),
        ({"advertise_host": "192.0.2.1"}, "keys"),
        ({"timeouts": {"lease_s": 1}}, "lease_s"),
    ],
)
def test_a_wrong_setting_is_named(extra: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read(extra)


def test_vllm_is_given_longer_to_answer_than_a_worker_and_may_be_given_less() -> None:
    plain, timeouts = TimeoutConfig(), read({}).timeouts
    assert (timeouts.peer_s, timeouts.lease_s) > (plain.peer_s, plain.lease_s)
    assert timeouts.request_s < ProxyConfig().request_timeout_s
    assert read({"timeouts": {"peer_s": 2}}).timeouts.lease_s == timeouts.lease_s


@pytest.mark.parametrize("version", ["0.24.0", "0.32.0+cpu", "0.33.1.dev3+gabc"])
def test_known_versions_are_accepted(version: str) -> None:
    assert versions.check(version, accept_newer=False) >= versions.OLDEST


@pytest.mark.parametrize("version", ["0.23.0", "0.9.1", "0.34.0", "1.0", "dev"])
def test_other_versions_are_refused_with_the_range(version: str) -> None:
    with pytest.raises(versions.UnsupportedVllm):
        versions.check(version, accept_newer=False)


def test_a_newer_version_can_be_accepted() -> None:
    assert versions.check("0.34.0", accept_newer=True) == (0, 34)
    with pytest.raises(versions.UnsupportedVllm, match="0.24 to 0.33"):
        versions.check("0.20.0", accept_newer=True)


def test_a_step_is_read_alike_from_both_model_runners() -> None:
    new = SimpleNamespace(req_id="n", block_ids=([1, 2],), num_computed_tokens=16)
    cached = SimpleNamespace(
        req_ids=["c", "r", "e"],
        new_block_ids=[([5],), ([6, 7],), None],
        resumed_req_ids={"r"},
        num_computed_tokens=[32, 0, 40],
    )
    output = SimpleNamespace(
        num_scheduled_tokens={"n": 4, "c": 8, "r": 32, "e": 1}, scheduled_new_reqs=[new], scheduled_cached_reqs=cached
    )
    assert versions.scheduled(output) == [
        ("n", (1, 2), True, 16, 4),
        ("c", (5,), False, 32, 8),
        ("r", (6, 7), True, 0, 32),
        ("e", (), False, 40, 1),
    ]


def backend(name: str) -> object:
    return SimpleNamespace(get_name=lambda: name)


@pytest.mark.parametrize(
    ("layer", "form"),
    [
        (SimpleNamespace(), ROWS),
        (SimpleNamespace(isa="vec"), COLUMNS),
        (SimpleNamespace(isa="vec16"), COLUMNS),
        (SimpleNamespace(isa="amx"), PACKED),
        (SimpleNamespace(impl=SimpleNamespace(isa="vec"), attn_backend=backend("CPU_ATTN")), COLUMNS),  # up to 0.28
        (SimpleNamespace(impl=SimpleNamespace(isa="amx"), attn_backend=backend("CPU_ATTN")), PACKED),
        (SimpleNamespace(impl=SimpleNamespace(), attn_backend=backend("CPU_ATTN")), PACKED),  # a version to come
        (SimpleNamespace(impl=SimpleNamespace(), attn_backend=backend("FLASH_ATTN")), ROWS),
        (None, ROWS),
    ],
)
def test_the_form_of_a_block_follows_the_attention_kernel(layer: object, form: str) -> None:
    assert versions.cache_form(layer) == form


@pytest.mark.parametrize(
    ("groups", "pipeline", "context"), [(2, 1, 1), (1, 2, 1), (1, 1, 2)], ids=["hybrid", "pipeline", "context"]
)
def test_what_is_not_transferred_yet_is_refused_at_start(groups: int, pipeline: int, context: int) -> None:
    parallel = SimpleNamespace(pipeline_parallel_size=pipeline, decode_context_parallel_size=context)
    with pytest.raises(UnsupportedCache):
        versions.check_config(
            SimpleNamespace(parallel_config=parallel), SimpleNamespace(kv_cache_groups=[None] * groups)
        )


def test_the_kv_of_a_prompt_depends_on_lora_salt_and_media() -> None:
    request = SimpleNamespace(
        lora_request=SimpleNamespace(lora_name="l"), cache_salt="s", mm_features=[SimpleNamespace(identifier="i")]
    )
    assert versions.identity(request) == ["lora l ", "salt s", "media i"]
    assert versions.identity(SimpleNamespace(lora_request=None, cache_salt=None, mm_features=None)) == []
