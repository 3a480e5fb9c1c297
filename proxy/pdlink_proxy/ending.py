"""What is kept of a request that has ended: its record, its last decision, its line in the decision log, and what the
metrics count."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdlink.api import kv_path

from .decision_log import Logged, hash_ids
from .decisions import Decision
from .steps import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from .admission import Admission
    from .attempt import Attempt
    from .decision_log import Tally
    from .records import RequestRecord
    from .shared import Shared

_WITH_TOKENS = frozenset({Outcome.OK.value, Outcome.BROKEN.value})


def keep(
    shared: Shared,
    record: RequestRecord,
    why: str,
    num_tokens: int,
    stages: Mapping[str, float],
    exemplar: dict[str, str],
) -> None:
    """why: of its last attempt. num_tokens: of its prompt, as placement counted them. stages: of the time to its
    first token."""
    outcome, kv, total_s, metrics = record.outcome, record.kv, record.total_s, shared.metrics
    shared.records.append(record)
    reason = f"{outcome}, KV {kv}"
    shared.decisions.append(
        Decision(
            request_id=record.request_id,
            at_s=record.at_s,
            why=why,
            verdict="ended",
            reason=reason,
            tokens=num_tokens,
            waited_s=total_s,
        )
    )
    metrics.requests.add(1, outcome)
    metrics.duration.observe(total_s, outcome, exemplar=exemplar)
    if outcome in _WITH_TOKENS:
        metrics.kv.add(1, kv_path.path_of(kv))
        metrics.stages.observe_each(stages)
    if record.per_token_s is not None:
        metrics.per_token.observe(record.per_token_s)


def logged(record: RequestRecord, admission: Admission, tally: Tally, attempts: Iterable[Attempt]) -> Logged:
    """Its line in the decision log."""
    wanted, last = admission.wanted, admission.decision
    return Logged(
        timestamp=int((record.at_s - record.total_s) * 1000),
        input_length=record.prompt_tokens if tally.prompt_tokens is None else tally.prompt_tokens,
        output_length=tally.answer_tokens,
        hash_ids=hash_ids(wanted.keys),
        request_id=record.request_id,
        model=wanted.model,
        outcome=record.outcome,
        kv=record.kv,
        reason=last.reason if last is not None else "",
        queued_s=record.queued_s,
        lost_s=record.lost_s,
        prefill_s=record.prefill_s,
        ttft_s=record.ttft_s,
        total_s=record.total_s,
        attempts=[attempt.logged() for attempt in attempts],
    )
