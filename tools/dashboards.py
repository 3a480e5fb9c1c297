"""Write the dashboard, deploy/grafana/pdlink.json, from the panels below, and the alerts of `tools/alerts.py`.

Both name metrics as our own processes do. What is written names them as the servers of vLLM and SGLang do, too
(`everywhere`); of requests, blocks and tokens those have their own metrics, which the panels name.

`make reference` runs it; `make lint` fails when a file is stale or a query names a metric or a label that nothing
declares, and tests/e2e/test_*prometheus.py ask every query of live deployments, with our engine, vLLM and SGLang.
"""

from __future__ import annotations

import json
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from alerts import ALERTS, HEAD, RUNBOOKS

from pdlink.integrations.stats import ENGINES, declared

ROOT = Path(__file__).parents[1]
PATH = "deploy/grafana/pdlink.json"
RULES_PATH = "deploy/prometheus/pdlink.rules.yml"
_WIDTH, _HEIGHT, _COLUMNS = 8, 7, 3


class Query(NamedTuple):
    expr: str
    legend: str = ""


class Panel(NamedTuple):
    title: str
    unit: str
    """Of Grafana: s, Bps, bytes, percentunit, reqps, short."""
    text: str
    """What it means, and what to do when it looks wrong."""
    queries: tuple[Query, ...]
    kind: str = "timeseries"


@cache
def _shown_by_engines() -> frozenset[str]:
    suffixes = {"histogram": ("_bucket", "_sum", "_count")}
    return frozenset(
        metric.name + suffix for metric in declared().metrics for suffix in suffixes.get(metric.kind, ("",))
    )


_AS_SHOWN = {"vllm": ("vllm:",), "sglang": ("sglang:", "sglang_")}
"""Prefixes by engine. SGLang's server, asked for OpenMetrics as Prometheus asks, writes a colon as an underscore
(prometheus_client 0.26)."""


def everywhere(expr: str) -> str:
    """The same query of servers of other engines, too, which show our metrics as `vllm:NAME` and `sglang:NAME`."""

    def named(found: re.Match[str]) -> str:
        engine, name, where = found[1], found[2], found[3]
        if engine is not None:
            names = [prefix + name for prefix in _AS_SHOWN[engine[:-1]]]
        elif name in _shown_by_engines():
            names = [name, *(prefix + name for engine in ENGINES for prefix in _AS_SHOWN[engine])]
        else:
            return found[0]
        if len(names) == 1:
            return found[0]
        return f'{{__name__=~"{"|".join(names)}"{"," if where else ""}{where or ""}}}'

    return re.sub(r"\b(vllm:|sglang:)?((?<=:)\w+|pdlink_\w+)(?:\{([^}]*)\})?", named, expr)


def _quantiles(metric: str, by: str = "", of: str = "") -> tuple[Query, ...]:
    """p50 and p95. of: whose, for the legend."""
    labels = f"le, {by}" if by else "le"
    rate = f"sum by ({labels}) (rate({metric}_bucket[$__rate_interval]))"
    name = (f" {{{{{by}}}}}" if by else "") + (f" {of}" if of else "")
    return tuple(Query(f"histogram_quantile({q}, {rate})", f"p{q * 100:.0f}{name}") for q in (0.5, 0.95))


def _rate(metric: str, by: str, where: str = "") -> Query:
    return Query(f"sum by ({by}) (rate({metric}{where}[$__rate_interval]))", f"{{{{{by.rpartition(', ')[2]}}}}}")


def _share(part: str, whole: str, by: str = "") -> Query:
    of = f" by ({by})" if by else ""
    return Query(
        f"sum{of} (rate({part}[$__rate_interval])) / sum{of} (rate({whole}[$__rate_interval]))",
        f"{{{{{by}}}}}" if by else "",
    )


