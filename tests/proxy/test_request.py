"""A request in one piece, whatever happens to it: it is answered, recorded once, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from pdlink_proxy.client_answer import ClientAnswer
from tests.proxy.fakes import FakeWorker, proxy_of, until

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tests.proxy.fakes import Proxy


async def _served(proxy: Proxy, **body: Any) -> tuple[int, dict[str, Any]]:
    async with proxy.post(**body) as response:
        return response.status, msgspec.json.decode(await response.read())


def _answers_late(prefill: FakeWorker, _decode: FakeWorker) -> None:
    prefill.gate = asyncio.Event()


def _breaks(prefill: FakeWorker, decode: FakeWorker) -> None:
    prefill.resets = 1
    decode.gate = told = asyncio.Event()
    decode.on_stop = lambda _: told.set()


def _fails(prefill: FakeWorker, decode: FakeWorker) -> None:
    prefill.fail_with = 500
    decode.gate = told = asyncio.Event()
    decode.on_stop = lambda _: told.set()


@pytest.mark.parametrize(
    ("happens", "more"),
    [
        (lambda *_: None, {}),
        (_answers_late, {}),
        (_breaks, {}),
        (_fails, {}),
        (lambda *_: None, {"decode_alone_tokens": 10_000}),
    ],
    ids=["nothing", "prefill is late", "prefill breaks", "prefill fails", "decode alone"],
)
async def test_a_request_is_recorded_once_and_leaves_nothing_behind(
    prefill: FakeWorker,
    decode: FakeWorker,
    happens: Callable[[FakeWorker, FakeWorker], None],
    more: Mapping[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pdlink_proxy.leg.LET_GO_S", 0.05)
    happens(prefill, decode)
    async with proxy_of([prefill], [decode], **more) as proxy:
        status, answer = await _served(proxy)
        assert (status, answer["leg"]) == (200, "alone" if "decode_alone_tokens" in more else "decode")
        router = proxy.router
        await until(lambda: not any(worker.in_flight for worker in router.services.pools.all), "the end of the legs")
        assert (router.services.num_running, router.services.shared.alarms.due_s) == (0, {})
        assert [worker.work.requests for worker in router.services.pools.all] == [0, 0]
        (record,) = router.services.records
        assert (record.outcome, record.request_id) == ("ok", decode.received[0].headers["X-Request-Id"])
        assert {each.reason for each in router.services.decisions_of() if each.verdict == "ended"} == {
            f"ok, KV {record.kv}"
        }


async def test_a_client_that_leaves_ends_both_legs(prefill: FakeWorker, decode: FakeWorker) -> None:
    prefill.gate = decode.gate = asyncio.Event()
    async with proxy_of([prefill], [decode]) as proxy:
        asked = asyncio.create_task(_served(proxy))
        await until(lambda: bool(prefill.received and decode.received), "both legs")
        asked.cancel()
        await until(lambda: prefill.received[0].aborted and decode.received[0].aborted, "the end of both legs")
        await until(lambda: proxy.router.services.num_running == 0, "the end of the request")
        assert proxy.counted("requests_total", outcome="client_left") == 1


async def test_a_deadline_ends_a_request_with_an_error(prefill: FakeWorker, decode: FakeWorker) -> None:
    prefill.gate = decode.gate = asyncio.Event()
    async with proxy_of([prefill], [decode], request_timeout_s=0.2) as proxy:
        status, answer = await _served(proxy)
        assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")


async def test_running_requests_end_with_an_error_when_the_drain_time_is_over(
    prefill: FakeWorker, decode: FakeWorker
) -> None:
    prefill.gate = decode.gate = asyncio.Event()
    async with proxy_of([prefill], [decode], drain_s=0.05) as proxy:
        asked = asyncio.create_task(_served(proxy))
        await until(lambda: bool(prefill.received and decode.received), "both legs")
        await proxy.router.drain()
        assert (await asked)[0] == 503


async def test_the_end_of_a_record_and_its_duration_are_of_one_moment(
    prefill: FakeWorker, decode: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Traces take one from the other: a request would begin after the transfer that it starts."""
    respond = ClientAnswer.respond

    def slowly(self: ClientAnswer, *said: Any) -> None:
        respond(self, *said)
        time.sleep(1.0)  # of the proxy's own code

    monkeypatch.setattr(ClientAnswer, "respond", slowly)
    async with proxy_of([prefill], [decode]) as proxy:
        await _served(proxy)
        (record,), (placed, _) = proxy.router.services.records, proxy.router.services.decisions_of()
        assert abs((record.at_s - record.total_s) - (placed.at_s - placed.waited_s)) < 0.5


async def test_a_request_whose_answer_cannot_be_made_fails_and_leaves_the_connection_to_others(
    prefill: FakeWorker, decode: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with proxy_of([prefill], [decode]) as proxy:

        def fails(*_: object) -> None:
            raise RuntimeError("a fault of ours")

        with monkeypatch.context() as patched:
            patched.setattr("pdlink_proxy.request.stages", fails)
            status, answer = await _served(proxy)
        assert (status, answer["error"]["code"]) == (500, "internal_error")
        assert (await _served(proxy))[0] == 200
        assert [worker.in_flight for worker in proxy.router.services.pools.all] == [0, 0]


@pytest.mark.parametrize(("length", "named"), [(60, True), (61, False)])
@pytest.mark.parametrize(
    ("traceparent", "trace"),
    [
        ("", {}),
        (f"00-{'a' * 32}-{'b' * 16}-01", {"trace_id": "a" * 32}),
        (f"00-{'a' * 32}-{'b' * 16}-00", {}),
        ("x", {}),
    ],
)
async def test_an_exemplar_names_a_request_whose_id_fits_and_its_trace_if_that_is_kept(
    prefill: FakeWorker, decode: FakeWorker, traceparent: str, trace: dict[str, str], length: int, named: bool
) -> None:
    request_id = "r" * length
    headers = {"X-Request-Id": request_id} | ({"traceparent": traceparent} if traceparent else {})
    asked = {"model": "m", "prompt": "hello"}
    async with proxy_of([prefill], [decode]) as proxy:
        async with proxy.client.post(proxy.url + "/v1/completions", json=asked, headers=headers) as response:
            assert response.status == 200
        text = proxy.router.services.metrics.exposition("application/openmetrics-text; version=1.0.0")[0].decode()
    found = [
        sample.exemplar.labels
        for family in text_string_to_metric_families(text)  # type: ignore[no-untyped-call]
        for sample in family.samples
        if sample.exemplar is not None
    ]
    said = ({"request_id": request_id} if named else {}) | trace
    assert bool(found) == bool(said)
    assert all(labels == said for labels in found), "of 128 characters in all"
