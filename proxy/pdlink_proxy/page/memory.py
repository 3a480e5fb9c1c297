"""What the page remembers: figures of the last 15 minutes in steps of 10 s, and what happened. No I/O, no clock.

Who opens the page after an alert still sees the incident. A worker's coming and going is told as it happens. All else
is found at the end of each step, from the records of requests and from what workers said.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING, Any

import msgspec

from ..findings import many, recomputed
from ..worker import State
from .report import grown
from .view import quantile_ms

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence, Set

    from ..records import EndedHead, RequestRecord
    from .report import Report

STEP_S = 10.0
NUM_STEPS = 90
MAX_HAPPENINGS = 200
MAX_CHARS = 200
_SAME_S = 3 * STEP_S
"""What goes on is one happening as long as it is seen again within this time."""
_LOST = (State.UNREACHABLE, State.FAILED, State.BARRED, State.WRONG_ROLE, State.INVALID)
_AWAY = frozenset(state.value for state in _LOST)


class Step(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One step. Its figures are of its end, or of all of it."""

    at_s: float
    """Unix time of its end."""
    requests_per_s: float
    """That ended, failed ones too."""
    failed_per_s: float
    ttft_p50_ms: float | None
    ttft_p95_ms: float | None
    running: int
    queued: int
    kv_bytes_per_s: float | None
    """Over all lanes; None where no worker said it."""
    sources: dict[str, float]
    """Prompt tokens a second, by where their KV came from: device, host, disk, ..., prefill, computed."""


class Happening(msgspec.Struct):
    """Something that people want to know afterwards."""

    at_s: float
    """Unix time."""
    until_s: float
    """When it was seen last; later than `at_s` of what went on."""
    kind: str
    """away, elsewhere, recomputed, failed, tier or misfit."""
    what: str
    """Whom or what it is about: a worker, a reason, a place."""
    count: int = 0
    """Requests that it was about."""
    detail: str = ""
    over: bool = False
    """Of a worker that was away: it is back, or is not listed any more."""

    @property
    def level(self) -> str:
        """ok, warn or bad."""
        if self.kind == "failed" or (self.kind == "away" and not self.over):
            return "bad"
        return "ok" if self.kind == "elsewhere" else "warn"

    @property
    def text(self) -> str:
        """A sentence without its time."""
        requests = many(self.count, "request")
        more = f": {self.detail}" if self.detail else ""
        match self.kind:
            case "away":
                away = f"was away for {self.until_s - self.at_s:.0f} s" if self.over else "is away"
                return f"{self.what} {away}{more}"
            case "elsewhere":
                return f"{requests} went on at another worker"
            case "recomputed":
                return f"{requests} recomputed on decode: {self.what}"
            case "failed":
                return f"{requests} failed ({self.what})"
            case "tier":
                return f"{self.what} keeps less than its settings say{more}"
            case _:
                return f"{self.what} do not fit together{more}"


class StepFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What is known when a step ends."""

    records: Sequence[EndedHead | RequestRecord]
    """At least the newest ones of the step."""
    num_ended: int
    """Requests since the start, which may be more."""
    running: int
    queued: int
    reports: Mapping[str, Report]
    """By URL."""
    problems: Mapping[str, str]
    """By place of a tier, why it keeps less than its settings say."""
    misfits: Iterable[tuple[str, str]]
    """Names of two workers, and what differs."""
    labels: Set[str]
    """Of the workers that are listed."""


class PageMemory:
    """Of one proxy, with all its processes."""

    def __init__(self) -> None:
        self.steps: deque[Step] = deque(maxlen=NUM_STEPS)
        self.happenings: deque[Happening] = deque(maxlen=MAX_HAPPENINGS)
        """Oldest first."""
        self._away: dict[str, Happening] = {}
        """By label, of workers that are away."""
        self.last_s = 0.0
        """Unix time of the end of the last step."""
        self._num_ended = 0
        self._totals: dict[str, Mapping[str, Mapping[str, float]]] = {}
        """By URL, those of the last step: a worker that came or restarted since adds nothing."""
        self._late: frozenset[str] = frozenset()
        """Who said nothing in the last step: of them `_totals` has those of the step before."""

    def worker_changed(self, now_s: float, label: str, state: str, reason: str) -> None:
        """A worker came or went. Its first coming is no news."""
        if state in _AWAY and label not in self._away:
            self._away[label] = away = Happening(now_s, now_s, kind="away", what=label, detail=reason[:MAX_CHARS])
            self.happenings.append(away)
        elif state == State.OK.value and (left := self._away.pop(label, None)) is not None:
            left.until_s, left.over = now_s, True

    def step(self, now_s: float, facts: StepFacts) -> None:
        """A step ends."""
        took_s = now_s - self.last_s if self.last_s else STEP_S
        since = [record for record in facts.records if self.last_s < record.at_s <= now_s] if self.last_s else []
        ended = max(len(since), facts.num_ended - self._num_ended) if self.last_s else 0
        share = ended / len(since) if since else 0.0  # requests that ended, for each record that is kept
        ttft = sorted(record.ttft_s for record in since if record.ttft_s is not None)
        failed = [record for record in since if record.outcome in ("failed", "broken")]
        kv, sources = self._moved(facts.reports, took_s)
        self.steps.append(
            Step(
                at_s=now_s,
                requests_per_s=ended / took_s,
                failed_per_s=len(failed) * share / took_s,
                ttft_p50_ms=quantile_ms(ttft, 0.5),
                ttft_p95_ms=quantile_ms(ttft, 0.95),
                running=facts.running,
                queued=facts.queued,
                kv_bytes_per_s=kv,
                sources=sources,
            )
        )
        self.last_s, self._num_ended = now_s, facts.num_ended
        for label, away in list(self._away.items()):
            away.until_s, away.over = now_s, label not in facts.labels
            if away.over:
                del self._away[label]
        self._note_requests(now_s, since, failed)
        for place, why in facts.problems.items():
            self._note(now_s, "tier", place, detail=why)
        for names, why in facts.misfits:
            self._note(now_s, "misfit", names, detail=why)

    def said(self, now_s: float) -> dict[str, Any]:
        """For the page: `history`, oldest first, and `happened`, newest first."""
        after_s = now_s - STEP_S * NUM_STEPS
        return {
            "history": [msgspec.structs.asdict(step) for step in self.steps if step.at_s > after_s],
            "happened": [
                {
                    "at_s": each.at_s,
                    "until_s": each.until_s,
                    "kind": each.kind,
                    "now": each.kind == "away" and not each.over,
                    "level": each.level,
                    "text": each.text,
                }
                for each in reversed(self.happenings)
                if each.until_s > after_s
            ],
        }

    def _note_requests(
        self, now_s: float, records: Sequence[EndedHead | RequestRecord], failed: Sequence[EndedHead | RequestRecord]
    ) -> None:
        elsewhere = sum(record.attempts > 1 and record.outcome == "ok" for record in records)
        if elsewhere:
            self._note(now_s, "elsewhere", "", elsewhere)
        for outcome, count in Counter(record.outcome for record in failed).most_common():
            self._note(now_s, "failed", outcome, count)
        for reason, count in recomputed(records).most_common():
            self._note(now_s, "recomputed", reason, count)

    def _note(self, now_s: float, kind: str, what: str, count: int = 0, detail: str = "") -> None:
        for each in reversed(self.happenings):
            if (each.kind, each.what) == (kind, what) and each.until_s >= now_s - _SAME_S:
                each.until_s, each.count = now_s, each.count + count
                return
        self.happenings.append(Happening(now_s, now_s, kind=kind, what=what, count=count, detail=detail[:MAX_CHARS]))

    def _moved(self, reports: Mapping[str, Report], took_s: float) -> tuple[float | None, dict[str, float]]:
        """Bytes of KV a second, and prompt tokens a second by source."""
        nbytes: float | None = None
        sources: Counter[str] = Counter()
        for url, report in reports.items():
            before = self._totals.get(url)
            if before is None:
                continue
            moved = grown(report.totals, before, "transfer_bytes")
            nbytes = (nbytes or 0.0) + sum(moved.values())
            sources.update(grown(report.totals, before, "prompt_tokens"))
        late = {url: totals for url, totals in self._totals.items() if url not in reports and url not in self._late}
        self._late, self._totals = frozenset(late), late | {url: report.totals for url, report in reports.items()}
        rates = {source: tokens / took_s for source, tokens in sources.items() if tokens}
        return None if nbytes is None else nbytes / took_s, rates
