"""A plain request is served as `Exchange` serves it, without one; whatever is unusual makes one."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from pdlink_proxy import app, plain
from pdlink_proxy.client_answer import ClientAnswer
from pdlink_proxy.exchange import Exchange
from pdlink_proxy.plain import Plain
from pdlink_proxy.steps import Outcome
from tests.proxy.fakes import FakeWorker, proxy_of, until

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tests.proxy.fakes import Proxy

_VARIES = frozenset(
    {"at_s", "total_s", "queued_s", "prefill_s", "decode_s", "ttft_s", "per_token_s", "waited_s", "tries"}
)
_NAMED_ANEW = frozenset({"request_id", "transfer_id", "legs"})


def _kept(found: Any) -> dict[str, Any]:
    """Of a record or a decision, what is the same for equal requests; of the rest, whether it is there."""
    said = msgspec.structs.asdict(found)
    return {
        name: value is not None if name in _VARIES else value
        for name, value in said.items()
        if name not in _NAMED_ANEW
    }


async def _served(proxy: Proxy, **body: Any) -> tuple[int, list[str], dict[str, Any]]:
    async with proxy.post(**body) as response:
        names = [name for name in response.headers if name != "Date"]
        return response.status, names, msgspec.json.decode(await response.read())


async def _all_about_one(prefill: FakeWorker, decode: FakeWorker, **more: Any) -> dict[str, Any]:
    """What a proxy tells of a request: its answer, record, decisions and metrics."""
    async with proxy_of([prefill], [decode], **more) as proxy:
        status, names, answer = await _served(proxy, max_tokens=5)
        router = proxy.router
        (record,), decisions = router.services.records, list(router.services.decisions)
        metrics = {
            name: {labels: sum(numbers[:-1]) if len(numbers) > 1 else numbers[0] for labels, numbers in found}
            for name, found in router.services.metrics.numbers().items()
            if name.startswith("pdlink_proxy_")
        }
        return {
            "answer": (status, names, sorted(answer)),
            "record": _kept(record),
            "legs": [(leg.leg, leg.worker, leg.answered_s is not None) for leg in record.legs],
            "decisions": [_kept(decision) for decision in decisions],
            "metrics": metrics,
            "left": (
                router.services.num_running,
                len(router.services.shared.alarms),
                [worker.in_flight for worker in router.services.pools.all],
            ),
        }


@pytest.fixture
def exchanges(monkeypatch: pytest.MonkeyPatch) -> list[Exchange]:
    """Every Exchange that a plain request has made."""
    made: list[Exchange] = []

    def make(*given: Any, **more: Any) -> Exchange:
        made.append(Exchange(*given, **more))
        return made[-1]

    monkeypatch.setattr(plain, "Exchange", make)
    return made


async def test_a_plain_request_is_told_of_as_an_exchange_tells_of_it(
    prefill: FakeWorker, decode: FakeWorker, monkeypatch: pytest.MonkeyPatch, exchanges: list[Exchange]
) -> None:
    short = await _all_about_one(prefill, decode)
    assert not exchanges
    monkeypatch.setattr(app, "opened_request", partial(Exchange, whole=False))
    assert await _all_about_one(prefill, decode) == short


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
    ("happens", "more", "num_exchanges"),
    [
        (_answers_late, {}, 0),
        (_breaks, {}, 1),
        (_fails, {}, 1),
        (lambda *_: None, {"decode_alone_tokens": 10_000}, 1),
    ],
    ids=["prefill is late", "prefill breaks", "prefill fails", "decode alone"],
)
async def test_what_is_unusual_is_an_exchanges_from_there_on(
    prefill: FakeWorker,
    decode: FakeWorker,
    happens: Callable[[FakeWorker, FakeWorker], None],
    more: Mapping[str, Any],
    num_exchanges: int,
    exchanges: list[Exchange],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pdlink_proxy.running_leg.LET_GO_S", 0.05)
    happens(prefill, decode)
    async with proxy_of([prefill], [decode], **more) as proxy:
        status, _, answer = await _served(proxy)
        assert (status, answer["leg"]) == (200, "alone" if "decode_alone_tokens" in more else "decode")
        assert len(exchanges) == num_exchanges
        router = proxy.router
        await until(lambda: not any(worker.in_flight for worker in router.services.pools.all), "the end of the legs")
        assert (router.services.num_running, len(router.services.shared.alarms)) == (0, 0)
        assert [worker.work.requests for worker in router.services.pools.all] == [0, 0]
        (record,) = router.services.records
        assert (record.outcome, record.request_id) == ("ok", decode.received[0].headers["X-Request-Id"])
        assert {each.reason for each in router.services.decisions if each.verdict == "ended"} == {
            f"ok, KV {record.kv}"
        }


async def test_a_client_that_leaves_ends_both_legs(
    prefill: FakeWorker, decode: FakeWorker, exchanges: list[Exchange]
) -> None:
    prefill.gate = decode.gate = asyncio.Event()
    async with proxy_of([prefill], [decode]) as proxy:
        asked = asyncio.create_task(_served(proxy))
        await until(lambda: bool(prefill.received and decode.received), "both legs")
        (running,) = proxy.router.services.exchanges
        assert isinstance(running, Plain)
        asked.cancel()
        await until(lambda: prefill.received[0].aborted and decode.received[0].aborted, "the end of both legs")
        await until(lambda: proxy.router.services.num_running == 0, "the end of the request")
        assert [exchange._flow.outcome for exchange in exchanges] == [Outcome.CLIENT_LEFT]


async def test_a_deadline_ends_a_plain_request_with_an_error(
    prefill: FakeWorker, decode: FakeWorker, exchanges: list[Exchange]
) -> None:
    prefill.gate = decode.gate = asyncio.Event()
    async with proxy_of([prefill], [decode], request_timeout_s=0.2) as proxy:
        status, _, answer = await _served(proxy)
        assert (status, len(exchanges)) == (504, 1)
        assert "request_timeout_s" in answer["error"]["message"] or answer["error"]["code"]


async def test_running_plain_requests_end_with_an_error_when_the_drain_time_is_over(
    prefill: FakeWorker, decode: FakeWorker
) -> None:
    prefill.gate = decode.gate = asyncio.Event()
    async with proxy_of([prefill], [decode], drain_s=0.05) as proxy:
        asked = asyncio.create_task(_served(proxy))
        await until(lambda: bool(prefill.received and decode.received), "both legs")
        await proxy.router.drain()
        assert (await asked)[0] == 503


async def test_the_end_of_a_record_and_its_duration_are_of_one_moment(
    prefill: FakeWorker, decode: FakeWorker, monkeypatch: pytest.MonkeyPatch, exchanges: list[Exchange]
) -> None:
    """Traces take one from the other: a request would begin after the transfer that it starts."""
    respond = ClientAnswer.respond_json

    def slowly(self: ClientAnswer, lines: str, body: bytes) -> None:
        respond(self, lines, body)
        time.sleep(0.2)  # of the proxy's own code

    monkeypatch.setattr(ClientAnswer, "respond_json", slowly)
    async with proxy_of([prefill], [decode]) as proxy:
        await _served(proxy)
        (record,), (placed, _) = proxy.router.services.records, proxy.router.services.decisions
        assert abs((record.at_s - record.total_s) - (placed.at_s - placed.waited_s)) < 0.1
        assert not exchanges
