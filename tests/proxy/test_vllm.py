"""The dialects of vLLM, against servers that behave like it: what each leg is asked, and what the client gets."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import sys
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import pytest_asyncio

from pdlink.api.fields import BadField
from pdlink.api.legs import PrefillAddress
from pdlink.api.openai import CHAT, COMPLETIONS, parse
from pdlink.config import ProxyConfig, load
from pdlink.errors import ConfigError
from pdlink_proxy.dialects import DIALECTS, TransferTerms
from pdlink_proxy.fleet import PlacementRequest, wanted
from pdlink_proxy.known_tokens import text_of
from pdlink_proxy.steps import Leg
from pdlink_proxy.worker import State
from tests.private import write_private
from tests.proxy.fake_vllm import HELD, FakeVllm
from tests.proxy.fakes import DONE, Proxy, proxy_of, settled, tokens_of, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

CONCURRENT, SEQUENTIAL = "vllm", "vllm-nixl"
BOTH = pytest.mark.parametrize("dialect", [CONCURRENT, SEQUENTIAL])
CONTROL = "tcp://10.0.0.1:4100"


class Pair:
    """Two prefill and two decode servers; tests use as many as they need."""

    def __init__(self, prefills: list[FakeVllm], decodes: list[FakeVllm]) -> None:
        self.prefills, self.decodes = prefills, decodes
        self.prefill, self.decode = prefills[0], decodes[0]

    @contextlib.asynccontextmanager
    async def proxy(
        self, dialect: str, num_prefill: int = 1, num_decode: int = 1, **more: Any
    ) -> AsyncIterator[Proxy]:
        prefills, decodes = self.prefills[:num_prefill], self.decodes[:num_decode]
        for worker in (*prefills, *decodes):
            worker.connector = "nixl" if dialect == SEQUENTIAL else "pdlink"
        control = {worker.url: [CONTROL] for worker in prefills} if dialect == CONCURRENT else {}
        async with proxy_of(prefills, decodes, dialect=dialect, control=control, **more) as proxy:
            yield proxy
        for worker in (*prefills, *decodes):
            assert worker.strange == [], "vLLM has no such route"


@pytest_asyncio.fixture
async def pair() -> AsyncIterator[Pair]:
    made = Pair([await FakeVllm().start() for _ in range(2)], [await FakeVllm().start() for _ in range(2)])
    yield made
    for worker in (*made.prefills, *made.decodes):
        await worker.stop()


async def said(proxy: Proxy, path: str = COMPLETIONS, **body: Any) -> tuple[int, bytes]:
    """The status and the body, of a stream without the proxy's own comment."""
    if "chat" in path:
        body = {"messages": [{"role": "user", "content": "hello"}], **body}
    async with proxy.post(path, **body) as response:
        data = await response.read()
        return response.status, tokens_of(data) if data.endswith(DONE) else data


REQUESTS: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"max_tokens": 4}),
    (COMPLETIONS, {"prompt": [5, 6, 7], "max_tokens": 4, "min_tokens": 3, "stop": ["x"], "logprobs": 2}),
    (COMPLETIONS, {"n": 2, "max_tokens": 2}),
    (COMPLETIONS, {"prompt": ["ab", "cde"], "max_tokens": 2}),
    (COMPLETIONS, {"max_tokens": 1}),
    (COMPLETIONS, {"echo": True, "best_of": 1, "return_token_ids": True}),
    (CHAT, {"max_completion_tokens": 4, "min_tokens": 2}),
    (CHAT, {"max_tokens": 4, "min_tokens": 4, "logprobs": True, "top_logprobs": 2}),
    (CHAT, {"n": 2, "max_tokens": 2}),
]


