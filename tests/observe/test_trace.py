"""A timeline as a trace: read back as the format of trace events has it."""

from __future__ import annotations

import pytest

from pdlink.events import LayerLanded, LayerWritten, TransferEnded
from pdlink.observe.spans import Span
from pdlink.observe.timeline import Dump, KeptTransfer
from pdlink.observe.trace import Laid, TracedRequest, laid, make
from tests.observe.traced import Traced, events_of, samples_of, tracks_of


def landed(layer: int, submitted_s: float, at_s: float, *, asked_s: float | None = None) -> LayerLanded:
    times = {"submitted_s": submitted_s, "asked_s": submitted_s if asked_s is None else asked_s, "at_s": at_s}
    return LayerLanded(transfer_id="t", layer=layer, start=0, end=8, nbytes=10**9, transport="mapped", **times)


def ended(side: str, peer: str, started_s: float, at_s: float) -> TransferEnded:
    times = {"started_s": started_s, "at_s": at_s}
    what = {"side": side, "peer": peer, "state": "DONE", "reason": "", "nbytes": 2 * 10**9, "transport": "mapped"}
    return TransferEnded(transfer_id="t", **what, **times)  # type: ignore[arg-type]


def written(layer: int, at_s: float) -> LayerWritten:
    return LayerWritten(transfer_id="t", layer=layer, start=0, end=8, at_s=at_s)


SENT = KeptTransfer(
    "t",
    [written(0, 11.0), written(1, 12.0)],
    [landed(0, 11.5, 12.5, asked_s=11.0), landed(1, 12.0, 14.0)],
    ended("sender", "decode-0", 10.0, 14.5),
)
RECEIVED = KeptTransfer("t", ended=ended("receiver", "prefill-0", 1010.0, 1014.4))
PREFILL = Dump(name="prefill-0", clock="here", now_s=20.0, transfers=[SENT])
DECODE = Dump(name="decode-0", clock="there", now_s=1020.0, transfers=[RECEIVED])
REQUEST = TracedRequest(
    ["t"],
    [
        Span(name="request", label="req-1", track="requests", span_id="r", begin_s=9.0, end_s=17.0),
        Span(name="queue", track="requests", span_id="q", parent_id="r", begin_s=9.0, end_s=9.5),
        Span(name="decode", track="requests", span_id="d", parent_id="r", begin_s=9.5, end_s=17.0),
    ],
)


def found(data: bytes, track: str) -> list[Traced]:
    return [event for event in events_of(data) if event.track == track]


def spans(events: list[Traced]) -> list[tuple[str, float, float]]:
    return [(event.name, event.begin_s, event.end_s) for event in events]


def test_one_worker_shows_what_was_written_waited_and_moved() -> None:
    made = make([Laid(PREFILL)])
    assert str(made) == f"1 transfers, 1 workers, {made.num_events} events"
    assert tracks_of(made.data) == ["prefill-0"]
    marks = found(made.data, "KV, decode-0: written")
    assert {each.kind for each in marks} == {"instant"}
    assert spans(marks) == [("layer 0", 1.0, 1.0), ("layer 1", 2.0, 2.0)]
    assert spans(found(made.data, "KV, decode-0: waits")) == [("layer 0", 1.0, 1.5)]
    moved = found(made.data, "KV, decode-0: in flight")
    assert spans(moved) == [("layer 0", 1.5, 2.5), ("layer 1", 2.0, 4.0)]
    assert moved[0].args == {"transfer": "t", "tokens": "0–8", "bytes": 10**9, "lane": "mapped"}
    whole, hidden = found(made.data, "KV, decode-0: transfers")
    assert (whole.name, whole.begin_s, whole.end_s) == ("t DONE", 0.0, 4.5)
    assert whole.args["pdlink.bytes"] == 2 * 10**9
    assert (hidden.name, hidden.begin_s, hidden.end_s, hidden.args) == (
        "not hidden by prefill",
        2.0,
        4.0,
        {"ms": 2000.0},
    )
    speed = samples_of(made.data, "KV in flight")
    assert [at_s for at_s, _ in speed] == [1.5, 2.0, 2.5, 4.0]
    assert [value for _, value in speed] == pytest.approx([1.0, 1.5, 0.5, 0.0])


