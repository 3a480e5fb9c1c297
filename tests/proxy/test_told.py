"""What clients and operators are told: clients a stable code and an id, the log everything under that id."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from typing import TYPE_CHECKING, Any

import pytest

from pdlink.api.errors import error_code, excerpt, rejection
from pdlink.few_lines import LINES
from pdlink_proxy.steps import Leg
from pdlink_proxy.worker import State
from tests.proxy.fakes import DEADLINE_S, DONE, FakeWorker, Proxy, proxy_of, until

if TYPE_CHECKING:
    from pathlib import Path

SECRET = "tcp://10.9.8.7:8101 traceback " + "s" * 3000
DOCUMENT = json.dumps({"error": {"message": SECRET, "type": "x", "param": None, "code": "transfer_failed"}}).encode()


def lines_about(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if text in record.getMessage()]


async def post(proxy: Proxy, **body: Any) -> tuple[int, bytes]:
    headers = {"X-Request-Id": "req-mine"}
    async with proxy.client.post(
        f"{proxy.url}/v1/completions", json={"model": "m", "prompt": "p", **body}, headers=headers
    ) as response:
        return response.status, await response.read()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fault", "status", "code"),
    [
        ("status", 502, "transfer_failed"),
        ("html", 500, "internal_error"),
        ("reset", 502, "peer_lost"),
        ("garbage", 502, "protocol_error"),
    ],
)
async def test_a_client_sees_a_code_and_its_id_and_nothing_of_the_workers(
    prefill: FakeWorker, decode: FakeWorker, stream: bool, fault: str, status: int, code: str,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    prefill.gate = asyncio.Event()
    match fault:
        case "status":
            decode.fail_with, decode.fail_body = 502, DOCUMENT
        case "html":
            decode.fail_with, decode.fail_body, decode.content_type = 500, SECRET.encode(), "text/html"
        case "reset":
            decode.resets = 1
        case "garbage":
            decode.answer_override, decode.content_type = SECRET.encode(), "text/html"
            decode.stream_override = f"data: {SECRET}\n\n".encode()
    async with proxy_of([prefill], [decode], retries=0) as proxy:
        got, data = await post(proxy, stream=stream)
    error = json.loads(data)["error"]
    assert (got, error["code"]) == (status, code)
    assert "req-mine" in error["message"]
    for word in ("10.9.8.7", "traceback", "sss", decode.url, str(decode.port), decode.name):
        assert word not in data.decode(), "not for clients"
    (line,) = lines_about(caplog, "request req-mine")
    assert decode.received[0].transfer_id in line
    assert decode.url in line
    assert (fault in ("reset",)) or "10.9.8.7" in line or stream


async def test_a_stream_that_breaks_names_no_worker(prefill: FakeWorker, decode: FakeWorker) -> None:
    decode.break_after = 2
    async with proxy_of([prefill], [decode]) as proxy:
        _, data = await post(proxy, stream=True)
    assert b"stream_error" in data
    assert b"(request req-mine)" in data
    assert b"127.0.0.1" not in data


async def test_a_request_that_is_tried_again_is_logged_with_both_ids(
    prefill: FakeWorker, decodes: list[FakeWorker], caplog: pytest.LogCaptureFixture
) -> None:
    prefill.gate = asyncio.Event()
    decodes[0].fail_with = 503
    async with proxy_of([prefill], decodes) as proxy:
        assert (await post(proxy))[0] == 200
    (line,) = lines_about(caplog, "request req-mine")
    assert line.startswith(f"request req-mine, transfer {decodes[0].received[0].transfer_id}: decode leg on ")
    assert line.endswith("; tried again")


async def test_a_worker_that_fails_many_requests_has_a_few_lines_in_its_own_words(
    prefill: FakeWorker, decode: FakeWorker, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdlink.few_lines.WINDOW_S", 10 * DEADLINE_S)
    decode.fail_with, decode.fail_body = 502, DOCUMENT
    async with proxy_of([prefill], [decode], retries=0) as proxy:
        for _ in range(3 * LINES):
            assert (await post(proxy))[0] == 502
        assert proxy.counted("leg_failures_total", leg="decode", reason="502") == 3 * LINES
    told = lines_about(caplog, "request req-mine")
    assert len(told) == LINES
    assert json.loads(DOCUMENT)["error"]["message"][:100] in told[0]
    assert '{"error"' not in told[0]


async def test_what_a_client_did_wrong_is_told_in_the_workers_words_and_not_logged(
    prefill: FakeWorker, decode: FakeWorker, caplog: pytest.LogCaptureFixture
) -> None:
    error = {"message": "max_tokens: got -1", "type": "t", "param": "max_tokens", "code": 400}
    decode.fail_with, decode.fail_body = 400, json.dumps({"error": {**error, "more": SECRET}}).encode()
    async with proxy_of([prefill], [decode]) as proxy:
        status, data = await post(proxy)
    assert status == 400
    assert json.loads(data) == {"error": error}
    assert lines_about(caplog, "req-mine") == []


@pytest.mark.parametrize("leg", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("text/html", b'{"choices":[]}'),
        ("application/json", b"<html>"),
        ("application/json", b""),
        ("application/json", b"[]"),
        ("application/json", b'{"choices":{}}'),
        ("application/json", b'{"error":{"message":"m"}}'),
        ("application/json", b"[" * 100_000),
    ],
)
async def test_a_200_that_is_no_answer_is_a_fault_of_its_worker(
    prefill: FakeWorker, decodes: list[FakeWorker], leg: str, content_type: str, body: bytes
) -> None:
    bad = prefill if leg == "prefill" else decodes[0]
    bad.answer_override, bad.content_type = body, content_type
    if leg == "decode":
        prefill.gate = asyncio.Event()
    async with proxy_of([prefill], decodes) as proxy:
        status, data = await post(proxy)
        assert status == 200
        assert json.loads(data)["choices"]
        assert proxy.counted("leg_failures_total", leg=leg, reason="malformed") == 1


def test_codes_that_are_not_ours_are_not_passed_on() -> None:
    assert error_code(DOCUMENT) == "transfer_failed"
    for code in ('"whatever they like"', "[1]", "7", "null"):
        assert error_code(b'{"error":{"code":%s}}' % code.encode()) == "internal_error"


def test_a_rejection_without_words_gets_some() -> None:
    for body in (b"", b"<html>", b'{"detail":"Not Found"}', b'{"error":7}'):
        error = json.loads(rejection(404, body))["error"]
        assert (error["message"], error["code"]) == ("the request was rejected with status 404", "invalid_request")
    assert len(json.loads(rejection(400, DOCUMENT))["error"]["message"]) == 2000


def test_what_goes_to_the_log_is_one_line_of_bounded_length() -> None:
    assert "\n" not in excerpt(b"a\nb\x1b[31m")
    assert len(excerpt(b"\xff" * 10_000)) < 2500


# ---- the proxy's own key


@pytest.fixture
def wrong_key(tmp_path: Path) -> str:
    (tmp_path / "key").touch(0o600)
    (tmp_path / "key").write_text("wrong\n")
    return str(tmp_path / "key")


async def test_a_wrong_worker_key_is_found_by_the_health_check_and_named(
    prefill: FakeWorker, decode: FakeWorker, wrong_key: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A client that reads `invalid_api_key` takes its own key for wrong."""
    prefill.key = decode.key = "right"
    async with proxy_of([prefill], [decode], worker_key_file=wrong_key) as proxy:
        assert [worker.state for worker in proxy.router.services.pools.all] == [State.BARRED] * 2
        status, data = await post(proxy)
        assert (status, json.loads(data)["error"]["code"]) == (502, "worker_key_refused")
        assert proxy.counted("requests_total", outcome="failed") == 1
        assert proxy.counted("requests_total", outcome="rejected") == 0
        (line,) = lines_about(caplog, decode.url)
        assert "worker_key_file" in line
        async with proxy.client.get(f"{proxy.url}/health") as response:
            assert response.status == 503
            assert "worker_key_file" in (await response.json())["reason"]
        decode.key = prefill.key = ""
        await until(
            lambda: all(worker.state is State.OK for worker in proxy.router.services.pools.all), "being let in"
        )
        assert (await post(proxy))[0] == 200
    assert prefill.received[:-1] == decode.received[:-1] == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("side", ["prefill", "decode", "both"])