@BOTH
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(("path", "body"), REQUESTS)
async def test_the_client_gets_what_decode_alone_would_say(
    pair: Pair, dialect: str, streaming: bool, path: str, body: dict[str, Any]
) -> None:
    """Ids, usage, log-probabilities, choices: all of it, and each token once."""
    if streaming:
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with pair.proxy(dialect) as proxy:
        status, got = await said(proxy, path, **body)
        request_id = pair.decode.received[0].headers["X-Request-Id"]
        headers = {"X-Request-Id": request_id}
        alone = {"model": "m", "prompt": "hello", "messages": [{"role": "user", "content": "hello"}], **body}
        alone.pop("prompt" if path == CHAT else "messages")
        async with proxy.client.post(pair.decode.url + path, json=alone, headers=headers) as response:
            wanted = await response.read()
    assert status == 200, got
    assert got == wanted
    assert streaming == got.endswith(DONE)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("path", "mine", "theirs"),
    [
        (COMPLETIONS, {"prompt": [1, 2], "max_tokens": 9, "min_tokens": 5, "n": 3, "logprobs": 1, "cache_salt": "x"},
         {"prompt": [1, 2], "max_tokens": 1, "temperature": 0, "cache_salt": "x"}),
        (COMPLETIONS, {"prompt": "x", "response_format": {"type": "json_object"}, "structured_outputs": {"json": {}}},
         {"prompt": "x", "max_tokens": 1, "temperature": 0}),
        (CHAT, {"messages": [], "max_tokens": 9, "max_completion_tokens": 8, "tools": [{"a": 1}], "top_logprobs": 1,
                "response_format": {"type": "text"}},
         {"messages": [], "max_completion_tokens": 1, "temperature": 0, "tools": [{"a": 1}],
          "response_format": {"type": "text"}}),
    ],
)  # fmt: skip
async def test_prefill_is_asked_for_the_same_prompt_and_one_token(
    pair: Pair, streaming: bool, path: str, mine: dict[str, Any], theirs: dict[str, Any]
) -> None:
    """min_tokens above max_tokens is a 400 (vllm#16705), and a stream would be one more thing to read."""
    if streaming:
        mine = {**mine, "stream": True, "stream_options": {"include_usage": True}}
    async with pair.proxy(CONCURRENT) as proxy, proxy.post(path, **mine) as response:
        transfer_id = response.headers["X-Pdlink-Transfer"]
        assert response.headers["X-Pdlink-Prefill"] == "prefill-0"
        await until(lambda: len(pair.prefill.received) == 1)
    prefill, decode = pair.prefill.received[0], pair.decode.received[0]
    assert prefill.path == decode.path == path
    params = {"transfer_id": transfer_id, "leg": "prefill", "num_prompts": 1}
    assert prefill.body.pop("kv_transfer_params") == params
    assert decode.body.pop("kv_transfer_params") == {
        "transfer_id": transfer_id,
        "leg": "decode",
        "prefill": {"name": f"127.0.0.1:{pair.prefill.port}", "control": CONTROL},
    }
    assert prefill.body == {"model": "m", **theirs}
    assert decode.body == {"model": "m", **({"prompt": "hello"} if path == COMPLETIONS else {}), **mine}
    assert prefill.headers["X-Request-Id"] == decode.headers["X-Request-Id"], "it makes the id of the answer"


@pytest.mark.parametrize(
    ("path", "prompt", "count"),
    [
        (CHAT, "", 1),
        (COMPLETIONS, '"text"', 1),
        (COMPLETIONS, "[1, 2, 3]", 1),
        (COMPLETIONS, '[ "a", "b"]', 2),
        (COMPLETIONS, "[[1, 2], [3], [4]]", 3),
        (COMPLETIONS, '["a", "\\"[x"]', 2),
        (COMPLETIONS, 'null,"prompt_embeds":"AAAA"', 1),
        (COMPLETIONS, '"x","prompt_embeds":"AAAA"', 2),
        (COMPLETIONS, '["x", "y"],"prompt_embeds":["AAAA", "AAAB"]', 4),
        (COMPLETIONS, '["x", "y"],"prompt_embeds": null', 2),
    ],
)
def test_prefill_is_told_how_many_prompts_will_come(path: str, prompt: str, count: int) -> None:
    """Only so can it know at once that decode waits for another one."""
    content = '"messages":[]' if path == CHAT else f'"prompt":{prompt}'
    call = parse(path, b'{"model":"m",' + content.encode() + b"}")
    attempt = TransferTerms(transfer_id="xfer-1", created=1, seed=2, prefill=PrefillAddress(CONTROL, "p"))
    prefill = msgspec.json.decode(DIALECTS[CONCURRENT].legs(call, attempt)[0])
    assert prefill["kv_transfer_params"]["num_prompts"] == count


SAMPLING: dict[str, Any] = {
    "seed": 5,
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.01,
    "frequency_penalty": 0.1,
    "presence_penalty": 0.1,
    "repetition_penalty": 1.1,
    "logit_bias": {"5": 1},
    "allowed_token_ids": [1, 2],
    "bad_words": ["x"],
    "stop": ["y"],
    "stop_token_ids": [3],
    "ignore_eos": True,
}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_prefill_is_told_nothing_of_how_tokens_are_chosen(pair: Pair, path: str) -> None:
    """Nobody reads its token, and a seed kills the engine if the prompt is computed in chunks (vLLM 0.32, CPUs)."""
    async with pair.proxy(CONCURRENT) as proxy:
        assert (await said(proxy, path, **SAMPLING))[0] == 200
        await until(lambda: len(pair.prefill.received) == 1)
    prefill, decode = pair.prefill.received[0].body, pair.decode.received[0].body
    assert SAMPLING.items() <= decode.items()
    assert {name: prefill[name] for name in SAMPLING if name in prefill} == {"temperature": 0}


