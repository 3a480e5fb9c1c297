"""What an operator is told of one request."""

from __future__ import annotations

import asyncio
import io
import json
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from pdlink.cli import main
from pdlink.observe.explain import Explained, advice, fetch_explanation, table_of
from pdlink.observe.fetch import CannotFetch
from tests.proxy.fake_vllm import FakeVllm
from tests.proxy.fakes import FakeWorker, proxy_of

if TYPE_CHECKING:
    from pathlib import Path


async def test_a_request_is_explained_from_its_placement_to_its_end(
    prefill: FakeWorker, decodes: list[FakeWorker], capsys: pytest.CaptureFixture[str]
) -> None:
    decodes[0].fail_with, prefill.gate = 503, asyncio.Event()
    decodes[1].gate = None
    async with proxy_of([prefill], decodes) as proxy:
        body = {"model": "m", "prompt": "hello", "stream": True}
        headers = {"X-Request-Id": "one/two"}
        async with proxy.client.post(f"{proxy.url}/v1/completions", json=body, headers=headers) as response:
            assert response.status == 200
            await response.read()
        found = await asyncio.to_thread(fetch_explanation, proxy.url, "one/two")
        assert [each["verdict"] for each in found.decisions] == ["placed", "failed", "placed", "ended"]
        assert "decode leg on decode-0: 503" in found.decisions[1]["reason"]
        assert found.decisions[-1]["reason"] == "ok, KV transferred"
        assert {each["worker"] for each in found.sources} == {"prefill-0", "decode-0", "decode-1"}
        assert all("404" in each["error"] for each in found.sources), "these workers have no such route"
        assert await asyncio.to_thread(main, ["explain", "one/two", "--proxy", proxy.url]) == 0
        shown = capsys.readouterr().out
        assert "request one/two" in shown
        assert "decode-1" in shown
        assert "first token" in shown
        assert await asyncio.to_thread(main, ["explain", "one/two", "--proxy", proxy.url, "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == found._asdict()
        with pytest.raises(CannotFetch, match="knows no request 'other'"):
            await asyncio.to_thread(fetch_explanation, proxy.url, "other")


DECISION: dict[str, Any] = {
    "request_id": "r",
    "at_s": 5.0,
    "verdict": "ended",
    "reason": "",
    "why": "",
    "tokens": 7,
    "waited_s": 2.0,
}
DECISION |= {"prefill": None, "decode": None, "prefill_load": None, "decode_load": None, "cached_tokens": 0}
RECORD: dict[str, Any] = {"queued_s": 0.01, "prefill_s": 0.4, "ttft_s": 0.412, "total_s": 2.0, "kv": "transferred"}
RECORD |= {"prompt_tokens": 25, "estimated": False}
RECORD |= {"legs": [{"transfer_id": "t", "leg": "prefill", "worker": "prefill-1", "ended_s": 0.41}]}
MOVED: dict[str, Any] = {
    "transfer_id": "t",
    "side": "sender",
    "peer": "decode-0",
    "lane": "mapped",
    "state": "DONE",
    "reason": "",
}
MOVED |= {"nbytes": 268_000_000, "layers": 32, "moving_s": 0.05, "exposed_s": 0.001}


def told(**record: Any) -> Explained:
    return Explained([DECISION], [], RECORD | record, 0.93, [MOVED])


def test_explanation_shows_the_transfer_and_where_the_time_to_the_first_token_went() -> None:
    console = Console(file=io.StringIO(), width=300)
    console.print(table_of(told()))
    assert isinstance(console.file, io.StringIO)
    rows = [line for line in console.file.getvalue().splitlines() if line.startswith("│")]
    cells = [[cell.strip() for cell in row.split("│")[2:4]] for row in rows]
    assert cells == [["transfer", "prefill-1"], ["", "decode-0"], ["first token", ""], ["ended", ""]]
    assert console.file.getvalue().startswith("request r: 25 tokens")
    assert "268.0 MB over mapped, 32 layers, 5.36 GB/s while it moved, 1.0 ms not hidden" in rows[0]
    assert "10.0 ms queued, 390.0 ms in prefill's leg, 12.0 ms then; slower than 93% of the last requests" in rows[2]
    assert advice(told()) == []


def test_explanation_says_about_how_many_tokens_where_they_are_a_guess() -> None:
    title = table_of(told(estimated=True)).title
    assert str(title) == "request r: about 25 tokens"


def test_explanation_of_a_rescued_stream_adds_up() -> None:
    """Its first token came from an attempt that was lost later, or after attempts that were lost."""
    for record, words in (
        ({"attempts": 2}, "10.0 ms queued, 390.0 ms in prefill's leg, 12.0 ms then"),
        (
            {"attempts": 2, "queued_s": 0.02, "lost_s": 0.3},
            "20.0 ms queued, 300.0 ms in attempts that were lost, 80.0 ms in prefill's leg, 12.0 ms then",
        ),
    ):
        console = Console(file=io.StringIO(), width=300)
        console.print(table_of(told(**record)))
        assert isinstance(console.file, io.StringIO)
        assert words in console.file.getvalue()
        assert advice(told(**record)) == []


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"kv": "recomputed;reason=no_offer"}, "raise cache.num_blocks"),
        ({"kv": "recomputed;reason=refused:dtype"}, "`pdlink doctor`"),
        ({"queued_s": 0.3}, "waited for workers"),
    ],
)
def test_explanation_says_what_to_do(record: dict[str, Any], words: str) -> None:
    (sentence,) = advice(told(**record))
    assert words in sentence


