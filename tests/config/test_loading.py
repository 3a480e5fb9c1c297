"""Where settings come from, and that none is taken for another one or dropped."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from pdlink.config import ProxyConfig, Section, StoreConfig, UpConfig, WorkerConfig, load, settings_of
from pdlink.errors import ConfigError

KINDS = (WorkerConfig, ProxyConfig, StoreConfig, UpConfig)

KUBERNETES = {
    # What a container sees beside Services called pdlink, pdlink-proxy and pdlink-decode.
    "PDLINK_SERVICE_HOST": "10.0.0.1",
    "PDLINK_SERVICE_PORT": "8000",
    "PDLINK_SERVICE_PORT_HTTP": "8000",
    "PDLINK_PORT": "tcp://10.0.0.1:8000",
    "PDLINK_PORT_8000_TCP": "tcp://10.0.0.1:8000",
    "PDLINK_PORT_8000_TCP_PROTO": "tcp",
    "PDLINK_PORT_8000_TCP_PORT": "8000",
    "PDLINK_PORT_8000_TCP_ADDR": "10.0.0.1",
    "PDLINK_PROXY_SERVICE_HOST": "10.0.0.2",
    "PDLINK_PROXY_PORT": "tcp://10.0.0.2:8000",
    "PDLINK_PROXY_PORT_53_UDP_ADDR": "10.0.0.2",
    "PDLINK_DECODE_SERVICE_PORT_WEB_UI": "80",
    "PDLINK_CONTROL_PORT": "tcp://10.0.0.3:8500",
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_kubernetes_service_called_pdlink_changes_nothing(kind: Any) -> None:
    assert load(kind, environment=KUBERNETES) == kind()


def test_an_address_is_a_setting_and_a_link_is_not() -> None:
    assert load(ProxyConfig, environment={"PDLINK_LISTEN": "h:9000"}).at == ("h", 9000)
    with pytest.raises(
        ConfigError, match=r"listen: must be HOST or HOST:PORT, without http:// before it, got 'http://a:1'"
    ):
        load(ProxyConfig, environment={"PDLINK_LISTEN": "http://a:1"})


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (WorkerConfig, "PDLINK_PREFILL", "[http://a:1]"),
        (WorkerConfig, "PDLINK_ENGINE", "vllm"),
        (WorkerConfig, "PDLINK_PROXY__LISTEN", "h:9000"),
        (ProxyConfig, "PDLINK_CACHE__NUM_BLOCKS", "5"),
        (ProxyConfig, "PDLINK_VLLM__ENVIRONMENT__OMP_NUM_THREADS", "1"),
        (UpConfig, "PDLINK_PREFILL", "[http://a:1]"),
        (UpConfig, "PDLINK_ENGINE__DEVICE", "cuda"),
    ],
)
def test_settings_of_other_roles_are_not_this_ones(
    kind: Any, name: str, value: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One environment for all containers of a deployment."""
    caplog.set_level(logging.INFO)
    assert load(kind, environment={name: value}) == kind()
    assert f"{name} is of " in caplog.text


def test_up_says_which_variables_reach_its_workers(caplog: pytest.LogCaptureFixture) -> None:
    load(UpConfig, environment={"PDLINK_CACHE__NUM_BLOCKS": "5"})
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "PDLINK_PREFILL__CACHE__NUM_BLOCKS and PDLINK_DECODE__CACHE__NUM_BLOCKS" in record.getMessage()