async def test_nixls_prefill_gets_no_seed_and_still_judges_the_rest(pair: Pair) -> None:
    """KV of a request that only decode rejects would be held until NixlConnector's own deadline."""
    async with pair.proxy(SEQUENTIAL) as proxy:
        assert (await said(proxy, **SAMPLING))[0] == 200
        assert (await said(proxy, temperature=-1))[0] == 400
    first, rejected = pair.prefill.received
    assert {name for name, value in SAMPLING.items() if first.body.get(name) != value} == {"seed"}
    assert rejected.body["temperature"] == -1
    assert len(pair.decode.received) == 1


async def test_with_pdlinks_connector_legs_start_at_once(pair: Pair) -> None:
    pair.prefill.gate, pair.decode.gate = asyncio.Event(), asyncio.Event()
    async with pair.proxy(CONCURRENT) as proxy:
        answer = asyncio.create_task(said(proxy))
        await until(lambda: len(pair.prefill.received) == len(pair.decode.received) == 1, "both legs")
        pair.prefill.gate.set()
        pair.decode.gate.set()
        assert (await answer)[0] == 200


async def test_with_nixl_decode_follows_prefill_and_gets_its_parameters_verbatim(pair: Pair) -> None:
    pair.prefill.gate = asyncio.Event()
    async with pair.proxy(SEQUENTIAL) as proxy:
        answer = asyncio.create_task(
            said(proxy, stream=True, prompt=[1, 2, 3], kv_transfer_params={"remote_host": "x"})
        )
        await until(lambda: len(pair.prefill.received) == 1)
        heard = [worker.heard_s or 0.0 for worker in proxy.router.services.pools.all]
        await until(
            lambda: all((w.heard_s or 0.0) > at for w, at in zip(proxy.router.services.pools.all, heard, strict=True))
        )
        assert pair.decode.received == [], "it has nothing to fetch yet"
        pair.prefill.gate.set()
        assert (await answer)[0] == 200
    assert pair.prefill.received[0].body["kv_transfer_params"] == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
    }
    assert pair.decode.received[0].body == {
        "model": "m",
        "prompt": [1, 2, 3],
        "stream": True,
        "kv_transfer_params": HELD,
    }


async def test_with_nixl_a_prompt_whose_kv_was_not_kept_is_computed_by_decode(pair: Pair) -> None:
    pair.prefill.keeps_no_kv = True
    async with pair.proxy(SEQUENTIAL) as proxy:
        assert (await said(proxy))[0] == 200
    assert pair.decode.received[0].body["kv_transfer_params"] is None


async def test_a_rank_list_of_control_addresses_reaches_decode(pair: Pair) -> None:
    ranks = ["tcp://h:1", "tcp://h:2"]
    pair.prefill.connector = pair.decode.connector = "pdlink"
    control = {pair.prefill.url + "/": ranks}
    async with proxy_of([pair.prefill], [pair.decode], dialect=CONCURRENT, control=control) as proxy:
        assert (await said(proxy))[0] == 200
    assert pair.decode.received[0].body["kv_transfer_params"]["prefill"]["control"] == ranks


