"""`pdlink bench proxy` counts only work that was done, and says what each figure is of."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from pdlink_bench import proxy, proxy_stub
from pdlink_bench.measure import Measured
from pdlink_bench.proxy_stub import CHUNKS, DIALECTS
from tests.waiting import WAIT_S

if TYPE_CHECKING:
    from pathlib import Path

EVENT = b'16\r\ndata: {"text":" word"}\n\r\n'


def whole(body: bytes, status: bytes = b"200 OK") -> bytes:
    return b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)


def streamed(num: int, end: bytes = b"e\r\ndata: [DONE]\n\n\r\n") -> bytes:
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + EVENT * num + end + b"0\r\n\r\n"


async def seen(answer: bytes, load: proxy.ProxyLoad) -> tuple[int, int]:
    """Answers and wrong ones of a client whose server writes this, byte by byte at the end of what it has."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for at in range(0, len(answer), 1 + len(answer) // 7):
            writer.write(answer[at : at + 1 + len(answer) // 7])
            await asyncio.sleep(0.005)
        writer.close()
        told.set()

    told = asyncio.Event()
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        drive = proxy._Drive(going=False)
        client = await proxy._Client(server.sockets[0].getsockname()[1], load, 0, drive).connect()
        await asyncio.wait_for(client.ended, WAIT_S)
        client.transport.abort()
        await told.wait()
    return len(drive.took_s), drive.wrong


SMALL, STREAM = proxy.LOADS[0], proxy.LOADS[2]


@pytest.mark.parametrize(
    ("load", "answer", "found"),
    [
        (SMALL, whole(b'{"text":" word"}'), (1, 0)),
        (SMALL, whole(b'{"text":""}'), (1, 1)),
        (SMALL, whole(b'{"text":" word"}', b"502 Bad Gateway"), (1, 1)),
        (SMALL, whole(b'{"text":" word"}')[:-1], (0, 1)),
        (STREAM, streamed(CHUNKS), (1, 0)),
        (STREAM, streamed(CHUNKS).replace(b'" word', b'" w\r\n5\r\nord', 1), (1, 0)),
        (STREAM, streamed(CHUNKS - 1), (1, 1)),
        (STREAM, streamed(CHUNKS, end=b""), (1, 1)),
    ],
)
async def test_an_answer_that_lacks_a_token_or_its_end_is_wrong(
    load: proxy.ProxyLoad, answer: bytes, found: tuple[int, int]
) -> None:
    assert await seen(answer, load) == found


async def test_a_stub_closes_a_connection_that_is_idle_and_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy_stub, "_KEEPALIVE_S", 0.2)
    stub = proxy_stub.Stub
    server = await asyncio.get_running_loop().create_server(stub, "127.0.0.1", 0)
    async with server, asyncio.timeout(WAIT_S):
        port = server.sockets[0].getsockname()[1]
        idle, unused = await asyncio.open_connection("127.0.0.1", port)
        held, asks = await asyncio.open_connection("127.0.0.1", port)
        body = b'{"prompt": "held", "stream": true}'
        asks.write(b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        await held.readuntil(b"\n\n")
        sweep = asyncio.create_task(proxy_stub.close_idle())
        assert await idle.read() == b""
        assert stub.running == len(stub.connections) == 1
        sweep.cancel()
        for each in (unused, asks):
            each.close()
            await each.wait_closed()


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_router_is_measured_only_if_each_request_reached_both_sides(dialect: str) -> None:
    with proxy.StubProcess("prefill", dialect) as prefill, proxy.StubProcess("decode", dialect) as decode:
        workers = {"prefill": [prefill], "decode": [decode]}
        with proxy.RouterProcess(proxy.OURS, "", workers, 0, dialect) as router:
            router.wait()
            router.turn(0.2, memory=False)
            assert not router.measured.problem
            assert all(router.measured.samples[load.name] for load in proxy.LOADS)
            router.port = decode.port
            router.turn(0.2, memory=False)
            assert "requests at prefill and decode" in router.measured.problem


def test_bars_are_ratios_of_the_same_rounds_and_say_whether_they_are_met() -> None:
    ours, beside = Measured(), Measured()
    for load in proxy.LOADS:
        ours.add(load.name, 1.0, 1.0)
        beside.add(load.name, 2.0, 2.0)
    ours.add(proxy._MEMORY, 30.0)
    ours.add(proxy._ADDED, 0.4e-3)
    for load in proxy.LOADS:
        ours.add(f"{load.name}, user", 0.6e-6)
        ours.add(f"{load.name}, kernel", 0.4e-6)
    bars = proxy._bars({proxy.OURS: ours, proxy.BESIDE: beside})
    assert [(bar.reached, bar.met) for bar in bars] == [
        (0.5, True),
        (0.5, True),
        (0.5, False),
        (0.5, True),
        (30.0, False),
        (pytest.approx(0.4), True),
    ]
    beside.problem = "not tried: no wheel"
    assert not any(bar.met for bar in proxy._bars({proxy.OURS: ours, proxy.BESIDE: beside})[:4])
    caption = "Dialect vllm"
    table = proxy._table({proxy.OURS: ours, proxy.BESIDE: beside}, caption, {proxy.OURS: "1", proxy.BESIDE: "2"})
    assert table.title == caption
    assert table.rows[1][:2] == (f"{proxy.BESIDE} 2", "not tried")
    split = proxy._split_table({proxy.OURS: ours, proxy.BESIDE: beside}, "")
    assert split.rows == [(proxy.OURS, *["1 + 0"] * len(proxy.LOADS))]


def test_router_that_does_not_serve_is_named_with_its_own_last_words(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\n[ $1 = -c ] && echo 1.2.3 && exit\necho no such flag: $3 >&2; exit 2\n")
    python.chmod(0o755)
    with proxy.RouterProcess("smg", str(python), {"prefill": [], "decode": []}, 0, "vllm") as router:
        router.wait()
        assert router.version == "1.2.3"
        assert router.measured.problem == "does not serve: no such flag: --pd-disaggregation"
        assert not router.measured.failed
    python.write_text("#!/bin/sh\nexit 1\n")
    with proxy.RouterProcess("smg", str(python), {"prefill": [], "decode": []}, 0, "vllm") as router:
        assert router.measured.problem == f"not tried: {python} has no wheel smg"
