"""What the page remembers of 15 minutes."""

from __future__ import annotations

import pytest

from pdlink_proxy.page.memory import NUM_STEPS, STEP_S, PageMemory, StepFacts
from pdlink_proxy.page.report import Report
from pdlink_proxy.page.view import before
from pdlink_proxy.records import RequestRecord

BEGAN_S = 1_000_000.0


def record(at_s: float, outcome: str = "ok", kv: str = "transferred", attempts: int = 1) -> RequestRecord:
    times = {"total_s": 1.0, "queued_s": 0.0, "prefill_s": 0.1, "decode_s": 0.2, "ttft_s": 0.1}
    places = {"transfer_id": "t", "prefill": "prefill-0", "decode": "decode-0"}
    return RequestRecord(f"req-{at_s}", at_s, outcome, kv=kv, prompt_tokens=9, attempts=attempts, **times, **places)  # type: ignore[arg-type]


class Told:
    """A memory with a step every 10 s."""

    def __init__(self) -> None:
        self.memory, self.now_s, self.num_ended = PageMemory(), BEGAN_S, 0
        self.records: list[RequestRecord] = []
        self.step()

    def step(self, *records: RequestRecord, ended: int | None = None, **more: object) -> None:
        self.now_s += STEP_S
        self.records += records
        self.num_ended += len(records) if ended is None else ended
        facts = StepFacts(
            records=self.records,
            num_ended=self.num_ended,
            running=2,
            queued=1,
            reports=more.get("reports", {}),  # type: ignore[arg-type]
            problems=more.get("problems", {}),  # type: ignore[arg-type]
            misfits=more.get("misfits", ()),  # type: ignore[arg-type]
            labels=more.get("labels", {"prefill-0", "decode-0"}),  # type: ignore[arg-type]
        )
        self.memory.step(self.now_s, facts)

    @property
    def texts(self) -> list[str]:
        """Newest first."""
        return [each["text"] for each in self.memory.said(self.now_s)["happened"]]


def test_a_step_has_the_rates_and_times_of_its_own_requests() -> None:
    told = Told()
    told.step(*(record(told.now_s + 5) for _ in range(20)))
    told.step()
    first, second = list(told.memory.steps)[1:]
    assert (first.requests_per_s, first.ttft_p50_ms, first.running, first.queued) == (2.0, 100.0, 2, 1)
    assert (second.requests_per_s, second.ttft_p50_ms) == (0.0, None)


def test_requests_of_which_no_record_is_kept_count_in_the_rate_and_in_the_failures() -> None:
    told = Told()
    kept = [record(told.now_s + 5, "failed" if number % 2 else "ok") for number in range(10)]
    told.step(*kept, ended=1000)
    assert told.memory.steps[-1].requests_per_s == 100.0
    assert told.memory.steps[-1].failed_per_s == 50.0


def test_fifteen_minutes_are_kept_and_no_more() -> None:
    told = Told()
    told.memory.worker_changed(told.now_s, "decode-0", "unreachable", "gone")
    told.memory.worker_changed(told.now_s, "decode-0", "ok", "")
    for _ in range(NUM_STEPS + 5):
        told.step()
    said = told.memory.said(told.now_s)
    assert len(said["history"]) == NUM_STEPS
    assert said["happened"] == []


def test_a_worker_that_was_away_is_told_with_how_long_and_why() -> None:
    told = Told()
    told.memory.worker_changed(told.now_s, "decode-0", "ok", "")
    assert told.texts == [], "its first coming is no news"
    told.memory.worker_changed(told.now_s, "decode-0", "unreachable", "connection refused")
    told.step()
    assert told.texts == ["decode-0 is away: connection refused"]
    told.memory.worker_changed(told.now_s + 6, "decode-0", "ok", "")
    told.step()
    assert told.texts == ["decode-0 was away for 16 s: connection refused"]


def test_a_worker_that_is_not_listed_any_more_is_away_no_longer() -> None:
    told = Told()
    told.memory.worker_changed(told.now_s, "decode-0", "unreachable", "connection refused")
    for _ in range(3):
        told.step(labels={"prefill-0"})
    assert told.texts == ["decode-0 was away for 10 s: connection refused"]


