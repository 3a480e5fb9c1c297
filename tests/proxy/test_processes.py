"""A proxy of several processes on one port, as real processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp

from tests.private import write_private
from tests.proxy.fakes import END, FakeWorker, event, tokens_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

START_S = 60.0
WHOLE = event("zero") + event("one") + event("two") + END


class Running:
    """`pdlink proxy --processes 2`. Every request comes on a connection of its own."""

    def __init__(self, process: asyncio.subprocess.Process, url: str) -> None:
        self.process, self.url = process, url

    async def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, bytes]:
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
        async with (
            aiohttp.ClientSession() as client,
            client.request(method, self.url + path, data=body, headers=headers) as response,
        ):
            return response.status, await response.read()

    async def complete(self, **body: Any) -> bytes:
        status, data = await self.ask("POST", "/v1/completions", {"model": "m", "prompt": "hello", **body})
        assert status == 200, data
        return data

    async def pids(self, number: int = 2) -> set[int]:
        """Of the processes that answer."""
        found: set[int] = set()

        async def look() -> bool:
            _, data = await self.ask("GET", "/health")
            found.add(json.loads(data)["proxy"]["pid"])
            return len(found) >= number

        await until(look, f"answers of {number} processes")
        return found

    async def insist(self, path: str) -> bytes:
        """The answer of GET where a process hangs: on new connections, until one comes to another process."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(3):
                    return (await self.ask("GET", path))[1]

    async def counted(self, pattern: str) -> float:
        _, data = await self.ask("GET", "/metrics")
        return sum(
            float(value) for value in re.findall(rf"^pdlink_proxy_{pattern} ([0-9.e+-]+)$", data.decode(), re.M)
        )


async def until(true: Callable[[], Any], what: str) -> None:
    try:
        async with asyncio.timeout(START_S):
            while not await true():  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise AssertionError(f"still waiting for {what}") from None


@contextlib.asynccontextmanager
async def processes(prefill: FakeWorker, decode: FakeWorker, *more: str) -> AsyncIterator[Running]:
    arguments = [
        "-m",
        "pdlink",
        "proxy",
        "--processes",
        "2",
        "--listen",
        "127.0.0.1:0",
        "--set",
        "health_interval_s=0.1",
    ]
    arguments += ["--prefill", prefill.url, "--decode", decode.url, *more]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    assert process.stdout is not None
    said = b""
    reading = asyncio.create_task(asyncio.sleep(0, b""))
    try:
        async with asyncio.timeout(START_S):
            while (found := re.search(rb"proxy ready on (http://\S+) .*, 2 processes", said)) is None:
                line = await process.stdout.readline()
                assert line, said.decode()
                said += line
        reading = asyncio.create_task(process.stdout.read())
        running = Running(process, found[1].decode())

        async def healthy() -> bool:
            return all([(await running.ask("GET", "/readyz"))[0] == 200 for _ in range(8)])

        await until(healthy, "healthy workers")
        yield running
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(START_S):
            told = (await reading).decode()
            print(told)
            await process.wait()
    assert process.returncode == 0
    assert "nanobind" not in told


async def test_two_processes_serve_one_port_and_answer_as_one(
    prefill: FakeWorker, decode: FakeWorker, tmp_path: Path
) -> None:
    """Also what only one of them knows: a decision, what an operator has changed."""
    admin = write_private(tmp_path / "admin", "boss")
    file = write_private(tmp_path / "keys", "one")
    config = tmp_path / "proxy.yaml"
    config.write_text("retries: 1\n")
    more = ["--set", f"admin_key_file={admin}", "--set", f"api_key_file={file}"]
    more += ["--config", str(config)]
    async with processes(prefill, decode, *more) as proxy:
        one = {"Authorization": "Bearer one"}

        async def ask(method: str, path: str, body: Any = None) -> tuple[int, bytes]:
            return await proxy.ask(method, path, body, **one)

        pids = set()
        for _ in range(40):
            body = {"model": "m", "prompt": "hello", "stream": True}
            status, data = await ask("POST", "/v1/completions", body)
            assert (status, tokens_of(data)) == (200, WHOLE)
            pids.add(json.loads((await ask("GET", "/health"))[1])["proxy"]["pid"])
        assert len(pids) == 2
        said = json.loads((await ask("GET", "/pdlink/state"))[1])["processes"]
        assert (said["answered"], said["silent"]) == ([0, 1], [])
        for _ in range(5):
            _, data = await ask("GET", "/metrics")
            assert re.search(rb'^pdlink_proxy_requests_total\{outcome="ok"\} 40.0$', data, re.M), data
            _, data = await ask("GET", "/decisions")
            verdicts = Counter(each["verdict"] for each in json.loads(data)["decisions"])
            assert verdicts == {"placed": 40, "ended": 40}
        assert len(json.loads((await ask("GET", "/pdlink/state"))[1])["requests"]) == 40
        known = json.loads((await ask("GET", "/decisions"))[1])["decisions"][0]["request_id"]
        found = {(await ask("GET", f"/pdlink/timeline?request={known}"))[0] for _ in range(6)}
        assert found == {200}, "whichever process is asked"
        boss = {"Authorization": "Bearer boss"}
        drained = {"role": "decode", "url": decode.url, "drain": True}
        assert (await proxy.ask("POST", "/workers", drained, **boss))[0] == 200
        for _ in range(8):
            _, data = await proxy.ask("GET", "/workers", **boss)
            assert json.loads(data)["decode"][0]["state"] == "draining"
        write_private(tmp_path / "new", "two")
        (tmp_path / "new").replace(file)
        config.write_text("retries: 1\nrate_limit: {requests: 1}\n")
        proxy.process.send_signal(signal.SIGHUP)

        async def reloaded() -> bool:
            return {(await ask("GET", "/v1/models"))[0] for _ in range(8)} == {401}

        await until(reloaded, "the new keys in both")
        body, two = {"model": "m", "prompt": "x"}, {"Authorization": "Bearer two"}
        statuses = [(await proxy.ask("POST", "/v1/completions", body, **two))[0] for _ in range(12)]
        assert set(statuses) == {503, 429}, "its only decode worker is draining"
        assert statuses.count(503) <= 2, "one a minute for each process"


