"""How SGLang's servers are started; with a program in SGLang's place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pdlink.config import ProxyConfig, SglangConfig, SglangServersConfig, UpConfig, load
from pdlink.errors import ConfigError
from pdlink.fleet import sglang
from pdlink.fleet.server import EngineMissing, ServerPlan


def plans(num_prefill: int = 1, num_decode: int = 1, **settings: Any) -> list[ServerPlan]:
    config = SglangServersConfig.model_validate(settings)
    return sglang.plan(config, num_prefill, num_decode, executable="/bin/sglang", model="/m")


def said(plan: ServerPlan, flag: str) -> str:
    return plan.command[plan.command.index(flag) + 1]


def test_servers_on_an_ipv6_address_are_told_with_brackets() -> None:
    made = plans(host="::1")
    assert [plan.url for plan in made] == ["http://[::1]:30000", "http://[::1]:30100"]
    environment = {"PDLINK_LISTEN": made[0].environment["PDLINK_LISTEN"]}
    assert load(SglangConfig, environment=environment).listen.control_host == "::1"


def test_each_server_knows_its_part_and_the_proxy_knows_them_all() -> None:
    made = plans(2, 1, args=["--page-size", "64"], decode_args=["--max-running-requests", "4"])
    assert [plan.url for plan in made] == [f"http://127.0.0.1:{port}" for port in (30000, 30001, 30100)]
    assert made[0].command[:4] == ("/bin/sglang", "serve", "--model-path", "/m")
    assert [said(plan, "--disaggregation-mode") for plan in made] == ["prefill", "prefill", "decode"]
    assert {said(plan, "--disaggregation-transfer-backend") for plan in made} == {"pdlink"}
    assert [said(plan, "--disaggregation-bootstrap-port") for plan in made[:2]] == ["8998", "8999"]
    assert "--disaggregation-bootstrap-port" not in made[2].command, "decode asks prefill's"
    assert {said(plan, "--page-size") for plan in made} == {"64"}
    assert ["--max-running-requests" in plan.command for plan in made] == [False, False, True]
    told = ProxyConfig.model_validate(sglang.proxy_settings(made))
    assert (told.dialect, told.prefill, told.decode) == (
        "sglang",
        ("http://127.0.0.1:30000", "http://127.0.0.1:30001"),
        ("http://127.0.0.1:30100",),
    )


def test_ranks_devices_and_settings_of_the_transfer_backend_arrive() -> None:
    made = plans(
        prefill_ranks=2, prefill_devices=["0,1"], host="127.0.0.2", environment={"PDLINK_LAYERWISE": "false"}
    )
    assert said(made[0], "--tp-size") == "2"
    assert "--tp-size" not in made[1].command
    assert made[0].environment == {
        "PDLINK_LISTEN": "127.0.0.2",
        "PDLINK_LAYERWISE": "false",
        "CUDA_VISIBLE_DEVICES": "0,1",
    }
    read = load(SglangConfig, environment=made[1].environment)
    assert (read.listen.control_host, read.layerwise) == ("127.0.0.2", False)
    with pytest.raises(ConfigError, match=r"sglang.decode_devices: 1 entries for 2 decode servers"):
        plans(1, 2, decode_devices=["0"])


def test_free_ports_are_taken_for_servers_and_bootstrap() -> None:
    made = plans(2, 2, prefill_port=0, decode_port=0, bootstrap_port=0, backend="nixl")
    ports = [said(plan, "--disaggregation-bootstrap-port") for plan in made[:2]]
    assert len({*ports, *(plan.url for plan in made)}) == 6
    assert {said(plan, "--disaggregation-transfer-backend") for plan in made} == {"nixl"}
    assert made[0].environment == {}


def test_a_missing_sglang_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(EngineMissing, match="make sglang"):
        sglang.find_executable(None)
    with pytest.raises(EngineMissing, match=r"sglang.executable: got /nowhere/sglang"):
        sglang.find_executable("/nowhere/sglang")


@pytest.mark.parametrize("path", sorted(Path("configs/sglang").glob("*.yaml")), ids=lambda path: path.name)
def test_the_example_files_are_valid(path: Path) -> None:
    if path.name.startswith("up"):
        config = load(UpConfig, path, environment={})
        assert config.engine == "sglang"
        made = sglang.plan(config.sglang, 1, 1, executable="/bin/sglang", model="/m")
        assert Path(made[0].environment["PYTHONPATH"], "sgl_kernel").is_dir()
    else:
        assert load(ProxyConfig, path, environment={}).dialect == "sglang"
