"""Counters, gauges and histograms of one process, and the text that Prometheus reads."""

from __future__ import annotations

import ast
import math
import random
import re
import shutil
import subprocess
import time
from bisect import bisect_left
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_families

from pdlink._http import Buckets
from pdlink.events import LayerLanded, TransferEnded
from pdlink.observe.metrics import DROPPED, HANDLED, StoreProcessMetrics, WorkerMetrics
from pdlink.observe.series import Busy, Counter, Gauge, Histogram, Numbers, Registry
from pdlink_proxy.metrics import Metrics as ProxyMetrics

ROOT = Path(__file__).parents[2]
OPEN = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
"""What Prometheus sends."""


def test_known_labels_have_series_before_anything_happens() -> None:
    registry = Registry()
    registry.add(Counter("x_total", "Help.", side=("a", "b"), state=("c",)))
    registry.add(Counter("y_total", "Help.", reason=()))
    assert registry.numbers() == {"x_total": [(("a", "c"), [0.0]), (("b", "c"), [0.0])], "y_total": []}


def test_openmetrics_only_who_asks_for_it_and_exemplars_only_there() -> None:
    registry = Registry()
    histogram = registry.add(Histogram("x_seconds", (0.1, 1.0), "Help.", leg=()))
    histogram.observe(0.5, "decode", exemplar={"request_id": "r"})
    plain, kind = registry.exposition("text/plain")
    assert kind.startswith("text/plain; version=0.0.4")
    assert 'x_seconds_bucket{le="1.0",leg="decode"} 1.0\n' in plain.decode()
    text, kind = registry.exposition(OPEN)
    assert kind.startswith("application/openmetrics-text; version=1.0.0")
    assert b"_created" not in plain + text
    (family,) = open_families(text.decode())  # type: ignore[no-untyped-call]
    (bucket,) = (sample for sample in family.samples if sample.labels.get("le") == "1.0")
    assert bucket.exemplar is not None
    assert (bucket.exemplar.labels, bucket.exemplar.value) == ({"request_id": "r"}, 0.5)
    assert family.unit == "seconds"


def test_what_is_no_number_is_in_the_first_bucket() -> None:
    buckets = Buckets((1.0, 2.0))
    buckets.observe(math.nan)
    *counts, total = buckets.numbers
    assert (counts, math.isnan(total)) == ([1.0, 0.0, 0.0], True)


def test_each_number_is_in_the_first_bucket_whose_bound_it_does_not_exceed() -> None:
    for seed in range(20):
        rng = random.Random(seed)
        bounds = tuple(sorted(rng.sample(range(50), 8)))
        numbers = [*bounds, *(rng.uniform(-5, 60) for _ in range(100)), math.inf]
        histogram = Histogram("x_seconds", tuple(map(float, bounds)), "Help.", leg=("a",))
        for number in numbers:
            histogram.observe(number, "a")
        wanted = [0.0] * 9
        for number in numbers:
            wanted[bisect_left(bounds, number)] += 1
        assert histogram.values["a",] == [*wanted, math.inf], f"seed {seed}"


def test_a_bucket_names_the_newest_of_those_that_have_names() -> None:
    histogram, before_s = Histogram("x_seconds", (1.0,), "Help."), time.time()
    for number, name in ((0.5, "old"), (0.6, "new"), (2.0, "large")):
        histogram.observe(number, exemplar={"request_id": name})
    histogram.observe(0.7, exemplar={})
    histogram.observe(0.8)
    found = histogram.series().exemplars
    assert {bucket: each[:2] for bucket, each in found.items()} == {
        0: ({"request_id": "new"}, 0.6),
        1: ({"request_id": "large"}, 2.0),
    }
    assert all(before_s <= at_s <= time.time() for _, _, at_s in found.values())


def test_single_numbers_are_kept_once_they_are_asked_for_until_they_are_taken() -> None:
    histogram = Histogram("x_seconds", (1.0,), "Help.", leg=("a",))
    histogram.observe(1, "a")
    histogram.keep_samples()
    histogram.observe(2, "a")
    histogram.observe(3, "a")
    histogram.observe(4, "b")
    assert histogram.take_samples() == {("a",): [2.0, 3.0], ("b",): [4.0]}
    assert histogram.take_samples() == {}
    assert histogram.values["a",] == [1.0, 2.0, 6.0]
    bounded = histogram.series("c")
    for _ in range(100_001):
        bounded.observe(1.0)
    assert len(bounded.take_samples()) == 100_000


def test_numbers_of_several_processes_add_up_but_for_what_all_of_them_know() -> None:
    registry = Registry()
    counter = registry.add(Counter("x_total", "Help.", leg=()))
    gauge = registry.add(Gauge("y", "Help.", of_all=True))
    histogram = registry.add(Histogram("z_seconds", (1.0,), "Help."))
    counter.add(2, "a")
    gauge.set(7)
    histogram.observe(0.5)
    other: Numbers = {
        "x_total": [(("a",), [3.0]), (("b",), [1.0])],
        "y": [((), [7.0])],
        "z_seconds": [((), [0.0, 4.0, 20.0])],
    }
    text = registry.exposition(others=[other])[0].decode()
    for line in (
        'x_total{leg="a"} 5.0',
        'x_total{leg="b"} 1.0',
        "y 7.0",
        "z_seconds_count 5.0",
        "z_seconds_sum 20.5",
    ):
        assert f"\n{line}\n" in text