@BOTH
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_cached_tokens_are_those_nobody_computed(pair: Pair, dialect: str, streaming: bool, path: str) -> None:
    """Decode calls every token cached that it was sent (vllm-project/router#193)."""
    pair.prefill.cached_tokens, pair.decode.cached_tokens = 2, 4
    more = {"stream": True, "stream_options": {"include_usage": True}} if streaming else {}
    async with pair.proxy(dialect) as proxy:
        status, got = await said(proxy, path, **more)
    assert status == 200
    document = got.split(b"\n\n")[-3].removeprefix(b"data: ") if streaming else got
    usage = msgspec.json.decode(document)["usage"]
    assert usage == {
        "prompt_tokens": 5,
        "completion_tokens": 3,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert b"remote_" not in got


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("said_by_decode", ["transferred", "cached", "recomputed;reason=other_prompt", "", "\n!"])
async def test_how_the_kv_came_is_told_in_a_header_and_nowhere_else(
    pair: Pair, path: str, said_by_decode: str
) -> None:
    pair.decode.kv_path = said_by_decode
    more: dict[str, Any] = {"messages": []} if path == CHAT else {"prompt": "x"}
    async with pair.proxy(CONCURRENT) as proxy:
        async with proxy.post(path, **more) as response:
            known = said_by_decode in ("", "\n!")
            assert response.headers["X-Pdlink-KV"] == ("unknown" if known else said_by_decode)
            body = await response.read()
        assert b"pdlink_kv" not in body
        assert msgspec.json.decode(body)["kv_transfer_params"] is None


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("at_end", [True, False], ids=["vLLM 0.33", "vLLM 0.32"])
async def test_how_the_kv_of_a_stream_came_is_told_at_its_end(pair: Pair, path: str, at_end: bool) -> None:
    """vLLM 0.33 says it in the last event, 0.32 nowhere."""
    pair.decode.kv_path, pair.decode.says_at_end = "recomputed;reason=other_prompt", at_end
    pair.decode.wait_at = {1: asyncio.Event()}
    more: dict[str, Any] = {"messages": []} if path == CHAT else {"prompt": "x"}
    async with pair.proxy(CONCURRENT) as proxy:
        async with proxy.post(path, stream=True, **more) as response:
            assert response.headers["X-Pdlink-KV"] == "transferring", "not known yet"
            pair.decode.wait_at[1].set()
            data, told = settled(await response.read())
        assert told == (pair.decode.kv_path if at_end else "unknown")
        assert b"pdlink_kv" not in data
        await until(lambda: len(proxy.router.services.records) == 1, "its record")
        assert proxy.router.services.records[0].kv == told


async def test_cached_tokens_that_are_not_known_yet_are_not_told(pair: Pair) -> None:
    """KV that was pushed layer by layer may let decode answer before prefill's answer is through."""
    pair.prefill.cached_tokens, pair.decode.cached_tokens = 2, 4
    pair.prefill.gate = asyncio.Event()
    async with pair.proxy(CONCURRENT) as proxy:
        _, got = await said(proxy)
        assert msgspec.json.decode(got)["usage"]["prompt_tokens_details"] is None
        pair.prefill.gate.set()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt_logprobs": 0}),
        (CHAT, {"prompt_logprobs": 1}),
        (COMPLETIONS, {"echo": True, "logprobs": 0}),
        (COMPLETIONS, {"echo": True, "max_tokens": 0}),
        (COMPLETIONS, {"use_beam_search": True, "n": 2}),
        (COMPLETIONS, {"truncate_prompt_tokens": -1}),
    ],
)
@BOTH
async def test_what_the_kv_alone_cannot_answer_is_served_by_decode_whole(
    pair: Pair, dialect: str, path: str, body: dict[str, Any]
) -> None:
    async with pair.proxy(dialect) as proxy:
        assert (await said(proxy, path, **body))[0] == 200
        assert proxy.counted("fallbacks_total", kind="decode_only") == 0, "it is no fallback"
    assert pair.prefill.received == []
    assert "kv_transfer_params" not in pair.decode.received[0].body


@pytest.mark.parametrize("prompt", [{}, {"prompt": None}, {"prompt": "text"}, {"prompt": [1, 2]}])
async def test_embeddings_go_to_both_servers_as_they_are(pair: Pair, prompt: dict[str, Any]) -> None:
    body = {"model": "m", "prompt_embeds": "AAAA", "max_tokens": 4, **prompt}
    async with pair.proxy(CONCURRENT) as proxy, proxy.client.post(proxy.url + COMPLETIONS, json=body) as response:
        assert response.status == 200
        assert len((await response.json())["choices"]) == (2 if prompt.get("prompt") else 1)
        await until(lambda: len(pair.prefill.received) == 1)
    for worker in (pair.prefill, pair.decode):
        received = worker.received[0].body
        assert {name: received[name] for name in ("prompt_embeds", *prompt)} == {"prompt_embeds": "AAAA", **prompt}


@pytest.mark.parametrize("body", [{"prompt": None}, {}, {"prompt_embeds": None}, {"prompt": 5, "prompt_embeds": "A"}])
def test_a_completion_without_a_prompt_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(BadField, match="prompt"):
        parse(COMPLETIONS, msgspec.json.encode({"model": "m", **body}))


def embeds(rows: bytes, **more: Any) -> PlacementRequest:
    """A tensor of torch's begins as all others of its shape do."""
    given = base64.b64encode(bytes(2000) + rows).decode()
    return wanted(parse(COMPLETIONS, msgspec.json.encode({"model": "m", "prompt_embeds": given, **more})), None)


