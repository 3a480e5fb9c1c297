"""Text that is held back after the first token is what one process sends, through a proxy and two real workers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import aiohttp
import pytest

from pdlink_bench.chaos.judge import ExchangeOutcome, KnownRequest, judge
from pdlink_bench.chaos.load import CHAT, NEVER, ask, awkward, catalogue, find_answers, parts_of_characters

from .deployment import Deployment, worker_settings

pytestmark = pytest.mark.e2e

SEED, DEADLINE_S, MODEL = 5, 30.0, "pdlink-tiny"


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    workers = {role: worker_settings(role, transport={"kind": "tcp"}) for role in ("prefill", "decode")}
    with Deployment.launch(workers) as deployment:
        yield deployment


def _chats(texts: list[str]) -> list[KnownRequest]:
    body = {"model": MODEL, "max_tokens": 6, "temperature": 0}
    prompts = ["grüße 🙂", "a"]
    stops = [[texts[0][0] + NEVER], [NEVER], []]
    return [
        KnownRequest(CHAT, {**body, "messages": [{"role": "user", "content": prompt}], "stop": stop})
        for prompt in prompts
        for stop in stops
    ]


def test_awkward_answers_through_the_proxy_are_those_of_one_process(deployment: Deployment) -> None:
    decode, proxy = deployment.url("decode"), deployment.url("proxy")

    async def run() -> list[KnownRequest]:
        async with aiohttp.ClientSession() as session:
            plain = await find_answers(session, decode, catalogue(SEED, MODEL, 18), DEADLINE_S)
            texts = [case.expected.text for case in plain if case.expected]
            cases = await find_answers(session, decode, [*awkward(SEED, plain), *_chats(texts)], DEADLINE_S)
            cases += await parts_of_characters(session, decode, SEED, MODEL, DEADLINE_S)
            both = [(case, stream) for case in cases for stream in (True, False)]
            replies = await asyncio.gather(
                *(ask(session, proxy, case, stream=stream, deadline_s=DEADLINE_S) for case, stream in both)
            )
        for (case, stream), reply in zip(both, replies, strict=True):
            verdict = judge(case, reply)
            assert verdict.outcome is ExchangeOutcome.RIGHT, (stream, case, verdict)
        return cases

    cases = asyncio.run(run())
    assert any(case.expected and case.expected.text[:1] > "~" for case in cases), "some begin in a character"
    assert deployment.metric("proxy", 'pdlink_proxy_time_to_first_token_seconds_count{first_leg="prefill"}') > 10
