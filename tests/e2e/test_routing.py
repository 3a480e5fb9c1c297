"""What a proxy promises when workers, clients or another proxy go, with a process for each of them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.ports import keep_port
from tests.waiting import WAIT_S, until

from .deployment import request
from .stubs import Fleet, ask, fleet_of, running, sending, streaming, url_of

pytestmark = pytest.mark.e2e


def whole(fleet: Fleet, **fields: Any) -> bool:
    """Whether a request is answered to its end."""
    if not fields.get("stream"):
        answer = ask(fleet.proxies[0], **fields)
        return answer.status == 200 and answer.text == " word"
    with streaming(fleet.proxies[0], "hello") as stream:
        return stream.read().endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("policy", ["round_robin", "cost"])
def test_with_one_of_two_dead_on_each_side_every_request_is_answered(policy: str) -> None:
    """Other routers lose half of them, or all: they blame the pair (sglang#12355)."""
    with fleet_of(2, 2) as fleet, ThreadPoolExecutor(8) as threads:
        fleet.add_proxy(policy=policy)
        answered = threading.Semaphore(0)

        def one(number: int) -> bool:
            # A stream that ran when its worker died would be another promise; those begin after the kill.
            good = whole(fleet, stream=number >= 100 and number % 2 == 0)
            answered.release()
            return good

        first = [threads.submit(one, number) for number in range(100)]
        for _ in range(25):
            assert answered.acquire(timeout=WAIT_S)
        fleet.prefill[0].kill()
        fleet.decode[0].kill()
        good = sum(each.result() for each in first) + sum(threads.map(one, range(100, 200)))
        assert good == 200
        until(fleet.idle, "nothing is left")


def test_a_decode_killed_in_mid_stream_ends_the_stream_with_an_error_the_client_can_read() -> None:
    with fleet_of(1, 1) as fleet:
        proxy = fleet.add_proxy(recover_streams=0)
        with streaming(proxy, "held") as answer:
            assert answer.readline().startswith(b"data: {")
            until(lambda: fleet.decode[0].running == 1, "decode streams")
            fleet.decode[0].kill()
            rest = answer.read()
        events = [line for line in rest.splitlines() if line.startswith(b"data:")]
        assert b'"stream_error"' in events[-2]
        assert events[-1] == b"data: [DONE]"
        until(fleet.idle, "nothing is left")
        fleet.decode[0].start()
        until(lambda: ask(proxy).status == 200, "the next one is served")


@pytest.mark.parametrize("phase", ["waits for a worker", "prefill computes", "decode streams"])
def test_a_client_that_leaves_leaves_nothing_behind(phase: str) -> None:
    with fleet_of(1, 1) as fleet:
        (prefill,), (decode,), proxy = fleet.prefill, fleet.decode, fleet.add_proxy(no_worker_timeout_s=60)
        match phase:
            case "waits for a worker":
                decode.kill()
                until(lambda: request(url_of(proxy) + "/health").status == 503, "the proxy misses decode")
                with sending(proxy, "hello"):
                    until(lambda: running(proxy) == 1, "it waits")
            case "prefill computes":
                with sending(proxy, "stuck"):
                    until(lambda: prefill.running == decode.running == 1, "both legs run")
            case _:
                with streaming(proxy, "held") as answer:
                    assert answer.readline().startswith(b"data: {")
                    until(lambda: decode.running == 1, "decode streams")
        until(fleet.idle, "nothing is left")
        if phase == "waits for a worker":
            decode.start()
            until(lambda: request(url_of(proxy) + "/health").status == 200, "decode is back")
            assert decode.requests == 0, "nobody asked for it any more"
        assert ask(proxy).status == 200


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_requests_wait_while_a_pool_is_empty_and_are_all_answered(side: str) -> None:
    """A rolling update: others answer 503 (vllm-project/router#140). Empty for 20 s: tests/proxy/test_promises.py."""
    with fleet_of(2, 2) as fleet, ThreadPoolExecutor(20) as threads:
        proxy = fleet.add_proxy(no_worker_timeout_s=60, on_no_prefill="fail")
        pool: list[Any] = getattr(fleet, side)
        for stub in pool:
            stub.kill()
        until(lambda: request(url_of(proxy) + "/health").status == 503, "the proxy misses them")
        asked = [threads.submit(ask, proxy) for _ in range(20)]
        until(lambda: running(proxy) == 20, "all wait")
        assert not any(each.done() for each in asked)
        for stub in pool:
            stub.start()
        assert [each.result().status for each in asked] == [200] * 20
        until(fleet.idle, "nothing is left")


def test_a_proxy_is_restarted_beside_another_and_no_client_loses_a_request() -> None:
    """Clients that cannot reach one go to the other, as behind a load balancer. What one has begun it ends."""
    with fleet_of(2, 2) as fleet, ThreadPoolExecutor(8) as threads:
        old, other = fleet.add_proxy(routers=2), fleet.add_proxy(routers=2)
        over = threading.Event()
        failed: list[Any] = []

        def keeps_asking(number: int) -> int:
            num = 0
            while not over.is_set():
                for proxy in (old, other) if number % 2 else (other, old):
                    try:
                        answer = ask(proxy)
                    except OSError:
                        continue
                    num += answer.status == 200
                    if answer.status == 200:
                        break
                    if answer.status != 503 or proxy is other:
                        failed.append(answer)
                else:
                    failed.append("nobody answered")
            return num

        clients = [threads.submit(keeps_asking, number) for number in range(6)]
        with streaming(old, "paced 100 ms, 10 events") as answer:
            assert answer.readline().startswith(b"data: {")
            old.terminate()
            assert answer.read().endswith(b"data: [DONE]\n\n"), "it was let finish"
        old.process.wait(WAIT_S)
        with keep_port(old.facts["port"]):
            again = fleet.add_proxy(old.facts["port"], routers=2)
        assert [ask(again).status for _ in range(10)] == [200] * 10
        over.set()
        assert failed == []
        assert all(client.result() > 0 for client in clients)
        until(fleet.idle, "nothing is left")


def rss_kb(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return int(status.partition("VmRSS:")[2].split()[0])


def test_an_open_stream_takes_less_than_25_kb_of_the_proxy() -> None:
    """What 600 more streams add to 200, so that what grows once does not count."""
    with fleet_of(1, 1) as fleet, ExitStack() as streams:
        proxy = fleet.add_proxy()
        used_kb: list[int] = []
        for more in (200, 600):
            for _ in range(more):
                streams.enter_context(sending(proxy, "held", stream=True))
            total = 200 if not used_kb else 800
            until(lambda total=total: fleet.decode[0].running == total, f"{total} streams")  # type: ignore[misc]
            used_kb.append(rss_kb(proxy.process.pid))
        each_kb = (used_kb[1] - used_kb[0]) / 600
        print(f"{each_kb:.1f} KB")
        assert each_kb < 25
