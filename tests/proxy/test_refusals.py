"""Pairs of workers that refuse each other: shown, avoided, told once, and tried again when it is time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from pdlink.api.health import Health, WorkerRefusal
from pdlink_proxy.refusals import Refusals
from pdlink_proxy.steps import Leg
from pdlink_proxy.worker import Worker
from tests.proxy.fakes import FakeWorker, Proxy, proxy_of, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HEADER = "X-Pdlink-KV"
PDP = (Leg.PREFILL, Leg.PREFILL, Leg.DECODE)


def entry(factor: str = "content", *, peer: str = "", address: str = "", retry_s: float = 3600.0) -> dict[str, Any]:
    said = {"peer": peer, "address": address, "factor": factor, "local": "aa", "remote": "bb"}
    return {**said, "count": 3, "retry_s": retry_s}


def control(worker: FakeWorker) -> str:
    return f"tcp://127.0.0.1:{worker.port + 1}"


NAMED_BY: dict[str, Callable[[FakeWorker, FakeWorker], None]] = {
    "decode, by name": lambda p, d: d.refused.append(entry(peer=p.name, address="tcp://elsewhere:1")),
    "decode, by address": lambda p, d: d.refused.append(entry(address=control(p))),
    "decode, by address with its key": lambda p, d: d.refused.append(entry(address=control(p) + "?key=abc")),
    "prefill, by name": lambda p, d: p.refused.append(entry(peer=d.name)),
}


async def pairs_of(proxy: Proxy) -> list[dict[str, Any]]:
    async with proxy.client.get(f"{proxy.url}/health") as response:
        assert response.status == 200
        body = await response.json()
    pairs: list[dict[str, Any]] = body["refused_pairs"]
    assert (body["status"] == "degraded") == (body["reason"].startswith("degraded: ")) == bool(pairs)
    return pairs


async def kv_of(proxy: Proxy, **body: Any) -> str:
    async with proxy.post(**body) as response:
        assert response.status == 200
        await response.read()
        return str(response.headers[HEADER])


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize("said_by", NAMED_BY)
async def test_a_refused_pair_is_shown_and_avoided_while_there_is_another(
    prefills: list[FakeWorker], decodes: list[FakeWorker], said_by: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A rolling update: two of each, of which two pairs fit."""
    (old_p, new_p), (old_d, new_d) = prefills, decodes
    wrong = [(old_p, new_d), (new_p, old_d)]
    for p, d in wrong:
        NAMED_BY[said_by](p, d)
    async with proxy_of(prefills, decodes) as proxy:
        await until(lambda: len(proxy.router.services.pools.refusals) == 2, "both pairs")
        shown = await pairs_of(proxy)
        assert {(pair["prefill"], pair["decode"]) for pair in shown} == {(p.name, d.name) for p, d in wrong}
        assert [(pair["factor"], pair["local"], pair["remote"]) for pair in shown] == [("content", "aa", "bb")] * 2
        assert [await kv_of(proxy) for _ in range(8)] == ["transferred"] * 8
        assert [len(worker.received) for worker in (*prefills, *decodes)] == [4] * 4
        for p, d in ((old_p, old_d), (new_p, new_d)):
            assert {got.body["kv_transfer_params"]["prefill"]["name"] for got in d.received} == {p.name}
        assert len(warnings_of(caplog)) == 2, "each pair once"
        for worker in (*prefills, *decodes):
            worker.refused.clear()
        await until(lambda: len(proxy.router.services.pools.refusals) == 0, "the end of it")
        assert len(warnings_of(caplog)) == 4, "the end at the level of the beginning"
        assert await pairs_of(proxy) == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("on_no_prefill", ["fail", "decode_only"])
