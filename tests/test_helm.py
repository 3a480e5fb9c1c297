"""The chart in deploy/helm, rendered by the real helm and checked against the API of three Kubernetes versions.

No API server runs here. `make helm` brings helm and the schemas.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

import pdlink
from pdlink.config import ProxyConfig, WorkerConfig, load, parse_assignments, settings_of
from pdlink_proxy.dialects import DIALECTS
from pdlink_proxy.discovery.joined import source_of

ROOT = Path(__file__).parents[1]
CHART = ROOT / "deploy/helm/pdlink"
TOOLS = ROOT / ".venv-helm/bin"
HELM = shutil.which("helm") or shutil.which("helm", path=str(TOOLS))
VERSIONS = ("1.29.0", "1.34.0", "1.37.0")
DEPLOYMENTS = ("values", *sorted(path.stem for path in (CHART / "examples").glob("*.yaml")))

pytestmark = pytest.mark.skipif(HELM is None, reason="no helm: make helm")

Document = dict[str, Any]


def helm(*words: str, values: Document | None = None) -> subprocess.CompletedProcess[str]:
    assert HELM is not None
    command = [HELM, "template", "pdlink", str(CHART), "--namespace", "ns", *words]
    if values is not None:
        command += ["--values", "-"]
    said = None if values is None else yaml.safe_dump(values)
    return subprocess.run(command, input=said, capture_output=True, text=True, check=False, timeout=60)


@cache
def rendered(name: str) -> tuple[Document, ...]:
    result = helm("--values", str(CHART / "values.yaml" if name == "values" else CHART / f"examples/{name}.yaml"))
    assert result.returncode == 0, result.stderr
    return tuple(each for each in yaml.safe_load_all(result.stdout) if each)


def of(name: str, kind: str) -> dict[str, Document]:
    return {each["metadata"]["name"]: each for each in rendered(name) if each["kind"] == kind}


def templates(name: str) -> Iterator[tuple[str, Document]]:
    """Every pod template: whose it is, and it."""
    for each in rendered(name):
        if each["kind"] in ("Deployment", "StatefulSet"):
            yield each["metadata"]["name"], each["spec"]["template"]
        elif each["kind"] == "LeaderWorkerSet":
            group = each["spec"]["leaderWorkerTemplate"]
            yield each["metadata"]["name"], group["leaderTemplate"]
            yield f"{each['metadata']['name']} (group)", group["workerTemplate"]


def labels_of(template: Document, owner: str) -> dict[str, str]:
    """With what the controller of LeaderWorkerSets adds."""
    index = "1" if owner.endswith("(group)") else "0"
    return {**template["metadata"]["labels"], "leaderworkerset.sigs.k8s.io/worker-index": index}


def selects(selector: dict[str, str], name: str) -> list[tuple[str, Document]]:
    return [
        (owner, template)
        for owner, template in templates(name)
        if selector.items() <= labels_of(template, owner).items()
    ]


def settings(name: str, owner: str) -> Document:
    found: Document = yaml.safe_load(of(name, "ConfigMap")[owner]["data"]["pdlink.yaml"])
    return found


every_deployment = pytest.mark.parametrize("name", DEPLOYMENTS)

VALIDATE = """
import functools, json, sys
from kubernetes_validate import utils
utils.schema_contents = functools.lru_cache(None)(utils.schema_contents)
documents, versions = json.load(sys.stdin)
for document in documents:
    for version in versions:
        try:
            utils.validate(document, version, strict=True)
        except utils.ValidationError as error:
            print(version, document["kind"], document["metadata"]["name"], error.message)
