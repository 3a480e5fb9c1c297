"""What is kept of a request that has ended, and what its readers get of it."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from pdlink_proxy.decisions import Considered
from pdlink_proxy.policies.base import Pick, Policy
from pdlink_proxy.records import MAX_RECORDS, EndedRequest, LegRecord, Records
from pdlink_proxy.table import Workers
from tests.proxy.fakes import FakeWorker, proxy_of, until

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdlink_proxy.fleet import PlacementRequest
    from pdlink_proxy.table import WorkerState


def kept(number: int = 0, **more: Any) -> EndedRequest:
    """Of a stream that came at 100 s and took one."""
    said: dict[str, Any] = {"request_id": f"r{number}", "at_s": 0.0, "outcome": "ok", "kv": "transferred"}
    said |= {"started_s": 100.0, "ended_s": 101.0, "first_s": 100.6, "attempts": 1, "prompt_tokens": 9}
    said |= {"estimated": False, "per_token_s": None, "model": "m", "transfer_ids": ["t"]}
    said |= {"prefill": "prefill-0", "decode": "decode-0"}
    said |= {"tries": [(100.0, 100.1, 100.5, 100.7)], "legs": [], "why": "first", "num_tokens": 8, "decided": []}
    return EndedRequest(**(said | more))


def test_a_record_counts_from_its_requests_arrival() -> None:
    leg = (1, "decode", "decode-0", 100.25, None, 101.0, "served", "")
    record = kept(legs=[leg], first_s=100.5).record()
    assert (record.total_s, record.ttft_s, record.attempts) == (1.0, 0.5, 1)
    assert [round(each or 0, 6) for each in (record.queued_s, record.prefill_s, record.decode_s)] == [0.1, 0.5, 0.7]
    assert record.legs == [
        LegRecord(
            transfer_id="t",
            leg="decode",
            worker="decode-0",
            sent_s=0.25,
            answered_s=None,
            ended_s=1.0,
            end="served",
        )
    ]


def test_the_last_decision_about_a_request_is_that_it_has_ended() -> None:
    said = (5.0, "first", "placed", "", 8, 0.1)
    placed, ended = kept(decided=[said], outcome="broken").decisions()
    assert (placed.verdict, placed.tokens, placed.considered) == ("placed", 8, {})
    assert (ended.verdict, ended.reason) == ("ended", "broken, KV transferred")
    assert (ended.why, ended.waited_s) == ("first", 1.0)


def test_records_are_kept_as_they_were() -> None:
    records, considered = Records(), {"prefill": Considered("cost", [("prefill-0", 1.5)], 2)}
    said = (5.0, "first", "placed", "", 8, 0.1, "prefill-0", "decode-0", 12.0, 0, 3, considered, "store", "turn 2")
    ended = kept(decided=[said], legs=[(1, "decode", "decode-0", 100.25, None, 101.0, "served", "")])
    records.keep(ended)
    assert records[0] == ended.record()
    (again,) = records.newest()
    assert [*again.decisions()] == [*ended.decisions()]
    assert next(again.decisions()).considered == considered


def test_the_newest_are_kept_in_the_order_in_which_they_ended() -> None:
    records = Records()
    assert (len(records), [*records], records.newest(3)) == (0, [], [])
    for number in range(MAX_RECORDS + 7):
        records.keep(kept(number, model="m" * (number % 50)))
    assert (len(records), records.num_ended) == (MAX_RECORDS, MAX_RECORDS + 7)
    assert [each.request_id for each in records] == [f"r{number}" for number in range(7, MAX_RECORDS + 7)]
    assert [each.request_id for each in records.newest(2)] == [f"r{MAX_RECORDS + 5}", f"r{MAX_RECORDS + 6}"]
    assert [each.request_id for each in (records[0], records[-1], *records[-2:-1])] == ["r7", "r1006", "r1005"]
    with pytest.raises(IndexError):
        records[MAX_RECORDS]


def test_of_the_newest_only_those_are_read_that_ended_since_then(monkeypatch: pytest.MonkeyPatch) -> None:
    records, read = Records(), list[int]()
    for number in range(MAX_RECORDS + 7):
        records.keep(kept(number, at_s=float(number), decided=[(5.0, "first", "placed", "", number, 0.1)]))
    of, last = records._of, MAX_RECORDS + 6

    def watched(number: int) -> EndedRequest:
        read.append(number)
        return of(number)

    monkeypatch.setattr(records, "_of", watched)
    assert [each.at_s for each in records.since(last - 2)] == [last - 2, last - 1, last]
    assert len(read) == 4
    assert [each.at_s for each in records.since(1e9, 2)] == [last - 1, last]
    read.clear()
    (found,) = records.of("r500")
    assert [each.tokens for each in found.decisions()] == [500, 8]
    assert (read, records.of("r6"), records.newest(0)) == ([500], [], [])
    assert len(records.since(0.0)) == len(records.heads()) == MAX_RECORDS
    assert records.heads()[-1].ttft_s == records[-1].ttft_s
    assert records.heads(2) == records.heads()[-2:]
    assert records.heads(0) == []


def test_what_was_read_stays_when_its_memory_is_used_again() -> None:
    records = Records()
    for number in range(MAX_RECORDS):
        records.keep(kept(number, decided=[(5.0, "first", "placed", "", number, 0.1)]))
    read = records.newest()
    for number in range(2 * MAX_RECORDS):
        records.keep(kept(number, model="m" * 5000))
    assert [next(each.decisions()).tokens for each in read] == list(range(MAX_RECORDS))


def test_a_record_that_does_not_pack_leaves_the_others_whole() -> None:
    records = Records()
    for number in range(MAX_RECORDS):
        records.keep(kept(number))
    said = (5.0, "first", "placed", "", 8, 0.1, "prefill-0", "decode-0", 12.0, 0, np.int64(3))
    with pytest.raises(TypeError):
        records.keep(kept(1, request_id="a longer id than the others have", decided=[said]))
    assert [each.request_id for each in records] == [f"r{number}" for number in range(MAX_RECORDS)]
    records.keep(kept(MAX_RECORDS))
    assert [each.request_id for each in records] == [f"r{number}" for number in range(1, MAX_RECORDS + 1)]


class Sums(Policy):
    """A policy of one's own, with what numpy makes of its numbers."""

    def pick(self, request: PlacementRequest, workers: Sequence[WorkerState], turn: int) -> Pick:
        found = Workers.of(workers)
        loads = found.table.columns.load
        rows: Any = np.argsort(loads)[:8]
        tokens: Any = np.int64(request.num_tokens // 2)
        return Pick(found.table.states[rows[0]], tokens, [(row, loads[row]) for row in rows])


async def test_numbers_of_numpy_in_a_pick_are_kept_as_others(prefills: list[FakeWorker], decode: FakeWorker) -> None:
    policy = {"prefill": "tests.proxy.test_records:Sums", "decode": "cost"}
    async with proxy_of(prefills, [decode], policy=policy) as proxy:
        async with proxy.post(prompt="word" * 50) as answer:
            assert answer.status == 200
        services = proxy.router.services
        await until(lambda: not services.num_running, "its end")
        placed, ended = services.decisions_of()
        assert placed.cached_tokens == placed.tokens // 2
        assert placed.considered["prefill"].scores == [("prefill-0", 0.0), ("prefill-1", 0.0)]
        assert ended.reason.startswith("ok")


async def test_a_request_is_over_and_counted_even_if_it_cannot_be_kept(
    prefill: FakeWorker, decode: FakeWorker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise TypeError("does not pack")

    async with proxy_of([prefill], [decode]) as proxy:
        services = proxy.router.services
        with monkeypatch.context() as patched:
            patched.setattr(Records, "keep", fails)
            async with proxy.post() as answer:
                assert (answer.status, bool(await answer.read())) == (200, True)
            await proxy.stream()
            await until(lambda: not services.num_running, "their ends")
        assert [each.exc_info is not None for each in caplog.records if "its end failed" in each.message] == [
            True
        ] * 2
        assert (proxy.counted("requests_total", outcome="ok"), len(services.records)) == (2, 0)
        await proxy.stream()
        assert len(services.records) == 1


async def test_what_is_kept_of_a_request_holds_nothing_large_or_open(prefill: FakeWorker, decode: FakeWorker) -> None:
    async with proxy_of([prefill], [decode]) as proxy:
        services, alive = proxy.router.services, list[Any]()
        services.requests = _Watched(alive)
        await proxy.stream(prompt="word" * 2000)
        async with proxy.post(prompt="word" * 2000) as answer:
            assert answer.status == 200
        await until(lambda: len(services.records) == 2, "their ends")
        await until(lambda: len(alive) == 2 and not any(each() for each in alive), "their requests gone")
    assert max(len(each) for each in services.records._packed) < 1000, "the prompt has 8,000 bytes"
    assert len(services.decisions_of()) == 4


class _Watched(set[Any]):
    def __init__(self, seen: list[Any]) -> None:
        super().__init__()
        self._seen = seen

    def add(self, item: Any) -> None:
        super().add(item)
        self._seen.append(weakref.ref(item))