async def test_a_worker_whose_key_changes_under_way_is_the_operators_problem(
    prefill: FakeWorker, decode: FakeWorker, side: str, stream: bool, wrong_key: str
) -> None:
    async with proxy_of([prefill], [decode], worker_key_file=wrong_key, health_interval_s=3600, retries=0) as proxy:
        for name, worker in (("prefill", prefill), ("decode", decode)):
            worker.key = "right" if side in (name, "both") else ""
        status, data = await post(proxy, stream=stream)
        if side == "prefill":
            assert status == 200, "decode computes the prompt"
        elif stream and status == 200:
            assert b"worker_key_refused" in data, "prefill had begun the stream"
        else:
            assert (status, json.loads(data)["error"]["code"]) == (502, "worker_key_refused")
        assert proxy.counted("requests_total", outcome="rejected") == 0
        barred = Leg.PREFILL if side == "prefill" else Leg.DECODE
        await until(lambda: proxy.router.services.pools.workers[barred][0].state is State.BARRED)


# ---- the log of a normal day


def levels(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.levelname for record in caplog.records if record.name == "pdlink.proxy"]


async def test_workers_that_come_up_after_the_proxy_are_warned_of_at_once_and_health_names_them(
    prefill: FakeWorker, decode: FakeWorker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    await prefill.stop()
    await decode.stop()
    async with proxy_of([prefill], [decode], settled=False) as proxy:
        pool = proxy.router.services.pools.all
        await until(lambda: all(worker.state is State.UNREACHABLE for worker in pool))
        assert levels(caplog) == ["WARNING"] * 2
        await decode.start()
        await until(lambda: pool[1].state is State.OK)
        status, reason = proxy.router.services.standing()
        assert status == "degraded"
        assert f"prefill worker {prefill.url.removeprefix('http://')} has never answered" in reason.replace(
            "http://", ""
        )
        await prefill.start()
        await until(lambda: all(worker.state is State.OK for worker in pool))
        assert proxy.router.services.standing() == ("ok", "")
    assert levels(caplog) == ["WARNING"] * 4


async def test_a_worker_that_never_comes_is_one_warning_and_its_coming_another(
    prefill: FakeWorker, decode: FakeWorker, caplog: pytest.LogCaptureFixture
) -> None:
    await decode.stop()
    async with proxy_of([prefill], [decode], settled=False, health_interval_s=0.01) as proxy:
        await until(lambda: levels(caplog) == ["WARNING"])
        asked = asyncio.get_running_loop().time()
        await until(lambda: asyncio.get_running_loop().time() > asked + 0.1)
        (line,) = lines_about(caplog, decode.url)
        assert line.endswith("unreachable (GET /health: Connection refused)")
        await decode.start()
        await until(lambda: proxy.router.services.pools.all[1].state is State.OK)
        assert levels(caplog) == ["WARNING", "WARNING"]
        assert lines_about(caplog, decode.url)[1].endswith(": ok again")


async def test_a_normal_end_warns_of_nothing(
    prefill: FakeWorker, decode: FakeWorker, caplog: pytest.LogCaptureFixture
) -> None:
    async with proxy_of([prefill], [decode]) as proxy:
        for worker in (prefill, decode):
            worker.status = "draining"
        pool = proxy.router.services.pools.all
        await until(lambda: all(worker.state is State.DRAINING for worker in pool))
        await prefill.stop()
        await until(lambda: pool[0].state is State.UNREACHABLE)
        await proxy.router.drain()
        await decode.stop()
        await until(lambda: pool[1].state is State.UNREACHABLE)
    assert levels(caplog) == []


async def test_a_worker_that_dies_is_a_warning_at_once_and_so_is_its_return(
    prefill: FakeWorker, decode: FakeWorker, caplog: pytest.LogCaptureFixture
) -> None:
    async with proxy_of([prefill], [decode]) as proxy:
        await decode.stop()
        await until(lambda: proxy.router.services.pools.all[1].state is State.UNREACHABLE)
        assert levels(caplog) == ["WARNING"]
        await decode.start()
        await until(lambda: proxy.router.services.pools.all[1].state is State.OK)
        assert levels(caplog) == ["WARNING", "WARNING"]


# ---- traces and times


@pytest.mark.parametrize("stream", [False, True])
async def test_a_trace_goes_on_in_both_legs(prefill: FakeWorker, decode: FakeWorker, stream: bool) -> None:
    trace = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "tracestate": "a=1,b=2"}
    async with proxy_of([prefill], [decode]) as proxy:
        url, body = f"{proxy.url}/v1/completions", {"model": "m", "prompt": "p", "stream": stream}
        async with proxy.client.post(url, json=body, headers=trace) as response:
            await response.read()
        for worker in (prefill, decode):
            await until(lambda w=worker: len(w.received) == 1)  # type: ignore[misc]
            assert {name: worker.received[0].headers[name] for name in trace} == trace