def test_busy_time_is_the_union_of_what_is_in_flight() -> None:
    for seed in range(50):
        rng = random.Random(seed)
        spans = [(begin, begin + rng.randint(1, 9)) for begin in (rng.randint(0, 60) for _ in range(30))]
        busy = Busy()
        gained = sum(busy.add(*span) for span in sorted(spans, key=lambda span: span[1]))
        union = len({second for begin, end in spans for second in range(begin, end)})
        assert gained == busy.total_s == union, f"seed {seed}"


def test_speed_of_the_link_is_bytes_by_busy_time() -> None:
    metrics = WorkerMetrics(transports=("tcp",))
    for begin_s, end_s in ((1.0, 2.0), (1.5, 3.0), (9.0, 10.0)):
        metrics.counting(
            LayerLanded(
                at_s=end_s,
                transfer_id="t",
                layer=0,
                start=0,
                end=1,
                nbytes=100,
                transport="tcp",
                submitted_s=begin_s,
                asked_s=begin_s,
            )  # fmt: skip
        )
    text = metrics.exposition()[0].decode()
    assert '\npdlink_push_busy_seconds_total{transport="tcp"} 3.0\n' in text
    assert '\npdlink_transfer_bytes_total{transport="tcp"} 300.0\n' in text


def test_a_push_of_20_us_and_one_of_200_fall_into_different_buckets() -> None:
    metrics = WorkerMetrics(transports=("mapped",))
    for took_s in (20e-6, 200e-6):
        at = {"at_s": 1.0 + took_s, "submitted_s": 1.0, "asked_s": 1.0}
        metrics.counting(LayerLanded(transfer_id="t", layer=0, start=0, end=1, nbytes=9, transport="mapped", **at))
    counts = re.findall(r"\npdlink_push_seconds_bucket\{.*?\} ([0-9.]+)", metrics.exposition()[0].decode())
    assert {"0.0", "1.0", "2.0"} == set(counts), "the first bucket ends below 20 us"


def test_a_failed_transfer_is_counted_by_a_code_and_never_by_a_peers_words() -> None:
    metrics = WorkerMetrics()
    for reason in ("peer_lost: silent for 3 s", "refused:evil\nfactor: it differs", "not_needed", "what is this"):
        metrics.counting(
            TransferEnded(
                transfer_id="t",
                side="sender",
                peer="p",
                state="FAILED",
                reason=reason,
                nbytes=0,
                transport="",
                started_s=0.0,
            )  # fmt: skip
        )
    lines = [line for line in metrics.exposition()[0].decode().splitlines() if not line.endswith(" 0.0")]
    for code in ("peer_lost", "refused", "other"):
        assert f'pdlink_transfer_failures_total{{reason="{code}",side="sender"}} 1.0' in lines
    assert 'pdlink_transfers_total{side="sender",state="failed"} 3.0' in lines
    assert 'pdlink_transfers_total{side="sender",state="unneeded"} 1.0' in lines


@pytest.mark.parametrize(("event", "field", "declared"), [("MessageDropped", "reason", DROPPED),
                                                          ("HandlingFailed", "what", HANDLED)])  # fmt: skip
def test_every_value_that_is_emitted_is_declared(event: str, field: str, declared: tuple[str, ...]) -> None:
    emitted = set()
    for path in (ROOT / "pdlink").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == event:
                emitted |= {word.value.value for word in node.keywords
                            if word.arg == field and isinstance(word.value, ast.Constant)}  # fmt: skip
    assert emitted
    assert emitted <= set(declared)


def test_names_end_in_their_unit_and_counters_in_total() -> None:
    for registry in (ProxyMetrics(), WorkerMetrics(store=True), StoreProcessMetrics()):
        for metric in registry.metrics:
            assert metric.name.startswith(("pdlink_", "process_"))
            assert metric.name.endswith("_total") == isinstance(metric, Counter), metric.name
            assert isinstance(metric, Histogram) <= metric.name.endswith("_seconds"), metric.name
            assert not metric.name.endswith(("_nbytes", "_s", "_ms", "_info_total")), metric.name


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool: make test unpacks one")
@pytest.mark.parametrize("registry", [ProxyMetrics(), WorkerMetrics(store=True), StoreProcessMetrics()], ids=type)
def test_promtool_finds_nothing_to_complain_about(registry: Registry) -> None:
    text, _ = registry.exposition()
    found = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, timeout=60)
    assert (found.returncode, found.stdout + found.stderr) == (0, b"")


def test_a_process_tells_its_version_memory_and_descriptors() -> None:
    lines = ProxyMetrics().exposition()[0].decode().splitlines()
    values = {line.split(" ")[0]: float(line.split(" ")[1]) for line in lines if line.startswith("process_")}
    assert values["process_resident_memory_bytes"] > 1e6
    assert 0 < values["process_open_fds"] < values["process_max_fds"]
    assert any(line.startswith('pdlink_build_info{python_version="3.') for line in lines)
