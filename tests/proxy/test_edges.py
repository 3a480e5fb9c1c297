"""Numbers at the edges of every field, header and message that the proxy reads, and honest requests after them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from pdlink._http import usage_of
from pdlink_proxy.dialects.own import read_health
from pdlink_proxy.steps import Leg
from pdlink_proxy.table import WorkerState
from tests.private import write_private
from tests.proxy.fake_sglang import FakeSglang
from tests.proxy.fakes import FakeWorker, proxy_of, until
from tests.proxy.test_processes import processes
from tests.waiting import WAIT_S

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from pathlib import Path

    Post = Callable[[str, bytes], Awaitable[tuple[int, bytes]]]

_TOKENS, _ANSWERS = (0, 2**31 - 1), (0, 2**16)
RANGES = {
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens"), _TOKENS),
    "n": _ANSWERS,
    "seed": (-(2**63), 2**63 - 1),
    "priority": (-(2**31), 2**31 - 1),
}
"""Of the fields of a request that the proxy reads, least and most."""
SAMPLING = {"max_new_tokens": _TOKENS, "n": _ANSWERS}
"""The same of SGLang's `sampling_params`."""
EDGES = (
    *("0", "-1", "2147483648", "9007199254740992", "9223372036854775807", "9223372036854775808", "1" + "0" * 30),
    *("-1" + "0" * 30, "NaN", "1e308", "-1e308", "1e999", "1" + "0" * 5000),
)
TEXT = '"model": "m", "prompt": "hi"'
CHAT = '"model": "m", "messages": []'
LONG = f'"model": "m", "prompt": "{"x" * 9000}"'
"""Longer than what is read in one look."""


def bodies(path: str, base: str, fields: Any = RANGES) -> Iterator[tuple[str, str, str, bytes]]:
    """Of each field and edge: path, field, value and body."""
    for name in fields:
        for value in EDGES:
            yield path, name, value, f'{{{base}, "{name}": {value}}}'.encode()


def nested(path: str, base: str) -> Iterator[tuple[str, str, str, bytes]]:
    for name in SAMPLING:
        for value in EDGES:
            told = f'{{"{name}": {value}}}'
            yield path, name, value, f'{{{base}, "sampling_params": {told}}}'.encode()
            if not fits(name, value):  # of a batch
                yield path, name, value, f'{{{base}, "sampling_params": [{told}]}}'.encode()


def fits(name: str, value: str) -> bool:
    least, most = {**RANGES, **SAMPLING}[name]
    try:
        return least <= int(value) <= most
    except ValueError:  # 1e308 is a number, but none that fits, and NaN is none
        return False


async def walk(post: Post, found: Iterator[tuple[str, str, str, bytes]]) -> None:
    """Each is answered, and what is out of its range with 400, its field and its range."""
    for path, name, value, body in found:
        status, answer = await post(path, body)
        what = f"{path} {name}={value[:40]}: {status}, {answer[:200]!r}"
        assert status < 500, what
        if not fits(name, value) and (value != "NaN" or path != "/v1/embeddings"):  # not JSON: the worker's to judge
            assert status == 400, what
            error = json.loads(answer)["error"]
            said = "JSON" if value == "NaN" else f"{name}: Expected an integer from "
            assert said in error["message"], what


async def test_no_number_of_a_request_fails_it_otherwise_than_with_its_field_and_range(
    prefill: FakeWorker, decode: FakeWorker, tmp_path: Path
) -> None:
    more: dict[str, Any] = {"admin_key_file": str(write_private(tmp_path / "admin", "boss"))}
    async with proxy_of([prefill], [decode], policy="cost", **more) as proxy:

        async def post(path: str, body: bytes) -> tuple[int, bytes]:
            headers = {"Authorization": "Bearer boss"} if path == "/workers" else {}
            async with proxy.client.post(proxy.url + path, data=body, headers=headers) as response:
                return response.status, await response.read()

        for path, base in (
            *(("/v1/completions", TEXT), ("/v1/completions", LONG), ("/v1/chat/completions", CHAT)),
            *(("/v1/completions", TEXT + ', "stream": true'), ("/v1/embeddings", TEXT)),
        ):
            await walk(post, bodies(path, base, RANGES))
        pair = '"prefill": "prefill-0", "decode": "decode-0"'
        for value in EDGES:
            status, answer = await post("/pdlink/probe", f'{{{pair}, "num_tokens": {value}}}'.encode())
            assert (status, b"num_tokens" in answer or b"JSON" in answer) == (400, True), (value, answer)
            listed = f'{{"role": "prefill", "url": "http://127.0.0.1:9", "data_parallel": {value}}}'
            status, answer = await post("/workers", listed.encode())
            assert (status, b"data_parallel" in answer or b"JSON" in answer) == (400, True), (value, answer)
        for path in ("/health", "/metrics", "/decisions", "/pdlink/state", "/v1/models"):
            async with proxy.client.get(proxy.url + path) as response:
                assert response.status == 200, path
        await proxy.stream()


