"""What a bad leg, a bad worker or a client that leaves does to a request. Legs share their fate, nobody waits."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from pdlink_proxy import worker as workers
from pdlink_proxy.steps import Leg
from pdlink_proxy.worker import FAILURES
from tests.proxy.fakes import DEADLINE_S, DONE, END, FakeWorker, Proxy, event, proxy_of, tokens_of, until

if TYPE_CHECKING:
    import aiohttp

WHOLE = event("zero") + event("one") + event("two") + END


async def error_of(response: aiohttp.ClientResponse) -> dict[str, Any]:
    document = await response.json()
    assert set(document["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = document["error"]
    return error


def stream_error_of(data: bytes) -> dict[str, Any]:
    """The error object of a stream that ended with one and the end marker."""
    *_, error, done, rest = data.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    found: dict[str, Any] = msgspec.json.decode(error.removeprefix(b"data: "))["error"]
    assert found["type"] == "stream_error"
    return found


# ---- prefill fails


@pytest.mark.parametrize("stream", [False, True])
async def test_prefills_rejection_reaches_the_client_and_ends_decode(
    prefill: FakeWorker, decode: FakeWorker, stream: bool
) -> None:
    """Ignored by other routers, which then wait minutes for decode (sglang#24159, #9726)."""
    prefill.fail_with, decode.silent = 400, True
    async with proxy_of([prefill], [decode]) as proxy:
        async with proxy.post(stream=stream) as response:
            assert response.status == 400
            assert (await error_of(response))["code"] == "code_400"
        await until(lambda: decode.received[0].aborted, "decode's leg being closed")
        assert proxy.counted("requests_total", outcome="rejected") == 1
        assert all(worker.state.value == "ok" for worker in proxy.router.services.pools.all), (
            "a 4xx is no fault of a worker"
        )


@pytest.mark.parametrize(
    ("fault", "stream"),
    [(fault, stream) for fault in ("status", "reset", "refused", "silent") for stream in (False, True)]
    + [("error event", True), ("no event", True)],
)
async def test_decode_is_told_when_prefill_fails_and_still_answers(
    prefill: FakeWorker, decode: FakeWorker, fault: str, stream: bool
) -> None:
    """Decode's answer is held back until it has been told, so an untold decode hangs this test (sglang#9726)."""
    decode.gate = told = asyncio.Event()
    decode.on_stop = lambda _: told.set()
    match fault:
        case "status":
            prefill.fail_with = 500
        case "reset":
            prefill.resets = 1
        case "silent":
            prefill.silent = True
        case "error event":
            prefill.stream_override = b'data: {"error":{"message":"engine died","code":"engine_failure"}}\n\n'
        case "no event":
            prefill.end_after = 0
    more: dict[str, Any] = {"first_byte_timeout_s": 1.0} if fault == "silent" else {}
    if fault == "refused":
        more = {"health_interval_s": 3600}  # it is gone before its health is asked for again
    async with proxy_of([prefill], [decode], **more) as proxy:
        if fault == "refused":
            await prefill.stop()
        async with proxy.post(stream=stream) as response:
            assert response.status == 200
            data = await response.read()
        assert tokens_of(data) == WHOLE if stream else msgspec.json.decode(data)["leg"] == "decode"
        assert [transfer_id for transfer_id, _ in decode.stops] == [decode.received[0].transfer_id]
        assert sum(proxy.counted("leg_failures_total", leg="prefill", reason=reason) for reason in _REASONS) == 1


_REASONS = ("500", "reset", "stale", "connect", "timeout", "malformed")


async def test_prefill_that_dies_after_its_token_does_not_repeat_it(prefill: FakeWorker, decode: FakeWorker) -> None:
    """The client has token 0 from prefill; decode recomputes and its copy is dropped."""
    prefill.break_after = 1
    decode.gate = told = asyncio.Event()
    decode.on_stop = lambda _: told.set()
    async with proxy_of([prefill], [decode]) as proxy:
        assert await proxy.stream() == WHOLE


async def test_a_prefill_leg_that_is_lost_after_the_answer_is_nobodys_fault(
    prefill: FakeWorker, decode: FakeWorker
) -> None:
    prefill.gate = asyncio.Event()
    async with proxy_of([prefill], [decode]) as proxy:
        async with proxy.post() as answer:
            assert answer.status == 200
            await answer.read()
        (worker,) = proxy.router.services.pools.workers[Leg.PREFILL]
        await prefill.stop()
        await until(lambda: worker.in_flight == 0, "the end of its leg")
        await asyncio.sleep(0)
        assert decode.stops == []
        assert sum(proxy.router.services.metrics.totals()["proxy_leg_failures"].values()) == 0


# ---- decode fails before anything was sent


@pytest.mark.parametrize("fault", ["502", "503", "504", "reset", "refused", "silent", "error event", "no event"])
async def test_a_lost_decode_leg_is_tried_again_elsewhere(
    prefills: list[FakeWorker], decodes: list[FakeWorker], fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sglang#6857: a second attempt found the state of the first under the same id."""
    monkeypatch.setattr("pdlink_proxy.leg.LET_GO_S", 0.05)
    bad, good = decodes
    for prefill in prefills:
        prefill.gate = asyncio.Event()  # no token of theirs may commit the first attempt
    good.gate = None
    match fault:
        case "reset":
            bad.resets = 1
        case "silent":
            bad.silent = True
        case "error event":
            bad.stream_override = b'data: {"error":{"message":"engine died","code":"engine_failure"}}\n\n' + DONE
        case "no event":
            bad.end_after = 0
        case "502" | "503" | "504":
            bad.fail_with = int(fault)
    more: dict[str, Any] = {"first_byte_timeout_s": 1.0} if fault == "silent" else {}
    if fault == "refused":
        more = {"health_interval_s": 3600}  # it is gone before its health is asked for again
    async with proxy_of(prefills, decodes, **more) as proxy:
        if fault == "refused":
            await bad.stop()
        assert await proxy.stream() == WHOLE
        assert proxy.counted("attempts_total", why="first") == 1
        assert proxy.counted("attempts_total", why="retry") == 1
        assert proxy.counted("fallbacks_total", kind="retry") == 1
        prefill_ids = [got.transfer_id for worker in prefills for got in worker.received]
        assert good.received[0].transfer_id in prefill_ids
        if bad.received:
            assert bad.received[0].transfer_id != good.received[0].transfer_id
        await until(
            lambda: all(got.aborted for worker in prefills for got in worker.received), "prefill's legs to end"
        )


async def test_retries_are_bounded_and_the_last_answer_is_passed_on(
    prefills: list[FakeWorker], decodes: list[FakeWorker]
) -> None:
    for worker in decodes:
        worker.fail_with = 502
    for worker in prefills:
        worker.gate = asyncio.Event()
    more: dict[str, Any] = {"retries": 2, "on_no_prefill": "fail"}
    async with proxy_of(prefills, decodes, **more) as proxy, proxy.post(stream=True) as response:
        assert response.status == 502
        assert (await error_of(response))["code"] == "internal_error"
        assert proxy.counted("attempts_total", why="retry") == 2
    ids = [got.transfer_id for worker in decodes for got in worker.received]
    assert len(ids) == len(set(ids)) == 3


async def test_what_no_other_worker_would_do_better_is_not_tried_again(
    prefill: FakeWorker, decodes: list[FakeWorker]
) -> None:
    prefill.gate = asyncio.Event()
    for worker in decodes:
        worker.fail_with = 500
    async with proxy_of([prefill], decodes) as proxy, proxy.post(stream=True) as response:
        assert response.status == 500
        await until(lambda: prefill.received[0].aborted, "prefill's leg being closed")
    assert sum(len(worker.received) for worker in decodes) == 1


async def test_without_retries_a_dead_decode_is_a_502(prefill: FakeWorker, decode: FakeWorker) -> None:
    """Not an empty 200 (vllm-ascend#13140)."""
    decode.resets = 1
    async with proxy_of([prefill], [decode], retries=0) as proxy, proxy.post() as response:
        assert response.status == 502
        assert (await error_of(response))["code"] == "peer_lost"


async def test_a_silent_decode_is_a_504(prefill: FakeWorker, decode: FakeWorker) -> None:
    decode.silent = True
    async with proxy_of([prefill], [decode], retries=0, first_byte_timeout_s=1.0) as proxy, proxy.post() as response:
        assert response.status == 504
        assert (await error_of(response))["code"] == "deadline_exceeded"
        await until(lambda: decode.received[0].aborted, "decode's leg being closed")


async def test_prefill_is_told_when_decode_will_not_take_its_kv(prefill: FakeWorker, decode: FakeWorker) -> None:
    """Prefill has answered: closing its connection would say nothing, and its KV wait for a lease (vllm#41269)."""
    decode.gate, decode.fail_with = asyncio.Event(), 400
    async with proxy_of([prefill], [decode]) as proxy:
        answer = asyncio.create_task(_status(proxy))
        await until(lambda: bool(prefill.received) and prefill.received[0].answered, "prefill's answer")
        await until(lambda: proxy.counted("in_flight_legs", worker=prefill.url, leg="prefill") == 0, "its end")
        decode.gate.set()
        assert await answer == 400
        await until(lambda: [i for i, _ in prefill.stops] == [prefill.received[0].transfer_id], "prefill being told")


# ---- decode fails after something was sent


@pytest.mark.parametrize("fault", ["reset", "end", "silent", "502"])
async def test_a_stream_that_breaks_ends_with_a_typed_error(
    prefill: FakeWorker, decodes: list[FakeWorker], fault: str
) -> None:
    """Everybody but one router just closes the connection, and half an answer looks like a whole one."""
    sent = event("zero") + event("one")
    for decode in decodes:
        match fault:
            case "reset":
                decode.break_after = 2
            case "end":
                decode.end_after = 2
            case "silent":
                decode.gates = {2: asyncio.Event()}
            case "502":
                decode.gate, decode.fail_with, sent = asyncio.Event(), 502, event("zero")
    idle_s = 1.0 if fault == "silent" else DEADLINE_S
    async with proxy_of([prefill], decodes, idle_timeout_s=idle_s) as proxy, proxy.post(stream=True) as response:
        assert response.status == 200
        assert await response.content.readexactly(len(event("zero"))) == event("zero")
        for decode in decodes:
            if decode.gate is not None:
                decode.gate.set()
        data = event("zero") + tokens_of(await response.read())
        assert data.startswith(sent)
        error = stream_error_of(data)
        assert (
            error["code"]
            == {
                "reset": "peer_lost",
                "end": "protocol_error",
                "silent": "deadline_exceeded",
                "502": "internal_error",
            }[fault]
        )
        assert proxy.counted("requests_total", outcome="broken") == 1
        assert proxy.counted("attempts_total", why="retry") == 0
    assert sum(len(decode.received) for decode in decodes) == 1, "nothing is tried again once a byte was sent"


async def test_half_an_event_never_reaches_the_client(prefill: FakeWorker, decode: FakeWorker) -> None:
    decode.stream_override = event("zero") + event("one") + b'data: {"choices":[{"te'
    async with proxy_of([prefill], [decode]) as proxy:
        data = await proxy.stream()
    assert data.startswith(event("zero") + event("one") + b'data: {"error"')
    stream_error_of(data)


async def test_an_error_event_of_a_worker_keeps_its_code_and_is_counted(
    prefill: FakeWorker, decode: FakeWorker
) -> None:
    error = b'data: {"error":{"message":"at tcp://10.0.0.1","type":"x","param":null,"code":"engine_failure"}}\n\n'
    decode.stream_override = event("zero") + error + DONE
    async with proxy_of([prefill], [decode]) as proxy:
        data = await proxy.stream()
        assert data.startswith(event("zero"))
        assert b"10.0.0.1" not in data
        assert stream_error_of(data)["code"] == "engine_failure"
        assert proxy.counted("leg_failures_total", leg="decode", reason="error") == 1
        await until(lambda: proxy.counted("requests_total", outcome="broken") == 1)


# ---- the client leaves


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_during_prefill_ends_both_legs(
    prefill: FakeWorker, decode: FakeWorker, stream: bool
) -> None:
    """aiohttp's default lets both run on."""
    prefill.silent = decode.silent = True
    async with proxy_of([prefill], [decode]) as proxy:
        answer = asyncio.create_task(_status(proxy, stream=stream))
        await until(lambda: len(prefill.received) == len(decode.received) == 1, "both legs")
        answer.cancel()
        await until(lambda: prefill.received[0].aborted and decode.received[0].aborted, "both legs being closed")
        await until(lambda: proxy.counted("requests_total", outcome="client_left") == 1)
        assert all(worker.state.value == "ok" for worker in proxy.router.services.pools.all)


async def test_a_client_that_leaves_during_decode_ends_decode_and_tells_prefill(
    prefill: FakeWorker, decode: FakeWorker
) -> None:
    decode.silent = True
    async with proxy_of([prefill], [decode]) as proxy:
        async with proxy.post(stream=True) as response:
            await response.content.readexactly(len(event("zero")))
            await until(
                lambda: proxy.counted("in_flight_legs", worker=prefill.url, leg="prefill") == 0, "prefill's end"
            )
            response.close()
        await until(lambda: decode.received[0].aborted, "decode's leg being closed")
        await until(lambda: len(prefill.stops) == 1, "prefill being told")


async def test_a_storm_of_leaving_clients_takes_no_worker_out(prefill: FakeWorker, decode: FakeWorker) -> None:
    """Breakers fed by client aborts refuse everybody (sglang#12355)."""
    gate = decode.gate = asyncio.Event()
    async with proxy_of([prefill], [decode]) as proxy:
        leaving = [asyncio.create_task(_status(proxy, stream=False)) for _ in range(30)]
        await until(lambda: len(decode.received) == 30, "30 legs")
        for task in leaving:
            task.cancel()
        await until(lambda: all(got.aborted for got in decode.received), "all legs being closed")
        gate.set()
        assert await proxy.stream() == WHOLE
        assert proxy.counted("leg_failures_total", leg="decode", reason="reset") == 0


async def test_a_client_that_stops_reading_is_closed_and_decode_ended(
    prefill: FakeWorker, decode: FakeWorker
) -> None:
    """And it is not decode that is blamed for the silence."""
    decode.stream_override = event("zero") + event("x" * 65536) * 512  # more than all the buffers on the way hold
    async with proxy_of([prefill], [decode], idle_timeout_s=1.0) as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(proxy.url.rsplit(":", 1)[1]), limit=1024)
        body = b'{"model":"m","prompt":"p","stream":true}'
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        await until(lambda: proxy.counted("requests_total", outcome="client_left") == 1, "the client being closed")
        await until(lambda: decode.received[0].aborted, "decode's leg being closed")
        assert proxy.counted("leg_failures_total", leg="decode", reason="timeout") == 0
        writer.close()
        assert reader is not None


# ---- connections


async def test_a_stale_pooled_connection_is_not_the_clients_problem(prefill: FakeWorker, decode: FakeWorker) -> None:
    """The worker closes an idle connection just when the next request is sent into it."""
    prefill.gate = asyncio.Event()
    async with proxy_of([prefill], [decode], retries=0) as proxy:
        assert await proxy.stream() == WHOLE
        decode.resets = 1
        assert await proxy.stream() == WHOLE
        assert proxy.counted("attempts_total", why="resend") == 1
        assert proxy.counted("attempts_total", why="retry") == 0
        ids = [got.transfer_id for got in decode.received]
        assert len(ids) == len(set(ids)) == 3, "a new transfer id, since the first may have arrived"
        assert proxy.router.services.pools.all[1].faults == 0


async def test_a_leg_that_answers_late_is_not_cut_off(prefill: FakeWorker, decode: FakeWorker) -> None:
    """When decode is done first, prefill ends by itself; its connection is not thrown away."""
    prefill.gates = {0: asyncio.Event()}
    async with proxy_of([prefill], [decode]) as proxy:
        assert await proxy.stream() == WHOLE
        prefill.gates[0].set()
        await until(lambda: prefill.received[0].answered, "prefill's end")
        assert not prefill.received[0].aborted
        await until(lambda: proxy.counted("in_flight_legs", worker=prefill.url, leg="prefill") == 0)


async def test_a_redirect_of_a_worker_is_not_followed(prefill: FakeWorker, decodes: list[FakeWorker]) -> None:
    decode, elsewhere = decodes
    decode.fail_with, decode.redirect_to = 307, elsewhere.url
    async with proxy_of([prefill], [decode]) as proxy, proxy.post() as response:
        assert response.status == 502
        assert (await error_of(response))["code"] == "protocol_error"
    assert elsewhere.received == []


async def _status(proxy: Proxy, **body: Any) -> int:
    async with proxy.post(**body) as response:
        await response.read()
        return int(response.status)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_worker_whose_legs_fail_is_left_alone_though_its_health_is_good_and_comes_back(
    prefills: list[FakeWorker], decode: FakeWorker, stream: bool
) -> None:
    bad, good = prefills
    bad.fail_with = 500
    async with proxy_of(prefills, [decode], policy="round_robin", retries=3) as proxy:
        for _ in range(3 * FAILURES):
            assert await _status(proxy, stream=stream) == 200
        assert len(bad.received) == FAILURES
        pool = proxy.router.services.pools.workers[Leg.PREFILL]
        assert [worker.describe()["fails"] for worker in pool] == [True, False]
        bad.fail_with, pool[0].breaker._closed_until_s = None, 0.0
        for _ in range(4):
            assert await _status(proxy, stream=stream) == 200
        assert len(bad.received) > FAILURES + 1
        assert not pool[0].breaker.keeps_away(0.0)


async def test_where_most_workers_fail_none_is_left_alone(prefills: list[FakeWorker], decode: FakeWorker) -> None:
    for worker in prefills:
        worker.fail_with = 500
    async with proxy_of(prefills, [decode], policy="round_robin", retries=0, on_no_prefill="fail") as proxy:
        for _ in range(4 * FAILURES):
            await _status(proxy, stream=True)
        assert len(proxy.router.services.pools.usable(Leg.PREFILL)) == 2


async def test_a_decode_that_got_no_kv_is_not_left_alone(prefill: FakeWorker, decodes: list[FakeWorker]) -> None:
    for worker in decodes:
        worker.fail_with = 502
    async with proxy_of([prefill], decodes, policy="round_robin", retries=0) as proxy:
        for _ in range(4 * FAILURES):
            await _status(proxy, stream=True)
        assert not any(worker.breaker.keeps_away(0.0) for worker in proxy.router.services.pools.all)


@pytest.mark.parametrize("answer", ["ends early", "begins with an error", "errs in the middle", "not an answer"])
async def test_a_worker_whose_answers_are_none_is_left_alone_though_their_status_is_good(
    prefill: FakeWorker, decodes: list[FakeWorker], answer: str
) -> None:
    bad, error = decodes[0], b'data: {"error":{"message":"engine died","code":"engine_failure"}}\n\n'
    match answer:
        case "ends early":
            bad.end_after = 2
        case "begins with an error":
            bad.stream_override = error + DONE
        case "errs in the middle":
            bad.stream_override = event("zero") + error + DONE
        case "not an answer":
            bad.answer_override = b"{}"
    async with proxy_of([prefill], decodes, policy="round_robin", retries=1) as proxy:
        for _ in range(3 * FAILURES):
            await _status(proxy, stream=bad.answer_override is None)
        assert len(bad.received) == FAILURES
        measured = [
            worker.work.tokens_per_s is not None for worker in proxy.router.services.pools.workers[Leg.DECODE]
        ]
        assert measured == [False, True]


async def test_legs_of_a_former_life_say_nothing_of_the_next(prefill: FakeWorker, decodes: list[FakeWorker]) -> None:
    old = decodes[0]
    old.gates[1] = goes_on = asyncio.Event()
    async with proxy_of([prefill], decodes, policy="round_robin", health_interval_s=0.01) as proxy:
        worker = proxy.router.services.pools.workers[Leg.DECODE][0]
        requests = [asyncio.create_task(_status(proxy, stream=True)) for _ in range(2 * FAILURES)]
        await until(lambda: len(old.received) == FAILURES, "requests at the old life")
        old.break_after = 2
        old.epoch = "e2"
        await until(lambda: worker.incarnations == 2, "the next life")
        calls = [worker.breaker.begin(0.0) for _ in range(FAILURES)]
        goes_on.set()
        await asyncio.gather(*requests)
        assert not worker.breaker.keeps_away(0.0)
        assert len(worker.breaker._running) == len(calls)


async def test_errors_that_a_request_caused_in_a_stream_do_not_count_against_a_worker(
    prefill: FakeWorker, decodes: list[FakeWorker]
) -> None:
    for worker in decodes:
        worker.stream_override = event("zero") + b'data: {"error":{"message":"too long","code":400}}\n\n' + DONE
    async with proxy_of([prefill], decodes, policy="round_robin") as proxy:
        for _ in range(4 * FAILURES):
            await _status(proxy, stream=True)
        assert not any(worker.breaker.keeps_away(0.0) for worker in proxy.router.services.pools.all)


@pytest.mark.parametrize("status", [400, 500])
@pytest.mark.parametrize("words", [b'"\xe9"', b"[" * 60_000], ids=["latin-1", "deep"])
async def test_an_error_that_is_no_json_is_an_error_of_its_worker(
    prefill: FakeWorker, decode: FakeWorker, status: int, words: bytes
) -> None:
    decode.fail_with, decode.fail_body = status, b'{"error":{"message":' + words + b"}}"
    async with proxy_of([prefill], [decode], retries=0) as proxy, proxy.post() as response:
        assert response.status == status
        assert (await response.json())["error"]["message"]


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_requests_in_hand_at_a_worker_that_answers_no_probe_go_elsewhere(
    prefill: FakeWorker, decode: FakeWorker, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    """And not after `first_byte_timeout_s`, which is ten minutes: a stopped process closes no connection."""
    monkeypatch.setattr(workers, "SILENT_S", 2.0)
    hung = prefill if role == "prefill" else decode
    prefill.gate, decode.gate = asyncio.Event(), asyncio.Event()
    decode.on_stop = lambda _: decode.gate.set() if decode.gate else None
    async with proxy_of([prefill], [decode], health_interval_s=0.05, connect_timeout_s=0.2) as proxy:
        (worker,) = proxy.router.services.pools.at(hung.url)
        async with asyncio.TaskGroup() as tasks:
            asking = tasks.create_task(_status(proxy))
            await until(lambda: len(hung.received) == 1, "the request there")
            hung.hung = True
            assert await asyncio.wait_for(asking, 60) == (200 if role == "prefill" else 502)
        assert (worker.in_flight, worker.legs, worker.state.value) == (0, set(), "unreachable")
