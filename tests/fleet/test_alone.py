"""One server of another engine, for a deployment on several hosts: `pdlink vllm` and `pdlink sglang`."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

from pdlink.cli import main
from pdlink.config import ProxyConfig, SglangConfig, load
from pdlink.endpoint.token import credentials_of, http_key_of

SECRET = "0123456789abcdef0123456789abcdef"


@pytest.fixture
def token(tmp_path: Path) -> str:
    path = tmp_path / "token"
    path.write_text(SECRET + "\n")
    path.chmod(0o600)
    return str(path)


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[list[str], list[str]]:
    """The server's words and the proxy's."""
    assert main([*words[: words.index("--")], "--print", *words[words.index("--") :]]) == 0
    server, _, proxy = capsys.readouterr().out.strip().partition("\n\n")
    return shlex.split(server), shlex.split(proxy)


def transfer_of(words: list[str]) -> dict[str, object]:
    found: dict[str, object] = json.loads(words[words.index("--kv-transfer-config") + 1])
    return found


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_server_on_an_ipv6_address_is_told_with_brackets_where_a_port_follows(
    capsys: pytest.CaptureFixture[str], token: str, engine: str
) -> None:
    server, proxy = printed(capsys, engine, "prefill", "M", "--listen", "fd00::7", "--token", token, "--")
    assert server[server.index("--host") + 1] == "fd00::7"
    assert "http://[fd00::7]:8100" in proxy
    if engine == "vllm":
        extra = transfer_of(server)["kv_connector_extra_config"]
        assert extra == {
            "name": "prefill-fd00--7-8100",
            "listen": "[fd00::7]:8500",
            "security": {"token_file": token},
        }
        assert "http://[fd00::7]:8100=tcp://[fd00::7]:8500" in proxy
    else:
        assert "PDLINK_LISTEN=[fd00::7]:8500" in server
        environment = {"PDLINK_LISTEN": "[fd00::7]:8500", "PDLINK_SECURITY__TOKEN_FILE": token}
        assert load(SglangConfig, environment=environment).listen.control_host == "fd00::7"


def test_a_pair_on_two_hosts_needs_no_setting_but_its_addresses_and_a_token(
    capsys: pytest.CaptureFixture[str], token: str
) -> None:
    prefill, proxy = printed(capsys, "vllm", "prefill", "M", "--listen", "10.0.0.1", "--token", token, "--")
    assert prefill[:7] == [
        f"VLLM_API_KEY={http_key_of(SECRET)}",
        *("vllm", "serve", "M", "--host", "10.0.0.1", "--port"),
    ]
    assert transfer_of(prefill)["kv_connector_extra_config"] == {
        "name": "prefill-10.0.0.1-8100",
        "listen": "10.0.0.1:8500",
        "security": {"token_file": token},
    }
    decode, _ = printed(capsys, "vllm", "decode", "M", "--listen", "10.0.0.2", "--token", token, "--")
    assert transfer_of(decode)["kv_role"] == "kv_consumer"
    assert proxy == [
        *("pdlink", "proxy", "--dialect", "vllm", "--prefill", "http://10.0.0.1:8100"),
        *("--control", "http://10.0.0.1:8100=tcp://10.0.0.1:8500"),
        *("--decode", "http://DECODE_HOST:8200", "--token", token),
    ]


def test_the_engine_gets_its_own_flags_and_the_proxy_an_address_for_each_rank(
    capsys: pytest.CaptureFixture[str], token: str
) -> None:
    flags = ("-tp", "2", "--pipeline-parallel-size=2", "--data-parallel-size", "2")
    server, proxy = printed(capsys, "vllm", "prefill", "M", "--token", token, "--", *flags)
    assert " ".join(flags) in " ".join(server)
    assert "http://127.0.0.1:8100=tcp://127.0.0.1:8500-8507" in proxy
    assert 'data_parallel={"http://127.0.0.1:8100": 2}' in proxy


@pytest.mark.parametrize("role", ["prefill", "decode", "both"])
def test_the_proxy_is_told_where_others_ask_a_servers_store(capsys: pytest.CaptureFixture[str], role: str) -> None:
    words = ("vllm", role, "M", "--listen", "127.0.0.2:9000", "--set", "tiers.peer_port=8110", "--")
    _, proxy = printed(capsys, *words)
    assert 'stores={"http://127.0.0.2:9000": "tcp://127.0.0.2:8110"}' in proxy


def test_a_server_without_tiers_names_no_store(capsys: pytest.CaptureFixture[str]) -> None:
    _, proxy = printed(capsys, "vllm", "both", "M", "--set", "tiers=null", "--")
    assert "--set" not in proxy


def test_one_server_with_a_disk_keeps_prompts_under_its_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    server, _ = printed(capsys, "vllm", "both", "M", "--disk", "kv", "--disk-size", "5", "--")
    extra = transfer_of(server)["kv_connector_extra_config"]
    assert isinstance(extra, dict)
    assert extra["tiers"] == {"local_disk": f"{tmp_path}/kv/{{name}}", "max_local_disk_size": 5.0}


def test_sglang_reads_its_settings_from_the_environment(capsys: pytest.CaptureFixture[str], token: str) -> None:
    words = ("sglang", "decode", "M", "--listen", "10.0.0.2", "--token", token, "--set", "transport.kind=tcp")
    server, proxy = printed(capsys, *words, "--", "--tp", "2")
    assert server[:3] == [
        "PDLINK_LISTEN=10.0.0.2:8600",
        "PDLINK_TRANSPORT__KIND=tcp",
        f"PDLINK_SECURITY__TOKEN_FILE={token}",
    ]
    assert server[-2:] == ["--tp", "2"]
    assert proxy[:6] == ["pdlink", "proxy", "--dialect", "sglang", "--decode", "http://10.0.0.2:8200"]


def test_a_setting_of_null_or_false_is_the_same_to_sglang(capsys: pytest.CaptureFixture[str]) -> None:
    """It reads its environment as YAML, in which Python's None is a word."""
    more = [part for each in ("timeline=null", "layerwise=false") for part in ("--set", each)]
    server, _ = printed(capsys, "sglang", "decode", "M", "--listen", "127.0.0.1", *more, "--")
    environment = dict(word.split("=", 1) for word in server if word.startswith("PDLINK_"))
    found = load(SglangConfig, environment=environment)
    assert (found.timeline, found.layerwise) == (None, False)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_server_that_other_hosts_reach_needs_the_token(capsys: pytest.CaptureFixture[str], engine: str) -> None:
    assert main([engine, "prefill", "M", "--listen", "10.0.0.1", "--print"]) == 2
    assert "security.token_file" in capsys.readouterr().err


