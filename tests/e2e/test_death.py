"""Workers that are killed in the middle of a transfer: clients are answered, nothing leaks, no one else restarts."""

from __future__ import annotations

import json
import signal
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from tests.waiting import WAIT_S, until

from ..store.process import process
from .deployment import TIMEOUTS, Answer, Deployment, prompt_of, worker_settings

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.e2e

NOT_BY_TIME = {"peer_s": 100.0, "request_s": 600.0}
"""So long that an answer within `WAIT_S` of a kill came of the lost connection, and not of silence."""

TRANSPORTS: dict[str, dict[str, Any]] = {
    "ucx-tcp": {"kind": "ucx", "ucx": {"tls": "tcp"}},
    "mapped": {"kind": "mapped"},
}


def launch(transport: dict[str, Any], policy: str, **timeouts: float) -> Deployment:
    cache = {"share_prefixes": False}  # the same prompt is sent again and must be computed again
    settings = {"transport": transport, "cache": cache, "timeouts": {**TIMEOUTS, **timeouts}}
    workers = {
        "prefill": worker_settings("prefill", **settings),
        "decode": worker_settings("decode", on_transfer_failure=policy, **settings),
    }
    return Deployment.launch(workers, {"retries": 0}, holdable=("prefill",))


@pytest.fixture(scope="module", params=TRANSPORTS)
def recomputing(request: pytest.FixtureRequest) -> Iterator[Deployment]:
    with launch(TRANSPORTS[request.param], "recompute", **NOT_BY_TIME) as deployment:
        yield deployment


@pytest.fixture(scope="module")
def failing() -> Iterator[Deployment]:
    with launch(TRANSPORTS["ucx-tcp"], "fail", **NOT_BY_TIME) as deployment:
        yield deployment


def begin_and_reach_layer_3(deployment: Deployment, threads: ThreadPoolExecutor, prompt: list[int]) -> Future[Answer]:
    """A request whose prefill has pushed three of eight layers and computes no other before it is let go."""
    before = deployment.metric("prefill", "pdlink_layers_landed_total")
    deployment.hold("prefill", "layer 2")
    future = threads.submit(deployment.complete, prompt)
    until(lambda: deployment.metric("prefill", "pdlink_layers_landed_total") == before + 3, "layer 3 has landed")
    return future


def test_prefill_killed_after_layer_3_is_recomputed_with_the_same_answer(recomputing: Deployment) -> None:
    """vllm#35943: decode used to wait for ever. vllm#49250: the recomputed answer was another one."""
    deployment, prompt = recomputing, prompt_of(100, seed=1)
    clean = deployment.complete(prompt).text
    with ThreadPoolExecutor(1) as threads:
        future = begin_and_reach_layer_3(deployment, threads, prompt)
        deployment.kill("prefill")
        answer = future.result(WAIT_S)
    deployment.let_go()
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
        answer = future.result(WAIT_S)
    deployment.let_go()
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
        answer = future.result(WAIT_S)
    deployment.let_go()
    assert answer.status == 502
    until(lambda: deployment.idle("prefill"), "prefill has all its blocks back")
    deployment.restart("decode")
    until(lambda: deployment.health("proxy")["status"] == "ok", "the proxy sees the new decode")
    assert deployment.complete(prompt).text == clean


def test_a_request_whose_decode_is_killed_goes_on_at_another_one_without_a_new_prefill() -> None:
    """The store of prefill has the prompt by then: it is loaded and pushed again, but for its last, partial chunk."""
    chunk, num_tokens = 32, 100
    tiers = {"chunk_size": chunk, "load_if_faster": False}
    settings = {"cache": {"share_prefixes": False}, "tiers": tiers, "transport": TRANSPORTS["mapped"]}
    decodes = ("decode-0", "decode-1")
    workers = {name: worker_settings(name.split("-")[0], **settings) for name in ("prefill", *decodes)}
    launched = Deployment.launch(workers, {"retries": 1}, holdable=decodes)
    with launched as deployment, ThreadPoolExecutor(1) as threads:

        def prefilled() -> tuple[float, float]:
            """Prompt tokens that prefill has computed, and that it has loaded."""
            tokens = "pdlink_prompt_tokens_total"
            of = (f'{tokens}{{source="{source}"}}' for source in ("computed", "host"))
            computed, loaded = (deployment.metric("prefill", name) for name in of)
            return computed, loaded

        prompt = prompt_of(num_tokens, seed=6)
        for decode in decodes:
            deployment.hold(decode, "answers 3")
        future = threads.submit(deployment.complete, prompt, max_tokens=200, ignore_eos=True)
        received = 'pdlink_transfers_total{side="receiver",state="ready"}'
        until(lambda: any(deployment.metric(name, received) for name in decodes), "a decode worker has the KV")
        (victim,) = (name for name in decodes if deployment.metric(name, received))
        (other,) = set(decodes) - {victim}
        assert prefilled() == (num_tokens, 0)
        assert not future.done()
        deployment.kill(victim)
        deployment.let_go()
        answer = future.result(3 * WAIT_S)
        assert answer.status == 200, answer.body
        assert prefilled() == (num_tokens + num_tokens % chunk, num_tokens - num_tokens % chunk)
        assert answer.text == deployment.complete(prompt, at=other, max_tokens=200, ignore_eos=True).text
        for name in ("prefill", other):
            until(lambda name=name: deployment.idle(name), f"{name} is idle")  # type: ignore[misc]


