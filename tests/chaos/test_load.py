"""The load against a server of its own: what is sent, and that a wrong answer is found."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from pdlink_bench.chaos.judge import ClientEnd, ExchangeOutcome, Expected, KnownRequest
from pdlink_bench.chaos.load import COMPLETIONS, NEVER, ChaosLoad, ask, awkward, catalogue, find_answers, hot, invalid

ANSWER = "abcdef"
DEADLINE_S = 10.0
BUSY = 20


class Server:
    """Answers every prompt with `ANSWER`, in the way its `fault` says."""

    def __init__(self) -> None:
        self.fault = ""
        self.url = ""
        self.seen = 0
        self.prompt_lengths: list[int] = []
        self.busy = asyncio.Event()
        """`BUSY` requests have come."""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.seen += 1
        if self.seen >= BUSY:
            self.busy.set()
        body = await request.json()
        self.prompt_lengths.append(len(body["prompt"]))
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(ANSWER)}
        if self.fault == "error":
            return web.json_response({"error": {"message": "no", "code": "overloaded"}}, status=503)
        if self.fault == "silence":
            await asyncio.sleep(60)
        if not body.get("stream"):
            choice = {"text": ANSWER, "finish_reason": "length"}
            return web.json_response({"choices": [choice], "usage": usage})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)

        async def event(value: Any) -> None:
            await response.write(b"data: " + json.dumps(value).encode() + b"\n\n")

        for index, letter in enumerate(ANSWER):
            if index == 3 and self.fault == "stream error":
                await event({"error": {"message": "gone", "code": "peer_lost"}})
                await response.write(b"data: [DONE]\n\n")
                return response
            if index == 3 and self.fault == "short":
                return response
            if index == 3 and self.fault == "cut":
                assert request.transport is not None
                request.transport.abort()
            last = index == len(ANSWER) - 1
            await event({"choices": [{"text": letter, "finish_reason": "length" if last else None}]})
        await event({"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    found = Server()
    app = web.Application()
    app.router.add_post(COMPLETIONS, found.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    found.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield found
    await runner.cleanup()


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as found:
        yield found


CASES = [KnownRequest(COMPLETIONS, {"model": "m", "prompt": [65] * 3}, Expected(ANSWER, "length", (3, 6)))]


async def tally_of(
    session: aiohttp.ClientSession, server: Server, cases: list[KnownRequest], count: int = 40
) -> ChaosLoad:
    load = ChaosLoad(session, server.url, cases, [], seed=3, deadline_s=DEADLINE_S)
    await load.burst(count)
    return load


async def test_right_answers_are_called_right(session: aiohttp.ClientSession, server: Server) -> None:
    tally = (await tally_of(session, server, CASES)).tally
    assert tally.counts[ExchangeOutcome.RIGHT] + tally.counts[ExchangeOutcome.LEFT] == 40
    assert tally.counts[ExchangeOutcome.RIGHT] > 20


async def test_one_wrong_token_is_called_wrong(session: aiohttp.ClientSession, server: Server) -> None:
    """The judge is only worth something if it can condemn: the answer expected here is another one."""
    corrupt = [replace(CASES[0], expected=Expected("abcXef", "length", (3, 6)))]
    tally = (await tally_of(session, server, corrupt)).tally
    assert tally.counts[ExchangeOutcome.RIGHT] == 0
    assert tally.counts[ExchangeOutcome.WRONG] > 20
    assert "differs from character 3" in tally.wrong[0]


@pytest.mark.parametrize(
    ("fault", "outcome"),
    [("stream error", ExchangeOutcome.ERROR), ("short", ExchangeOutcome.WRONG), ("cut", ExchangeOutcome.CUT)],
)
async def test_ends_of_streams_are_told_apart(
    session: aiohttp.ClientSession, server: Server, fault: str, outcome: ExchangeOutcome
) -> None:
    server.fault = fault
    load = ChaosLoad(session, server.url, CASES, [], seed=0, deadline_s=DEADLINE_S)
    reply = await ask(session, server.url, CASES[0], stream=True, deadline_s=DEADLINE_S)
    assert reply.text == "abc"
    assert load.tally.add(CASES[0], reply).outcome is outcome


async def test_silence_ends_at_the_deadline_or_when_the_client_leaves(
    session: aiohttp.ClientSession, server: Server
) -> None:
    server.fault = "silence"
    late = await ask(session, server.url, CASES[0], stream=False, deadline_s=0.05)
    left = await ask(session, server.url, CASES[0], stream=False, deadline_s=5.0, leave_after_s=0.05)
    assert (late.end, left.end) == (ClientEnd.DEADLINE, ClientEnd.LEFT)


async def test_clients_send_until_they_are_stopped(session: aiohttp.ClientSession, server: Server) -> None:
    load = ChaosLoad(session, server.url, CASES, [], seed=1, deadline_s=DEADLINE_S)
    load.start(4)
    async with asyncio.timeout(DEADLINE_S):
        await server.busy.wait()
        await load.stop()
    assert load.running == 0
    assert load.tally.sent >= BUSY


async def test_answers_are_found_by_asking(session: aiohttp.ClientSession, server: Server) -> None:
    unknown = [replace(case, expected=None) for case in CASES]
    assert await find_answers(session, server.url, unknown, DEADLINE_S) == CASES


def test_the_catalogue_is_the_same_for_the_same_seed_and_shares_prefixes() -> None:
    assert catalogue(1, "m") == catalogue(1, "m")
    assert catalogue(1, "m") != catalogue(2, "m")
    prompts = [case.body["prompt"] for case in catalogue(1, "m")]
    assert {len(prompt) % 16 for prompt in prompts} >= {0, 1, 15}
    starts = [tuple(prompt[:16]) for prompt in prompts if len(prompt) > 16]
    assert len(set(starts)) < len(starts)
    assert all(case.expected is None for case in invalid("m"))


def test_awkward_requests_hold_text_back_in_every_way() -> None:
    answered = [replace(case, expected=Expected("abcdefgh", "length", (1, 8))) for case in catalogue(1, "m")]
    cases = awkward(1, answered)
    assert cases == awkward(1, answered)
    assert all(case.expected is None for case in cases)
    stops = [stop for case in cases for stop in case.body.get("stop", ())]
    assert max(len(case.body.get("stop", ())) for case in cases) == 4, "as many as may be"
    assert any(stop.startswith("a") and stop.endswith(NEVER) for stop in stops)
    assert "ab" in stops
    assert any(len(stop) == 3 and stop in "abcdefgh" for stop in stops)
    assert any(isinstance(case.body["prompt"], str) and not case.body["prompt"].isascii() for case in cases)
    assert len({case.body["seed"] for case in hot(1, "m")}) == len(hot(1, "m"))


async def test_pools_are_filled_with_the_longest_request(session: aiohttp.ClientSession, server: Server) -> None:
    long = KnownRequest(COMPLETIONS, {"model": "m", "prompt": [65] * 9, "max_tokens": 9}, None)
    load = ChaosLoad(
        session,
        server.url,
        [*CASES, replace(long, expected=Expected(ANSWER, "length", (9, 6)))],
        [],
        seed=0,
        deadline_s=DEADLINE_S,
    )
    await load.fill(5)
    assert (server.seen, load.tally.sent) == (5, 5)
    assert set(server.prompt_lengths) == {9}
