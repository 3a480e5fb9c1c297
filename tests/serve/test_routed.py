"""Legs that a router has signed, of callers without the workers' key."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Any

from aiohttp.test_utils import TestClient, TestServer

from pdlink.api.legs import PrefillAddress
from pdlink.api.route_token import HEADER, RouteToken, peer_of
from pdlink.serve.app import build_app

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .pair import Script, WorkerPair

PATH = "/v1/completions"


def headers(leg: str, transfer_id: str, peer: str = "", secret: bytes = b"route") -> dict[str, str]:
    return {HEADER: RouteToken(leg, transfer_id, peer, int(time.time()) + 600).signed(secret)}


def test_a_signed_leg_is_served_without_the_key_and_no_other_is(pair: WorkerPair, script: Script) -> None:
    seed = pair.number()
    script.answers[seed] = list(b"abc")
    body = pair.body(seed, prompt="hello", max_tokens=3)
    peer = peer_of(PrefillAddress(pair.prefill.node.address, "prefill"))

    async def talk() -> None:
        async with (
            TestClient(TestServer(build_app(pair.prefill, "key", "route"))) as prefill,
            TestClient(TestServer(build_app(pair.decode, "key", "route"))) as decode,
        ):

            async def sent(to: Any, body: object, headers: Mapping[str, str], path: str = PATH) -> tuple[int, str]:
                async with to.post(path, json=body, headers=headers) as response:
                    return response.status, await response.text()

            first, second = pair.leg("prefill", "r-1", body), pair.leg("decode", "r-1", body)
            for to, leg, wrong in (
                (prefill, first, {}),
                (prefill, first, headers("prefill", "r-1", secret=b"other")),
                (prefill, first, headers("prefill", "r-2")),
                (prefill, first, headers("decode", "r-1", peer)),
                (prefill, body, headers("prefill", "r-1")),
                (decode, second, headers("decode", "r-1")),
                (decode, second, headers("decode", "r-1", peer_of(PrefillAddress("tcp://127.0.0.1:1", "prefill")))),
            ):
                status, text = await sent(to, leg, wrong)
                assert (status, json.loads(text)["error"]["code"]) == (401, "invalid_api_key")
            assert (await sent(decode, {}, headers("decode", "r-1", peer), "/pdlink/transfers/r-1/stop"))[0] == 401

            answers = await asyncio.gather(
                sent(prefill, first, headers("prefill", "r-1")), sent(decode, second, headers("decode", "r-1", peer))
            )
            assert [status for status, _ in answers] == [200, 200]
            assert json.loads(answers[1][1])["choices"][0]["text"] == "abc"
            status, text = await sent(decode, body, headers("decode", "r-3"))
            assert (status, json.loads(text)["choices"][0]["text"]) == (200, "abc")
            assert (await sent(decode, body, {"X-Pdlink-Key": "key"}))[0] == 200

    pair.run(talk())
