"""Alerts: each fires when it should and not before. `make lint` looks at the words of alerts and dashboard."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from pdlink.integrations.stats import declared

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy/prometheus/pdlink.rules.yml"
ALERTS: list[dict[str, Any]] = [
    rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]
]
with_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool: make test unpacks one")


@with_promtool
def test_promtool_takes_the_rules_and_the_example() -> None:
    for command in (["rules", str(RULES)], ["config", str(RULES.parent / "prometheus.yml")]):
        found = subprocess.run(["promtool", "check", *command], capture_output=True, text=True, timeout=60)
        assert found.returncode == 0, found.stdout + found.stderr


# ---- every alert fires

OUTCOMES = 'pdlink_proxy_requests_total{instance="p",outcome="%s"}'
FIRES: dict[str, dict[str, str]] = {
    "PdlinkProxyDown": {'up{job="pdlink-proxy",instance="p"}': "0x90"},
    "PdlinkWorkerDown": {'up{job="pdlink-workers",instance="w"}': "0x90"},
    "PdlinkNoHealthyWorker": {'pdlink_proxy_worker_healthy{instance="p",leg="decode",worker="w"}': "0x90"},
    "PdlinkRequestsFail": {OUTCOMES % "ok": "0+95x90", OUTCOMES % "failed": "0+2x90", OUTCOMES % "broken": "0+3x90"},
    "PdlinkRequestsRefused": {OUTCOMES % "ok": "0+90x90", OUTCOMES % "unavailable": "0+10x90"},
    "PdlinkRequestsWait": {'pdlink_proxy_queued_requests{instance="p"}': "11x90"},
    "PdlinkPromptsRecomputed": {
        'pdlink_proxy_requests_kv_total{instance="p",path="transferred"}': "0+90x90",
        'pdlink_proxy_requests_kv_total{instance="p",path="recomputed"}': "0+10x90",
    },
    "PdlinkTransfersFail": {
        'pdlink_transfers_total{instance="w",side="sender",state="done"}': "0+90x90",
        'pdlink_transfers_total{instance="w",side="sender",state="failed"}': "0+10x90",
    },
    "PdlinkPeerRefused": {'pdlink_refused_peers{instance="w",peer="d",factor="revision"}': "1x90"},
    "PdlinkRequestsWaitForTheLink": {
        'pdlink_transfer_exposed_seconds_sum{instance="w"}': "0+2x90",
        'pdlink_transfer_exposed_seconds_count{instance="w"}': "0+10x90",
        'pdlink_proxy_time_to_first_token_seconds_sum{instance="p",first_leg="prefill"}': "0+10x90",
        'pdlink_proxy_time_to_first_token_seconds_count{instance="p",first_leg="prefill"}': "0+10x90",
    },
    "PdlinkBlocksInQuarantine": {'pdlink_quarantined_blocks{instance="w"}': "3x90"},
    "PdlinkEndpointStalls": {'pdlink_endpoint_longest_absence_seconds{instance="w"}': "0x80 5 0x10"},
    "PdlinkUnexpectedErrors": {'pdlink_handling_failures_total{instance="w",what="frame"}': "0x80 1x10"},
    "PdlinkTierLeftAlone": {
        'pdlink_tier_answering{instance="w",tier="disk"}': "0x90",
        'pdlink_tier_problem{instance="w",tier="disk"}': "1x90",
    },
    "PdlinkTierKeepsLess": {
        'pdlink_tier_answering{instance="w",tier="disk"}': "1x90",
        'pdlink_tier_problem{instance="w",tier="disk"}': "1x90",
    },
    "PdlinkTierBehind": {'pdlink_tier_writes_dropped_total{instance="w",tier="disk"}': "0+1x90"},
    "PdlinkDescriptorsRunOut": {
        'process_open_fds{job="pdlink-proxy",instance="p"}': "900x90",
        'process_max_fds{job="pdlink-proxy",instance="p"}': "1000x90",
    },
    "PdlinkDecisionLogLosesLines": {'pdlink_proxy_decision_log_dropped_total{instance="p"}': "0x80 4x10"},
    "PdlinkVersionsDiffer": {
        'pdlink_build_info{instance="p",version="1"}': "1x90",
        'pdlink_build_info{instance="w",version="2"}': "1x90",
    },
}
"""By alert, series of 90 minutes at whose end it fires."""

WELL = {
    'up{job="pdlink-proxy",instance="p"}': "1x90",
    'up{job="pdlink-workers",instance="w"}': "1x90",
    'pdlink_proxy_worker_healthy{instance="p",leg="decode",worker="w"}': "1x90",
    OUTCOMES % "ok": "0+995x90",
    OUTCOMES % "failed": "0+5x90",
    OUTCOMES % "unavailable": "0+5x90",
    'pdlink_proxy_queued_requests{instance="p"}': "2x90",
    'pdlink_proxy_requests_kv_total{instance="p",path="transferred"}': "0+99x90",
    'pdlink_proxy_requests_kv_total{instance="p",path="recomputed"}': "0+1x90",
    'pdlink_transfers_total{instance="w",side="sender",state="done"}': "0+99x90",
    'pdlink_transfers_total{instance="w",side="sender",state="failed"}': "0+1x90",
    'pdlink_transfer_exposed_seconds_sum{instance="w"}': "0+0.1x90",
    'pdlink_transfer_exposed_seconds_count{instance="w"}': "0+10x90",
    'pdlink_proxy_time_to_first_token_seconds_sum{instance="p",first_leg="prefill"}': "0+10x90",
    'pdlink_proxy_time_to_first_token_seconds_count{instance="p",first_leg="prefill"}': "0+10x90",
    'pdlink_quarantined_blocks{instance="w"}': "0x90",
    'pdlink_endpoint_longest_absence_seconds{instance="w"}': "0.2x90",
    'pdlink_handling_failures_total{instance="w",what="frame"}': "1x90",
    'pdlink_tier_answering{instance="w",tier="disk"}': "1x90",
    'pdlink_tier_problem{instance="w",tier="disk"}': "0x90",
    'pdlink_tier_writes_dropped_total{instance="w",tier="disk"}': "7x90",
    'process_open_fds{job="pdlink-proxy",instance="p"}': "90x90",
    'process_max_fds{job="pdlink-proxy",instance="p"}': "1000x90",
    'pdlink_proxy_decision_log_dropped_total{instance="p"}': "4x90",
    'pdlink_build_info{instance="p",version="1"}': "1x90",
    'pdlink_build_info{instance="w",version="1"}': "1x90",
}


def case(series: dict[str, str], at_m: int, firing: dict[str, str] | None) -> dict[str, Any]:
    """firing: labels of ALERTS that must fire; None for no alert at all, not even a pending one."""
    expected: dict[str, Any] = {"expr": "count by (alertname) (ALERTS)", "eval_time": f"{at_m}m", "exp_samples": []}
    if firing is not None:
        expected["expr"] = 'count by (alertname) (ALERTS{alertstate="firing"})'
        expected["exp_samples"] = [{"labels": f'{{alertname="{firing["alertname"]}"}}', "value": 1}]
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [expected],
    }


def shown_by(prefix: str, series: dict[str, str]) -> dict[str, str]:
    """The same of a server of an engine: what it shows of them has its prefix."""
    names = {metric.name for metric in declared().metrics}

    def named(name: str) -> str:
        return prefix + name if re.sub("_(sum|count)[{].*|[{].*", "", name) in names else name

    return {named(name): values for name, values in series.items()}


@with_promtool
def test_every_alert_fires_alone_and_none_while_all_is_well(tmp_path: Path) -> None:
    assert list(FIRES) == [rule["alert"] for rule in ALERTS]
    cases = [case(series, 85, {"alertname": name}) for name, series in FIRES.items()]
    for prefix in ("vllm:", "sglang:", "sglang_"):
        theirs = {name: shown_by(prefix, series) for name, series in FIRES.items()}
        cases += [case(series, 85, {"alertname": name}) for name, series in theirs.items() if series != FIRES[name]]
    assert len(cases) > len(FIRES) + 10
    file = tmp_path / "alerts.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "tests": [*cases, case(WELL, 85, None)]}))
    found = subprocess.run(["promtool", "test", "rules", file], capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stdout + found.stderr