def test_request_that_goes_on_is_said_to() -> None:
    (sentence,) = advice(Explained([DECISION | {"verdict": "placed"}], []))
    assert "goes on" in sentence
    (sentence,) = advice(Explained([DECISION | {"verdict": "waits"}], []))
    assert "waits for a worker" in sentence


async def test_a_request_to_vllm_is_explained_by_what_its_answers_said() -> None:
    """Prefill's answer is never a stream, so at least that leg is heard."""
    said = {
        **{"at_s": 1.5, "cached": 0, "loaded": 256, "places": {"disk": 256}, "received": 0, "computed": 44},
        **{"found": 256, "reason": "faster", "load_s": 0.01, "other_s": 0.3},
    }
    servers = [FakeVllm("pdlink") for _ in range(2)]
    for server, leg in zip(servers, ("prefill", "decode"), strict=True):
        server.source = said | {"leg": leg}
        await server.start()
    try:
        control = {servers[0].url: "tcp://127.0.0.1:4100"}
        async with proxy_of([servers[0]], [servers[1]], dialect="vllm", control=control) as proxy:
            body = {"model": "m", "prompt": [1, 2, 3]}
            headers = {"X-Request-Id": "one"}
            async with proxy.client.post(f"{proxy.url}/v1/completions", json=body, headers=headers) as response:
                assert response.status == 200
                assert "pdlink_source" not in await response.text()
            found = await asyncio.to_thread(fetch_explanation, proxy.url, "one")
    finally:
        for server in servers:
            await server.stop()
    assert [(each["worker"], each["leg"]) for each in found.sources] == [
        ("prefill-0", "prefill"),
        ("decode-0", "decode"),
    ]
    assert all(each.items() >= said.items() for each in found.sources)


async def test_a_proxy_with_keys_explains_to_those_who_have_one(
    prefill: FakeWorker, decode: FakeWorker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = tmp_path / "key"
    key.write_text("secret\n")
    key.chmod(0o600)
    async with proxy_of([prefill], [decode], api_keys=["secret"]) as proxy:
        assert await asyncio.to_thread(main, ["explain", "x", "--proxy", proxy.url]) == 1
        assert "--key-file" in capsys.readouterr().err
        assert await asyncio.to_thread(main, ["explain", "x", "--proxy", proxy.url, "--key-file", str(key)]) == 1
        assert "knows no request" in capsys.readouterr().err
    assert await asyncio.to_thread(main, ["explain", "x", "--proxy", proxy.url]) == 1
    assert "did not answer" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["127.0.0.1:not-a-port", "a b", "127.0.0.1:1"])
def test_a_url_that_nobody_answers_is_one_line(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "x", "--proxy", url]) == 1
    error = capsys.readouterr().err
    assert "did not answer" in error
    assert "Traceback" not in error