def test_a_token_that_can_be_guessed_is_refused(capsys: pytest.CaptureFixture[str], token: str) -> None:
    Path(token).write_text("swordfish\n")
    assert main(["vllm", "prefill", "M", "--listen", "10.0.0.1", "--token", token, "--print"]) == 2
    said = capsys.readouterr().err
    assert "expected 20 or more" in said
    assert "swordfish" not in said


def test_a_flag_of_the_engine_before_the_dashes_is_told_where_it_belongs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["vllm", "prefill", "M", "--max-model-len", "8192"])
    assert "flags of vLLM go after --" in capsys.readouterr().err


def test_the_server_takes_the_place_of_the_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    ran = []
    monkeypatch.setattr("pdlink.fleet.server.find_program", lambda *_: sys.executable)
    monkeypatch.setattr("os.execve", lambda *arguments: ran.append(arguments))
    assert main(["vllm", "prefill", "M", "--token", token]) == 0
    [(path, words, environment)] = ran
    assert path == words[0] == sys.executable
    assert environment["VLLM_API_KEY"] == http_key_of(SECRET)
    assert "pdlink proxy --dialect vllm --prefill http://127.0.0.1:8100" in capsys.readouterr().err


def test_the_proxy_knows_the_key_of_connectors_that_share_its_token(token: str) -> None:
    from pdlink_proxy.dialects import DIALECTS
    from pdlink_proxy.membership import from_settings

    flags = {"dialect": "vllm", "prefill": ["http://h:1"], "control": {"http://h:1": "tcp://h:8500-8501"}}
    flags |= {"stores": {"http://h:1": "tcp://h:8110"}, "token_file": token}
    config = load(ProxyConfig, environment={}, flags=flags)
    [entry] = from_settings(config, DIALECTS[config.dialect]).prefill
    key = credentials_of(SECRET).keys.public
    assert entry.control == (f"tcp://h:8500?key={key}", f"tcp://h:8501?key={key}")
    assert entry.store == f"tcp://h:8110?key={key}"


def test_a_section_that_is_set_as_one_value_is_refused_in_words(
    capsys: pytest.CaptureFixture[str], token: str
) -> None:
    assert main(["vllm", "prefill", "M", "--token", token, "--set", "security=5", "--print"]) == 2
    assert "security is a single value, not a section" in capsys.readouterr().err
