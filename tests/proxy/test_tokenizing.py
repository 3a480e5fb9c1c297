"""Prompts of text: their token ids are asked for where workers say what KV they have, and where it pays."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from typing import TYPE_CHECKING, Any, cast

import msgspec
import numpy as np
import pytest

from pdlink.api.openai import CHAT, COMPLETIONS, parse
from pdlink_proxy.client_answer import ClientAnswer
from pdlink_proxy.fleet import wanted
from pdlink_proxy.known_tokens import CHUNK_NBYTES, KnownTokens, Text, Worth, text_of
from tests.proxy.fakes import FakeWorker, Proxy, proxy_of, tokens_in, until
from tests.proxy.test_kv_events import FakePublisher
from tests.proxy.test_kv_index import batch, stored

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

TEXT = "".join(f"{number:05d}" for number in range(4000))
"""20 KB, and 4000 tokens of a fake worker."""
COST: dict[str, Any] = {"policy": "cost", "tokenize_wait_s": 5}


@contextlib.asynccontextmanager
async def told(prefills: list[FakeWorker], text: str = TEXT) -> AsyncIterator[FakeWorker]:
    """The second of these workers says that it has this text; all can tokenise."""
    publisher, tokens = FakePublisher(), tokens_in(text)
    blocks = [*range(1, len(tokens) // 16 + 1)]
    await publisher.publish(0, batch(stored(blocks, None, tokens[: 16 * len(blocks)])))
    answering = asyncio.create_task(publisher.answer())
    prefills[1].kv_events = (f"{publisher.endpoint},{publisher.replay}",)
    for worker in prefills:
        worker.tokenizes = True
    try:
        yield prefills[1]
    finally:
        answering.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await answering
        publisher.close()


async def heard(proxy: Proxy) -> None:
    """Its events are known; and these workers compute so fast that no question would pay."""
    await until(lambda: len(proxy.router.services.pools.kv_events.index) > 0, "events")
    if (tokenizing := proxy.router.services.shared.tokenizing) is not None:
        tokenizing.worth.pays = lambda nbytes, tokens_per_s: True  # type: ignore[method-assign]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_a_text_goes_where_a_worker_says_it_has_it(
    prefills: list[FakeWorker], decode: FakeWorker, path: str
) -> None:
    async with told(prefills) as has, proxy_of(prefills, [decode], **COST) as proxy:
        await heard(proxy)
        for number in range(4):
            more = f" and {number} more"
            fields: dict[str, Any] = {"messages": [{"role": "user", "content": TEXT + more}]} if path == CHAT else {}
            fields = fields or {"prompt": TEXT + more}
            async with proxy.post(path, **fields) as answer:
                assert answer.status == 200
        assert [len(worker.received) for worker in prefills] == [0, 4]
        assert has.received
        (first, *_) = [asked for worker in prefills for asked in worker.tokenized]
        assert first.keys() == {"model", "messages" if path == CHAT else "prompt"}


async def test_the_next_turn_waits_for_nothing(prefills: list[FakeWorker], decode: FakeWorker) -> None:
    async with told(prefills), proxy_of(prefills, [decode], **COST) as proxy:
        await heard(proxy)
        async with proxy.post(prompt=TEXT) as answer:
            assert answer.status == 200
        for worker in prefills:
            worker.tokenize_gate = asyncio.Event()
        async with proxy.post(prompt=TEXT + " and so on" * 200) as answer:  # 2 KB
            assert answer.status == 200
        assert proxy.counted("tokenized_total", how="known") == 1
        assert [len(worker.received) for worker in prefills] == [0, 2]
        async with proxy.post(prompt=TEXT) as answer:  # nothing to ask
            assert answer.status == 200
        assert sum(len(worker.tokenized) for worker in prefills) == 2


async def test_a_late_answer_holds_no_request_and_serves_the_next(
    prefills: list[FakeWorker], decode: FakeWorker
) -> None:
    async with told(prefills), proxy_of(prefills, [decode], policy="cost", tokenize_wait_s=0.001) as proxy:
        await heard(proxy)
        gate = asyncio.Event()
        for worker in prefills:
            worker.tokenize_gate = gate
        async with proxy.post(prompt=TEXT) as answer:
            assert answer.status == 200
        assert proxy.counted("tokenized_total", how="late") == 1
        gate.set()
        tokenizing = proxy.router.services.shared.tokenizing
        assert tokenizing is not None
        await until(lambda: len(tokenizing.known) == 4000, "the late answer")
        async with proxy.post(prompt=TEXT) as answer:
            assert answer.headers["X-Pdlink-Prefill"] == "prefill-1"
        assert proxy.counted("tokenized_total", how="known") == 1


async def test_a_request_that_ends_while_its_tokens_are_asked_for_is_not_placed(
    prefills: list[FakeWorker], decode: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client has not read the answer yet, so it is not closed."""
    read, gate = asyncio.Event(), asyncio.Event()

    async def caught_up(_self: ClientAnswer, _timeout_s: float) -> None:
        await read.wait()

    monkeypatch.setattr(ClientAnswer, "caught_up", caught_up)
    async with told(prefills), proxy_of(prefills, [decode], **COST) as proxy:
        await heard(proxy)
        for worker in prefills:
            worker.tokenize_gate = gate

        async def ask() -> int:
            async with proxy.post(prompt=TEXT) as answer:
                return int(answer.status)

        asking = asyncio.create_task(ask())
        await until(lambda: any(worker.tokenized for worker in prefills), "the question")
        (running,) = proxy.router.services.requests
        cast("Any", running).client.connection.writing_paused = True
        running.shut_down()
        gate.set()
        await until(lambda: proxy.counted("tokenized_total", how="asked") == 1, "the tokens")
        await asyncio.sleep(0)
        read.set()
        assert await asking == 503
        decided = proxy.router.services.decisions_of
        await until(lambda: any(each.verdict == "ended" for each in decided()), "its end")
        assert [each.verdict for each in decided()] == ["ended"]