def test_arrows_lead_from_the_request_over_prefill_to_decode() -> None:
    # Asked at 30.0, answered at 30.2: its 1020.0 is laid at 30.1, right within 0.1 s.
    workers = [laid(PREFILL, "here", 29.0, 29.5), laid(DECODE, "here", 30.0, 30.2)]
    assert workers[0] == Laid(PREFILL)
    assert workers[1].offset_s == pytest.approx(30.1 - 1020.0)
    made = make(workers, [REQUEST])
    others = "decode-0 (another host's clock, right within 100.00 ms)"
    assert tracks_of(made.data) == ["proxy", "prefill-0", others]
    events = events_of(made.data)
    (request,) = [each for each in events if each.name == "req-1"]
    (sent,) = [each for each in events if each.process == "prefill-0" and each.name == "t DONE"]
    (received,) = [each for each in events if each.process == others and each.name == "t DONE"]
    assert len(request.sends) == len(sent.sends) == 1
    assert request.sends == sent.takes
    assert sent.sends == received.takes
    assert request.sends != sent.sends
    assert received.end_s == pytest.approx(1014.4 + 30.1 - 1020.0 - 9.0)
    assert spans(found(made.data, "requests")) == [("req-1", 0.0, 8.0), ("queue", 0.0, 0.5), ("decode", 0.5, 8.0)]


def test_one_request_shows_nothing_of_others() -> None:
    other = KeptTransfer("other", [LayerWritten(transfer_id="other", layer=0, start=0, end=1, at_s=1.0)])
    dump = Dump(name="prefill-0", clock="here", now_s=20.0, transfers=[other, SENT])
    made = make([Laid(dump)], [REQUEST, REQUEST._replace(transfer_ids=["other"])], only={"t"})
    assert (made.num_transfers, made.num_requests) == (1, 1)
    assert not any("other" in (each.name, each.args.get("transfer")) for each in events_of(made.data))


def test_an_arrow_leads_to_the_transfer_of_each_attempt() -> None:
    first = KeptTransfer(
        "t0", [LayerWritten(transfer_id="t0", layer=0, start=0, end=1, at_s=at_s) for at_s in (10.0, 10.5)]
    )
    dump = Dump(name="prefill-0", clock="here", now_s=20.0, transfers=[first, SENT])
    made = make([Laid(dump)], [REQUEST._replace(transfer_ids=["t0", "t"])], only={"t0", "t"})
    assert (made.num_transfers, made.num_requests) == (2, 1)
    events = events_of(made.data)
    (request,) = [each for each in events if each.name == "req-1"]
    takes = {name: each.takes for each in events for name in ("t0 goes on", "t DONE") if each.name == name}
    assert list(request.sends) == [*takes["t0 goes on"], *takes["t DONE"]]


def test_transfers_at_one_time_are_beside_each_other_and_live_ones_are_shown() -> None:
    def live(name: str, begin_s: float, end_s: float) -> KeptTransfer:
        times = (begin_s, end_s)
        return KeptTransfer(
            name, [LayerWritten(transfer_id=name, layer=0, start=0, end=1, at_s=at_s) for at_s in times]
        )

    dump = Dump(name="p", clock="c", now_s=9.0, transfers=[live("a", 1, 5), live("b", 2, 3), live("c", 5, 6)])
    events = found(make([Laid(dump)]).data, "KV, live: transfers")
    assert [each.name for each in events] == ["a goes on", "c goes on", "b goes on"], "two rows"


def test_nothing_is_a_trace_too() -> None:
    made = make([Laid(Dump(name="p", clock="c", now_s=1.0))])
    assert tracks_of(made.data) == ["p"]
    assert made.num_events == 0