async def test_where_no_pair_fits_decode_serves_alone_and_says_why(
    prefill: FakeWorker, decodes: list[FakeWorker], stream: bool, on_no_prefill: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Right answers, and prefill does not compute for nothing."""
    for decode in decodes:
        decode.refused = [entry("name that goes with the key", peer=prefill.name)]
    async with proxy_of([prefill], decodes, on_no_prefill=on_no_prefill) as proxy:
        await until(lambda: len(proxy.router.services.pools.refusals) == 2)
        before = len(warnings_of(caplog))
        for _ in range(4):
            assert await kv_of(proxy, stream=stream) == "recomputed;reason=refused:name_that_goes_with_the_key"
        assert [len(worker.received) for worker in (prefill, *decodes)] == [0, 2, 2]
        assert proxy.counted("fallbacks_total", kind="decode_only") == 4
        (begun,) = warnings_of(caplog)[before:]
        assert "no pair of workers fits together" in begun
        decodes[0].refused = []
        await until(lambda: len(proxy.router.services.pools.refusals) == 1)
        decodes[0].needs = prefill
        for _ in range(2):
            assert await kv_of(proxy, stream=stream) == "transferred"
        assert sum("fits together again" in line for line in warnings_of(caplog)) == 1


async def test_a_pair_whose_next_try_is_due_gets_one_request(prefill: FakeWorker, decode: FakeWorker) -> None:
    """Otherwise nobody would ever find out that the cause is mended."""
    decode.refused = [entry(peer=prefill.name, retry_s=0.0)]
    async with proxy_of([prefill], [decode]) as proxy:
        await until(lambda: len(proxy.router.services.pools.refusals) == 1)
        assert (await kv_of(proxy)).startswith("recomputed;reason=refused"), "it has just been heard of"
        for paused_s in (2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0):
            (pair,) = proxy.router.services.pools.refusals
            assert pair.pause_s == paused_s
            pair.until_s = 0.0
            prefilled = len(prefill.received)
            kv = [await kv_of(proxy) for _ in range(3)]
            assert kv == ["transferred"] + ["recomputed;reason=refused:content"] * 2
            await until(lambda n=prefilled: len(prefill.received) == n + 1)  # type: ignore[misc]


async def test_a_prefill_worker_that_decode_may_not_dial_is_not_the_clients_problem(
    prefill: FakeWorker, decode: FakeWorker, caplog: pytest.LogCaptureFixture
) -> None:
    """It was told 403 `peer_not_allowed`, for an allow-list that only its operator can mend."""
    decode.fail_with, decode.fail_legs_only = 403, True
    decode.fail_body = b'{"error":{"message":"no","type":"x","param":null,"code":"peer_not_allowed"}}'
    async with proxy_of([prefill], [decode]) as proxy:
        for _ in range(3):
            assert await kv_of(proxy) == "recomputed;reason=refused:peer_not_allowed"
        assert len([got for got in decode.received if "kv_transfer_params" in got.body]) == 1
        assert [pair["factor"] for pair in await pairs_of(proxy)] == ["peer_not_allowed"]
        assert proxy.counted("requests_total", outcome="rejected") == 0
        decode.fail_with = None
        (pair,) = proxy.router.services.pools.refusals
        pair.until_s = 0.0
        assert await kv_of(proxy) == "transferred"
        assert await pairs_of(proxy) == []
    assert sum("no longer refuse each other" in line for line in warnings_of(caplog)) == 1


def test_no_worker_can_make_the_log_long(caplog: pytest.LogCaptureFixture) -> None:
    said = WorkerRefusal(peer="p", factor="f\n" * 10_000, local="l" * 10_000, remote="r\r\n" * 10_000)
    prefill, decode = Worker("http://p", Leg.PREFILL), Worker("http://d", Leg.DECODE)
    prefill.health = Health("ok", "p", "e", "prefill", "m", "tcp://p:1")
    decode.health = Health("ok", "d\n" * 10_000, "e", "decode", "m", "tcp://d:1", refused=(said,) * 50)
    Refusals().heard(decode, [prefill])
    (line,) = warnings_of(caplog)
    assert len(line) < 2000
    assert "\n" not in line


def test_a_worker_that_says_what_it_said_before_makes_nobody_be_looked_at() -> None:
    """Thousands of them say it each second, and each pair of a thousand would be a million looks."""

    class Others(list[Worker]):
        num_looks = 0

        def __iter__(self) -> Iterator[Worker]:
            Others.num_looks += 1
            return super().__iter__()

    refusals, said = Refusals(), WorkerRefusal(peer="p", factor="content", retry_s=9.0)
    prefill, bystander, decode = (Worker(f"http://{name}", leg) for name, leg in zip("pbd", PDP, strict=True))
    for worker in (prefill, bystander):
        worker.health = Health("ok", worker.url[-1], "e", "prefill", "m", f"tcp://{worker.url[-1]}:1")
    decode.health = Health("ok", "d", "e", "decode", "m", "tcp://d:1", refused=(said,))
    others = Others([prefill, bystander])
    refusals.heard(decode, others)
    refusals.heard(bystander, [decode])
    assert ([pair.prefill for pair in refusals], Others.num_looks) == ([prefill], 1)
    decode.health = msgspec.structs.replace(decode.health, refused=(msgspec.structs.replace(said, retry_s=3.0),))
    refusals.heard(decode, others)
    assert (len(refusals), Others.num_looks) == (1, 1)
    decode.health = msgspec.structs.replace(decode.health, refused=())
    refusals.heard(decode, others)
    assert (len(refusals), Others.num_looks) == (0, 1)
    decode.health = msgspec.structs.replace(decode.health, refused=(said,))
    refusals.heard(decode, others)
    refusals.forget(prefill)
    assert (len(refusals), Others.num_looks) == (0, 2)


def test_a_refused_worker_that_is_heard_last_makes_a_pair_all_the_same() -> None:
    refusals = Refusals()
    prefill, decode = Worker("http://p", Leg.PREFILL), Worker("http://d", Leg.DECODE)
    decode.health = Health(
        "ok", "d", "e", "decode", "m", "tcp://d:1", refused=(WorkerRefusal(peer="p", factor="content"),)
    )
    refusals.heard(decode, [prefill])
    assert len(refusals) == 0
    prefill.health = Health("ok", "p", "e", "prefill", "m", "tcp://p:1")
    refusals.heard(prefill, [decode])
    assert len(refusals) == 1
