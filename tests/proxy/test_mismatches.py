"""Workers whose KV is of no use to each other: never paired, and named."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdlink.api.health import Health
from pdlink_proxy.mismatches import MAX_SHOWN, mismatched
from pdlink_proxy.steps import Leg
from pdlink_proxy.worker import State, Worker
from tests.proxy.fakes import FakeWorker, proxy_of, until

if TYPE_CHECKING:
    from pdlink_proxy.mismatches import Mismatch

OLD, NEW = "3.aaaa.float32.1111", "3.bbbb.float32.1111"


def worker(side: Leg, name: str, fingerprint: str, *, model: str = "m", cell: str = "", ok: bool = True) -> Worker:
    made = Worker(f"http://{name}:1", side, cell=cell)
    made.health = Health("ok", name, "e", side.value, model, "tcp://a:1", fingerprint=fingerprint)
    made.state = State.OK if ok else State.UNREACHABLE
    return made


def found(*workers: Worker) -> list[Mismatch]:
    return mismatched(
        [each for each in workers if each.side is Leg.PREFILL], [each for each in workers if each.side is Leg.DECODE]
    )


def p(name: str, fingerprint: str, **more: str) -> Worker:
    return worker(Leg.PREFILL, name, fingerprint, **more)  # type: ignore[arg-type]


def d(name: str, fingerprint: str, **more: str) -> Worker:
    return worker(Leg.DECODE, name, fingerprint, **more)  # type: ignore[arg-type]


def test_in_a_rolling_update_old_and_new_are_named_and_nobody_is_stranded() -> None:
    both = found(p("p1", OLD), p("p2", NEW), d("d1", OLD), d("d2", NEW))
    assert [(each.prefill, each.decode, each.stranded) for each in both] == [("p1", "d2", ""), ("p2", "d1", "")]
    assert {each.factor for each in both} == {"model, revision or content"}


def test_a_worker_that_fits_nobody_is_stranded() -> None:
    (one,) = found(p("p1", OLD), p("p2", NEW), d("d1", OLD))
    assert (one.prefill, one.decode, one.stranded) == ("p2", "d1", "prefill")
    assert str(one).endswith("1 prefill (p2) and 1 decode (d1) differ in model, revision or content")


def test_other_models_other_cells_and_workers_that_are_away_are_no_mismatch() -> None:
    assert found(p("p1", OLD), d("d1", NEW, model="n")) == []
    assert found(p("p1", OLD, cell="east"), d("d1", NEW, cell="west")) == []
    assert found(p("p1", OLD), worker(Leg.DECODE, "d1", NEW, ok=False)) == []
    assert found(p("p1", ""), d("d1", NEW)) == []


def test_a_fleet_in_disorder_is_shown_in_part() -> None:
    workers = [made for n in range(20) for made in (p(f"p{n}", f"3.{n}.f.1"), d(f"d{n}", f"3.x{n}.f.1"))]
    assert len(found(*workers)) == MAX_SHOWN


async def test_no_request_is_spent_on_finding_out(prefills: list[FakeWorker], decode: FakeWorker) -> None:
    prefills[0].fingerprint, prefills[1].fingerprint, decode.fingerprint = NEW, OLD, OLD
    async with proxy_of(prefills, [decode]) as proxy:
        await until(lambda: proxy.router.services.standing()[0] == "degraded", "the comparison")
        for _ in range(6):
            await proxy.stream()
        assert [len(each.received) for each in prefills] == [0, 6]
        async with proxy.client.get(f"{proxy.url}/health") as response:
            body = await response.json()
        assert (response.status, [each["stranded"] for each in body["mismatched"]]) == (200, ["prefill"])
        prefills[0].fingerprint, prefills[0].epoch = OLD, "e2"
        await until(lambda: proxy.router.services.standing()[0] == "ok", "its update")


async def test_a_misfit_that_no_handshake_has_found_is_the_reason_of_its_requests(
    prefill: FakeWorker, decode: FakeWorker
) -> None:
    """It was told as `no_prefill`, although a prefill worker is healthy and /health names what differs."""
    prefill.fingerprint, decode.fingerprint = NEW, OLD
    async with proxy_of([prefill], [decode]) as proxy:
        await until(lambda: proxy.router.services.standing()[0] == "degraded", "the comparison")
        async with proxy.post() as response:
            assert response.headers["X-Pdlink-KV"] == "recomputed;reason=refused:model_revision_or_content"


async def test_a_model_that_no_healthy_prefill_worker_serves_is_the_reason_of_its_requests(
    prefill: FakeWorker, decode: FakeWorker
) -> None:
    prefill.model = "alpha"
    async with proxy_of([prefill], [decode]) as proxy, proxy.post() as response:
        assert response.headers["X-Pdlink-KV"] == "recomputed;reason=refused:model"
