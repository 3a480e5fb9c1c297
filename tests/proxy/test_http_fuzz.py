"""Answers in any form that HTTP/1.1 allows, cut anywhere: the proxy's client reads what aiohttp's client reads."""

from __future__ import annotations

import asyncio
import random

import aiohttp
import pytest

from pdlink_proxy.http_connection import HttpError
from pdlink_proxy.upstream import answer_of
from tests.proxy.test_http_client import client, server
from tests.waiting import WAIT_S

_MAX_NBYTES = 1 << 20


def _chunked(rng: random.Random, body: bytes) -> bytes:
    sent, at = b"", 0
    while at < len(body):
        piece = body[at : at + rng.randrange(1, 600)]
        size = f"{len(piece):{rng.choice('xX')}}".rjust(rng.choice([0, 4]), "0")
        extension = rng.choice(["", ";x=y", ';q="a;b"'])
        sent += f"{size}{extension}\r\n".encode() + piece + b"\r\n"
        at += len(piece)
    trailers = rng.choice([b"", b"X-Trailer: 1\r\n", b"X-A: 1\r\nX-B: 2\r\n"])
    return sent + b"0\r\n" + trailers + b"\r\n"


def _answer(rng: random.Random) -> tuple[bytes, bool]:
    """An answer, and whether its end closes the connection."""
    body = rng.randbytes(rng.choice([0, 1, 50, 3000]))
    head = b"HTTP/1.1 %d Said\r\n" % rng.choice([200, 200, 201, 404, 503])
    head += b"X-Long: " + b"l" * rng.choice([1, 100, 7000]) + b"\r\n"
    if rng.random() < 0.2:
        head = b"HTTP/1.1 100 Continue\r\n\r\n" + head
    kind = rng.choice(["length", "chunked", "chunked", "closed", "broken"])
    if kind == "length":
        return head + b"Content-Length: %d\r\n\r\n" % len(body) + body, False
    if kind == "chunked":
        return head + b"Transfer-Encoding: chunked\r\n\r\n" + _chunked(rng, body), False
    if kind == "closed":
        return head + b"Connection: close\r\n\r\n" + body, True
    whole = rng.choice(
        [
            head + b"Content-Length: %d\r\n\r\n" % (len(body) + 1) + body,
            head + b"Transfer-Encoding: chunked\r\n\r\n" + _chunked(rng, body + b"more")[:-3],
            head + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n" + body,
            head[:-4],
        ]
    )
    return whole, True


def _cut(rng: random.Random, data: bytes) -> list[bytes]:
    cuts = sorted(rng.sample(range(1, len(data)), min(len(data) - 1, rng.choice([0, 1, 5, 60]))))
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


@pytest.mark.parametrize("seed", range(8))
async def test_the_proxys_client_reads_what_aiohttps_client_reads(seed: int) -> None:
    rng = random.Random(seed)
    script: list[tuple[list[bytes], bool]] = []
    for _ in range(40):
        answer, closes = _answer(rng)
        script.append((_cut(rng, answer), closes))

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            pieces, closes = script[int(head.split()[1][1:])]
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            if closes:
                return

    async with server(talk) as url, client() as ours, aiohttp.ClientSession(max_field_size=1 << 16) as theirs:
        for number in range(len(script)):
            async with asyncio.timeout(WAIT_S):
                try:
                    async with theirs.get(f"{url}/{number}") as said:
                        wanted: object = said.status, await said.read()
                except aiohttp.ClientError:
                    wanted = "broken"
                try:
                    asked = answer_of(ours, "GET", f"{url}/{number}", max_nbytes=_MAX_NBYTES, timeout_s=WAIT_S)
                    got: object = tuple(await asked)
                except HttpError:
                    got = "broken"
            assert got == wanted, f"seed {seed}, answer {number}: {script[number]}"
