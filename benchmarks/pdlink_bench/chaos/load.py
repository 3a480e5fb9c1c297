"""Requests with known answers, sent as clients do: streaming or not, impatient, in bursts, invalid.

The seed draws the catalogue. Lengths lie around block boundaries, many prompts share their first tokens, and half of
the answers are sampled with a seed, so any mix-up on the way shows in the text. Some answers are hard to join from
two legs: text held back after the first token, because a stop string may begin there or a character is incomplete.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec

from pdlink.errors import LocalError
from pdlink_bench.chaos.judge import ClientEnd, ClientReply, ExchangeOutcome, ExchangeTally, Expected, KnownRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"

_BORDERS = (1, 15, 16, 17, 31, 33, 48, 64, 65, 127, 129, 200, 256, 257, 400, 513)
"""Prompt lengths in tokens: one, and both sides of multiples of common block sizes and of the largest step."""
_ANSWERS = (1, 2, 8, 16, 24, 48)
"""`max_tokens`."""
_FRESH = 0.7
"""Share of requests with their own `cache_salt`: none of their KV is cached, so all of it must cross."""
_LEAVES = 0.06
_SLOW = 0.04
_INVALID = 0.03
_BACK_OFF_S = 0.1
"""Pause of a client after no answer, so that refused connections do not count by the thousand."""


class NoAnswers(LocalError):
    """The right answers could not be determined."""

    code = "no_answers"


def catalogue(seed: int, model: str, size: int = 40) -> list[KnownRequest]:
    """Valid requests of one run, without their answers."""
    chance = random.Random(f"catalogue/{seed}")
    prefixes = [_tokens(chance, length) for length in (16, 48, 100, 256)]
    cases = []
    for index in range(size):
        length = _BORDERS[index % len(_BORDERS)]
        shared = chance.choice(prefixes)[: length - 1] if index % 2 else []
        body: dict[str, Any] = {
            "model": model,
            "prompt": shared + _tokens(chance, length - len(shared)),
            "max_tokens": _ANSWERS[index % len(_ANSWERS)],
            "temperature": 0,
        }
        if chance.random() < 0.5:
            body |= {"temperature": 0.9, "top_p": 0.95, "seed": chance.randrange(2**31)}
        cases.append(KnownRequest(COMPLETIONS, body))
    return cases


def awkward(seed: int, answered: Sequence[KnownRequest]) -> list[KnownRequest]:
    """More valid requests, made of answered ones: with stop strings that begin with the first character, span tokens,
    or are never completed; with prompts of many bytes per character."""
    chance = random.Random(f"awkward/{seed}")
    cases: list[KnownRequest] = []
    for case in answered:
        text = case.expected.text if case.expected else ""
        if len(text) >= _STOPPABLE_CHARS and len(cases) < _STOPS:
            at = chance.randrange(1, len(text) - 3)
            stops: list[str] = [text[0] + NEVER, text[:3] + NEVER, text[:2], text[at : at + 3], text[at:] + NEVER]
            stop = chance.sample(stops, chance.randrange(1, 5))
            cases.append(replace(case, body=case.body | {"stop": stop}, expected=None))
    body = {"model": answered[0].body["model"], "max_tokens": 8, "temperature": 0}
    cases += [
        KnownRequest(COMPLETIONS, {**body, "prompt": text}) for text in ("grüße €", "中文字符 🙂👍🏽", "é" * 40)
    ]
    return cases


def hot(seed: int, model: str) -> list[KnownRequest]:
    """Requests whose answers may begin with any byte, so some begin inside a character."""
    chance = random.Random(f"hot/{seed}")
    body = {"model": model, "max_tokens": 6, "temperature": 2.0}
    return [
        KnownRequest(COMPLETIONS, {**body, "prompt": _tokens(chance, 24), "seed": chance.randrange(2**31)})
        for _ in range(_HOT)
    ]


NEVER = "\N{SNOWMAN}"
"""No model generates it: a stop string that ends with it is never completed."""
_STOPPABLE_CHARS = 6
_STOPS = 16
"""Cases with stop strings."""
_PARTS = 3
_HOT = 60
"""With the built model one answer in fifteen begins with an incomplete character."""


async def all_answers(
    session: aiohttp.ClientSession, url: str, seed: int, model: str, timeout_s: float
) -> list[KnownRequest]:
    """Every case of a run with its right answer, as `find_answers` finds them. Raises NoAnswers."""
    plain = await find_answers(session, url, catalogue(seed, model), timeout_s)
    more = await find_answers(session, url, awkward(seed, plain), timeout_s)
    return [*plain, *more, *await parts_of_characters(session, url, seed, model, timeout_s)]


async def parts_of_characters(
    session: aiohttp.ClientSession, url: str, seed: int, model: str, timeout_s: float
) -> list[KnownRequest]:
    """A few requests whose answers do not begin with ASCII, if the model has any. Raises NoAnswers."""
    found: list[KnownRequest] = []
    for case in hot(seed, model):
        (answered,) = await find_answers(session, url, [case], timeout_s)
        if answered.expected and answered.expected.text[:1] > "~":
            found.append(answered)
        if len(found) == _PARTS:
            break
    return found


def invalid(model: str) -> list[KnownRequest]:
    """Requests that must get a 4xx in any state of the deployment."""
    return [
        KnownRequest(COMPLETIONS, {"model": model, "prompt": [65] * 200_000, "max_tokens": 8}),
        KnownRequest(COMPLETIONS, {"model": model, "prompt": [65, 66], "max_tokens": 0}),
        KnownRequest(COMPLETIONS, {"model": model, "prompt": [65, 66], "temperature": "warm"}),
        KnownRequest(COMPLETIONS, {"model": model, "prompt": [-1, 10**9], "max_tokens": 4}),
    ]


def _tokens(chance: random.Random, count: int) -> list[int]:
    """Ids of printable ASCII in byte-level vocabularies, and ordinary tokens in all others."""
    return [chance.randrange(33, 123) for _ in range(count)]


async def find_answers(
    session: aiohttp.ClientSession, url: str, cases: Sequence[KnownRequest], timeout_s: float
) -> list[KnownRequest]:
    """The same cases with their right answers, asked at `url` one after the other while nothing is wrong.

    Raises NoAnswers if one of them is not answered.
    """
    found = []
    for case in cases:
        reply = await ask(session, url, case, stream=False, deadline_s=timeout_s)
        if reply.end is not ClientEnd.COMPLETE or reply.status != 200 or reply.usage is None:
            raise NoAnswers(f"{url}{case.path} answered {reply.status} {reply.error} {reply.detail} on a clean pass")
        found.append(replace(case, expected=Expected(reply.text, reply.finish_reason, reply.usage)))
    return found


async def ask(
    session: aiohttp.ClientSession,
    url: str,
    case: KnownRequest,
    *,
    stream: bool,
    deadline_s: float,
    leave_after_s: float | None = None,
    pause_s: float = 0.0,
) -> ClientReply:
    """Send one request and read its reply. leave_after_s: hang up then; pause_s: between events of a stream."""
    body = {**case.body, "stream": True, "stream_options": {"include_usage": True}} if stream else case.body
    reply = ClientReply(started_s=time.monotonic())
    leaves = leave_after_s is not None and leave_after_s < deadline_s
    try:
        async with (
            asyncio.timeout(leave_after_s if leaves else deadline_s),
            session.post(url + case.path, json=body) as response,
        ):
            reply.status = response.status
            reply.request_id = response.headers.get("X-Request-Id", "")
            if response.content_type == "text/event-stream":
                reply.end = ClientEnd.SHORT
                async for line in response.content:
                    if _take_line(reply, line):
                        reply.end = ClientEnd.COMPLETE
                    if pause_s:
                        await asyncio.sleep(pause_s)
            else:
                _take_whole(reply, await response.read())
    except TimeoutError:
        reply.end = ClientEnd.LEFT if leaves else ClientEnd.DEADLINE
    except (aiohttp.ClientError, OSError) as error:
        reply.end, reply.detail = ClientEnd.BROKEN, f"{type(error).__name__}: {error}"
    reply.ended_s = time.monotonic()
    return reply


def _take_line(reply: ClientReply, line: bytes) -> bool:
    """One line of a stream. True for the last one."""
    if not line.startswith(b"data: "):
        return False
    data = line.removeprefix(b"data: ").strip()
    if data == b"[DONE]":
        return True
    reply.events += 1
    _take(reply, data)
    return False


def _take_whole(reply: ClientReply, data: bytes) -> None:
    reply.end = ClientEnd.COMPLETE
    _take(reply, data)


def _take(reply: ClientReply, data: bytes) -> None:
    """One JSON object of an answer. Invalid JSON becomes an unknown text, which is judged wrong."""
    try:
        value = msgspec.json.decode(data, type=dict[str, Any])
    except msgspec.DecodeError:
        reply.text += f"<no JSON: {data[:80]!r}>"
        return
    if isinstance(value.get("error"), dict):
        reply.error = str(value["error"].get("code"))
        reply.detail = str(value["error"].get("message"))[:300]
    for choice in value.get("choices") or ():
        delta = choice.get("delta") or choice.get("message") or choice
        reply.text += delta.get("text") or delta.get("content") or ""
        reply.finish_reason = choice.get("finish_reason") or reply.finish_reason
    if value.get("usage"):
        reply.usage = (value["usage"]["prompt_tokens"], value["usage"]["completion_tokens"])


class ChaosLoad:
    """Clients that send requests until `stop`, and judge every answer."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        cases: Sequence[KnownRequest],
        refused: Sequence[KnownRequest],
        *,
        seed: int,
        deadline_s: float,
        rate: float | None = None,
    ) -> None:
        """cases: with answers. deadline_s: of a request. rate: requests per second at most."""
        self.tally = ExchangeTally()
        self.running = 0
        self._session, self._url = session, url
        self._cases, self._refused = cases, refused
        self._chance = random.Random(f"load/{seed}")
        self._deadline_s, self._rate = deadline_s, rate
        self._stopping = asyncio.Event()
        self._clients: list[asyncio.Task[None]] = []

    def start(self, num_clients: int) -> None:
        self._clients = [asyncio.create_task(self._client(num_clients)) for _ in range(num_clients)]

    async def burst(self, count: int) -> None:
        """`count` requests at the same moment; returns when all are settled."""
        await asyncio.gather(*(self._one() for _ in range(count)))

    async def fill(self, count: int) -> None:
        """`count` of the longest requests at the same moment; returns when all are settled."""
        longest = max(self._cases, key=lambda case: sum(case.expected.usage) if case.expected else 0)
        await asyncio.gather(*(self._one(longest) for _ in range(count)))

    async def stop(self) -> None:
        """No new requests; returns when the running ones are settled, by their deadline at the latest."""
        self._stopping.set()
        await asyncio.gather(*self._clients)

    async def abandon(self) -> None:
        """End every client at once. No effect after `stop`."""
        for client in self._clients:
            client.cancel()
        await asyncio.gather(*self._clients, return_exceptions=True)

    async def _client(self, num_clients: int) -> None:
        while not self._stopping.is_set():
            started_s = time.monotonic()
            outcome = await self._one()
            pause_s = 0.0 if self._rate is None else num_clients / self._rate - (time.monotonic() - started_s)
            if outcome in (ExchangeOutcome.CUT, ExchangeOutcome.ERROR):
                pause_s = max(pause_s, _BACK_OFF_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, pause_s)):
                    await self._stopping.wait()

    async def _one(self, case: KnownRequest | None = None) -> ExchangeOutcome:
        """case: a request whose KV must not be cached; None draws one."""
        chance, fresh = self._chance, case is not None
        if case is None:
            case = chance.choice(self._refused if self._refused and chance.random() < _INVALID else self._cases)
        stream, leaves, slow = chance.random() < 0.5, chance.random() < _LEAVES, chance.random() < _SLOW
        patience_s = chance.random() * 0.8
        if chance.random() < _FRESH or fresh:
            case = replace(case, body=case.body | {"cache_salt": f"{chance.getrandbits(64):x}"})
        self.running += 1
        reply = await ask(
            self._session,
            self._url,
            case,
            stream=stream,
            deadline_s=self._deadline_s,
            leave_after_s=patience_s if leaves else None,
            pause_s=0.05 if slow and stream else 0.0,
        )
        self.running -= 1
        return self.tally.add(case, reply).outcome