ROWS: dict[str, tuple[Panel, ...]] = {
    "Is it well?": (
        Panel(
            "Answered well",
            "percentunit",
            "Share of the requests. Lower: see Lost legs, by reason.",
            (_share('pdlink_proxy_requests_total{outcome="ok"}', "pdlink_proxy_requests_total"),),
            "stat",
        ),
        Panel(
            "KV transferred",
            "percentunit",
            "Share of the answers whose prompt decode did not have to compute. Lower: see Recomputed, by reason.",
            (
                _share(
                    'pdlink_proxy_requests_kv_total{path=~"transferred|cached"}',
                    'pdlink_proxy_requests_kv_total{path!~"unknown|transferring"}',
                ),
            ),
            "stat",
        ),
        Panel(
            "Healthy workers",
            "short",
            "As the proxy sees them.",
            (Query("sum by (leg) (pdlink_proxy_worker_healthy)", "{{leg}}"),),
            "stat",
        ),
    ),
    "Requests": (
        Panel(
            "Requests by outcome",
            "reqps",
            "failed and broken are errors that clients see.",
            (_rate("pdlink_proxy_requests_total", "outcome"),),
        ),
        Panel(
            "Time to first token",
            "s",
            "From the request's arrival at the proxy. High: Stages says where it goes.",
            _quantiles("pdlink_proxy_time_to_first_token_seconds"),
        ),
        Panel(
            "Time per output token",
            "s",
            "Of whole requests. High: decode has too many requests at once.",
            _quantiles("pdlink_proxy_time_per_output_token_seconds"),
        ),
        Panel(
            "Stages of the first token, mean",
            "s",
            "queue: too few workers. prefill: compute. transfer: the link, or decode's queue.",
            (
                Query(
                    "sum by (stage) (rate(pdlink_proxy_stage_seconds_sum[$__rate_interval])) / "
                    "sum by (stage) (rate(pdlink_proxy_stage_seconds_count[$__rate_interval]))",
                    "{{stage}}",
                ),
            ),
        ),
        Panel(
            "Request duration, by outcome",
            "s",
            "To the end of the answer.",
            _quantiles("pdlink_proxy_request_duration_seconds", "outcome"),
        ),
        Panel(
            "Queued requests, open streams",
            "short",
            "Requests that wait for a worker, and streams to clients.",
            (
                Query("sum(pdlink_proxy_queued_requests)", "queued"),
                Query("sum(pdlink_proxy_active_streams)", "streams"),
            ),
        ),
        Panel(
            "Lost legs, by reason",
            "reqps",
            "Each was tried again, if retries were left.",
            (_rate("pdlink_proxy_leg_failures_total", "leg, reason"),),
        ),
        Panel(
            "Retries and fallbacks",
            "reqps",
            "Retries, decode alone, streams that went on elsewhere.",
            (_rate("pdlink_proxy_fallbacks_total", "kind"),),
        ),
        Panel(
            "Legs by worker",
            "short",
            "Uneven without a reason (prefixes, sizes): look at the policy.",
            (Query("sum by (leg, worker) (pdlink_proxy_in_flight_legs)", "{{leg}} {{worker}}"),),
        ),
    ),
    "Link": (
        Panel(
            "KV moved, by lane",
            "Bps",
            "The load of the link. A lane that you do not want: see the table of sessions.",
            (_rate("pdlink_transfer_bytes_total", "transport"),),
        ),
        Panel(
            "Speed while something moves",
            "Bps",
            "Bytes by the time in which a push was in flight: the speed of the link, of all senders on the lane.",
            (_share("pdlink_transfer_bytes_total", "pdlink_push_busy_seconds_total", "transport"),),
        ),
        Panel(
            "Not hidden by prefill",
            "s",
            "From the last layer being written until it has landed. This is what pdlink adds to the first token.",
            _quantiles("pdlink_transfer_exposed_seconds"),
        ),
        Panel(
            "Pushes of a layer",
            "s",
            "From handing it to the transport until it is visible.",
            _quantiles("pdlink_push_seconds"),
        ),
        Panel(
            "Pushes wait",
            "s",
            "Written and offered for, and not begun: others are on the link.",
            _quantiles("pdlink_push_wait_seconds"),
        ),
        Panel(
            "Bytes waiting and in flight",
            "bytes",
            "At the senders.",
            (Query("sum by (state) (pdlink_push_bytes)", "{{state}}"),),
        ),
        Panel(
            "Transfers ended",
            "reqps",
            "By side and end.",
            (Query("sum by (side, state) (rate(pdlink_transfers_total[$__rate_interval]))", "{{side}} {{state}}"),),
        ),
        Panel(
            "Transfers failed, by reason",
            "reqps",
            "docs/troubleshooting.md has the reasons in words.",
            (_rate("pdlink_transfer_failures_total", "side, reason"),),
        ),
        Panel(
            "Recomputed, by reason",
            "reqps",
            "Requests whose prompt decode computed. SGLang computes none: the proxy tries again.",
            (
                _rate("pdlink_fallbacks_total", "reason"),
                _rate("vllm:pdlink_transfer_failures_total", "reason", '{side="receiver"}'),
            ),
        ),
        Panel(
            "Live transfers",
            "short",
            "waiting: prefill computes, no offer yet. expected: decode has no blocks for it yet.",
            (Query("sum by (side, state) (pdlink_live_transfers)", "{{side}} {{state}}"),),
        ),
        Panel(
            "Sessions",
            "short",
            "Lane of each pair; sessions that close, blocks that wait for a fence.",
            (
                Query("sum by (transport, lane) (pdlink_session_info)", "{{transport}} {{lane}}"),
                Query('sum(pdlink_sessions{state="closing"})', "closing"),
                Query("sum(pdlink_quarantined_blocks)", "blocks in quarantine"),
            ),
        ),
        Panel(
            "Life of a transfer",
            "s",
            "From its announcement; most of it is prefill's computing.",
            _quantiles("pdlink_transfer_seconds", "side"),
        ),
    ),
    "Engine": (
        Panel(
            "Requests in engines",
            "short",
            "awaiting_kv: decode waits for a transfer.",
            (
                Query("sum by (state) (pdlink_engine_requests)", "{{state}}"),
                Query("sum(vllm:num_requests_running)", "running, vLLM"),
                Query("sum(vllm:num_requests_waiting)", "waiting, vLLM"),
                Query("sum(sglang:num_running_reqs)", "running, SGLang"),
                Query("sum(sglang:num_queue_reqs)", "waiting, SGLang"),
                Query("sum(sglang:num_decode_transfer_queue_reqs)", "awaiting_kv, SGLang"),
            ),
        ),
        Panel(
            "Blocks held",
            "percentunit",
            "Of each pool. At 1 requests wait for blocks.",
            (
                Query(
                    'sum by (instance) (pdlink_blocks{state="held"}) / sum by (instance) (pdlink_blocks_capacity)',
                    "{{instance}}",
                ),
                Query("max by (instance) (vllm:kv_cache_usage_perc)", "{{instance}}"),
                Query("max by (instance) (sglang:token_usage)", "{{instance}}"),
            ),
        ),
        Panel(
            "Prompt tokens by source",
            "short",
            "Per second: device is the engine's own prefix cache, host and below the store.",
            (
                _rate("pdlink_prompt_tokens_total", "source"),
                _rate("sglang:cached_tokens_total", "cache_source"),
                Query("sum(rate(sglang:uncached_prompt_tokens_histogram_sum[$__rate_interval]))", "others, SGLang"),
            ),
        ),
        Panel(
            "Tokens",
            "short",
            "Per second, of ended requests.",
            (
                _rate("pdlink_tokens_total", "kind"),
                *(
                    Query(f"sum(rate({engine}:{name}_tokens_total[$__rate_interval]))", kind)
                    for engine in ENGINES
                    for name, kind in (("prompt", "prompt"), ("generation", "completion"))
                ),
            ),
        ),
        Panel(
            "First token at the worker",
            "s",
            "By role, from the leg's arrival there.",
            (
                *_quantiles("pdlink_time_to_first_token_seconds", "role"),
                *_quantiles("vllm:time_to_first_token_seconds", of="vLLM"),
                *_quantiles("sglang:time_to_first_token_seconds", of="SGLang"),
            ),
        ),
        Panel(
            "Endpoint could not run",
            "s",
            "Of our engine. Longest time between two scrapes. Above 0.1 s: too few cores.",
            (Query("pdlink_endpoint_longest_absence_seconds", "{{instance}}"),),
        ),
    ),
    "Store": (
        Panel(
            "Chunks by place",
            "short",
            "Looked up per second: where they were, or missed.",
            (_rate("pdlink_store_chunks_total", "place"),),
        ),
        Panel(
            "Memory of the store",
            "bytes",
            "Of records; pinned cannot be evicted.",
            (
                Query("sum(pdlink_store_used_bytes)", "used"),
                Query("sum(pdlink_store_pinned_bytes)", "pinned"),
                Query("sum(pdlink_store_capacity_bytes)", "capacity"),
            ),
        ),
        Panel(
            "Bytes in tiers",
            "bytes",
            "Of records.",
            (Query("sum by (tier) (pdlink_tier_used_bytes)", "{{tier}}"),),
        ),
        Panel(
            "Records come and go",
            "short",
            "Evicted at once after stored: the memory is too small.",
            (_rate("pdlink_store_records_total", "change"),),
        ),
        Panel(
            "Look-ups",
            "s",
            "Of a prompt, in memory and tiers.",
            _quantiles("pdlink_store_lookup_seconds"),
        ),
        Panel(
            "Copies",
            "s",
            "Between the engine's blocks and the store.",
            _quantiles("pdlink_store_copy_seconds", "direction"),
        ),
        Panel(
            "Tiers read and written",
            "Bps",
            "Payload of records.",
            (Query("sum by (tier, call) (rate(pdlink_tier_bytes_total[$__rate_interval]))", "{{tier}} {{call}}"),),
        ),
        Panel(
            "Calls of tiers, mean",
            "s",
            "By outcome; failed and slow ones lead to a tier that is left alone.",
            (
                Query(
                    "sum by (tier, call, outcome) (rate(pdlink_tier_seconds_sum[$__rate_interval])) / "
                    "sum by (tier, call, outcome) (rate(pdlink_tier_seconds_count[$__rate_interval]))",
                    "{{tier}} {{call}} {{outcome}}",
                ),
            ),
        ),
        Panel(
            "Tiers that answer",
            "short",
            "0: left alone since it failed or stalled.",
            (Query("min by (tier) (pdlink_tier_answering)", "{{tier}}"),),
        ),
    ),
    "Processes": (
        Panel(
            "CPU",
            "short",
            "Cores in use.",
            (
                Query('rate(process_cpu_seconds_total{job=~"pdlink-.*"}[$__rate_interval])', "{{instance}}"),
                Query("sum by (instance) (rate(sglang:process_cpu_seconds_total[$__rate_interval]))", "{{instance}}"),
            ),
        ),
        Panel(
            "Memory",
            "bytes",
            "In RAM, shared memory included: the store's arena counts in each process that maps it.",
            (Query('process_resident_memory_bytes{job=~"pdlink-.*"}', "{{instance}}"),),
        ),
        Panel(
            "Versions",
            "short",
            "Processes of each.",
            (Query("count by (version) (pdlink_build_info)", "{{version}}"),),
        ),
    ),
}
"""Rows in the order in which a request passes."""