async def test_nobody_is_asked_where_it_cannot_help(prefills: list[FakeWorker], decode: FakeWorker) -> None:
    for worker in prefills:
        worker.tokenizes = True
    async with proxy_of(prefills, [decode], **COST) as proxy, proxy.post(prompt=TEXT) as answer:
        assert answer.status == 200  # no worker publishes
    async with told(prefills) as has:
        async with proxy_of([has], [decode], **COST) as proxy:
            await heard(proxy)
            async with proxy.post(prompt=TEXT) as answer:  # one worker
                assert answer.status == 200
        async with proxy_of(prefills, [decode], **COST) as proxy:
            await heard(proxy)
            for prompt in ("short", tokens_in(TEXT), [TEXT]):
                async with proxy.post(prompt=prompt) as answer:
                    assert answer.status == 200
            tokenizing = proxy.router.services.shared.tokenizing
            assert tokenizing is not None
            tokenizing.worth.pays = lambda nbytes, tokens_per_s: False  # type: ignore[method-assign]
            async with proxy.post(prompt=TEXT) as answer:
                assert answer.status == 200
            assert proxy.counted("tokenized_total", how="not_asked") == 1
        async with proxy_of(prefills, [decode], policy="cost", tokenize_wait_s=0) as proxy:
            await heard(proxy)
            async with proxy.post(prompt=TEXT) as answer:
                assert answer.status == 200
    assert [worker.tokenized for worker in prefills] == [[], []]


async def test_a_worker_without_the_route_is_asked_once(prefills: list[FakeWorker], decode: FakeWorker) -> None:
    async with told(prefills), proxy_of(prefills, [decode], **COST) as proxy:
        await heard(proxy)
        for worker in prefills:
            worker.tokenizes = False
        for number in range(5):
            async with proxy.post(prompt=f"{number}{TEXT}") as answer:
                assert answer.status == 200
        assert [len(worker.tokenized) for worker in prefills] == [1, 1]
        assert len(decode.tokenized) == 1
        assert proxy.counted("tokenized_total", how="failed") == 3


async def test_equal_prompts_at_once_are_one_question(prefills: list[FakeWorker], decode: FakeWorker) -> None:
    async with told(prefills), proxy_of(prefills, [decode], **COST) as proxy:
        await heard(proxy)
        gate = asyncio.Event()
        for worker in prefills:
            worker.tokenize_gate = gate

        async def one() -> int:
            async with proxy.post(prompt=TEXT) as answer:
                return int(answer.status)

        running = [asyncio.create_task(one()) for _ in range(8)]
        await until(
            lambda: proxy.router.services.num_running == 8 and any(worker.tokenized for worker in prefills), "all"
        )
        gate.set()
        assert await asyncio.gather(*running) == [200] * 8
        assert sum(len(worker.tokenized) for worker in prefills) == 1
        assert [len(worker.received) for worker in prefills] == [0, 8]


