"""Files in deploy/: what they run exists, and a deployment made of compose.yaml's own commands serves.

No container is built here: there is no container engine on the machines that run these tests.
"""

from __future__ import annotations

import configparser
import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pdlink.cli import whole_parser
from pdlink.commands.runs import settings_of_flags
from pdlink.config import ProxyConfig, WorkerConfig, load, parse_assignments, settings_of
from pdlink.fleet.child import start
from pdlink.fleet.ports import free_ports
from tests.e2e.deployment import READY_S, Deployment, request

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"


def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    return found


def manifests() -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all((DEPLOY / "kubernetes/pdlink.yaml").read_text()) if each]


def containers() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    for each in manifests():
        if each["kind"] in ("StatefulSet", "Deployment"):
            for container in each["spec"]["template"]["spec"]["containers"]:
                yield each, container


def check(words: list[str]) -> None:
    """pdlink takes these arguments, and knows the settings among them."""
    args, unknown = whole_parser().parse_known_args(words)
    assert not unknown
    known = settings_of(ProxyConfig if words[0] == "proxy" else WorkerConfig)
    assert not set(parse_assignments(args.set)) - set(known)


def test_commands_of_compose_and_kubernetes_are_pdlinks() -> None:
    for service in compose().values():
        check(shlex.split(service["command"]))
    seen = [container["args"] for _, container in containers()]
    assert [words[0] for words in seen] == ["prefill", "decode", "proxy"]
    for words in seen:
        check(words)


def test_probes_ask_what_serves_them() -> None:
    for _, container in containers():
        assert container["livenessProbe"]["httpGet"]["path"] == "/livez", "draining is no reason to be killed"
        assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
        port = container["args"][container["args"].index("--listen") + 1].rpartition(":")[2]
        assert str(container["livenessProbe"]["httpGet"]["port"]) == port


def test_the_proxy_of_kubernetes_lists_each_worker_by_its_own_name() -> None:
    sets = {each["metadata"]["name"]: each["spec"]["replicas"] for each, _ in containers()}
    [proxy] = [container["args"] for each, container in containers() if each["kind"] == "Deployment"]
    for side in ("prefill", "decode"):
        urls = [proxy[index + 1] for index, word in enumerate(proxy) if word == f"--{side}"]
        names = [f"http://pdlink-{side}-{index}.pdlink-{side}:8100" for index in range(sets[f"pdlink-{side}"])]
        assert urls == names


def test_each_label_that_is_selected_is_there() -> None:
    labels = [each["spec"]["template"]["metadata"]["labels"] for each, _ in containers()]
    for each in manifests():
        selector = each["spec"]["selector"]
        assert selector.get("matchLabels", selector) in labels


def test_the_unit_runs_pdlink_and_systemd_takes_it(tmp_path: Path) -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(DEPLOY / "systemd/pdlink@.service")
    for command in ("prefill", "decode", "both", "proxy", "store"):
        line = unit["Service"]["ExecStart"].replace("%i", command)
        assert line.startswith("/opt/pdlink/bin/pdlink ")
        whole_parser().parse_args(line.split()[1:])
    whole_parser().parse_args(unit["Service"]["ExecStartPre"].replace("%i", "proxy").split()[1:])
    text = (DEPLOY / "systemd/pdlink@.service").read_text().replace("/opt/pdlink/bin/pdlink", "/bin/true")
    copy = tmp_path / "pdlink@proxy.service"
    copy.write_text(re.sub("Documentation=.*", "", text))
    try:
        result = subprocess.run(
            ["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, check=False, timeout=60
        )
    except FileNotFoundError:
        pytest.skip("no systemd here")
    assert (result.returncode, result.stderr) == (0, "")


def test_the_image_copies_what_is_there_and_starts_pdlink() -> None:
    lines = re.sub(r"\\\n", " ", (DEPLOY / "Dockerfile").read_text()).splitlines()
    steps = [line.partition(" ") for line in lines if line and not line.startswith("#")]
    known = {"FROM", "RUN", "COPY", "ARG", "USER", "EXPOSE", "STOPSIGNAL", "ENTRYPOINT", "CMD"}
    assert {word for word, _, _ in steps} <= known
    rest = {word: text for word, _, text in steps}
    assert json.loads(rest["ENTRYPOINT"]) == ["pdlink"]
    assert isinstance(json.loads(rest["CMD"]), list)
    stages = [text for word, _, text in steps if word == "FROM"]
    assert stages[0].endswith(" AS build")
    named = {service["build"].get("args", {}).get("EXTRAS", "engine") for service in compose().values()}
    extras = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2]
    for extra in named - {""}:
        assert re.search(rf"^{extra} = ", extras, re.MULTILINE)


@pytest.mark.e2e
def test_what_compose_starts_serves_and_moves_kv_over_tcp() -> None:
    """As processes of this host, with its names and ports; each container has its own pid namespace, so no mapped."""
    ports = {(name, port): str(free_ports(1)) for name in ("prefill", "decode") for port in ("8100", "8101")}
    ports["proxy", "8000"] = str(free_ports(1))

    def words(name: str) -> list[str]:
        found = []
        for word in shlex.split(compose()[name]["command"]):
            for (of, port), free in ports.items():
                word = word.replace(f"//{of}:{port}", f"//127.0.0.1:{free}")
                if of == name:
                    word = re.sub(rf"^(.*):{port}$", rf"\g<1>:{free}", word)
            found.append(word.replace(f"listen.advertise={name}", "listen.advertise=127.0.0.1"))
        more = [] if name == "proxy" else ["--set", "model.num_layers=2", "--transport", "tcp"]
        return found + more

    def settings(name: str) -> dict[str, Any]:
        """As the command line makes them."""
        args = whole_parser().parse_args(words(name))
        if name == "proxy":
            flags = {"listen": args.listen, "prefill": args.prefill, "decode": args.decode}
            return load(ProxyConfig, flags=flags, environment={}).model_dump(mode="json")
        flags = {"role": name, **settings_of_flags(args, "--listen", "--transport")}
        return load(WorkerConfig, flags=flags, environment={}).model_dump(mode="json")

    deployment = Deployment()
    with deployment:
        for name in ("prefill", "decode", "proxy"):
            more = {} if name == "proxy" else {"name": name}
            deployment.children[name] = start(name, name, settings(name) | more)
        for child in deployment.children.values():
            child.wait_ready(READY_S)
        deployment.wait_proxy_hears_all()
        answer = deployment.complete("Compose it and see whether the KV moves")
        assert answer.headers["X-Pdlink-KV"] == "transferred"
        for name in deployment.children:
            port = next(free for (of, port), free in ports.items() if of == name and port != "8101")
            assert request(f"http://127.0.0.1:{port}/livez").status == 200
