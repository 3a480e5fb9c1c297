"""A worker's spans, from its events."""

from __future__ import annotations

import time
from collections.abc import Sequence

from pdlink.events import PromptSourced, RequestEnded, TransferEnded
from pdlink.observe.spans import Span, TraceContext
from pdlink.observe.worker_spans import _MAX_TRACED, WorkerSpans

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = f"00-{TRACE}-{PARENT}-01"


def transfer_ended(reason: str = "", side: str = "receiver", transfer_id: str = "t") -> TransferEnded:
    what = {"transfer_id": transfer_id, "side": side, "peer": "p", "state": "FAILED" if reason else "DONE"}
    more = {"nbytes": 8, "started_s": time.monotonic()}
    return TransferEnded(**what, **more, reason=reason, transport="tcp")  # type: ignore[arg-type]


def request_ended(outcome: str, *, first_token_s: float | None, request_id: str = "decode-t") -> RequestEnded:
    tokens = {"prompt_tokens": 9, "completion_tokens": 3}
    times = {"started_s": time.monotonic() - 5, "first_token_s": first_token_s}
    return RequestEnded(request_id=request_id, role="decode", outcome=outcome, **tokens, **times)  # type: ignore[arg-type]


class Taken(list[Span]):
    def take(self, context: TraceContext, spans: Sequence[Span]) -> None:
        assert context.trace_id == TRACE
        self += spans


def test_a_transfer_and_a_request_that_failed_say_why() -> None:
    taken = Taken()
    spans = WorkerSpans(taken.take, share=0)
    spans.began("decode-t", "t", "decode", "mine", SAMPLED, None)
    spans(transfer_ended("peer_lost"))
    spans(request_ended("transfer_failed", first_token_s=None))
    assert [(each.name, each.error) for each in taken] == [
        ("receive KV", "peer_lost"),
        ("decode", "transfer_failed"),
        ("queue", ""),
    ]
    assert len({each.span_id for each in taken}) == 3
    spans(request_ended("stop", first_token_s=None))
    assert len(taken) == 3, "it has one end"


def test_phases_follow_each_other() -> None:
    taken = Taken()
    spans = WorkerSpans(taken.take, share=0)
    spans.began("decode-t", "t", "decode", "mine", SAMPLED, None)
    now_s = time.monotonic()
    counts = {"cached": 1, "loaded": 2, "received": 3, "computed": 4, "found": 2}
    spans(
        PromptSourced(request_id="decode-t", reason="", load_s=0, other_s=0, began_s=now_s - 4, **counts)  # type: ignore[arg-type]
    )
    spans(request_ended("stop", first_token_s=now_s - 1))
    whole, queue, wait, decode = taken
    assert [each.name for each in taken] == ["decode", "queue", "wait for KV", "decode"]
    assert abs(whole.end_s - time.monotonic()) < 60
    near = 0.05
    assert abs(queue.begin_s - whole.begin_s) < near
    assert abs(queue.end_s - queue.begin_s - 1) < near
    assert abs(wait.end_s - wait.begin_s - 3) < near
    assert abs(decode.end_s - decode.begin_s - 1) < near
    assert whole.attributes["pdlink.prompt_tokens.loaded"] == 2


def test_what_is_not_sampled_and_what_is_too_old_makes_no_span() -> None:
    taken = Taken()
    spans = WorkerSpans(taken.take, share=0)
    spans.began("decode-u", "u", "decode", "", SAMPLED[:-2] + "00", None)
    spans.began("decode-v", "v", "decode", "", None, None)
    for number in range(_MAX_TRACED + 1):
        spans.began(f"decode-{number}", str(number), "decode", "", SAMPLED, None)
    for name in ("u", "v", "0"):
        spans(transfer_ended(transfer_id=name))
        spans(request_ended("stop", first_token_s=None, request_id=f"decode-{name}"))
    assert taken == []
    spans(transfer_ended(transfer_id="1"))
    assert [each.name for each in taken] == ["receive KV"]