async def test_a_process_that_dies_is_started_again_and_the_others_serve_on(
    prefill: FakeWorker, decode: FakeWorker, tmp_path: Path
) -> None:
    admin = write_private(tmp_path / "admin", "boss")
    async with processes(prefill, decode, "--set", f"admin_key_file={admin}") as proxy:
        before = await proxy.pids()
        drained = {"role": "prefill", "url": prefill.url, "drain": True}
        assert (await proxy.ask("POST", "/workers", drained, Authorization="Bearer boss"))[0] == 200
        victim = min(before)
        os.kill(victim, signal.SIGKILL)
        lost = 0
        for _ in range(20):
            try:
                assert tokens_of(await proxy.complete(stream=True)) == WHOLE
            except aiohttp.ClientError:  # it was in the queue of the dead one's socket
                lost += 1
        assert lost <= 2

        async def back() -> bool:
            pids = await proxy.pids()
            return victim not in pids and len(pids) == 2

        await until(back, "a process in its place")
        for _ in range(8):
            _, data = await proxy.ask("GET", "/workers", Authorization="Bearer boss")
            assert json.loads(data)["prefill"][0]["state"] == "draining", "it has read what the operator changed"


async def test_a_process_that_hangs_is_named_and_the_others_answer_for_themselves(
    prefill: FakeWorker, decode: FakeWorker
) -> None:
    async with processes(prefill, decode) as proxy:
        pid = min(await proxy.pids())
        os.kill(pid, signal.SIGSTOP)
        try:
            said = json.loads(await proxy.insist("/pdlink/state"))["processes"]
            numbers = (await proxy.insist("/metrics")).decode()
        finally:
            os.kill(pid, signal.SIGCONT)
        assert said["answered"] == [said["this"]]
        (silent,) = said["silent"]
        counted = re.findall(r'^pdlink_proxy_process_counted{process="(.)"} (.*)$', numbers, re.M)
        assert dict(counted) == {str(said["this"]): "1.0", str(silent): "0.0"}


async def test_a_stop_lets_streams_of_every_process_end(prefill: FakeWorker, decode: FakeWorker) -> None:
    decode.gates = {1: asyncio.Event()}
    async with processes(prefill, decode) as proxy:
        streams = [asyncio.create_task(proxy.complete(stream=True)) for _ in range(8)]

        async def open_() -> bool:
            return await proxy.counted("active_streams") == 8

        await until(open_, "8 streams")
        proxy.process.send_signal(signal.SIGTERM)
        decode.gates[1].set()
        assert {tokens_of(data) for data in await asyncio.gather(*streams)} == {WHOLE}


async def test_the_limits_of_a_key_are_divided_among_the_processes(
    prefill: FakeWorker, decode: FakeWorker, tmp_path: Path
) -> None:
    """Each connection comes to one of two processes by chance: 24 to one of them once in eight million runs."""
    config = tmp_path / "c.yaml"
    config.write_text("rate_limit:\n  requests: 10\n")
    async with processes(prefill, decode, "--config", str(config)) as proxy:
        statuses, began_s = [], time.monotonic()
        for _ in range(24):
            body = {"model": "m", "prompt": "hello"}
            status, _ = await proxy.ask("POST", "/v1/completions", body, Authorization="Bearer someone")
            statuses.append(status)
        regained = (time.monotonic() - began_s) * 10 / 60
        assert 6 <= statuses.count(200) <= 10 + regained + 2


async def test_a_request_with_huge_numbers_ends_no_service_of_any_process(
    prefill: FakeWorker, decode: FakeWorker
) -> None:
    """Both processes are asked, and serve honest requests afterwards."""
    async with processes(prefill, decode, "--set", "policy={prefill: cost, decode: cost}") as proxy:
        for number in (10**16, 2**62, 2**63 - 1):
            for _ in range(12):
                body = {"model": "m", "prompt": "hi", "max_tokens": number}
                status, _ = await proxy.ask("POST", "/v1/completions", body)
                assert status in (200, 400)
            for _ in range(12):
                await proxy.complete(max_tokens=4)
        await proxy.pids()