def dashboard() -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    source, top = {"type": "prometheus", "uid": "${datasource}"}, 0
    for title, row in ROWS.items():
        panels.append(
            {
                "type": "row",
                "title": title,
                "id": len(panels) + 1,
                "collapsed": False,
                "panels": [],
                "gridPos": {"x": 0, "y": top, "w": 24, "h": 1},
            }  # fmt: skip
        )
        top += 1
        for at, panel in enumerate(row):
            place = {"x": at % _COLUMNS * _WIDTH, "y": top + at // _COLUMNS * _HEIGHT, "w": _WIDTH, "h": _HEIGHT}
            panels.append(
                {
                    "type": panel.kind,
                    "title": panel.title,
                    "description": panel.text,
                    "id": len(panels) + 1,
                    "datasource": source,
                    "gridPos": place,
                    "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
                    "targets": [
                        {
                            "refId": chr(ord("A") + number),
                            "datasource": source,
                            "expr": everywhere(query.expr),
                            "legendFormat": query.legend,
                        }  # fmt: skip
                        for number, query in enumerate(panel.queries)
                    ],
                }
            )
        top += -(-len(row) // _COLUMNS) * _HEIGHT
    return {
        "title": "pdlink",
        "uid": "pdlink",
        "description": "Made by tools/dashboards.py; change that.",
        "tags": ["pdlink"],
        "schemaVersion": 36,
        "version": 1,
        "editable": True,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {
                    "name": "datasource",
                    "type": "datasource",
                    "query": "prometheus",
                    "label": "Prometheus",
                    "hide": 0,
                    "refresh": 1,
                }  # fmt: skip
            ]
        },
        "panels": panels,
    }


def page() -> str:
    return json.dumps(dashboard(), indent=1) + "\n"


def rules() -> str:
    """Of Prometheus, in YAML."""
    made = [
        {
            "alert": alert.name,
            "expr": everywhere(alert.expr),
            **({"for": alert.after} if alert.after else {}),
            "labels": {"severity": alert.severity},
            "annotations": {"summary": alert.summary, "runbook": f"{RUNBOOKS}#{alert.name.lower()}"},
        }
        for alert in ALERTS
    ]
    return HEAD + yaml.safe_dump({"groups": [{"name": "pdlink", "rules": made}]}, sort_keys=False, width=10_000)


def main() -> int:
    (ROOT / PATH).write_text(page())
    (ROOT / RULES_PATH).write_text(rules())
    print(f"{PATH}: {sum(map(len, ROWS.values()))} panels; {RULES_PATH}: {len(ALERTS)} alerts")
    return 0


if __name__ == "__main__":
    sys.exit(main())
