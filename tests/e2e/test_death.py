"""Workers that are killed in the middle of a transfer: clients are answered, nothing leaks, no one else restarts."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from .deployment import Answer, Deployment, prompt_of, until, worker_settings

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

LAYER_S = 0.15
ANSWER_S = 2.0
"""The client has an answer this long after the kill. Not a benchmark: the promise of the product."""

TRANSPORTS: dict[str, dict[str, Any]] = {
    "ucx-tcp": {"kind": "ucx", "ucx": {"tls": "tcp"}},
    "mapped": {"kind": "mapped"},
}


def launch(transport: dict[str, Any], policy: str) -> Deployment:
    cache = {"share_prefixes": False}  # the same prompt is sent again and must be computed again
    workers = {
        "prefill": worker_settings("prefill", transport=transport, cache=cache, simulate_layer_s=LAYER_S),
        "decode": worker_settings("decode", transport=transport, cache=cache, on_transfer_failure=policy),
    }
    return Deployment.launch(workers, {"retries": 0})


@pytest.fixture(scope="module", params=TRANSPORTS)
def recomputing(request: pytest.FixtureRequest) -> Iterator[Deployment]:
    with launch(TRANSPORTS[request.param], "recompute") as deployment:
        yield deployment


@pytest.fixture(scope="module")
def failing() -> Iterator[Deployment]:
    with launch(TRANSPORTS["ucx-tcp"], "fail") as deployment:
        yield deployment


def begin_and_reach_layer_3(deployment: Deployment, threads: ThreadPoolExecutor, prompt: list[int]) -> Future[Answer]:
    """A request whose prefill has pushed at least three of eight layers and is not done."""
    before = deployment.metric("prefill", "pdlink_layers_landed_total")
    future = threads.submit(deployment.complete, prompt)
    until(lambda: deployment.metric("prefill", "pdlink_layers_landed_total") >= before + 3, "layer 3 has landed")
    assert deployment.metric("prefill", "pdlink_layers_landed_total") < before + 8
    return future


def test_prefill_killed_after_layer_3_is_recomputed_with_the_same_answer(recomputing: Deployment) -> None:
    """vllm#35943: decode used to wait for ever. vllm#49250: the recomputed answer was another one."""
    deployment, prompt = recomputing, prompt_of(100, seed=1)
    clean = deployment.complete(prompt).text
    with ThreadPoolExecutor(1) as threads:
        future = begin_and_reach_layer_3(deployment, threads, prompt)
        deployment.kill("prefill")
        answer = future.result(ANSWER_S)
    assert answer.status == 200, answer.body
    assert answer.text == clean
    until(lambda: deployment.idle("decode"), "decode has all its blocks back")
    deployment.restart("prefill")
    until(lambda: deployment.health("proxy")["reason"] == "", "the proxy sees the new prefill")
    landed = deployment.metric("prefill", "pdlink_layers_landed_total")
    assert deployment.complete(prompt).text == clean
    assert deployment.metric("prefill", "pdlink_layers_landed_total") == landed + 8, "the KV crossed again"


def test_prefill_killed_after_layer_3_is_a_502_when_so_configured(failing: Deployment) -> None:
    """smg#2382: failures were answered 200."""
    deployment, prompt = failing, prompt_of(100, seed=2)
    with ThreadPoolExecutor(1) as threads:
        future = begin_and_reach_layer_3(deployment, threads, prompt)
        deployment.kill("prefill")
        answer = future.result(ANSWER_S)
    assert answer.status == 502
    assert answer.body["error"]["code"] == "transfer_failed"
    until(lambda: deployment.idle("decode"), "decode has all its blocks back")
    deployment.restart("prefill")
    until(lambda: deployment.health("proxy")["reason"] == "", "the proxy sees the new prefill")
    assert deployment.complete(prompt).status == 200


def test_decode_killed_after_layer_3_is_a_502_and_its_successor_works(recomputing: Deployment) -> None:
    """smg#2503: decode restarted on the same address used to poison every prefill."""
    deployment, prompt = recomputing, prompt_of(100, seed=3)
    clean = deployment.complete(prompt).text
    with ThreadPoolExecutor(1) as threads:
        future = begin_and_reach_layer_3(deployment, threads, prompt)
        deployment.kill("decode")
        answer = future.result(ANSWER_S)
    assert answer.status == 502
    until(lambda: deployment.idle("prefill"), "prefill has all its blocks back")
    deployment.restart("decode")
    until(lambda: deployment.health("proxy")["status"] == "ok", "the proxy sees the new decode")
    assert deployment.complete(prompt).text == clean


def test_prefill_that_is_stopped_and_wakes_up_later_harms_nobody(recomputing: Deployment) -> None:
    """nixl#2047: alive but stalled. Its late bytes must not reach blocks that others have by then."""
    deployment, prompt, other = recomputing, prompt_of(100, seed=4), prompt_of(120, seed=5)
    clean = [deployment.complete(prompt).text, deployment.complete(other).text]
    with ThreadPoolExecutor(1) as threads:
        future = begin_and_reach_layer_3(deployment, threads, prompt)
        deployment.kill("prefill", signal.SIGSTOP)
        try:
            answer = future.result(20.0)
            assert answer.text == clean[0]
            until(lambda: deployment.idle("decode"), "decode has all its blocks back")
        finally:
            deployment.kill("prefill", signal.SIGCONT)
    until(lambda: deployment.health("proxy")["status"] == "ok", "the proxy sees prefill again")
    until(lambda: deployment.idle("prefill"), "prefill has given up the old transfer")
    assert [deployment.complete(prompt).text, deployment.complete(other).text] == clean


def test_workers_that_do_not_fit_are_a_502_and_health_names_the_factor() -> None:
    """vllm#29503: a mismatch used to show as garbage; here an error comes at once, and /health says why."""
    workers = {
        "prefill": worker_settings("prefill", model={"num_layers": 8, "seed": 1}),
        "decode": worker_settings("decode", on_transfer_failure="fail"),
    }
    with Deployment.launch(workers, {"retries": 0}) as deployment:
        answer = deployment.complete(prompt_of(40))
        assert answer.status == 502
        assert answer.took_s < ANSWER_S
        until(lambda: deployment.health("proxy")["refused_pairs"], "the proxy has heard of it")
        (pair,) = deployment.health("proxy")["refused_pairs"]
        assert (pair["factor"], {pair["local"], pair["remote"]}) == (
            "revision",
            {"seed-0-layers-8", "seed-1-layers-8"},
        )
        for label in ("prefill", "decode"):
            until(lambda label=label: deployment.idle(label), f"{label} is idle")  # type: ignore[misc]
