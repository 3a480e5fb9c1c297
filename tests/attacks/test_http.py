"""Requests that are well-formed HTTP and meant to hurt, at the workers and at the proxy."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from pdlink.serve import http as serving
from pdlink.serve.http import errors_as_json
from tests.e2e.deployment import Answer, Deployment, prompt_of, request
from tests.waiting import WAIT_S, until

from .conftest import PROMPT
from .processes import throw

pytestmark = pytest.mark.e2e

COMPLETIONS = "/v1/completions"
EVERYWHERE = ["prefill", "decode", "proxy"]


def body_of(**fields: Any) -> bytes:
    return json.dumps({"model": "pdlink-tiny", "prompt": "a", "max_tokens": 1, **fields}).encode()


def spliced(fragment: bytes) -> bytes:
    """A request with this JSON after its other fields; fragments that no encoder would write."""
    return body_of()[:-1] + b"," + fragment + b"}"


REFUSED: dict[str, bytes] = {
    "nothing": b"",
    "a pickle": b"\x80\x04\x95\x1c\x00\x00\x00\x00\x00\x00\x00",
    "100,000 nested lists": spliced(b'"x":' + b"[" * 100_000 + b"]" * 100_000),
    "100,000 nested objects": spliced(b'"x":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
    "nested prompt": spliced(b'"prompt":' + b"[" * 500 + b"]" * 500),
    "cut off": body_of()[:-3],
    "token of 31 digits": spliced(b'"prompt":[1%s]' % (b"0" * 30)),
    "token of 100,000 digits": spliced(b'"prompt":[1%s]' % (b"0" * 100_000)),
    "negative token": body_of(prompt=[-1]),
    "token that is no number": body_of(prompt=[1, None]),
    "boolean token": body_of(prompt=[True]),
    "NaN": spliced(b'"temperature":NaN'),
    "infinite": spliced(b'"temperature":1e999'),
    "endless answer": spliced(b'"max_tokens":1%s' % (b"0" * 300)),
    "negative answer": body_of(max_tokens=-1),
    "lone surrogate": spliced(b'"prompt":"\\ud800"'),
    "no UTF-8": spliced(b'"prompt":"\xff\xfe"'),
    "a million tokens": body_of(prompt=[65] * 1_000_000),
    "a million prompts": body_of(prompt=["a"] * 1_000_000),
    "model of a megabyte": body_of(model="m" * 1_000_000),
    "a stop that is everything": body_of(stop=[""]),
    "a thousand answers": body_of(n=1000),
    "a million stop strings": body_of(stop=["never"] * 1_000_000),
    "five stop strings": body_of(stop=["never"] * 5),
    "a million stop tokens": body_of(stop_token_ids=[1] * 1_000_000),
    "a million nothings for a prompt": body_of(prompt=[None] * 1_000_000),
    "a million tokens, then as many strings": body_of(prompt=[65] * 1_000_000 + ["a"] * 1_000_000),
    "a prompt of 8 MB": body_of(prompt="hello wor" * 900_000),
    "seed of 300 digits": spliced(b'"seed":1%s' % (b"0" * 300)),
    "seed of -2^70": body_of(seed=-(2**70)),
    "100,000 unknown fields": body_of(**{f"field-{number}": number for number in range(100_000)}),
}
ANSWERED: dict[str, bytes] = {
    "NUL": spliced(b'"prompt":"\\u0000a\\u0000"'),
    "salt of a megabyte": body_of(cache_salt="x" * 1_000_000),
    "four stop strings": body_of(stop=["never"] * 4),
    "1024 stop tokens": body_of(stop_token_ids=[1] * 1024),
    "tiny temperature": spliced(b'"temperature":1e-300,"top_p":1e-300'),
}


@pytest.mark.parametrize("at", EVERYWHERE)
@pytest.mark.parametrize("name", REFUSED)
def test_requests_that_cannot_be_meant_are_refused_in_words(victims_many: Deployment, at: str, name: str) -> None:
    answer = request(victims_many.url(at) + COMPLETIONS, REFUSED[name])
    assert 400 <= answer.status < 500, answer.body
    assert answer.body["error"]["message"]
    assert len(answer.body["error"]["message"]) <= 2000, "an answer does not grow with what was sent"


@pytest.mark.parametrize("at", EVERYWHERE)
@pytest.mark.parametrize("name", ANSWERED)
def test_strange_requests_that_mean_something_are_answered(victims_many: Deployment, at: str, name: str) -> None:
    assert request(victims_many.url(at) + COMPLETIONS, ANSWERED[name]).status == 200


@pytest.fixture(scope="module")
def victims_many(deployment: Deployment, right_answer: str) -> Any:
    """As `victims`, but looked at once after the whole matrix: no single request of it may leave anything behind."""
    yield deployment
    assert deployment.complete(PROMPT).text == right_answer
    for label in ("prefill", "decode"):
        assert deployment.health(label)["status"] == "ok"
        until(lambda label=label: deployment.idle(label), f"{label} holds nothing")  # type: ignore[misc]


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /health HTTP/1.1\r\nHost: x\r\n"
        + b"".join(b"X-%d: y\r\n" % number for number in range(10_000))
        + b"\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 1_000_000 + b"\r\n\r\n",
        b"GET /" + b"y" * 1_000_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nX: \0\r\n\r\n",
        HEAD + b"Content-Length: -1\r\n\r\n",
        HEAD + b"Content-Length: 1%s\r\n\r\n" % (b"0" * 100),
        HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n{}",
        HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\nx",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 1000 + b"zz\r\n",
        HEAD + b"Content-Encoding: gzip\r\nContent-Length: 4\r\n\r\n\x1f\x8b\x08\x00",
        b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 500,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS to a port that speaks none
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
    ids=range(14),
)
def test_hostile_http_harms_nobody(victims: Deployment, sent: bytes) -> None:
    for child in victims.children.values():
        answer = throw("127.0.0.1", int(str(child.facts["port"])), sent)
        assert not answer or answer.startswith(b"HTTP/1."), answer[:100]


@pytest.mark.parametrize("at", ["prefill", "decode"])
def test_stop_of_a_transfer_takes_no_nonsense(victims: Deployment, at: str) -> None:
    def stop(transfer_id: str, body: bytes) -> int:
        return request_status(victims.url(at) + f"/pdlink/transfers/{transfer_id}/stop", body)

    assert stop("x" * 129, b"") == 400
    assert stop("x", b"x" * 5000) == 413
    for body in (b"", b"\xff", b"[" * 4000, b'{"reason":1}', b'{"reason":"\xff"}', b"null", b"\x80\x04\x95"):
        assert stop("%ff%00", body) == 202


def request_status(url: str, body: bytes) -> int:
    async def ask() -> int:
        async with aiohttp.ClientSession() as session, session.post(url, data=body) as response:
            return response.status

    return asyncio.run(ask())


def test_ten_thousand_stops_of_unknown_transfers_do_not_disturb_a_running_one(
    victims: Deployment, right_answer: str
) -> None:
    """An id has 128 random bits and is known to nobody but the workers, the proxy and its own client."""

    async def storm() -> set[int]:
        async with aiohttp.ClientSession() as session:

            async def stop(number: int) -> int:
                url = victims.url(("prefill", "decode")[number % 2]) + f"/pdlink/transfers/xfer-{number:032x}/stop"
                async with session.post(url, json={"reason": "because I can"}) as response:
                    return response.status

            statuses: set[int] = set()
            for start in range(0, 10_000, 100):
                statuses.update(await asyncio.gather(*map(stop, range(start, start + 100))))
            return statuses

    with ThreadPoolExecutor(2) as threads:
        clients = [threads.submit(victims.complete, PROMPT) for _ in range(2)]
        assert asyncio.run(storm()) == {202}
        assert [client.result().text for client in clients] == [right_answer] * 2
    assert victims.complete(PROMPT).text == right_answer


def leg(victims: Deployment, side: str, transfer_id: str, control: str | None = None) -> Answer:
    params: dict[str, Any] = {"transfer_id": transfer_id, "leg": side, "seed": 1, "created": 1}
    if side == "decode":
        address = victims.health("prefill")["control"] if control is None else control
        params["prefill"] = {"name": "prefill", "control": address}
    return victims.complete(prompt_of(20, seed=3), at=side, max_tokens=2, kv_transfer_params=params)


def test_transfer_id_is_good_once_on_every_worker(victims: Deployment) -> None:
    """sglang#40125: a duplicate of a client-chosen id used to crash both schedulers."""
    with ThreadPoolExecutor(8) as threads:
        prefills = [threads.submit(leg, victims, "prefill", "chosen") for _ in range(4)]
        decodes = [threads.submit(leg, victims, "decode", "chosen") for _ in range(4)]
        for legs in (prefills, decodes):
            statuses = sorted(future.result().status for future in legs)
            assert statuses == [200, 400, 400, 400]
    again = leg(victims, "decode", "chosen")
    assert again.status == 400
    assert again.body["error"]["code"] == "invalid_request"


