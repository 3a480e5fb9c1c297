"""What the metrics of vLLM's and SGLang's servers are told of transfers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from pdlink.events import LayerLanded, TransferEnded
from pdlink.integrations.stats import Counts, Stats, declared, in_short, split

ROOT = Path(__file__).parents[2]


def ended(side: str, state: str, reason: str = "", transport: str = "cma") -> TransferEnded:
    return TransferEnded(
        transfer_id="t", side=side, peer="p", state=state, reason=reason, nbytes=0, transport=transport, started_s=0.0
    )


def landed() -> LayerLanded:
    return LayerLanded(transfer_id="t", layer=0, start=0, end=4, nbytes=100, transport="cma", submitted_s=1.0,
                       asked_s=1.0, at_s=1.5)  # fmt: skip


def test_counts_have_the_lane_or_the_reason() -> None:
    counts = Counts()
    for event in (
        landed(),
        landed(),
        ended("sender", "DONE"),
        ended("receiver", "READY", transport="ucx"),
        ended("receiver", "FAILED", "peer_lost: silent for 10.0 s"),
        ended("receiver", "FAILED", "peer_lost: silent for 3.0 s"),
        ended("sender", "FAILED", "other_prompt"),
        ended("receiver", "FAILED", "not_needed"),
    ):
        counts(event)
    taken = counts.take()
    assert {key: value for key, value in taken.items() if not isinstance(value, list)} == {
        "pdlink_transfer_bytes_total|cma": 200,
        "pdlink_layers_landed_total|cma": 2,
        "pdlink_push_busy_seconds_total|cma": 0.5,
        "pdlink_transfers_total|sender|done": 1,
        "pdlink_transfers_total|receiver|ready": 1,
        "pdlink_transfers_total|receiver|unneeded": 1,
        "pdlink_transfers_total|receiver|failed": 2,
        "pdlink_transfers_total|sender|failed": 1,
        "pdlink_transfer_failures_total|receiver|peer_lost": 2,
        "pdlink_transfer_failures_total|sender|other_prompt": 1,
    }
    assert taken["pdlink_push_seconds"] == [0.5, 0.5]
    assert counts.take() == {}


def test_every_key_has_as_many_values_as_its_metric_has_labels() -> None:
    labels = {metric.name: metric.labels for metric in declared()[0].metrics}
    counts = Counts()
    for event in (landed(), ended("sender", "DONE"), ended("receiver", "FAILED", "peer_lost: silent for 3 s")):
        counts(event)
    for key in counts.take():
        name, values = split(key)
        assert len(values) == len(labels[name])


def test_a_log_line_tells_sums_and_means() -> None:
    told: Stats = {
        "pdlink_transfer_bytes_total|tcp": 10.0,
        "pdlink_transfer_seconds|sender": [0.001, 0.002],
        "pdlink_x": [],
    }
    assert in_short(told) == {"transfer_bytes[tcp]": 10.0, "transfer_mean_ms[sender]": 1.5}


def test_what_pdlink_counts_in_an_sglang_scheduler_is_shown_and_ends_with_its_nodes() -> None:
    """In a process of its own: prometheus_client takes a name once."""
    code = """
from types import SimpleNamespace
from prometheus_client import REGISTRY, generate_latest
from pdlink.events import emit
from pdlink.integrations.sglang_parts.metrics import SHOWN
from tests.integrations.test_stats import landed
from tests.integrations.test_vllm_stats import PEER, report

def line(name):
    (found,) = [line for line in generate_latest(REGISTRY).decode().splitlines() if line.startswith(name + "{")]
    return found

off = SimpleNamespace(enable_metrics=False, served_model_name="m", model_path="p")
SHOWN.add_nodes(off, lambda: [])()
assert "pdlink" not in generate_latest(REGISTRY).decode()
on = SimpleNamespace(enable_metrics=True, served_model_name="m", model_path="p")
node = SimpleNamespace(report=lambda: report(num_peers=1, peers=[PEER], quarantined_blocks=3))
ends = SHOWN.add_nodes(on, lambda: [node]), SHOWN.add_nodes(on, lambda: [])
emit(landed())
ends[1]()
assert line("sglang:pdlink_transfer_bytes_total").endswith('{model_name="m",transport="cma"} 100.0')
ends[0]()
assert line("sglang:pdlink_quarantined_blocks").endswith(" 0.0")
again = SHOWN.add_nodes(on, lambda: [node])
emit(landed())
again()
assert line("sglang:pdlink_layers_landed_total").endswith(" 2.0")
"""
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=120).returncode == 0