def test_embeddings_begin_alike_only_where_all_of_them_are_equal() -> None:
    rows = bytes(1024 * 8192)
    one, same, other = embeds(rows), embeds(rows), embeds(rows[:-1] + b"1")
    assert one.keys == same.keys
    assert len(one.keys) == 2, "as a text of so many tokens"
    assert 1000 < one.num_tokens < 1100
    assert not set(one.keys) & (set(other.keys) | set(embeds(rows, prompt="x").keys))
    assert len(one.prompt) < 5000, "what is hashed and compared by its beginnings is not the tensor"
    assert one.ids is None
    call = parse(COMPLETIONS, msgspec.json.encode({"model": "m", "prompt_embeds": "A" * 10**8}))
    assert text_of(wanted(call, None), call) is None, "no worker is asked for its tokens"


@pytest.mark.parametrize(
    "body", [{"n": 2}, {"prompt": ["a", "b"]}, {"prompt": [ [1], [2]]}, {"prompt_embeds": "AAAA"}]
)  # fmt: skip
async def test_nixl_gives_the_blocks_of_one_prompt_to_one_reader(pair: Pair, body: dict[str, Any]) -> None:
    """The second one would read blocks that are free already."""
    async with pair.proxy(SEQUENTIAL) as proxy:
        assert (await said(proxy, **body))[0] == 200
    assert pair.prefill.received == []


@pytest.mark.parametrize(
    "field",
    ['"echo":{"a":1}', '"prompt_logprobs":"x"', '"n":null', '"n":"1"', '"max_tokens":16.0', '"stream":"true"'],
)
def test_types_of_fields_are_left_to_vllm_to_judge(field: str) -> None:
    call = parse(COMPLETIONS, b'{"model":"m","prompt":"x",' + field.encode() + b"}")
    for name in (CONCURRENT, SEQUENTIAL):
        whole = DIALECTS[name].whole
        assert whole is not None
        assert whole(call) is False


# ---- bad legs


@BOTH
@pytest.mark.parametrize("streaming", [False, True])
async def test_what_vllm_rejects_the_client_hears_and_decode_is_closed(
    pair: Pair, dialect: str, streaming: bool
) -> None:
    pair.decode.gate = asyncio.Event()
    async with pair.proxy(dialect) as proxy:
        status, got = await said(proxy, temperature=-1, stream=streaming)
        assert status == 400
        assert "temperature" in msgspec.json.decode(got)["error"]["message"]
        await until(lambda: all(leg.aborted or leg.answered for leg in pair.decode.received))
        assert proxy.counted("requests_total", outcome="rejected") == 1


@BOTH
@pytest.mark.parametrize("fault", ["500", "503", "reset", "refused"])
async def test_a_lost_prefill_is_tried_again_elsewhere_at_once(pair: Pair, dialect: str, fault: str) -> None:
    """Decode, which cannot be told, would wait for the KV until its lease ends."""
    bad, good = pair.prefills
    pair.decode.gate = asyncio.Event()
    if fault.isdigit():
        bad.fail_with = int(fault)
    elif fault == "reset":
        bad.resets = 1
    async with pair.proxy(dialect, num_prefill=2, health_interval_s=3600) as proxy:
        if fault == "refused":
            await bad.stop()
        answer = asyncio.create_task(said(proxy, stream=True))
        await until(lambda: len(good.received) == 1, "the second attempt")
        await until(lambda: all(leg.aborted for leg in pair.decode.received[:-1]), "the end of the first decode leg")
        pair.decode.gate.set()
        status, got = await answer
        assert status == 200
        assert got.endswith(DONE)
        assert proxy.counted("attempts_total", why="retry") == 1
    if dialect == CONCURRENT:
        ids = [leg.transfer_id for leg in pair.decode.received]
        assert len(set(ids)) == len(ids)
        assert ids[-1] == good.received[0].transfer_id


@BOTH
async def test_without_another_prefill_decode_works_alone_if_so_configured(pair: Pair, dialect: str) -> None:
    pair.prefill.resets = 1
    pair.decode.gate = asyncio.Event()
    async with pair.proxy(dialect, on_no_prefill="decode_only", health_interval_s=3600) as proxy:
        answer = asyncio.create_task(said(proxy))
        await until(lambda: proxy.counted("fallbacks_total", kind="decode_only") == 1)
        pair.decode.gate.set()
        assert (await answer)[0] == 200
    assert "kv_transfer_params" not in pair.decode.received[-1].body