def test_a_request_whose_prefill_and_decode_are_killed_goes_on_from_the_store_without_a_new_prefill(
    tmp_path: Path,
) -> None:
    """A store process outlives both: it has what one prefill pushed, and the other one loads and pushes that."""
    chunk, num_tokens = 32, 100
    roles = ("prefill", "decode")
    with process(tmp_path, tiers={"max_local_cpu_size": 0.1}) as store:
        # A machine with more to do than it has cores keeps the store from answering for seconds.
        tiers = {"store": str(store.path), "chunk_size": chunk, "load_if_faster": False, "store_timeout_s": 20.0}
        settings = {"cache": {"share_prefixes": False}, "tiers": tiers, "transport": TRANSPORTS["mapped"]}
        workers = {f"{role}-{number}": worker_settings(role, **settings) for role in roles for number in range(2)}
        launched = Deployment.launch(workers, {"retries": 3}, holdable=("decode-0", "decode-1"))
        with launched as deployment, ThreadPoolExecutor(1) as threads:
            deployment.wait_store_answers(*workers)

            def counted(name: str, source: str) -> float:
                return deployment.metric(name, f'pdlink_prompt_tokens_total{{source="{source}"}}')

            prompt = prompt_of(num_tokens, seed=7)
            long: dict[str, Any] = {"max_tokens": 200, "ignore_eos": True}
            for label in deployment.holdable:
                deployment.hold(label, "answers 3")
            future = threads.submit(lambda: deployment.complete(prompt, **long))
            received = 'pdlink_transfers_total{side="receiver",state="ready"}'
            until(lambda: any(deployment.metric(f"decode-{number}", received) for number in range(2)), "KV is there")
            (decoding,) = (number for number in range(2) if deployment.metric(f"decode-{number}", received))
            (computing,) = (number for number in range(2) if counted(f"prefill-{number}", "computed"))
            prefill, decode = f"prefill-{1 - computing}", f"decode-{1 - decoding}"
            assert counted(prefill, "computed") == 0
            assert not future.done()
            deployment.kill(f"prefill-{computing}")
            deployment.kill(f"decode-{decoding}")
            deployment.let_go()
            answer = future.result(3 * WAIT_S)
            assert answer.status == 200, answer.body
            rest = num_tokens % chunk
            assert (counted(prefill, "computed"), counted(prefill, "host")) == (rest, num_tokens - rest)
            assert deployment.metric(decode, received) == 1
            computed = deployment.complete(prompt, at=decode, cache_salt="of nobody else", **long)
            assert answer.text == computed.text
            for name in (prefill, decode):
                until(lambda name=name: deployment.idle(name), f"{name} is idle")  # type: ignore[misc]