def of(prompt: str, **more: object) -> tuple[Text, int]:
    call = parse(COMPLETIONS, msgspec.json.encode({"model": "m", "prompt": prompt, **more}))
    request = wanted(call, None)
    text = text_of(request, call)
    assert text is not None
    return text, len(request.prompt)


def test_known_tokens_are_those_of_the_longest_common_beginning() -> None:
    """Against all prompts noted, searched one by one; tokens of equal length, where estimates are exact."""
    rng = random.Random(20261123)
    known, noted = KnownTokens(max_tokens=40_000), list[tuple[str, "np.ndarray[tuple[int], np.dtype[np.uint32]]"]]()
    for _ in range(60):
        parts = [rng.choice("ab") * CHUNK_NBYTES for _ in range(rng.randint(1, 6))]
        prompt = "".join(parts)[: -rng.randint(1, 99)]
        if len(prompt) < CHUNK_NBYTES:
            continue
        text, nbytes = of(prompt)
        ids = np.array(tokens_in(prompt), np.uint32)
        if (found := known.find(text, nbytes)) is not None:
            common = max(_common(prompt, other) for other, _ in noted)
            assert len(found.ids) * 5 <= common + 5
            assert found.ids.tolist()[:-1] == ids[: len(found.ids) - 1].tolist()  # a token may span the end
            assert found.share <= 1
            if found.share == 1:
                assert len(found.ids) == len(ids)
        noted.append((prompt, ids))
        known.note(text, nbytes, ids)
        assert len(known) <= 40_000
        again = known.find(text, nbytes)
        assert again is not None
        assert again.share == 1
        assert again.ids is ids


def _common(one: str, other: str) -> int:
    return len(os.path.commonprefix([one, other]))


def test_memory_for_texts_is_bounded_and_nothing_stays_behind() -> None:
    known = KnownTokens(max_tokens=5_000)
    for number in range(50):
        text, nbytes = of(f"{number:05d}" * 1000)
        known.note(text, nbytes, np.zeros(1000, np.uint32))
    assert len(known) == 5_000
    assert len(known._of) == 5
    assert len(known._by_key) == 5 * len(text.keys)


def test_prompts_of_other_tools_templates_models_or_media_are_other_texts() -> None:
    def keys(**fields: object) -> object:
        body = {"model": "m", "messages": [{"role": "user", "content": TEXT}], **fields}
        call = parse(CHAT, msgspec.json.encode(body))
        text = text_of(wanted(call, None), call)
        return text and (text.keys[0], sorted(msgspec.json.decode(text.body)))

    said = [keys(), keys(tools=[{}]), keys(chat_template_kwargs={"a": 1}), keys(model="n")]
    assert len({str(each) for each in said}) == 4
    assert keys(temperature=1, stream=True) == keys()
    media = "image_url", "input_audio", "video_url", "image_embeds", "audio_url", "image_pil", "prompt_embeds"
    for name in media:
        for part in ({"type": name, "x_y": {}}, {"type": "x", name: "_"}):
            assert keys(messages=[{"role": "user", "content": [TEXT, part]}]) is None
    assert keys(messages=[1] * len(TEXT)) is None  # the engine will refuse it
    in_text = " ".join(f'"{name}" and {name}' for name in media)
    assert keys(messages=[{"role": "user", "content": f"{in_text} _ {TEXT}_"}]) is not None


def test_a_question_pays_where_it_saves_more_time_than_it_takes() -> None:
    worth = Worth()
    assert worth.pays(4096, None)  # nothing is known
    assert worth.pays(4096, 10_000)  # half of 1024 tokens take 50 ms, and the question 4 ms
    assert not worth.pays(4096, 1_000_000)
    for _ in range(100):
        worth.found(0)
    assert worth.pays(4096, 10_000)  # it never takes more than a twentieth of prefill
    assert not worth.pays(4096, 13_000)
    for _ in range(100):
        worth.cost(1000, 0.01)
    assert not worth.pays(4096, 10_000)