async def test_no_number_of_a_sampling_object_fails_a_request_otherwise() -> None:
    servers = [FakeSglang("prefill"), FakeSglang("decode")]
    prefill, decode = [await each.start() for each in servers]
    try:
        async with proxy_of([prefill], [decode], dialect="sglang") as proxy:

            async def post(path: str, body: bytes) -> tuple[int, bytes]:
                async with proxy.client.post(proxy.url + path, data=body) as response:
                    return response.status, await response.read()

            await walk(post, nested("/generate", '"text": "hello"'))
            status, _ = await post("/generate", b'{"text": "hello", "sampling_params": {"max_new_tokens": 2}}')
            assert status == 200
    finally:
        for each in servers:
            await each.stop()


@pytest.mark.parametrize("value", EDGES)
async def test_no_content_length_keeps_the_proxy_from_its_next_client(
    prefill: FakeWorker, decode: FakeWorker, value: str
) -> None:
    async with proxy_of([prefill], [decode]) as proxy:
        host, port = proxy.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        with contextlib.closing(writer):
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {value}\r\n\r\n"
            writer.write(head.encode())
            writer.write_eof()
            answer = await asyncio.wait_for(reader.read(), WAIT_S)
        assert answer[9:12] in (b"", b"400", b"413"), answer
        await proxy.stream()


async def test_after_numbers_at_every_edge_each_process_serves_honest_requests(
    prefill: FakeWorker, decode: FakeWorker
) -> None:
    """Of two, of which each gets about half of the requests."""
    async with processes(prefill, decode, "--set", "policy={prefill: cost, decode: cost}") as proxy:

        async def post(path: str, body: bytes) -> tuple[int, bytes]:
            return await proxy.ask("POST", path, body)

        await walk(post, bodies("/v1/completions", TEXT, ("max_tokens", "priority", "seed")))
        for _ in range(12):
            await proxy.complete(max_tokens=4)
        await proxy.pids()


COUNTS = ("running", "waiting", "load_tokens", "free_blocks", "num_blocks", "block_tokens")


@pytest.mark.parametrize("field", COUNTS)
def test_a_health_with_a_number_out_of_range_is_no_health_and_names_the_field(field: str) -> None:
    said = '"status": "ok", "name": "w", "epoch": "e", "role": "prefill", "model": "m", "control": null'
    for value in EDGES:
        found = read_health(200, f'{{{said}, "{field}": {value}}}'.encode())
        if value in ("0", "2147483648", "9007199254740992"):
            assert not isinstance(found, str)
            msgspec.json.encode(found)
        else:
            assert isinstance(found, str)
            assert field in found or "malformed" in found, found


async def test_a_worker_with_numbers_at_the_edge_of_every_field_is_asked_and_gets_requests_as_others(
    prefill: FakeWorker, decode: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks and their tokens are multiplied."""
    said, most = decode.health, dict.fromkeys(COUNTS, 2**53)
    async with proxy_of([prefill], [decode], policy="cost") as proxy:
        (worker,) = proxy.router.services.pools.workers[Leg.DECODE]
        monkeypatch.setattr(decode, "health", lambda: {**said(), **most})
        await until(lambda: worker.work.room_tokens == worker.work.pool_tokens == 2**53, "what it says")
        await proxy.stream()
        async with proxy.client.get(proxy.url + "/health") as response:
            assert response.status == 200
        monkeypatch.setattr(decode, "health", lambda: {**said(), "free_blocks": 7, "block_tokens": 16})
        await until(lambda: worker.work.room_tokens == 7 * 16, "what it says then")


def test_a_workers_number_of_tokens_out_of_range_counts_as_none() -> None:
    for value in ("-1", "9223372036854775807", "1" + "0" * 30):
        body = f'{{"choices": [{{}}], "usage": {{"prompt_tokens": {value}, "completion_tokens": 1}}}}'.encode()
        assert usage_of(body) == (0, 1)


def test_an_answered_request_with_a_huge_limit_makes_its_worker_look_no_quicker() -> None:
    """Pace of decode is measured in tokens that clients allow."""
    for others in (0, 50):
        worker, now = WorkerState("w", allowed=True), 0.0
        for tokens in (*[100] * others, 2**31 - 1, *[100] * 50):
            worker.sent(tokens, now)
            now += 0.1
            worker.finished(tokens, now, served=True)
        assert worker.tokens_per_s == pytest.approx(1000, rel=0.3 if others else 5)
