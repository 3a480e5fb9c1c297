"""What is left of a leg whose answer ends in one read with its last bytes, as that of a short or fast answer does."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from pdlink_proxy.admission import Admission
from pdlink_proxy.steps import Leg

from .fake_vllm import FakeVllm
from .fakes import DONE, END, FakeWorker, event, proxy_of, until

if TYPE_CHECKING:
    from pathlib import Path

    from aiohttp import web

    from pdlink_proxy.records import LegRecord
    from pdlink_proxy.steps import Event

    from .fakes import Proxy, Received

ERROR = b'data: {"error":{"message":"m","code":500}}\n\n'
REJECTED = b'data: {"error":{"message":"m","code":400,"type":"invalid_request_error"}}\n\n'
ALONE: dict[str, Any] = {"decode_alone_tokens": 10_000, "retries": 0, "recover_streams": 0}
_HEAD = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n"


async def write_at_once(request: web.Request, data: bytes) -> web.StreamResponse:
    """A whole stream in one write; aiohttp would make its end another one."""
    assert request.transport is not None
    request.transport.write(_HEAD % len(data) + data)
    await asyncio.Event().wait()  # until the proxy closes the connection
    raise AssertionError


class AtOnce(FakeWorker):
    async def answer(self, request: web.Request, received: Received) -> web.StreamResponse:
        if self.stream_override is None:
            return await super().answer(request, received)
        return await write_at_once(request, self.stream_override)


@pytest.fixture
async def at_once() -> Any:
    worker = await AtOnce(role="decode").start()
    yield worker
    await worker.stop()


def _legs(proxy: Proxy) -> list[LegRecord]:
    (record,) = proxy.router.services.records
    assert all(leg.ended_s is None or leg.ended_s <= record.total_s for leg in record.legs)
    return record.legs


async def _status_of(proxy: Proxy) -> int:
    async with proxy.post() as response:
        return int(response.status)


@pytest.mark.parametrize(
    ("stream", "end", "outcome"),
    [
        (event("a") + END, "served", "ok"),
        (event("a") + ERROR + DONE, "error", "broken"),
        (event("a"), "malformed", "broken"),
        (b"data: nonsense\n\n", "malformed", "failed"),
    ],
    ids=["well", "error", "no end", "no event"],
)
async def test_a_leg_that_ended_with_its_request_does_not_go_on_in_the_record(
    prefill: FakeWorker, at_once: AtOnce, stream: bytes, end: str, outcome: str
) -> None:
    at_once.stream_override = stream
    async with proxy_of([prefill], [at_once], **ALONE) as proxy:
        async with proxy.post(stream=True) as response:
            await response.read()
        (leg,) = _legs(proxy)
        assert (leg.end, leg.ended_s is not None) == (end, True)
        assert proxy.counted("requests_total", outcome=outcome) == 1
        assert [worker.work.requests for worker in proxy.router.services.pools.all] == [0, 0]


@pytest.mark.parametrize("in_pieces", [False, True])
async def test_a_stream_that_says_that_the_request_is_wrong_counts_for_nothing(
    prefill: FakeWorker, at_once: AtOnce, decode: FakeWorker, in_pieces: bool
) -> None:
    worker = decode if in_pieces else at_once
    worker.stream_override, worker.split = event("a") + REJECTED + DONE, 60
    async with proxy_of([prefill], [worker], **ALONE) as proxy:
        (of_decode,) = proxy.router.services.pools.workers[Leg.DECODE]
        of_decode.breaker.failures = 2
        async with proxy.post(stream=True) as response:
            await response.read()
        await until(lambda: not of_decode.legs, "the end of the leg")
        assert of_decode.breaker.failures == 2, "neither a failure nor a success, as a whole answer of that status"
        assert of_decode.work.requests == 0


async def test_legs_of_an_answer_in_one_piece_were_served(
    prefill: FakeWorker, decode: FakeWorker, tmp_path: Path
) -> None:
    decode.gate = asyncio.Event()
    log = tmp_path / "decisions"
    async with proxy_of([prefill], [decode], decision_log=str(log)) as proxy:
        asked = asyncio.create_task(_status_of(proxy))
        of_prefill, _ = proxy.router.services.pools.all
        await until(lambda: bool(decode.received and prefill.received) and not of_prefill.work.requests, "prefill")
        decode.gate.set()
        assert await asked == 200
        assert [(leg.leg, leg.end, leg.ended_s is not None) for leg in _legs(proxy)] == [
            ("prefill", "served", True),
            ("decode", "served", True),
        ]
    (attempt,) = msgspec.json.decode(log.read_bytes())["attempts"]
    assert [attempt[leg]["end"] for leg in ("prefill", "decode")] == ["served", "served"]


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_leg_at_whose_end_our_own_code_fails_was_not_served(
    prefill: FakeWorker, at_once: AtOnce, streaming: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once.stream_override = event("a") + END if streaming else None

    def fails(*_: object) -> None:
        raise RuntimeError("a fault of ours")

    async with proxy_of([prefill], [at_once], **ALONE) as proxy:
        monkeypatch.setattr("pdlink_proxy.request.stages", fails)
        async with proxy.post(stream=streaming) as response:
            assert response.status == 500
        assert [leg.end for leg in _legs(proxy)] == ["cancelled"]


@dataclass
class InOtherWords(FakeVllm):
    async def answer(self, request: web.Request, received: Received) -> web.StreamResponse:
        return await write_at_once(request, event("other words") + END)


async def test_a_leg_that_diverges_at_its_end_counts_for_nothing_when_the_next_one_is_placed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with AsyncExitStack() as stack:
        prefill, bad, other, good = FakeVllm(), FakeVllm(), InOtherWords(), FakeVllm()
        for server in (prefill, bad, other, good):
            await server.start()
            stack.push_async_callback(server.stop)
        bad.break_at = 3
        control = {prefill.url: "tcp://127.0.0.1:1"}
        more = {"dialect": "vllm", "control": control, **ALONE, "recover_streams": 3}
        proxy = await stack.enter_async_context(proxy_of([prefill], [bad, other, good], **more))
        workers = proxy.router.services.pools.all
        loads: list[list[int]] = []
        place = Admission.place

        def noted(self: Admission, *asked: Any) -> Event | None:
            loads.append([worker.work.requests for worker in workers])
            return place(self, *asked)

        monkeypatch.setattr(Admission, "place", noted)
        diverges = next(worker for worker in workers if worker.url == other.url)
        for _ in range(20):
            diverges.breaker.failures = 1
            async with proxy.post(stream=True, temperature=0, max_tokens=5) as response:
                await response.read()
            if proxy.counted("leg_failures_total", leg="decode", reason="diverged"):
                break
        else:
            pytest.fail("no stream went from the one that breaks to the one that diverges")
        assert diverges.breaker.failures == 1, "such an end says nothing of the worker"
        assert loads[-1] == [0] * 4