@BOTH
@pytest.mark.parametrize("fault", ["500", "reset"])
async def test_without_another_prefill_the_client_is_told_if_so_configured(
    pair: Pair, dialect: str, fault: str
) -> None:
    """In the proxy's words: prefill's own 500 says "See stack trace (above)"."""
    if fault == "500":
        pair.prefill.fail_with = 500
    else:
        pair.prefill.resets = 1
    pair.decode.gate = asyncio.Event()
    async with pair.proxy(dialect, on_no_prefill="fail", health_interval_s=3600) as proxy:
        status, got = await said(proxy)
    assert status == 502
    error = msgspec.json.decode(got)["error"]
    assert error["code"] == "peer_lost"
    assert "prefill worker" in error["message"]


@BOTH
@pytest.mark.parametrize("retries", [0, 1])
async def test_a_prefill_that_dies_under_a_request_is_not_asked_again_for_it(
    pair: Pair, dialect: str, retries: int
) -> None:
    """vLLM's engine dies before its API server: first a 500, then no connection, and only then a health check."""
    pair.prefill.fail_with = 500
    async with pair.proxy(dialect, on_no_prefill="decode_only", retries=retries, health_interval_s=3600) as proxy:
        for _ in range(3):
            status, got = await said(proxy, stream=True)
            assert (status, got.endswith(DONE)) == (200, True), got
        assert proxy.counted("fallbacks_total", kind="decode_only") == 3
    assert len(pair.prefill.received) == 3, "once a request"


@BOTH
async def test_two_dead_prefills_do_not_fail_a_request_that_decode_can_serve(pair: Pair, dialect: str) -> None:
    """The second one takes the last retry."""
    for worker in pair.prefills:
        worker.fail_with = 500
    pair.decode.kv_gate = asyncio.Event()
    async with pair.proxy(dialect, num_prefill=2, on_no_prefill="decode_only", health_interval_s=3600) as proxy:
        assert (await said(proxy))[0] == 200
    assert [len(worker.received) for worker in pair.prefills] == [1, 1]
    assert "kv_transfer_params" not in pair.decode.received[-1].body


async def test_a_prefill_that_answers_500_is_asked_for_its_health_at_once(pair: Pair) -> None:
    pair.prefill.fail_with, pair.prefill.dead = 500, False
    async with pair.proxy(CONCURRENT, on_no_prefill="decode_only", health_interval_s=3600) as proxy:
        pair.prefill.dead = True
        assert (await said(proxy))[0] == 200
        await until(lambda: side(proxy, Leg.PREFILL) is State.FAILED, "the watcher has asked")


@BOTH
@pytest.mark.parametrize("fault", ["500", "reset", "error event"])
async def test_a_lost_decode_is_tried_again_elsewhere(pair: Pair, dialect: str, fault: str) -> None:
    """With kv_load_failure_policy: fail a lost transfer is a 500, or an error in place of the first token."""
    bad, good = pair.decodes
    match fault:
        case "500":
            bad.fail_with = 500
        case "reset":
            bad.resets = 1
        case "error event":
            bad.error_at = 0
    async with pair.proxy(dialect, num_prefill=2, num_decode=2) as proxy:
        status, got = await said(proxy, stream=True)
        assert status == 200
        assert got.endswith(DONE)
        assert b"error" not in got
        assert proxy.counted("attempts_total", why="retry") == 1
    assert len(bad.received) == len(good.received) == 1


@BOTH
async def test_a_load_that_failed_is_told_without_vllms_words(pair: Pair, dialect: str) -> None:
    pair.decode.error_at = 0
    async with pair.proxy(dialect, retries=0) as proxy:
        status, got = await said(proxy, stream=True)
    assert status == 502
    error = msgspec.json.decode(got)["error"]
    assert (error["type"], error["code"]) == ("server_error", "internal_error")
    assert "began with an error" in error["message"]


async def test_a_prefill_answer_that_is_none_is_a_lost_leg(pair: Pair) -> None:
    pair.prefill.answer_override = b"<html>"
    async with pair.proxy(SEQUENTIAL, retries=0, on_no_prefill="fail") as proxy:
        status, got = await said(proxy)
        assert status == 502
        assert msgspec.json.decode(got)["error"]["code"] == "protocol_error"
        assert proxy.counted("leg_failures_total", leg="prefill", reason="malformed") == 1
    assert pair.decode.received == []


