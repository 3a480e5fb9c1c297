"""No setting is ever ignored: each one, given in each way to each command, arrives where it is used, or is refused
with its name and a reason.

The settings come from the models, so a new one is tested as soon as it is there.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, get_args, get_origin

import pytest
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from pdlink import cli
from pdlink.config import ProxyConfig, StoreConfig, UpConfig, WorkerConfig, settings_of
from pdlink.config.store import OF_PEERS
from pdlink.config.tiers import OF_A_WORKER
from pdlink.config.up import ENGINES
from pdlink.engine import places
from pdlink.fleet import engines, processes, sglang, up, vllm
from pdlink.serve import check, checkpoint, roles

ROOT = Path(__file__).parents[2]

VALUES: dict[str, Any] = {
    # What a generated value cannot be: the end of a dotted key to a value that differs from the default.
    "listen": "127.0.0.2:4321",
    "listen.http": "127.0.0.2:4322",
    "listen.control": "127.0.0.2:4323",
    "listen.data": "127.0.0.2",
    "listen.advertise": "127.0.0.2",
    "local_disk": "/tmp/{name}",
    "peer_port": 4322,
    "engine.device": "cuda:1",
    "timeouts.peer_s": 4.0,
    "kv_events.endpoint": "ipc:///tmp/events",
    "kv_events.replay_endpoint": "tcp://127.0.0.1:5558",
    "memory_fraction": 0.5,
    "control": {"http://a:1": ["tcp://a:2"]},
    "data_parallel": {"http://a:1": 2},
    "kv_events": {"http://a:1": ["tcp://a:2"]},
    "policy": {"prefill": "prefix"},
    "shares": {"m": 2.0},
    "cells": {"http://a:1": "east"},
    "stores": {"http://a:1": "tcp://a:3"},
    "rate_limits": {"k": {"requests": 3, "tokens": 4}},
    "transport.verify": "all",
    "request_timeout_s": 2000.0,
    "vllm.prefill_ranks": 3,
    "sglang.prefill_ranks": 3,
    "sglang.environment": {"A": "b"},
    "vllm.transfer_config": {"kv_buffer_device": "cpu"},
    "vllm.environment": {"A": "b"},
    "vllm.connector_config": {"a": 1},
    "tiers.codec": {"disk": "zstd"},
    "tiers.ttl_s": 60.0,
    "decision_share": 0.5,
    "log.level": "debug",
    "prefill": ["http://other"],
    "decode": ["http://other"],
    "both": ["http://other"],
    "tracing.endpoint": "http://127.0.0.1:4318/v1/spans",
    "tracing.share": 0.5,
}
TOGETHER: dict[str, dict[str, Any]] = {
    # What a setting is of no use without.
    "replay_endpoint": {"endpoint": "ipc:///tmp/events"},
    "tls_cert": {"tls_key": "k"},
    "tls_key": {"tls_cert": "c"},
    "key_file": {"allow_file": "a"},
    "allow_file": {"key_file": "k"},
    "model.revision": {"path": "m"},
    "local_disk": {"max_local_disk_size": 1.0},
    "max_local_disk_size": {"local_disk": "d"},
    "store_timeout_s": {"store": "/tmp/store"},
}
TOGETHER_HERE = {
    "control": {"dialect": "vllm"},
    "data_parallel": {"dialect": "vllm"},
    "stores": {"dialect": "vllm"},
}
"""The same for settings that are given to the proxy itself."""


MADE = ("prefill", "decode", "dialect", "control", "data_parallel", "stores")
"""Settings of the proxy that follow from the workers which `pdlink up` starts."""


def other_value(dotted: str, field: FieldInfo) -> Any:
    """A valid value that is not the default."""
    for end, value in VALUES.items():
        if dotted == end or dotted.endswith(f".{end}"):
            return value
    default, annotation = field.default, field.annotation
    kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
    if get_origin(annotation) is Literal:
        return next(choice for choice in get_args(annotation) if choice != default)
    kind = annotation if default is not None or not kinds else kinds[0]
    if kind is bool:
        return not default
    if kind is int:
        return 4321 if dotted.endswith("port") else 2 if not default else default - 1 if default > 1 else default + 1
    if kind is float:
        return default * 1.25 if default else 0.25
    if kind is str:
        return "other"
    if get_origin(kind) is tuple:
        return ["other"]
    raise AssertionError(f"{dotted}: no value for {annotation}")


def beside(dotted: str, command: str) -> dict[str, Any]:
    """More settings that this one needs."""
    side = "store." if command == "up" and dotted.startswith("store.") else ""
    shared: dict[str, Any] = {"share_store": True} if side else {}
    if (side or command == "store") and dotted.removeprefix(side).split(".")[0] in OF_PEERS:
        shared[f"{side}tiers.peer_port"] = 4322
    if dotted in TOGETHER_HERE:
        return dict(TOGETHER_HERE[dotted])
    for end, more in TOGETHER.items():
        if dotted == end or dotted.endswith(f".{end}"):
            above = dotted.rsplit(".", 1)[0] + "." if "." in dotted else ""
            return shared | {above + name: value for name, value in more.items()}
    return shared


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for dotted, value in values.items():
        *above, last = dotted.split(".")
        inner = found
        for part in above:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return found


def plain(value: Any) -> Any:
    """As it would be read back from JSON, so that a tuple is a list."""
    return json.loads(json.dumps(value))


def at(data: Any, dotted: str) -> Any:
    for part in dotted.split("."):
        data = data[part]
    return data


def arrived_at(settings: Any, dotted: str) -> Any:
    """What came of a setting; that of a section which has a short form is inside of it."""
    found = at(plain(settings), dotted)
    return found["address"] if dotted == "listen" and isinstance(found, dict) else found


_make_parser = cli._parser


@functools.cache
def _parser_of(command: str) -> argparse.ArgumentParser:
    return _make_parser([command])


@pytest.fixture(autouse=True)
def one_parser_for_each_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two thousand commands are read here, and making the parser is most of reading one."""
    monkeypatch.setattr(cli, "_parser", lambda argv: _parser_of(argv[0]))