def test_what_goes_on_stays_one_happening_when_another_one_has_ended() -> None:
    told = Told()
    for number in range(10):
        told.step(*[record(told.now_s + 5, "failed")] * (number == 1), problems={"disk of decode-0": "it is full"})
    assert told.texts == [
        "1 request failed (failed)",
        "disk of decode-0 keeps less than its settings say: it is full",
    ]


def test_what_goes_on_is_one_happening_and_what_comes_again_is_another() -> None:
    told = Told()
    for _ in range(3):
        told.step(record(told.now_s + 5, kv="recomputed;reason=peer_lost"))
    assert told.texts == ["3 requests recomputed on decode: peer_lost"]
    for _ in range(10):
        told.step()
    told.step(record(told.now_s + 5, kv="recomputed;reason=peer_lost"))
    assert told.texts == ["1 request recomputed on decode: peer_lost", "3 requests recomputed on decode: peer_lost"]


def test_prompts_that_decode_computes_because_that_is_better_are_no_incident() -> None:
    told = Told()
    told.step(record(told.now_s + 5, kv="recomputed;reason=short_prompt"))
    assert told.texts == []


@pytest.mark.parametrize("outcome", ["failed", "broken"])
def test_failures_moved_requests_tiers_and_misfits_are_told(outcome: str) -> None:
    told = Told()
    told.step(
        record(told.now_s + 1, outcome),
        record(told.now_s + 2, attempts=2),
        problems={"disk of decode-0": "no space left"},
        misfits=[("prefill-0 and decode-1", "dtype differs")],
    )
    assert sorted(told.texts) == [
        "1 request failed (" + outcome + ")",
        "1 request went on at another worker",
        "disk of decode-0 keeps less than its settings say: no space left",
        "prefill-0 and decode-1 do not fit together: dtype differs",
    ]
    levels = {each["text"]: each["level"] for each in told.memory.said(told.now_s)["happened"]}
    assert levels[f"1 request failed ({outcome})"] == "bad"


def test_kv_and_sources_are_differences_of_what_workers_said_and_a_new_life_counts_from_zero() -> None:
    def said(nbytes: float, disk: float) -> dict[str, Report]:
        totals = {"transfer_bytes": {"mapped": nbytes}, "prompt_tokens": {"disk": disk, "computed": 0.0}}
        return {"http://a": Report("a", totals=totals)}

    told = Told()
    told.step(reports=said(1e9, 100))
    assert told.memory.steps[-1].kv_bytes_per_s is None, "what was moved before is not of this step"
    told.step(reports=said(3e9, 300))
    assert told.memory.steps[-1].kv_bytes_per_s == 2e8
    assert told.memory.steps[-1].sources == {"disk": 20.0}
    told.step(reports=said(1e9, 50))
    assert told.memory.steps[-1].kv_bytes_per_s == 1e8
    assert told.memory.steps[-1].sources == {"disk": 5.0}


def test_the_sentence_ends_with_the_worst_of_what_happened() -> None:
    told = Told()
    told.memory.worker_changed(told.now_s, "decode-0", "unreachable", "")
    told.memory.worker_changed(told.now_s + 4, "decode-0", "ok", "")
    told.step(record(told.now_s + 5, "failed"), record(told.now_s + 6, kv="recomputed;reason=peer_lost"))
    happened = told.memory.said(told.now_s)["happened"]
    assert before(happened) == (
        " In the last 15 minutes: 1 request failed (failed); 1 request recomputed on decode: peer_lost and 1 more."
    )
    assert before([]) == ""


def test_a_worker_that_says_nothing_once_loses_nothing_of_the_charts() -> None:
    def said(nbytes: float) -> dict[str, Report]:
        return {"http://a": Report("a", totals={"transfer_bytes": {"mapped": nbytes}})}

    told = Told()
    told.step(reports=said(1e9))
    told.step(reports={})
    told.step(reports=said(3e9))
    assert told.memory.steps[-1].kv_bytes_per_s == 2e8