@pytest.mark.parametrize(
    "control",
    [
        "tcp://127.0.0.1:1",
        "tcp://127.0.0.1:http",
        "tcp://127.0.0.1:99999",
        "tcp://no-such-host.invalid:5",
        "ipc:///tmp/x",
        "inproc://zeromq.zap.01",
        "pgm://1.2.3.4:5",
        "tcp://*:0",
        "",
        "\0",
        "x" * 10_000,
    ],
    ids=range(11),
)
def test_address_that_leads_nowhere_is_refused_or_ends_in_a_recomputation(victims: Deployment, control: str) -> None:
    """vllm#45230: the proxy drops such parameters from clients; this is somebody who reaches the worker itself."""
    answer = leg(victims, "decode", f"nowhere-{len(control)}-{control[:40]}", control)
    assert answer.status in (200, 400, 403), answer.body


@pytest.mark.parametrize("at", EVERYWHERE)
def test_control_port_of_another_protocol_is_no_trap(victims: Deployment, at: str) -> None:
    """Decode is sent to an HTTP port for its KV."""
    port = victims.children[at].facts["port"]
    assert leg(victims, "decode", f"http-{at}", f"tcp://127.0.0.1:{port}").status == 200


async def test_body_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "BODY_S", 0.05)

    async def read(http: web.Request) -> web.Response:
        return web.Response(body=await serving.body_of(http))

    app = web.Application(middlewares=[errors_as_json])
    app.router.add_post("/", read)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        reader, writer = await asyncio.open_connection(*runner.addresses[0][:2])
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
        async with asyncio.timeout(WAIT_S):
            assert b" 408 " in await reader.readline()
        writer.close()
    finally:
        await runner.cleanup()