Way = Callable[[dict[str, Any], pytest.MonkeyPatch, Path], list[str]]


def by_flag(values: dict[str, Any], _: pytest.MonkeyPatch, __: Path) -> list[str]:
    return [word for dotted, value in values.items() for word in ("--set", f"{dotted}={json.dumps(value)}")]


def by_environment(values: dict[str, Any], monkeypatch: pytest.MonkeyPatch, _: Path) -> list[str]:
    for dotted, value in values.items():
        monkeypatch.setenv("PDLINK_" + dotted.upper().replace(".", "__"), json.dumps(value))
    return []


def by_file(values: dict[str, Any], _: pytest.MonkeyPatch, directory: Path) -> list[str]:
    (directory / "settings.yaml").write_text(yaml.safe_dump(nested(values)))
    return ["--config", str(directory / "settings.yaml")]


WAYS = pytest.mark.parametrize("way", [by_flag, by_environment, by_file])


class Started:
    """What `pdlink up` would have started."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.children: list[tuple[str, str, dict[str, Any]]] = []
        self.servers: list[tuple[Any, Path]] = []
        self.kept: list[tuple[Any, ...]] = []
        self.waited_s: list[float] = []
        self.executable: list[str | None] = []

        def start(label: str, role: str, settings: dict[str, Any]) -> Any:
            self.children.append((label, role, plain(settings)))
            return SimpleNamespace(label=label, role=role, facts={"url": f"http://{label}"})

        def program(name: str, _: str, configured: str | None) -> str:
            self.executable.append(configured)
            return configured or name

        def server(plan: Any, log_dir: Path) -> Any:
            self.servers.append((asdict(plan), log_dir))
            return SimpleNamespace(label=plan.label, role=plan.role, facts={"url": plan.url})

        def post(label: str, role: str, start: Callable[[], Any], **settings: Any) -> Any:
            self.kept.append((label, settings))
            return SimpleNamespace(label=label, role=role, url=start().facts["url"], child=None)

        monkeypatch.setattr(up, "start", start)
        monkeypatch.setattr(up, "stop", lambda *_: None)
        monkeypatch.setattr(up, "Post", post)
        monkeypatch.setattr(up, "keep", lambda *_: None)
        monkeypatch.setattr(up, "_picture", lambda *_: "")
        monkeypatch.setattr(up, "await_all", lambda _, timeout_s: self.waited_s.append(timeout_s))
        monkeypatch.setattr("signal.signal", lambda *_: None)
        monkeypatch.setattr(places, "find_model", lambda _: False)
        monkeypatch.setattr(engines, "Server", server)
        for engine in (vllm, sglang):
            monkeypatch.setattr(engine, "find_program", program)
            monkeypatch.setattr(engine, "free_ports", lambda _: 40000)
        monkeypatch.setattr(up, "_hold", lambda _, host, port, setting: port)
        monkeypatch.setattr(checkpoint, "write_checkpoint", lambda *_: None)
        monkeypatch.setattr("tempfile.TemporaryDirectory", lambda **_: contextlib.nullcontext("/tmp/pdlink"))
        monkeypatch.setattr(Path, "mkdir", lambda *_, **__: None)

    def of_role(self, role: str) -> list[dict[str, Any]]:
        return [settings for _, found, settings in self.children if found == role]

    def described(self) -> str:
        return repr((self.children, self.servers, self.kept, self.waited_s, self.executable))


@WAYS
@pytest.mark.parametrize("command", ["prefill", "decode", "both", "check", "proxy", "store"])
def test_every_setting_arrives_at_a_role(
    command: str, way: Way, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arrived: list[BaseModel] = []
    monkeypatch.setattr(roles, "run_worker", lambda config, *_: arrived.append(config))
    monkeypatch.setattr(processes, "run_proxy", lambda config, *_, **_more: arrived.append(config))
    monkeypatch.setattr(roles, "run_store", lambda config, *_: arrived.append(config))

    def take(config: BaseModel) -> int:
        arrived.append(config)
        return 0

    monkeypatch.setattr(check, "check", take)
    kinds: dict[str, type[BaseModel]] = {"proxy": ProxyConfig, "store": StoreConfig}
    kind = kinds.get(command, WorkerConfig)
    refused = {}
    for dotted, field in settings_of(kind).items():
        value = other_value(dotted, field)
        with monkeypatch.context() as patch:
            status = cli.main([command, *way({dotted: value, **beside(dotted, command)}, patch, tmp_path)])
        if status == 0:
            assert arrived_at(arrived.pop().model_dump(mode="json"), dotted) == plain(value), dotted
        else:
            refused[dotted] = capsys.readouterr().err
        assert arrived == []
    for dotted, text in refused.items():
        assert dotted in text, f"{dotted} was refused without being named: {text}"
    of_a_gpu, of_another_role = {"cache.memory_fraction"}, {"role"}  # the value of `role` is prefill
    of_a_worker = {f"tiers.{name}" for name in OF_A_WORKER}
    expected = {"proxy": set(), "store": of_a_worker, "check": of_a_gpu, "prefill": of_a_gpu}
    assert set(refused) == expected.get(command, of_a_gpu | of_another_role)


@WAYS
@pytest.mark.parametrize("engine", ["builtin", *ENGINES])
def test_every_setting_of_up_arrives_at_its_processes(
    engine: str, way: Way, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(values: dict[str, Any]) -> tuple[int, Started]:
        with monkeypatch.context() as patch:
            started = Started(patch)
            return cli.main(["up", "--engine", engine, *way(values, patch, tmp_path)]), started

    _, usual = run({})
    refused = {}
    for dotted, field in settings_of(UpConfig).items():
        if dotted == "engine":
            continue
        value = other_value(dotted, field)
        status, started = run({dotted: value, **beside(dotted, "up")})
        if status != 0:
            refused[dotted] = capsys.readouterr().err
            continue
        side, _, below = dotted.partition(".")
        if side in ("prefill", "decode", "proxy", "store"):
            found = started.of_role(side)
            assert found or engine in ENGINES and dotted == "prefill.role", dotted  # which it is anyway
            assert all(arrived_at(settings, below) == plain(value) for settings in found), dotted
        else:
            assert started.described() != usual.described(), f"{dotted} = {value!r} changes nothing"
    made = {f"proxy.{name}" for name in MADE}
    strange = tuple(f"{other}." for other in ENGINES if other != engine)
    if engine in ENGINES:
        others = {dotted for dotted in settings_of(UpConfig) if dotted.startswith(("prefill.", "decode.", *strange))}
        others -= {"prefill.role"}  # it is the role it has anyway
        others |= {"share_store"} | {dotted for dotted in settings_of(UpConfig) if dotted.startswith("store.")}
    else:
        others = {dotted for dotted in settings_of(UpConfig) if dotted.startswith(strange)}
        others |= {f"store.tiers.{name}" for name in OF_A_WORKER}
        others |= {"decode.role", "prefill.cache.memory_fraction", "decode.cache.memory_fraction"}
    assert set(refused) == made | others
    for dotted, text in refused.items():
        assert text.startswith("pdlink: "), text
        assert dotted in text or dotted.split(".", 1)[0] + ": " in text, f"{dotted} is not named: {text}"


def test_a_fraction_of_a_gpus_memory_arrives_with_a_gpu() -> None:
    config = WorkerConfig.model_validate({"cache": {"memory_fraction": 0.5}, "engine": {"device": "cuda"}})
    assert config.cache.memory_fraction == 0.5


@pytest.mark.parametrize(
    ("words", "role", "dotted", "value"),
    [
        (["--listen", "h:4321"], "proxy", "listen", "h:4321"),
        (["--listen", "h", "--set", "proxy.listen=h:4321"], "proxy", "listen", "h:4321"),
        (["--model", "m"], "prefill", "model.path", "m"),
        (["--model", "m"], "decode", "model.path", "m"),
        (["--set", "prefill.model.path=m"], "prefill", "model.path", "m"),
        (["--transport", "tcp"], "decode", "transport.kind", "tcp"),
        (["--transport", "tcp", "--set", "prefill.transport.kind=ucx"], "prefill", "transport.kind", "ucx"),
        (["--prefill", "2", "--set", "prefill.listen=127.0.0.3:4321"], "prefill", "listen.http", "127.0.0.3:4321"),
        (["--set", "prefill.name=p"], "prefill", "name", "p"),
    ],
)
def test_flags_of_up_arrive_and_set_comes_last(
    words: list[str], role: str, dotted: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = Started(monkeypatch)
    assert cli.main(["up", *words]) == 0
    assert at(started.of_role(role)[0], dotted) == value


def test_workers_of_one_side_get_names_and_ports_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    started = Started(monkeypatch)
    listens = ["--set", "decode.listen=127.0.0.3:4321", "--set", "decode.listen.control=127.0.0.3:5000"]
    assert cli.main(["up", "--decode", "2", *listens]) == 0
    found = [(one["name"], one["listen"]["http"], one["listen"]["control"]) for one in started.of_role("decode")]
    assert found[0] == ("decode-0", "127.0.0.3:4321", "127.0.0.3:5000")
    assert found[1] == ("decode-1", "127.0.0.3:4322", "127.0.0.3:5001")


@pytest.mark.parametrize(
    ("words", "dotted", "value"),
    [
        (["--set", "prefill=[http://a:1]"], "prefill", ("http://a:1",)),
        (["--prefill", "http://a:1", "--prefill", "http://b:1"], "prefill", ("http://a:1", "http://b:1")),
        (["--set", "dialect=vllm-nixl"], "dialect", "vllm-nixl"),
        (["--set", "retries=2"], "retries", 2),
    ],
)
def test_flags_of_the_proxy_arrive_and_set_comes_last(
    words: list[str], dotted: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrived: list[ProxyConfig] = []
    monkeypatch.setattr(processes, "run_proxy", lambda config, *_, **_more: arrived.append(config))
    assert cli.main(["proxy", *words]) == 0
    assert getattr(arrived[0], dotted) == value


@functools.cache
def names_read() -> set[str]:
    return {
        node.attr
        for folder in ("pdlink", "proxy")
        for path in (ROOT / folder).rglob("*.py")
        if "config" not in path.relative_to(ROOT).parts
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }


@pytest.mark.parametrize("kind", [WorkerConfig, ProxyConfig, StoreConfig, UpConfig])
def test_every_setting_is_read_by_somebody(kind: type[BaseModel]) -> None:
    """By name only: it finds a setting that no code outside of the settings knows."""
    names = {dotted.rsplit(".", 1)[-1] for dotted in settings_of(kind)}
    handed_down = {"model", "http", "local_disk"}  # `listen.http` is read as the host and the port of `listen`
    assert names - names_read() - handed_down == set()