def test_streams_go_on_at_another_worker_when_theirs_is_killed() -> None:
    """Completions and chats: text, finish reason and usage of an undisturbed answer, one id."""
    decodes = ("decode-0", "decode-1")
    settings = {"transport": TRANSPORTS["mapped"]}
    workers = {name: worker_settings(name.split("-")[0], **settings) for name in ("prefill", *decodes)}
    launched = Deployment.launch(workers, holdable=("decode-0",))
    with launched as deployment, ThreadPoolExecutor(8) as threads:
        running = threading.Semaphore(0)

        def told(path: str, body: dict[str, Any], at: str) -> tuple[set[str], str, str, dict[str, Any]]:
            """(ids, text, finish reason, usage)."""
            ids: set[str] = set()
            text, finish, usage = "", "", dict[str, Any]()
            begun = at != "proxy"
            data = json.dumps(body | {"model": "pdlink-tiny", "stream": True}).encode()
            request = urllib.request.Request(deployment.url(at) + path, data, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=60) as answer:
                for line in answer:
                    if not line.startswith(b"data: {"):
                        continue
                    chunk = json.loads(line[6:])
                    assert "error" not in chunk, chunk
                    ids.add(chunk["id"])
                    usage = chunk.get("usage") or usage
                    for choice in chunk["choices"]:
                        text += choice.get("text") or choice.get("delta", {}).get("content") or ""
                        finish = choice["finish_reason"] or finish
                    if not begun and text:
                        begun = True
                        running.release()
            return ids, text, finish, usage

        options = {"max_tokens": 120, "ignore_eos": True, "stream_options": {"include_usage": True}}
        asked: list[tuple[str, dict[str, Any]]] = []
        for seed in range(2):
            how = {"temperature": 0.0}  # drawn tokens near a border differ with the batch that computes them
            asked.append(("/v1/completions", {"prompt": prompt_of(60, seed=seed), **how, **options}))
            messages = [{"role": "user", "content": f"hello {seed}"}]
            asked.append(("/v1/chat/completions", {"messages": messages, "stop": ["never said"], **how, **options}))
        deployment.hold("decode-0", "answers 5")  # its streams do not end before it is killed
        futures = [threads.submit(told, path, body, "proxy") for path, body in asked]
        for _ in asked:
            assert running.acquire(timeout=WAIT_S)
        deployment.kill("decode-0")
        answers = [future.result(3 * WAIT_S) for future in futures]
        assert deployment.metric("proxy", 'pdlink_proxy_fallbacks_total{kind="recovered"}') >= 1
        alone = list(threads.map(lambda each: told(each[0], each[1], "decode-1"), asked))
        for (ids, text, finish, usage), (_, expected, reason, counted) in zip(answers, alone, strict=True):
            assert (len(ids), text, finish) == (1, expected, reason)
            for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
                assert usage[name] == counted[name], name
        for name in ("prefill", "decode-1"):
            until(lambda name=name: deployment.idle(name), f"{name} is idle")  # type: ignore[misc]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_prefill_that_is_stopped_and_wakes_up_later_harms_nobody(transport: str) -> None:
    """nixl#2047: alive but stalled. Its late bytes must not reach blocks that others have by then."""
    prompt, other = prompt_of(100, seed=4), prompt_of(120, seed=5)
    launched = launch(TRANSPORTS[transport], "recompute", peer_s=2.5)
    with launched as deployment, ThreadPoolExecutor(1) as threads:
        clean = [deployment.complete(prompt).text, deployment.complete(other).text]
        future = begin_and_reach_layer_3(deployment, threads, prompt)
        deployment.kill("prefill", signal.SIGSTOP)
        try:
            answer = future.result(WAIT_S)
            assert answer.text == clean[0]
            until(lambda: deployment.idle("decode"), "decode has all its blocks back")
        finally:
            deployment.kill("prefill", signal.SIGCONT)
            deployment.let_go()
        until(lambda: deployment.health("proxy")["status"] == "ok", "the proxy sees prefill again")
        until(lambda: deployment.idle("prefill"), "prefill has given up the old transfer")
        assert [deployment.complete(prompt).text, deployment.complete(other).text] == clean


def test_workers_that_do_not_fit_are_never_paired_and_health_says_what_differs() -> None:
    """vllm#29503: a mismatch used to show as garbage. Here the workers say what they have."""
    workers = {
        "prefill": worker_settings("prefill", model={"num_layers": 8, "seed": 1}),
        "decode": worker_settings("decode", on_transfer_failure="fail"),
    }
    with Deployment.launch(workers, {"retries": 0}) as deployment:
        answer, alone = deployment.complete(prompt_of(40)), deployment.complete(prompt_of(40), at="decode")
        assert (answer.status, answer.text) == (200, alone.text)
        assert "transferred" not in answer.headers.get("X-Pdlink-KV", "")
        until(lambda: deployment.health("proxy")["mismatched"], "the proxy has compared them")
        body = deployment.health("proxy")
        assert body["mismatched"] == [
            {
                "factor": "model, revision or content",
                **{"prefill": "prefill", "num_prefill": 1, "decode": "decode", "num_decode": 1},
                "stranded": "prefill and decode",
            }
        ]
        assert (body["status"], body["refused_pairs"]) == ("degraded", [])
        for label in ("prefill", "decode"):
            until(lambda label=label: deployment.idle(label), f"{label} is idle")  # type: ignore[misc]
