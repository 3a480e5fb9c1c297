"""How vLLM's servers are started, and that they do not outlive us; with a program in vLLM's place."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from pdlink.config import ProxyConfig, UpConfig, VllmConfig, load
from pdlink.errors import ConfigError
from pdlink.fleet import vllm
from pdlink.fleet.child import stop
from pdlink.fleet.server import EngineMissing, Server, ServerFailed, ServerPlan
from pdlink.integrations.vllm_parts import settings
from tests.proxy.fakes import command


def plans(num_prefill: int = 1, num_decode: int = 1, **settings: Any) -> list[ServerPlan]:
    config = VllmConfig.model_validate(settings)
    return vllm.plan(config, num_prefill, num_decode, executable="/bin/vllm", model="/m")


def transfer(plan: ServerPlan) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(plan.command[plan.command.index("--kv-transfer-config") + 1])
    return found


def test_each_server_knows_its_part_and_the_proxy_knows_them_all() -> None:
    config = VllmConfig(connector_config={"timeouts": {"peer_s": 2.0}}, on_transfer_failure="fail")
    made = vllm.plan(config, 2, 2, executable="/bin/vllm", model="/m")
    assert [plan.url for plan in made] == [f"http://127.0.0.1:{port}" for port in (8100, 8101, 8200, 8201)]
    assert transfer(made[1]) == {
        "kv_connector": "PDLinkConnector",
        "kv_connector_module_path": "pdlink.integrations.vllm",
        "kv_role": "kv_producer",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {
            "listen": {"address": "127.0.0.1:8501"},
            "name": "prefill-1",
            "timeouts": {"peer_s": 2.0},
        },
    }
    assert transfer(made[2])["kv_role"] == "kv_consumer"
    assert transfer(made[2])["kv_connector_extra_config"]["listen"] == {"address": "127.0.0.1:0"}, "nobody dials it"
    told = ProxyConfig.model_validate(vllm.proxy_settings(config, made))
    assert told.dialect == "vllm"
    assert told.control == {
        "http://127.0.0.1:8100": ("tcp://127.0.0.1:8500",),
        "http://127.0.0.1:8101": ("tcp://127.0.0.1:8501",),
    }


def test_servers_on_an_ipv6_address_are_told_with_brackets() -> None:
    config = VllmConfig(host="::1")
    made = vllm.plan(config, 1, 1, executable="/bin/vllm", model="/m")
    listen = transfer(made[0])["kv_connector_extra_config"]["listen"]
    assert settings.read({"listen": listen}).listen.control_host == "::1"
    told = ProxyConfig.model_validate(vllm.proxy_settings(config, made))
    assert told.control == {"http://[::1]:8100": ("tcp://[::1]:8500",)}
    assert told.decode == ("http://[::1]:8200",)


def test_ranks_have_an_address_each_and_servers_their_devices() -> None:
    made = plans(
        2,
        1,
        prefill_ranks=2,
        decode_ranks=1,
        prefill_devices=["0,1", "2,3"],
        connector_config={"listen": {"advertise": "h"}},
    )
    assert [plan.control for plan in made[:2]] == [("tcp://h:8500", "tcp://h:8501"), ("tcp://h:8502", "tcp://h:8503")]
    assert made[1].environment == {"CUDA_VISIBLE_DEVICES": "2,3"}
    assert made[1].command[made[1].command.index("--tensor-parallel-size") + 1] == "2"
    assert "--tensor-parallel-size" not in made[2].command
    VllmConfig(prefill_ranks=2)
    with pytest.raises(ConfigError, match=r"vllm.decode_devices: 1 entries for 2 decode servers"):
        plans(1, 2, decode_devices=["0"])


def test_engines_behind_one_port_have_addresses_each_and_the_proxy_is_told_how_many_there_are() -> None:
    made = plans(2, 1, prefill_ranks=2, prefill_engines=2)
    assert made[1].control == tuple(f"tcp://127.0.0.1:{port}" for port in (8504, 8505, 8506, 8507))
    assert made[1].command[made[1].command.index("--data-parallel-size") + 1] == "2"
    assert "--data-parallel-size" not in made[2].command
    config = VllmConfig(prefill_ranks=2, prefill_engines=2)
    told = ProxyConfig.model_validate(vllm.proxy_settings(config, made))
    assert told.data_parallel == {"http://127.0.0.1:8100": 2, "http://127.0.0.1:8101": 2}


@pytest.mark.parametrize(("connector", "name"), [("nixl", "NixlConnector"), ("nixl-push", "NixlPushConnector")])
def test_vllms_own_connectors_get_ports_of_their_own_and_their_dialect(connector: str, name: str) -> None:
    made = plans(connector=connector, transfer_config={"kv_buffer_device": "cpu"}, prefill_port=0, decode_port=0)
    assert transfer(made[0])["kv_connector"] == name
    assert transfer(made[0])["kv_buffer_device"] == "cpu"
    ports = [plan.environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] for plan in made]
    assert len({*ports, *(plan.url for plan in made)}) == 4
    config = VllmConfig.model_validate({"connector": connector})
    assert ProxyConfig.model_validate(vllm.proxy_settings(config, made)).dialect == "vllm-nixl"


def test_a_missing_vllm_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(EngineMissing, match="make vllm"):
        vllm.find_executable(None)
    with pytest.raises(EngineMissing, match=r"vllm.executable: got /nowhere/vllm"):
        vllm.find_executable("/nowhere/vllm")
    made = tmp_path / ".venv-vllm" / "bin"
    made.mkdir(parents=True)
    command(made)
    assert Path(vllm.find_executable(None)).resolve() == made / "vllm"


@pytest.mark.parametrize("path", sorted(Path("configs/vllm").glob("*.yaml")), ids=lambda path: path.name)
def test_the_example_files_are_valid(path: Path) -> None:
    if path.name.startswith("up"):
        config = load(UpConfig, path, environment={})
        assert config.engine == "vllm"
        made = vllm.plan(config.vllm, config.num_prefill, config.num_decode, executable="/bin/vllm", model="/m")
        assert len(made) == config.num_prefill + config.num_decode
    else:
        assert load(ProxyConfig, path, environment={}).dialect == "vllm"


def test_the_connector_takes_what_the_page_tells_people_to_type() -> None:
    found = re.findall(r"--kv-transfer-config\s+'({[^']*})'", Path("docs/vllm.md").read_text().replace("\\\n", ""))
    assert found
    for text in found:
        transfer = json.loads(text)
        assert transfer["kv_role"] in ("kv_producer", "kv_consumer", "kv_both")
        extra = transfer.get("kv_connector_extra_config", {})
        if transfer["kv_connector"] == "OffloadingConnector":
            (tier,) = extra["secondary_tiers"]
            settings.read_tier({name: value for name, value in tier.items() if name not in ("type", "module_path")})
        else:
            settings.read(extra)


def test_by_hand_servers_of_one_host_get_the_environment_of_the_files() -> None:
    """Without the settings for CPUs the second server by hand found no memory, with a shipped file it did."""
    text = Path("docs/vllm.md").read_text()
    exported = dict(
        re.findall(r"\b((?:VLLM|OMP)_\w+)=(\w+)", text.partition("On CPUs of one host put `")[2].partition("`")[0])
    )
    assert exported == load(UpConfig, "configs/vllm/up-1p1d.yaml", environment={}).vllm.environment


def test_every_way_to_start_a_proxy_lets_decode_work_alone() -> None:
    """By hand and by each shipped file: a request survives its prefill server however the proxy was started."""
    assert ProxyConfig().on_no_prefill == "decode_only"
    for path in Path("configs").rglob("*.yaml"):
        if path.name.startswith("up"):
            assert load(UpConfig, path, environment={}).proxy.on_no_prefill == "decode_only", path
        elif path.name == "proxy.yaml" and path.parent.name != "secure":
            assert load(ProxyConfig, path, environment={}).on_no_prefill == "decode_only", path
    assert "on_no_prefill" not in Path("configs/secure/proxy.yaml").read_text()


def test_a_server_that_ends_is_reported_with_its_last_words(tmp_path: Path) -> None:
    executable = command(tmp_path, fails="ValueError: no such layout")
    config = VllmConfig(prefill_port=0, decode_port=0, control_port=0)
    made = vllm.plan(config, 1, 1, executable=str(executable), model="/m")
    server = Server(made[0], tmp_path)
    try:
        with pytest.raises(ServerFailed, match="(?s)prefill-0 ended before it was ready.*no such layout"):
            server.wait_ready(30)
    finally:
        stop([server], 1)


def test_a_killed_server_comes_back_on_its_ports(tmp_path: Path) -> None:
    config = VllmConfig(prefill_port=0, decode_port=0, control_port=0, environment={"SOME_THING": "here"})
    made = vllm.plan(config, 1, 1, executable=str(command(tmp_path)), model="/m")
    server = Server(made[0], tmp_path)
    try:
        server.wait_ready(30)
        assert "SOME_THING=here" in Path(f"/proc/{server.process.pid}/environ").read_text().split("\0")
        first = server.process
        first.kill()
        first.wait()
        server.again()
        server.wait_ready(30)
        assert server.process.pid != first.pid
    finally:
        stop([server], 5)
    assert server.process.returncode == 0, "it was asked, not killed"
