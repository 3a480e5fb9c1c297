"""The alerts: `tools/dashboards.py` writes them to deploy/prometheus/pdlink.rules.yml, with their metrics as vLLM and
SGLang name them, too. What to do at each: docs/monitoring.md."""

from __future__ import annotations

from typing import NamedTuple

RUNBOOKS = "docs/monitoring.md"
HEAD = """\
# Alerts of a pdlink deployment. What to do at each: docs/monitoring.md. Jobs as in prometheus.yml beside this file.
# Made by tools/dashboards.py from tools/alerts.py; change that.
"""


class Alert(NamedTuple):
    name: str
    """Also of its section in `RUNBOOKS`."""
    severity: str
    """critical, warning or info."""
    after: str
    """For how long the expression has to hold; empty: at once."""
    expr: str
    """Metrics as our own processes name them. One series for each thing that is told."""
    summary: str
    """A sentence."""


ALERTS = (
    Alert(
        "PdlinkProxyDown",
        "critical",
        "1m",
        'up{job="pdlink-proxy"} == 0',
        "Proxy {{ $labels.instance }} does not answer.",
    ),
    Alert(
        "PdlinkWorkerDown",
        "warning",
        "2m",
        'up{job=~"pdlink-(workers|stores)"} == 0',
        "{{ $labels.instance }} of {{ $labels.job }} does not answer.",
    ),
    Alert(
        "PdlinkNoHealthyWorker",
        "critical",
        "1m",
        "sum by (instance, leg) (pdlink_proxy_worker_healthy) == 0",
        "Proxy {{ $labels.instance }} has no healthy {{ $labels.leg }} worker.",
    ),
    Alert(
        "PdlinkRequestsFail",
        "critical",
        "5m",
        'sum by (instance) (rate(pdlink_proxy_requests_total{outcome=~"failed|broken"}[5m])) / sum by '
        "(instance) (rate(pdlink_proxy_requests_total[5m])) > 0.02",
        "{{ $value | humanizePercentage }} of the requests of {{ $labels.instance }} fail.",
    ),
    Alert(
        "PdlinkRequestsRefused",
        "warning",
        "5m",
        'sum by (instance) (rate(pdlink_proxy_requests_total{outcome="unavailable"}[5m])) / sum by (instance) '
        "(rate(pdlink_proxy_requests_total[5m])) > 0.02",
        "{{ $value | humanizePercentage }} of the requests of {{ $labels.instance }} find no worker.",
    ),
    Alert(
        "PdlinkRequestsWait",
        "warning",
        "5m",
        "pdlink_proxy_queued_requests > 10",
        "{{ $value }} requests wait for a worker at {{ $labels.instance }}.",
    ),
    Alert(
        "PdlinkPromptsRecomputed",
        "warning",
        "10m",
        'sum by (instance) (rate(pdlink_proxy_requests_kv_total{path="recomputed"}[10m])) / sum by (instance) '
        "(rate(pdlink_proxy_requests_kv_total[10m])) > 0.05",
        "Decode computed {{ $value | humanizePercentage }} of the prompts of {{ $labels.instance }} itself.",
    ),
    Alert(
        "PdlinkTransfersFail",
        "warning",
        "5m",
        'sum by (instance, side) (rate(pdlink_transfers_total{state="failed"}[5m])) / sum by (instance, side) '
        "(rate(pdlink_transfers_total[5m])) > 0.05",
        "{{ $value | humanizePercentage }} of the transfers of {{ $labels.instance }} ({{ $labels.side }}) fail.",
    ),
    Alert(
        "PdlinkPeerRefused",
        "warning",
        "5m",
        "max by (instance, peer, factor) (pdlink_refused_peers) > 0",
        "{{ $labels.instance }} and {{ $labels.peer }} do not fit together: {{ $labels.factor }} differs.",
    ),
    Alert(
        "PdlinkRequestsWaitForTheLink",
        "warning",
        "10m",
        "sum(rate(pdlink_transfer_exposed_seconds_sum[10m])) / "
        "sum(rate(pdlink_transfer_exposed_seconds_count[10m])) > 0.1 * "
        "sum(rate(pdlink_proxy_time_to_first_token_seconds_sum[10m])) / "
        "sum(rate(pdlink_proxy_time_to_first_token_seconds_count[10m]))",
        "Transfers end {{ $value | humanizeDuration }} after prefill: more than a tenth of the time to the "
        "first token.",
    ),
    Alert(
        "PdlinkBlocksInQuarantine",
        "warning",
        "10m",
        "sum by (instance) (pdlink_quarantined_blocks) > 0",
        "{{ $value }} blocks of {{ $labels.instance }} wait for a fence that does not come.",
    ),
    Alert(
        "PdlinkEndpointStalls",
        "warning",
        "",
        "max_over_time(pdlink_endpoint_longest_absence_seconds[5m]) > 2",
        "The endpoint of {{ $labels.instance }} could not run for {{ $value | humanizeDuration }}.",
    ),
    Alert(
        "PdlinkUnexpectedErrors",
        "warning",
        "",
        "sum by (instance, what) (increase(pdlink_handling_failures_total[10m])) > 0",
        "{{ $labels.instance }} met unexpected errors ({{ $labels.what }}).",
    ),
    Alert(
        "PdlinkTierLeftAlone",
        "warning",
        "5m",
        "min by (instance, tier) (pdlink_tier_answering) == 0",
        "{{ $labels.instance }} leaves its tier {{ $labels.tier }} alone: it failed or stalled.",
    ),
    Alert(
        "PdlinkTierKeepsLess",
        "warning",
        "10m",
        "max by (instance, tier) (pdlink_tier_problem) > 0 unless on (instance, tier) min by (instance, tier) "
        "(pdlink_tier_answering) == 0",
        "{{ $labels.tier }} of {{ $labels.instance }} keeps less KV than its settings say.",
    ),
    Alert(
        "PdlinkTierBehind",
        "warning",
        "10m",
        "sum by (instance, tier) (rate(pdlink_tier_writes_dropped_total[5m])) > 0",
        "Tier {{ $labels.tier }} of {{ $labels.instance }} is too slow for what is written to it.",
    ),
    Alert(
        "PdlinkDescriptorsRunOut",
        "warning",
        "5m",
        'process_open_fds{job=~"pdlink-.*"} / process_max_fds{job=~"pdlink-.*"} > 0.8',
        "{{ $labels.instance }} uses {{ $value | humanizePercentage }} of its file descriptors.",
    ),
    Alert(
        "PdlinkDecisionLogLosesLines",
        "warning",
        "",
        "sum by (instance) (increase(pdlink_proxy_decision_log_dropped_total[10m])) > 0",
        "The decision log of {{ $labels.instance }} has lost lines.",
    ),
    Alert(
        "PdlinkVersionsDiffer",
        "info",
        "1h",
        "count(count by (version) (pdlink_build_info)) > 1",
        "{{ $value }} versions of pdlink run side by side.",
    ),
)
