"""The file of decisions: one line a request, which is a line of a trace, too."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from pdlink.errors import ConfigError
from pdlink.observe.explain import fetch_explanation, table_of
from pdlink.plan.traffic import read_trace
from pdlink_proxy import decision_log
from pdlink_proxy.decision_log import DecisionLog, Tally
from tests.proxy.fakes import DONE, FakeWorker, Proxy, proxy_of, until
from tests.waiting import WAIT_S

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decision_log, "FLUSH_S", 0.01)


def written(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines() if path.exists() else []


async def lines(path: Path, number: int) -> list[dict[str, Any]]:
    await until(lambda: len(written(path)) >= number, f"{number} lines")
    found = [json.loads(line) for line in written(path)]
    assert len(found) == number
    return found


async def test_a_request_with_a_retry_is_one_line_with_both_attempts_and_their_legs(
    prefills: list[FakeWorker], decodes: list[FakeWorker], tmp_path: Path
) -> None:
    decodes[0].fail_with = 503
    for worker in prefills:
        worker.gate = asyncio.Event()
    path = tmp_path / "log"
    policies = {"prefill": "cost", "decode": "round_robin"}
    async with proxy_of(prefills, decodes, decision_log=str(path), policy=policies) as proxy:
        async with proxy.post(stream=True, prompt=list(range(1200)), max_tokens=9) as response:
            await response.read()
            request_id = response.headers["X-Request-Id"]
        (line,) = await lines(path, 1)
        assert (line["request_id"], line["outcome"], line["kv"]) == (request_id, "ok", "transferred")
        assert (line["input_length"], line["output_length"]) == (1200, 4)
        assert len(line["hash_ids"]) == 2
        first, second = line["attempts"]
        assert (first["why"], second["why"]) == ("first", "retry")
        assert (first["decode"]["worker"], first["decode"]["end"]) == ("decode-0", "503")
        assert (first["prefill"]["end"], second["decode"]["end"]) == ("cancelled", "served")
        considered = first["prefill"]["considered"]
        assert considered == {"policy": "cost", "scores": [["prefill-0", 1200.0], ["prefill-1", 1200.0]], "of": 2}
        assert first["decode"]["considered"]["policy"] == "round_robin"
        assert first["transfer_id"] != second["transfer_id"]
        assert 0 <= line["queued_s"] <= line["total_s"]
        trace = read_trace(path, 10)
        assert (trace.prompt_tokens.tolist(), trace.answer_tokens.tolist()) == ([1200], [4])
        assert trace.keys == (tuple(line["hash_ids"]),)
        found = await asyncio.to_thread(fetch_explanation, proxy.url, request_id)
        console = Console(width=250, record=True, quiet=False)
        console.print(table_of(found))
        assert "prefill by cost: prefill-0 1,200, prefill-1 1,200" in console.export_text()


async def test_equal_beginnings_have_equal_ids_and_only_a_share_is_written(
    prefill: FakeWorker, decode: FakeWorker, tmp_path: Path
) -> None:
    path = tmp_path / "log"
    async with proxy_of([prefill], [decode], decision_log=str(path)) as proxy:
        for tail in (1, 2):
            await proxy.stream(prompt=[7] * 512 + [tail] * 512)
        one, other = await lines(path, 2)
        assert one["hash_ids"][0] == other["hash_ids"][0]
        assert one["hash_ids"][1] != other["hash_ids"][1]
    path = tmp_path / "share"
    async with proxy_of([prefill], [decode], decision_log=str(path), decision_share=0) as proxy:
        await proxy.stream()
        assert proxy.router.services.decisions_of()[0].considered == {}
    assert written(path) == []


async def test_a_log_that_was_renamed_goes_on_in_a_new_file(
    prefill: FakeWorker, decode: FakeWorker, tmp_path: Path
) -> None:
    path = tmp_path / "log"
    async with proxy_of([prefill], [decode], decision_log=str(path)) as proxy:
        await proxy.stream()
        await lines(path, 1)
        path.rename(tmp_path / "old")
        proxy.router.reload()
        await proxy.stream()
        await lines(path, 1)
        await lines(tmp_path / "old", 1)


async def test_a_full_disk_costs_lines_and_no_request(
    prefill: FakeWorker, decode: FakeWorker, caplog: pytest.LogCaptureFixture
) -> None:
    async def dropped(proxy: Proxy) -> float:
        await proxy.client.get(f"{proxy.url}/metrics")
        return proxy.counted("decision_log_dropped_total")

    async with proxy_of([prefill], [decode], decision_log="/dev/full") as proxy:
        for number in (1, 2):
            await proxy.stream()
            async with asyncio.timeout(WAIT_S):
                while await dropped(proxy) < number:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
    assert caplog.text.count("lines are dropped") == 1


def test_end_of_a_trouble_is_told_once_and_as_loudly_as_its_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log = DecisionLog(str(tmp_path / "log"))
    full, write = [True], os.write

    def refuse(file: int, data: bytes) -> int:
        if full[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, data)

    monkeypatch.setattr(os, "write", refuse)
    for _ in range(2):
        log._write([b"lost\n"])
    full[0] = False
    for _ in range(2):
        log._write([b"kept\n"])
    told = [(each.levelname, each.getMessage()) for each in caplog.records]
    assert [level for level, _ in told] == ["ERROR", "ERROR"]
    assert "lines are dropped" in told[0][1]
    assert "written again" in told[1][1]
    assert "2 were dropped" in told[1][1]
    assert (tmp_path / "log").read_text() == "kept\nkept\n"


def test_a_file_that_cannot_be_written_is_a_wrong_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="decision_log: cannot write"):
        DecisionLog(str(tmp_path / "nowhere" / "log"))


def test_tokens_that_a_stream_does_not_say_are_its_ids_or_its_events() -> None:
    tally = Tally()
    tally.add(b'data: {"choices":[{"index":0,"text":"a \\"choices\\":[{"}]}\n\ndata: {"choices":[{"text":"b"}]}\n\n')
    tally.add(b'data: {"choices":[],"usage":{"prompt_tokens":5}}\n\n')
    assert tally.answer_tokens == 2
    tally.add(b'data: {"choices":[{"text":"a","token_ids":[5, 6]}]}\n\ndata: {"choices":[{"token_ids":[7]}]}\n\n')
    tally.add(b'data: {"choices":[{"text":"","finish_reason":"length","token_ids":[]}]}\n\n')
    assert tally.answer_tokens == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_are_those_that_the_answer_says(
    prefill: FakeWorker, decode: FakeWorker, tmp_path: Path, stream: bool
) -> None:
    usage = b'"usage":{"prompt_tokens":5,"completion_tokens":17}}'
    event = b'data: {"choices":[{"text":"a","finish_reason":"stop"}]}\n\ndata: {"choices":[],'
    decode.answer_override, decode.stream_override = b'{"choices":[],' + usage, event + usage + b"\n\n" + DONE
    path = tmp_path / "log"
    async with proxy_of([prefill], [decode], decision_log=str(path)) as proxy:
        async with proxy.post(stream=stream) as response:
            assert response.status == 200
            await response.read()
        (line,) = await lines(path, 1)
        assert (line["input_length"], line["output_length"]) == (5, 17)