@BOTH
async def test_an_error_of_vllm_in_mid_stream_is_told_in_our_words_and_counted(pair: Pair, dialect: str) -> None:
    pair.decode.error_at = 1
    async with pair.proxy(dialect) as proxy:
        status, got = await said(proxy, stream=True)
        assert status == 200
        first, error, done, rest = got.split(b"\n\n")
        assert b"0.0 " in first
        assert msgspec.json.decode(error.removeprefix(b"data: "))["error"]["code"] == "internal_error"
        assert (done, rest) == (b"data: [DONE]", b"")
        await until(lambda: proxy.counted("requests_total", outcome="broken") == 1)


@BOTH
async def test_a_decode_that_dies_in_mid_stream_ends_it_with_a_typed_error(pair: Pair, dialect: str) -> None:
    pair.decode.break_at = 2
    async with pair.proxy(dialect, num_decode=2) as proxy:
        _, got = await said(proxy, stream=True)
    *_, error, done, _ = got.split(b"\n\n")
    assert msgspec.json.decode(error.removeprefix(b"data: "))["error"]["type"] == "stream_error"
    assert done == b"data: [DONE]"


@BOTH
@pytest.mark.parametrize("streaming", [False, True])
async def test_a_client_that_leaves_during_prefill_closes_what_was_begun(
    pair: Pair, dialect: str, streaming: bool
) -> None:
    pair.prefill.gate, pair.decode.gate = asyncio.Event(), asyncio.Event()
    begun = [pair.prefill, pair.decode] if dialect == CONCURRENT else [pair.prefill]
    async with pair.proxy(dialect) as proxy:
        answer = asyncio.create_task(said(proxy, stream=streaming))
        await until(lambda: all(len(worker.received) == 1 for worker in begun))
        answer.cancel()
        await until(lambda: all(worker.received[0].aborted for worker in begun), "the legs being closed")
        await until(lambda: proxy.counted("requests_total", outcome="client_left") == 1)
    assert len(pair.prefill.received) + len(pair.decode.received) == len(begun)


@BOTH
async def test_a_client_that_leaves_during_decode_closes_decode(pair: Pair, dialect: str) -> None:
    pair.decode.wait_at = {1: asyncio.Event()}
    async with pair.proxy(dialect) as proxy:
        async with proxy.post(stream=True) as response:
            assert b"0.0 " in await response.content.readany()
            response.close()
        await until(lambda: pair.decode.received[0].aborted, "decode's leg being closed")


# ---- health


def side(proxy: Proxy, leg: Leg) -> State:
    return proxy.router.services.pools.workers[leg][0].state


async def test_models_are_asked_for_when_a_worker_comes_up_and_not_all_the_time(pair: Pair) -> None:
    pair.decode.models = pair.prefill.models = ["m", "m-lora"]
    pair.prefill.version = ""  # it has no such route, and serves all the same
    async with pair.proxy(CONCURRENT) as proxy:
        worker = proxy.router.services.pools.workers[Leg.DECODE][0]
        heard = worker.heard_s or 0.0
        await until(lambda: (worker.heard_s or 0.0) > heard + 0.1)
        assert pair.decode.models_asked == 1
        assert worker.health is not None
        assert worker.health.version == "vLLM 0.32.0"
        for model in ("m", "m-lora"):
            assert (await said(proxy, model=model))[0] == 200
        assert (await said(proxy, model="other"))[0] == 404
        async with proxy.client.get(f"{proxy.url}/v1/models") as response:
            assert [model["id"] for model in (await response.json())["data"]] == ["m", "m-lora"]
        await pair.decode.stop()
        await until(lambda: side(proxy, Leg.DECODE) is State.UNREACHABLE)
        pair.decode.models = ["new"]
        await pair.decode.start()
        await until(lambda: side(proxy, Leg.DECODE) is State.OK)
        assert worker.incarnations == 2
        assert proxy.router.services.pools.models() == ["new"]


async def test_what_a_server_does_not_say_is_null_and_not_zero(pair: Pair) -> None:
    """`free_blocks: 0` reads as full."""
    async with pair.proxy(CONCURRENT) as proxy, proxy.client.get(f"{proxy.url}/health") as response:
        body = await response.json()
    health = body["decode"][0]["health"]
    unknown = ("role", "control", "running", "waiting", "free_blocks", "num_blocks", "block_tokens")
    assert {name: health[name] for name in unknown} == dict.fromkeys(unknown)
    assert body["prefill"][0]["health"]["control"] == [CONTROL], "it is in the settings"


async def test_a_dead_engine_takes_its_server_out(pair: Pair) -> None:
    """The API server of vLLM outlives its engine for a moment, and answers 503."""
    async with pair.proxy(CONCURRENT) as proxy:
        pair.decode.dead = True
        await until(lambda: side(proxy, Leg.DECODE) is State.FAILED)
        assert (await said(proxy))[0] == 503
        pair.decode.dead = False
        await until(lambda: side(proxy, Leg.DECODE) is State.OK)