def _times(header: str) -> dict[str, float]:
    """Of Server-Timing, in ms."""
    return {name: float(value) for name, value in re.findall(r"([a-z]+);dur=([0-9.]+)", header)}


async def test_requests_that_do_not_stream_have_times_too(prefill: FakeWorker, decode: FakeWorker) -> None:
    decode.needs = prefill
    async with proxy_of([prefill], [decode]) as proxy:
        async with proxy.post() as response:
            assert response.status == 200
            names = [part.split(";")[0].strip() for part in response.headers["Server-Timing"].split(",")]
            assert names == ["queue", "placement", "prefill", "transfer", "decode", "total"]
        async with proxy.post(stream=True) as response:
            names = [part.split(";")[0].strip() for part in response.headers["Server-Timing"].split(",")]
            assert names in (
                ["queue", "placement", "prefill", "ttft"],
                ["queue", "placement", "prefill", "transfer", "decode", "ttft"],
            )
            data = await response.read()
            assert data.endswith(DONE)
            times = _times(re.findall(rb": Server-Timing: (.*)\n: X-Pdlink-KV: ", data)[0].decode())
            assert [*times] == ["queue", "placement", "prefill", "transfer", "decode", "total"]
            assert times["placement"] <= times["queue"] + 1
            assert times["decode"] == pytest.approx(times["prefill"] + times["transfer"], abs=0.2)
            assert times["queue"] + times["decode"] <= times["total"] + 0.2
        count = "time_to_first_token_seconds_count"
        await until(lambda: sum(proxy.counted(count, first_leg=leg) for leg in ("prefill", "decode")) == 2)
        await until(lambda: proxy.counted("request_duration_seconds_count", outcome="ok") == 2)
        for stage in ("queue", "placement", "prefill", "transfer"):
            assert proxy.counted("stage_seconds_count", stage=stage) == 2


async def test_words_that_are_no_http_are_one_line_of_the_log(
    prefill: FakeWorker, decode: FakeWorker, caplog: pytest.LogCaptureFixture
) -> None:
    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nWARNING forged\x00line: 1\r\n" + b"a\x1b[31m\r\n" * 1000 + b"\r\n")
        writer.close()

    port = decode.port
    async with proxy_of([prefill], [decode], health_interval_s=3600, retries=0) as proxy:
        await decode.stop()
        server = await asyncio.start_server(babble, "127.0.0.1", port)
        status, data = await post(proxy)
        server.close()
        await server.wait_closed()
    assert status == 502
    assert b"forged" not in data
    for record in caplog.records:
        line = record.getMessage()
        assert line.isprintable(), line
        assert len(line) < 1000
