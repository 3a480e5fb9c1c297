"""What the page knows of servers of vLLM and SGLang, from their metrics."""

from __future__ import annotations

import pytest

from pdlink_proxy.page.exposition import report_of
from pdlink_proxy.page.report import PeerSession
from tests.proxy.fake_vllm import FakeVllm
from tests.proxy.fakes import proxy_of

VLLM = """\
# HELP vllm:num_requests_running Number of requests
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
vllm:num_requests_waiting{engine="0",model_name="m"} 4.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
vllm:generation_tokens_total{engine="0",model_name="m"} 70.0
vllm:generation_tokens_created{engine="0",model_name="m"} 1.7e+09
vllm:pdlink_transfer_bytes_total{engine="0",model_name="m",transport="mapped"} 1e+06
vllm:pdlink_transfer_bytes_total{engine="1",model_name="m",transport="mapped"} 5e+05
vllm:pdlink_tier_bytes_total{call="get",engine="0",model_name="m",tier="disk"} 7.0
vllm:pdlink_prompt_tokens_total{engine="0",model_name="m",source="computed"} 9.0
vllm:pdlink_session_info{engine="0",lane="mapped",model_name="m",peer="decode/0",transport="mapped"} 1.0
vllm:pdlink_session_info{engine="0",lane="",model_name="m",peer="gone",transport="tcp"} 0.0
vllm:pdlink_push_seconds_bucket{engine="0",le="1e-05",model_name="m"} 3.0
process_cpu_seconds_total 9.0
"""
SGLANG = """\
sglang:num_running_reqs{engine_type="unified",model_name="a \\"b\\" }",tp_rank="0"} 2.0
sglang:num_queue_reqs{engine_type="unified",model_name="m",tp_rank="0"} 1.0
sglang:num_decode_transfer_queue_reqs{engine_type="unified",model_name="m"} 3.0
sglang:token_usage{model_name="m"} 0.125
sglang:generation_tokens_total{model_name="m",is_streaming="true"} 5.0
sglang:pdlink_transfer_bytes_total{model_name="m",transport="tcp"} 8.0
"""


def test_requests_pool_rates_lanes_and_totals_of_vllm_add_up_over_its_engines() -> None:
    report = report_of(VLLM, "vllm", "decode-0")
    assert (report.name, report.requests) == ("decode-0", {"running": 3, "waiting": 4})
    assert (report.held, report.sampled) == (0.5, 70.0)
    assert report.peers == [PeerSession("decode/0", "ready", "mapped", "mapped")]
    assert report.totals["transfer_bytes"] == {"mapped": 1.5e6}
    assert report.totals["tier_bytes"] == {"disk/get": 7.0}
    assert report.totals["prompt_tokens"] == {"computed": 9.0}


def test_sglang_is_read_alike() -> None:
    report = report_of(SGLANG, "sglang", "d")
    assert report.requests == {"running": 2, "waiting": 1, "awaiting_kv": 3}
    assert (report.held, report.sampled, report.totals["transfer_bytes"]) == (0.125, 5.0, {"tcp": 8.0})


def test_what_is_no_exposition_is_refused_or_says_nothing() -> None:
    assert report_of("<html>vllm:x</html>", "vllm", "d").requests == {}
    for text, error in (
        ("vllm:num_requests_running{} x", ValueError),
        ("vllm:num_requests_running{} +Inf", OverflowError),
        ('vllm:pdlink_session_info{lane="x"} 1.0', KeyError),
        ('vllm:pdlink_tier_bytes_total{tier="x"} 1.0', KeyError),
    ):
        with pytest.raises(error):
            report_of(text, "vllm", "d")


async def test_the_page_reads_the_metrics_of_such_servers_and_survives_nonsense() -> None:
    prefill, decode = [await FakeVllm().start() for _ in range(2)]
    control = {prefill.url: ["tcp://127.0.0.1:1"]}
    prefill.metrics, decode.metrics = VLLM, 'vllm:pdlink_session_info{lane="x"} 1.0'
    try:
        async with (
            proxy_of([prefill], [decode], dialect="vllm", control=control) as proxy,
            proxy.client.get(proxy.url + "/pdlink/state") as response,
        ):
            state = await response.json()
    finally:
        for server in (prefill, decode):
            await server.stop()
    assert [each["held"] for each in state["workers"]] == [0.5, None]
    assert state["workers"][0]["requests"] == {"running": 3, "waiting": 4}
    assert state["pairs"][0]["lane"] == "mapped", "its only peer"
    assert (state["engine"], state["totals"]["prompt_tokens"]) == ("vLLM", {"computed": 9.0})