"""


def test_three_kubernetes_versions_take_every_object_and_no_misspelt_one() -> None:
    if not (TOOLS / "kubernetes-validate").exists():
        pytest.skip("no schemas of Kubernetes: make helm")
    ours = {"ServiceMonitor", "LeaderWorkerSet", "ScaledObject"}  # definitions of others, whose schemas are not there
    once = {
        json.dumps(each, sort_keys=True)
        for name in DEPLOYMENTS
        for each in rendered(name)
        if each["kind"] not in ours
    }
    wrong = json.loads(json.dumps(of("values", "Deployment")["pdlink-proxy"]))
    wrong["spec"]["replicsa"] = wrong["spec"].pop("replicas")
    said = json.dumps([[*map(json.loads, sorted(once)), wrong], VERSIONS])
    result = subprocess.run(
        [TOOLS / "python", "-c", VALIDATE], input=said, capture_output=True, text=True, check=True, timeout=60
    )
    found = result.stdout.splitlines()
    assert len(found) == len(VERSIONS), result.stdout
    assert all("replicsa" in line for line in found)


def test_the_chart_is_of_this_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (pdlink.__version__, pdlink.__version__)


@every_deployment
def test_pdlink_takes_every_argument_and_setting(name: str, tmp_path: Path) -> None:
    seen = 0
    for owner, template in templates(name):
        [container] = template["spec"]["containers"]
        words = container["args"]
        if "--config" not in words:  # another engine
            assert name == "vllm"
            continue
        seen += 1
        assert words[0] == template["metadata"]["labels"].get("pdlink/role", "proxy")
        assert words[1:3] == ["--config", "/etc/pdlink/settings/pdlink.yaml"]
        if words[0] != "proxy":
            assert words[3:6] == ["--name", "$(POD_NAME)", "--set"]
            assert not set(parse_assignments(words[6:])) - set(settings_of(WorkerConfig))
        file = tmp_path / f"{owner}.yaml"
        file.write_text(yaml.safe_dump(settings(name, owner)))
        if words[0] == "proxy":
            load(ProxyConfig, file, environment={})
        else:
            load(WorkerConfig, file, environment={})
    assert seen


@every_deployment
def test_a_pod_is_killed_later_than_its_drain_ends(name: str) -> None:
    for owner, template in templates(name):
        spec = template["spec"]
        [container] = spec["containers"]
        command, wait_s = container["lifecycle"]["preStop"]["exec"]["command"]
        assert command == "sleep"
        if "--config" in container["args"]:
            said = settings(name, owner)
            drain_s = said["drain_s"] if container["name"] == "proxy" else said["timeouts"]["drain_s"]
        else:
            [word] = [word for word in container["args"] if word.startswith("--shutdown-timeout=")]
            drain_s = int(word.partition("=")[2])
        if owner.endswith("(group)"):
            leader_s = next(each for other, each in templates(name) if f"{other} (group)" == owner)
            before = int(leader_s["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][1])
            assert int(wait_s) >= before + drain_s, "the others of a group end while its leader drains"
            drain_s = 0
        assert spec["terminationGracePeriodSeconds"] > int(wait_s) + math.ceil(drain_s)


def test_seconds_before_sigterm_are_as_set_and_the_grace_period_follows_them() -> None:
    group = {"role": "prefill", "kind": "LeaderWorkerSet", "groupSize": 2, "args": ["--x"], "groupArgs": ["--y"]}
    values = {
        "proxy": {"preStopS": 11, "settings": {"drain_s": 13}},
        "poolDefaults": {"preStopS": 17, "drainS": 19},
        "pools": {"prefill": group, "decode": {"role": "decode", "preStopS": 23}},
    }
    result = helm(values=values)
    assert result.returncode == 0, result.stderr
    found = {}
    for each in yaml.safe_load_all(result.stdout):
        name = each["metadata"]["name"] if each else ""
        if each and each["kind"] == "Deployment":
            found[name] = each["spec"]["template"]["spec"]
        elif each and each["kind"] == "LeaderWorkerSet":
            template = each["spec"]["leaderWorkerTemplate"]
            found[f"{name} leader"] = template["leaderTemplate"]["spec"]
            found[f"{name} other"] = template["workerTemplate"]["spec"]
    waits = {
        name: (
            int(spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][1]),
            spec["terminationGracePeriodSeconds"],
        )
        for name, spec in found.items()
    }
    assert waits == {
        "pdlink-proxy": (11, 11 + 13 + 10),
        "pdlink-decode": (23, 23 + 19 + 10),
        "pdlink-prefill leader": (17, 17 + 19 + 10),
        "pdlink-prefill other": (17 + 19, 17 + 19 + 10),
    }


def test_autoscalers_read_gauges_that_workers_have_and_own_the_number_alone() -> None:
    metrics = (ROOT / "docs/monitoring.md").read_text()
    hpa = of("autoscaling", "HorizontalPodAutoscaler")["pdlink-prefill"]["spec"]
    pods = hpa["metrics"][0]["pods"]
    assert (pods["metric"]["name"], pods["target"]["averageValue"]) == ("pdlink_prefill_queue_seconds", "1000m")
    keda = of("autoscaling", "ScaledObject")["pdlink-decode"]["spec"]
    said = keda["triggers"][0]["metadata"]
    assert said["query"] == 'sum(pdlink_decode_kv_used_ratio{namespace="ns",pdlink_pool="decode"})'
    assert (said["threshold"], keda["triggers"][0]["metricType"]) == ("0.6", "AverageValue")
    assert all(f"`{name}`" in metrics for name in (pods["metric"]["name"], "pdlink_decode_kv_used_ratio"))
    for spec in (hpa, keda):
        target = spec["scaleTargetRef"]
        owned = of("autoscaling", target["kind"])[target["name"]]
        assert owned["apiVersion"] == target["apiVersion"]
        assert "replicas" not in owned["spec"]
    for name in set(DEPLOYMENTS) - {"autoscaling"}:
        assert not of(name, "HorizontalPodAutoscaler") | of(name, "ScaledObject"), "off by default"


def test_a_proxy_with_a_certificate_serves_probes_and_scrapers_by_it() -> None:
    said = settings("autoscaling", "pdlink-proxy")
    assert (said["tls_cert"], said["tls_key"]) == ("/etc/pdlink/tls/tls.crt", "/etc/pdlink/tls/tls.key")
    spec = of("autoscaling", "Deployment")["pdlink-proxy"]["spec"]["template"]["spec"]
    [container] = spec["containers"]
    assert {container[probe]["httpGet"]["scheme"] for probe in ("livenessProbe", "readinessProbe")} == {"HTTPS"}
    assert {each["name"]: each["mountPath"] for each in container["volumeMounts"]}["tls"] == "/etc/pdlink/tls"
    assert {each["name"]: each for each in spec["volumes"]}["tls"]["secret"]["secretName"] == "pdlink-tls"
    monitor = of("autoscaling", "ServiceMonitor")
    assert monitor["pdlink-proxy"]["spec"]["endpoints"][0]["scheme"] == "https"
    assert "scheme" not in monitor["pdlink-worker"]["spec"]["endpoints"][0]


def test_where_pods_have_ipv6_addresses_alone_everything_listens_on_them() -> None:
    result = helm(values={"insecure": True, "listen": "[::]"})
    assert result.returncode == 0, result.stderr
    assert "0.0.0.0" not in result.stdout
    maps = [each for each in yaml.safe_load_all(result.stdout) if each and each["kind"] == "ConfigMap"]
    for each in maps:
        said = yaml.safe_load(each["data"]["pdlink.yaml"])
        if "discover" in said:
            assert ProxyConfig.model_validate(said).at.host == "::"
        else:
            assert WorkerConfig.model_validate(said).listen.control_host == "::"
    assert len(maps) == 3


@every_deployment
def test_each_probe_asks_a_port_that_is_there(name: str) -> None:
    for owner, template in templates(name):
        [container] = template["spec"]["containers"]
        if owner.endswith("(group)"):
            assert not [key for key in container if key.endswith("Probe")], "it answers no HTTP"
            continue
        paths = {key: container[key]["httpGet"] for key in ("livenessProbe", "readinessProbe")}
        assert {each["port"] for each in paths.values()} <= {each["name"] for each in container["ports"]}
        if "--config" in container["args"]:
            assert {key: each["path"] for key, each in paths.items()} == {
                "livenessProbe": "/livez",
                "readinessProbe": "/readyz",
            }


@every_deployment
def test_each_selector_finds_pods_of_one_kind(name: str) -> None:
    for each in rendered(name):
        spec = each.get("spec", {})
        selector = spec.get("podSelector", spec.get("selector"))
        if selector is None or each["kind"] == "ServiceMonitor":
            continue
        found = selects(selector.get("matchLabels", selector), name)
        assert len({template["metadata"]["labels"].get("pdlink/pool", "") for _, template in found}) == 1, each


@every_deployment
def test_what_the_proxy_discovers_is_a_service_that_shows_who_is_ready(name: str) -> None:
    said = settings(name, "pdlink-proxy")
    services = of(name, "Service")
    for text in said["discover"]:
        source_of(text, DIALECTS[said.get("dialect", "pdlink")])
        pairs = dict(part.split("=") for part in text.removeprefix("kubernetes:").split(","))
        [(role, service)] = [(key, value) for key, value in pairs.items() if key in ("prefill", "decode", "both")]
        spec = services[service]["spec"]
        assert spec["clusterIP"] == "None"
        assert not spec.get("publishNotReadyAddresses"), "all pods would seem ready"
        [(owner, template)] = selects(spec["selector"], name)
        assert template["metadata"]["labels"]["pdlink/role"] == role
        ports = {each["name"]: each["port"] for each in spec["ports"]}
        inside = {each["name"]: each["containerPort"] for each in template["spec"]["containers"][0]["ports"]}
        assert ports.items() <= inside.items()
        assert {pairs["port"], pairs.get("control", "http")} <= ports.keys()
        assert service not in of(name, "LeaderWorkerSet"), "its controller makes a Service of that name"


def test_each_rank_of_each_engine_has_a_control_port_and_the_proxy_knows_how_many_engines_there_are() -> None:
    prefill = {"ranks": 2, "engines": 3, "controlPort": 8500}
    result = helm(values={"proxy": {"settings": {"dialect": "vllm"}}, "pools": {"prefill": prefill}})
    assert result.returncode == 0, result.stderr
    made = {(each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(result.stdout) if each}
    [(_, service)] = [(key, each) for key, each in made.items() if key[0] == "Service" and key[1].endswith("prefill")]
    ports = [each["port"] for each in service["spec"]["ports"] if each["name"].startswith("control")]
    assert ports == list(range(8500, 8506))
    assert ",control=control,data_parallel=3" in result.stdout
    assert result.stdout.count("data_parallel") == 1, "a decode server shares its requests out by itself"


@every_deployment
def test_only_proxies_may_ask_the_api_server_and_only_for_endpointslices(name: str) -> None:
    roles = of(name, "Role")
    assert roles["pdlink-proxy"]["rules"] == [
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]}
    ]
    [subject] = of(name, "RoleBinding")["pdlink-proxy"]["subjects"]
    assert subject["name"] in of(name, "ServiceAccount")
    assert (len(roles), not of(name, "ClusterRole")) == (1, True)
    for owner, template in templates(name):
        assert template["spec"]["automountServiceAccountToken"] == (owner == "pdlink-proxy")


@every_deployment
def test_no_service_sets_a_variable_that_pdlink_takes_for_a_setting(name: str) -> None:
    for _, template in templates(name):
        assert template["spec"]["enableServiceLinks"] is False
        names = {each["name"] for each in template["spec"]["containers"][0].get("env", ())}
        assert not {each for each in names if each.startswith("PDLINK_")}


@every_deployment
def test_ports_other_than_http_are_for_workers_alone(name: str) -> None:
    policies = of(name, "NetworkPolicy")
    for owner, template in templates(name):
        mine = [
            each["spec"]
            for each in policies.values()
            if each["spec"]["podSelector"]["matchLabels"].items() <= labels_of(template, owner).items()
        ]
        [policy] = mine
        for rule in policy["ingress"]:
            numbers = {each["port"] for each in rule.get("ports", ())}
            if owner == "pdlink-proxy":
                assert numbers, "no rule opens all ports"
            elif numbers != {8100}:
                [peer] = rule["from"]
                assert peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "worker"


def test_a_pod_sees_its_own_key_alone_and_clients_keys_are_the_proxys() -> None:
    for name in ("keys", "cells"):
        for owner, template in templates(name):
            spec = template["spec"]
            [container] = spec["containers"]
            mounts = {each["name"]: each for each in container["volumeMounts"]}
            worker = owner != "pdlink-proxy"
            assert ("keys" in mounts) == worker
            if worker:
                assert mounts["keys"]["subPathExpr"] == "$(POD_NAME).key"
            assert ("api" in mounts) == (name == "keys" and not worker)
            for volume in spec["volumes"]:
                assert "secret" not in volume or volume["secret"]["defaultMode"] == 0o440
            assert spec["securityContext"]["fsGroup"] == spec["securityContext"]["runAsGroup"]
            said = settings(name, owner)
            assert not said.get("insecure")
            assert not said.get("security", {}).get("insecure")


def test_pods_share_the_nodes_process_namespace_only_for_mapped_memory() -> None:
    assert not any(template["spec"].get("hostPID") for _, template in templates("values"))
    shared = {owner for owner, template in templates("cells") if template["spec"].get("hostPID")}
    assert shared == set(of("cells", "StatefulSet"))


def test_false_zero_and_none_of_a_pool_win_over_the_defaults() -> None:
    pool = {"role": "prefill", "mappedMemory": False, "preStopS": 0, "replicas": None}
    values = {"poolDefaults": {"mappedMemory": True}, "pools": {"prefill": pool}}
    result = helm("--show-only", "templates/workers.yaml", values=values)
    [found] = [
        each["spec"]
        for each in yaml.safe_load_all(result.stdout)
        if each and each["kind"] == "Deployment" and each["metadata"]["name"] == "pdlink-prefill"
    ]
    assert "replicas" not in found
    assert found["template"]["spec"]["hostPID"] is False
    assert found["template"]["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "0"]


def test_a_settings_change_makes_new_pods_and_a_new_chart_version_does_not() -> None:
    before, after = (
        next(
            each["spec"]["template"]
            for each in yaml.safe_load_all(helm("--show-only", "templates/workers.yaml", values=values).stdout)
            if each and each["kind"] == "Deployment"
        )
        for values in ({}, {"poolDefaults": {"settings": {"summary_s": 1}}})
    )
    assert before != after
    assert not {"helm.sh/chart", "app.kubernetes.io/version"} & before["metadata"]["labels"].keys()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"pools": {"prefill": {"replicsa": 3}}}, "replicsa"),
        ({"keys": {"secret": "k"}}, "pools.decode.kind: got Deployment"),
        ({"networkPolicy": {"enabled": False}}, "networkPolicy.enabled: got false without keys.secret"),
        ({"pools": {"decode": None}}, "pools: got the roles prefill"),
        ({"pools": {"prefill": {"autoscaling": {"kind": "hpa"}}}}, "pools.prefill.replicas: got 2"),
        (
            {"pools": {"decode": {"replicas": None, "autoscaling": {"kind": "keda"}}}},
            "pools.decode.autoscaling.prometheus: got none",
        ),
        (
            {"pools": {"decode": {"replicas": None, "autoscaling": {"kind": "hpa", "min": 3, "max": 2}}}},
            "pools.decode.autoscaling.min: got 3",
        ),
    ],
)
def test_values_that_cannot_work_are_refused_with_a_remedy(values: Document, words: str) -> None:
    result = helm(values=values)
    assert result.returncode != 0
    assert words in result.stderr