async def test_a_server_with_a_key_says_which_setting_is_missing(pair: Pair, tmp_path: Any) -> None:
    pair.prefill.api_key = pair.decode.api_key = "s3cret"
    async with pair.proxy(CONCURRENT) as proxy:
        await until(lambda: side(proxy, Leg.DECODE) is State.BARRED)
        assert "worker_key_file" in proxy.router.services.pools.workers[Leg.DECODE][0].reason
    key = write_private(tmp_path / "key", "s3cret\n")
    async with pair.proxy(CONCURRENT, worker_key_file=key, api_keys=["client"]) as proxy:
        await until(lambda: side(proxy, Leg.DECODE) is State.OK)
        body = {"model": "m", "prompt": "hello"}
        headers = {"Authorization": "Bearer client"}
        async with proxy.client.post(proxy.url + COMPLETIONS, json=body, headers=headers) as response:
            assert response.status == 200, "the client's own key is not vLLM's"


@pytest.mark.parametrize("models", [[], ["m"]])
async def test_something_that_is_no_vllm_is_not_used(pair: Pair, models: list[str], monkeypatch: Any) -> None:
    if models:
        monkeypatch.setattr(
            "tests.proxy.fake_vllm._json", lambda *_: __import__("aiohttp").web.Response(text="hello")
        )
    pair.decode.models = models
    async with pair.proxy(CONCURRENT) as proxy:
        await until(lambda: side(proxy, Leg.DECODE) is State.INVALID)


def test_a_prefill_worker_without_its_control_address_is_refused_at_start() -> None:
    flags = {"dialect": "vllm", "prefill": ["http://a:1", "http://b:1"]}
    with pytest.raises(ConfigError, match=r"control: no address for the prefill worker http://b:1"):
        load(ProxyConfig, environment={}, flags={**flags, "control": {"http://a:1/": "tcp://a:2"}})
    right = {"http://a:1": "tcp://a:2", "http://b:1": "tcp://b:2"}
    assert load(ProxyConfig, environment={}, flags={**flags, "control": right}).control["http://a:1"] == (
        "tcp://a:2",
    )
    with pytest.raises(
        ConfigError, match=r"tcp://b:1, given for http://a:1, is the HTTP port of http://b:1.*`listen`"
    ):
        load(ProxyConfig, environment={}, flags={**flags, "control": {**right, "http://a:1": "tcp://b:1"}})
    config = load(ProxyConfig, environment={}, flags={**flags, "dialect": "vllm-nixl"})
    assert config.control == {}


@pytest.mark.parametrize(
    ("answer", "client", "kv"),
    [
        (
            {"choices": [], "kv_transfer_params": {"pdlink_kv": "cached"}},
            {"choices": [], "kv_transfer_params": None},
            "cached",
        ),
        ({"kv_transfer_params": {"pdlink_kv": "cached"}, "z": 1}, {"kv_transfer_params": None, "z": 1}, "cached"),
        ({"kv_transfer_params": {"a": "}"}}, {"kv_transfer_params": None}, None),
        (
            {"response": {"kv_transfer_params": {"pdlink_kv": "cached"}}},
            {"response": {"kv_transfer_params": None}},
            None,
        ),
        ({"kv_transfer_params": {"pdlink_kv": 7}}, {"kv_transfer_params": None}, None),
    ],
    ids=["last", "not last", "of others", "in a response", "not ours"],
)
def test_transfer_parameters_are_read_and_kept_from_the_client_wherever_they_stand(
    answer: dict[str, Any], client: dict[str, Any], kv: str | None
) -> None:
    document = msgspec.json.encode(answer)
    assert DIALECTS["vllm"].said({}, document).kv == kv
    assert msgspec.json.decode(DIALECTS["vllm"].rules.merge_answer(b"", document)) == client


def test_an_answer_is_not_kept_once_the_client_has_it() -> None:
    answer = msgspec.json.encode({"choices": [{"text": "x"}], "kv_transfer_params": {"pdlink_kv": "transferred"}})
    before = sys.getrefcount(answer)
    dialect = DIALECTS["vllm"]
    assert dialect.said({}, answer).kv == "transferred"
    assert dialect.rules.merge_answer(b"", answer) == b'{"choices":[{"text":"x"}],"kv_transfer_params":null}'
    assert sys.getrefcount(answer) == before