@pytest.mark.parametrize(
    ("kind", "name", "near"),
    [
        (WorkerConfig, "PDLINK_CACHE_NUM_BLOCKS", "PDLINK_CACHE__NUM_BLOCKS"),
        (WorkerConfig, "PDLINK_CACHE__NUM_BLOK", "PDLINK_CACHE__NUM_BLOCKS"),
        (WorkerConfig, "PDLINK_NUM_BLOCKS", "PDLINK_CACHE__NUM_BLOCKS"),
        (WorkerConfig, "PDLINK_TRANSPRT__KIND", "PDLINK_TRANSPORT__KIND"),
        (WorkerConfig, "PDLINK_TRANSPORT__TCP_STREAMS", "PDLINK_TRANSPORT__TCP__STREAMS"),
        (ProxyConfig, "PDLINK_RETRYS", "PDLINK_RETRIES"),
        (UpConfig, "PDLINK_NUM_PREFIL", "PDLINK_NUM_PREFILL"),
        (WorkerConfig, "PDLINK_SERVICE_HOTS", ""),
    ],
)
def test_a_near_miss_in_the_environment_is_refused(kind: Any, name: str, near: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(kind, environment={name: "1"})
    assert str(error.value).startswith(f"{name} in the environment: unknown setting ")
    assert f"did you mean {near}" in str(error.value) or not near


@pytest.mark.parametrize(
    ("kind", "flags", "message"),
    [
        (WorkerConfig, {"cache.num_blok": 1}, "unknown setting 'cache.num_blok'; did you mean 'cache.num_blocks'?"),
        (
            WorkerConfig,
            {"transport.ucx_tls": "tcp"},
            "unknown setting 'transport.ucx_tls'; did you mean 'transport.ucx.tls'?",
        ),
        (WorkerConfig, {"num_blocks": 1}, "unknown setting 'num_blocks'; did you mean 'cache.num_blocks'?"),
        (UpConfig, {"prefil.port": 1}, "unknown setting 'prefil'; did you mean 'prefill'?"),
        (WorkerConfig, {"cache.num_blocks": "a"}, "cache.num_blocks: must be a whole number, got 'a'"),
        (WorkerConfig, {"timeouts.peer_s": "long"}, "timeouts.peer_s: must be a number, got 'long'"),
        (WorkerConfig, {"security.insecure": 7}, "security.insecure: must be true or false, got 7"),
        (WorkerConfig, {"model.name": 1.1}, "model.name: must be text (write it in quotes), got 1.1"),
        (ProxyConfig, {"prefill": "http://a:1"}, "prefill: must be a list, got 'http://a:1'"),
        (WorkerConfig, {"cache.num_blocks": 1}, "cache.num_blocks: must be greater than or equal to 2, got 1"),
        (WorkerConfig, {"tiers.quota_per_salt": 1e-12}, "tiers.quota_per_salt: must be greater than or equal to"),
        (WorkerConfig, {"tiers.session_quota": 1e-12}, "tiers.session_quota: must be greater than or equal to"),
        (WorkerConfig, {"transport": "tcp"}, "transport: is a section, got 'tcp'; its settings are transport.kind, "),
        (UpConfig, {"decode.security.tls_cert": "c"}, "decode.security.tls_key: missing"),
        (
            UpConfig,
            {"engine.max_batched_tokens": 512},
            "engine: takes one value and must be 'builtin', 'vllm' or 'sglang', got a section with "
            "max_batched_tokens; did you mean 'prefill.engine.max_batched_tokens' or "
            "'decode.engine.max_batched_tokens'?",
        ),
    ],
)
def test_a_wrong_setting_is_explained_in_the_words_of_the_file(
    kind: Any, flags: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        load(kind, environment={}, flags=flags)
    assert str(error.value).startswith(message)


def test_a_refusal_does_not_show_a_secret() -> None:
    with pytest.raises(ConfigError) as error:
        load(ProxyConfig, environment={}, flags={"api_keys": "sesame"})
    assert "sesame" not in str(error.value)


CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize(
    ("kind", "file", "command"),
    [
        (ProxyConfig, "prefill.yaml", "prefill"),
        (ProxyConfig, "up.yaml", "up"),
        (ProxyConfig, "secure/decode.yaml", "decode"),
        (WorkerConfig, "proxy.yaml", "proxy"),
        (WorkerConfig, "up.yaml", "up"),
        (WorkerConfig, "vllm/up-1p1d.yaml", "up"),
        (UpConfig, "proxy.yaml", "proxy"),
        (UpConfig, "decode.yaml", "decode"),
        (WorkerConfig, "store.yaml", "store"),
    ],
)
def test_a_file_of_another_role_is_recognised(kind: Any, file: str, command: str) -> None:
    with pytest.raises(ConfigError, match=rf"; use `pdlink {command} --config \S*{file}`$"):
        load(kind, CONFIGS / file, environment={})


def test_a_key_given_twice_is_refused(tmp_path: Path) -> None:
    """YAML takes the last one, and the first would be ignored."""
    (tmp_path / "a.yaml").write_text("cache:\n  num_blocks: 5\nlisten: h:1\ncache:\n  block_tokens: 8\n")
    with pytest.raises(ConfigError, match=r"'cache' is there twice.*line 4"):
        load(WorkerConfig, tmp_path / "a.yaml", environment={})


@pytest.mark.parametrize("text", ["a: [", "\t", "a: !!python/object:x {}"])
def test_what_is_no_yaml_is_refused_in_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(text)
    for source in ({"path": tmp_path / "a.yaml", "environment": {}}, {"environment": {"PDLINK_NAME": text}}):
        with pytest.raises(ConfigError, match=r"^[^\n]*not valid YAML[^\n]*$"):
            load(WorkerConfig, **source)


def test_a_section_with_nothing_under_it_holds_its_defaults(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("cache:\n  # num_blocks: 5\nlisten: 127.0.0.1:7\n")
    config = load(WorkerConfig, tmp_path / "a.yaml", environment={}, flags={"cache.block_tokens": 8})
    assert config == WorkerConfig.model_validate({"listen": "127.0.0.1:7", "cache": {"block_tokens": 8}})


def test_a_whole_section_on_the_command_line_leaves_the_files_other_values(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("cache: {num_blocks: 5, block_tokens: 8}")
    config = load(WorkerConfig, tmp_path / "a.yaml", environment={}, flags={"cache": {"num_blocks": 6}})
    assert (config.cache.num_blocks, config.cache.block_tokens) == (6, 8)


def test_null_takes_back_what_the_file_says(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("name: a")
    assert load(WorkerConfig, tmp_path / "a.yaml", environment={}, flags={"name": None}).name is None


def sections(kind: type[BaseModel]) -> set[type[BaseModel]]:
    found = {kind}
    for field in kind.model_fields.values():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            found |= sections(field.annotation)
    return found


def test_every_setting_says_what_it_does() -> None:
    silent = {
        f"{section.__name__}.{name}"
        for kind in KINDS
        for section in sections(kind)
        for name, field in section.model_fields.items()
        if not (field.description or "").strip()
    }
    assert silent == set()
    assert len(settings_of(WorkerConfig)) > 50
