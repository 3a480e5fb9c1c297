"""X-Pdlink-KV: a client can see whether the KV of its prompt was moved or computed again."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pdlink._http import place_of_done
from pdlink.api.kv_path import checked, recomputed
from pdlink.reasons import Reason
from tests.proxy import fakes
from tests.proxy.fake_vllm import FakeVllm
from tests.proxy.fakes import DONE, END, FakeWorker, event, proxy_of, until

HEADER = "X-Pdlink-KV"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("transferred", "transferred"),
        ("recomputed;reason=peer_lost", "recomputed;reason=peer_lost"),
        ("recomputed;reason=refused:content", "recomputed;reason=refused:content"),
        ("unknown", "unknown"),
        ("", "unknown"),
        ("tcp://10.0.0.1:8101 is down", "unknown"),
        ("recomputed;reason=" + "x" * 65, "unknown"),
    ],
)
async def test_what_decode_says_of_the_kv_reaches_the_client_and_the_metric(
    prefill: FakeWorker, decode: FakeWorker, stream: bool, said: str, told: str
) -> None:
    prefill.gate = asyncio.Event()  # decode's first event opens the stream
    decode.kv = said
    async with proxy_of([prefill], [decode]) as proxy:
        async with proxy.post(stream=stream) as response:
            assert response.headers[HEADER] == told
            data = await response.read()
        if stream:
            assert fakes.settled(data) == (event("zero") + event("one") + event("two") + END, told)
        await until(lambda: proxy.counted("requests_kv_total", path=told.partition(";")[0]) == 1)


async def test_a_stream_that_prefill_begins_waits_a_moment_for_decodes_headers(
    prefill: FakeWorker, decode: FakeWorker
) -> None:
    """Decode's first event comes only after prefill's token is here, and in time for the header."""
    decode.needs, decode.kv = prefill, "recomputed;reason=request_failed"
    async with (
        proxy_of([prefill], [decode], kv_header_grace_s=1) as proxy,
        proxy.post(stream=True) as response,
    ):
        assert response.headers[HEADER] == decode.kv
        assert fakes.settled(await response.read())[1] == decode.kv
        assert proxy.counted("time_to_first_token_seconds_count", first_leg="prefill") == 1


@pytest.mark.parametrize("grace_s", [0, 0.01])
async def test_a_stream_that_began_before_decode_spoke_tells_the_truth_at_its_end(
    prefill: FakeWorker, decode: FakeWorker, grace_s: float
) -> None:
    decode.gate, decode.kv = asyncio.Event(), "recomputed;reason=peer_lost"
    async with (
        proxy_of([prefill], [decode], kv_header_grace_s=grace_s) as proxy,
        proxy.post(stream=True) as response,
    ):
        assert response.headers[HEADER] == "transferring"
        decode.gate.set()
        data = await response.read()
        assert data.endswith(b": X-Pdlink-KV: recomputed;reason=peer_lost\n\n" + DONE)
        await until(lambda: proxy.counted("requests_kv_total", path="recomputed") == 1)


async def test_a_stream_that_breaks_says_it_too(prefill: FakeWorker, decode: FakeWorker) -> None:
    decode.break_after = 2
    async with proxy_of([prefill], [decode]) as proxy, proxy.post(stream=True) as response:
        data = await response.read()
    assert b"stream_error" in data
    assert fakes.settled(data)[1] == "transferred"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_retry_is_told_by_its_own_attempt(
    prefill: FakeWorker, decodes: list[FakeWorker], stream: bool
) -> None:
    prefill.gate = asyncio.Event()
    bad, good = decodes
    bad.stream_override, good.kv = b"data: nonsense\n\n", "recomputed;reason=no_room"
    bad.resets = 0 if stream else 1
    async with proxy_of([prefill], decodes) as proxy, proxy.post(stream=stream) as response:
        assert response.headers[HEADER] == good.kv
    assert len(bad.received) == len(good.received) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_without_a_transfer_is_recomputed_whatever_decode_says(
    decode: FakeWorker, stream: bool
) -> None:
    async with (
        proxy_of([], [decode], on_no_prefill="decode_only") as proxy,
        proxy.post(stream=stream) as response,
    ):
        assert response.headers[HEADER] == "recomputed;reason=no_prefill"
        data = await response.read()
        if stream:
            assert fakes.settled(data)[1] == "recomputed;reason=no_prefill"


async def test_a_short_prompt_that_decode_computes_itself_is_told_as_such(
    prefill: FakeWorker, decode: FakeWorker
) -> None:
    async with proxy_of([prefill], [decode], decode_alone_tokens=3) as proxy:
        for prompt, told in (([1, 2, 3], "recomputed;reason=short_prompt"), ([1, 2, 3, 4], "transferred")):
            async with proxy.post(stream=False, prompt=prompt) as response:
                assert (response.status, response.headers[HEADER]) == (200, told)
    assert len(prefill.received) == 1


@pytest.mark.parametrize(
    ("body", "told"), [({}, "unknown"), ({"prompt_logprobs": 1}, "recomputed;reason=prompt_only_decode")]
)
async def test_what_vllm_does_not_say_is_unknown_and_what_it_serves_whole_is_not(
    body: dict[str, Any], told: str
) -> None:
    prefill, decode = await FakeVllm().start(), await FakeVllm().start()
    control = {prefill.url: ["tcp://10.0.0.1:4100"]}
    async with (
        proxy_of([prefill], [decode], dialect="vllm", control=control) as proxy,
        proxy.post(**body) as response,
    ):
        assert response.headers[HEADER] == told
    await prefill.stop()
    await decode.stop()


async def test_an_error_has_no_kv(prefill: FakeWorker, decode: FakeWorker) -> None:
    decode.fail_with = 500
    async with proxy_of([prefill], [decode]) as proxy, proxy.post() as response:
        assert response.status == 500
        assert HEADER not in response.headers


def test_reasons_are_one_token_of_bounded_length() -> None:
    odd = recomputed(Reason.refused("Name that\r\ngoes with; the key" + "x" * 100).label)
    assert odd.startswith("recomputed;reason=refused:name_that_goes_with_the_key")
    assert checked(odd) == odd


@pytest.mark.parametrize("done", [b"data: [DONE]\n\n", b"data:[DONE]\r\n\r\n", b"id: 7\ndata: [DONE]\n\n"])
def test_the_comment_stands_before_the_end_marker_however_it_is_written(done: bytes) -> None:
    text = event("say data: [DONE] now")
    events = text + done
    at = place_of_done(events)
    assert events[:at] + b": X-Pdlink-KV: unknown\n\n" + events[at:] == text + done.replace(
        b"data:", b": X-Pdlink-KV: unknown\n\ndata:"
    )
    assert place_of_done(text) is None
