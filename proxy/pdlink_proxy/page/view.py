"""What people see of a deployment, made of what the proxy and its workers know. Pure."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec

from ..findings import find, many, sentence, why_of
from ..records import until_first_by_part

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pdlink.observe.findings import Finding
    from pdlink.observe.timeline import EndedTransfer

    from ..records import RequestRecord
    from .report import Rates, Report

WINDOW_S = 300.0
"""Requests that the sentence and the figures are about."""
SHOWN_REQUESTS = 50
_SHOWN_TRANSFERS = 20
_SHOWN_IN_PAIRS = 32
"""Workers of each side in the table of pairs."""
_SHOWN_TOTALS = frozenset(
    {
        *("prompt_tokens", "store_chunks", "store_copied_bytes", "store_records", "store_record_bytes"),
        "tier_bytes",
    }
)
_SAME_AS = {"failed": "failed", "recomputed": "recomputed", "place": "tier", "misfit": "misfit"}
"""By kind of a finding, the kind of happenings that say the same."""
_TOLD = 2
"""Of what happened, in the sentence; the strip below it has all."""


def view(
    *,
    now_s: float,
    status: str,
    reason: str,
    workers: Sequence[Mapping[str, Any]],
    refused_pairs: Sequence[Mapping[str, Any]],
    mismatched: Sequence[Mapping[str, Any]],
    records: Sequence[RequestRecord],
    reports: Mapping[str, Report],
    reported_s: float,
    rates: Rates | None = None,
    engine: str = "",
    running: int,
    queued: int,
    happened: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """The body of GET /pdlink/state, without what `PageMemory` adds.

    now_s: unix time. workers: of `Worker.describe`, with `side`. records: oldest first. reports: by URL, made at
    `reported_s`. rates: by them. engine: of the workers. happened: newest first, of `PageMemory`.
    """
    recent = recent_of(records, now_s)
    summary = summary_of(recent, reports)
    found = find(
        status=status,
        reason=reason,
        workers=workers,
        refused_pairs=refused_pairs,
        mismatched=mismatched,
        recent=recent,
        summary=summary,
    )
    ended = [(url, each) for url, report in reports.items() for each in report.ended if each.side == "sender"]
    names = {worker["label"]: _name(worker, reports) for worker in workers}
    of_url = {worker["url"]: names[worker["label"]] for worker in workers}
    return {
        "at_s": now_s,
        "reported_s": reported_s,
        "verdict": verdict(found, len(workers), recent, summary, happened),
        "findings": found,
        "running": running,
        "queued": queued,
        "summary": summary,
        "engine": engine,
        "rates": rates,
        "totals": _totals(reports),
        "workers": [_worker(worker, names[worker["label"]], reports.get(worker["url"])) for worker in workers],
        "pairs": _pairs(workers, names, refused_pairs, reports),
        "live": _live(reports),
        "ended": [
            {**msgspec.structs.asdict(each), "worker": of_url.get(url, url)}
            for url, each in sorted(ended, key=lambda pair: pair[1].ended_s_ago)[:_SHOWN_TRANSFERS]
        ],
        "requests": [
            {**msgspec.structs.asdict(record), "parts": until_first_by_part(record)}
            for record in list(records)[: -SHOWN_REQUESTS - 1 : -1]
        ],
        "errors": _errors(recent),
    }


def verdict(
    found: Sequence[Finding],
    num_workers: int,
    recent: Sequence[RequestRecord],
    summary: Mapping[str, Any],
    happened: Sequence[Mapping[str, Any]],
) -> dict[str, str]:
    """The one sentence, its `level` (ok, warn, bad, idle) and its `text`: what is wrong now and what to do, and what
    happened lately."""
    if found:
        same = _SAME_AS.get(found[0].kind)
        rest = [each for each in happened if each["kind"] != same]
        return {"level": found[0].level, "text": sentence(found, num_workers) + before(rest)}
    if not recent:
        told = "All workers are ready. No request in the last five minutes."
        return {"level": "idle", "text": told + before(happened)}
    what = many(len(recent), "request")
    text = f"All is well: {what} in five minutes, KV of {_percent(summary)} was transferred."
    return {"level": "ok", "text": text + before(happened)}


def before(happened: Sequence[Mapping[str, Any]]) -> str:
    """What else happened lately, the worst and newest first: the end of the sentence. Workers that are away now are
    findings, and not told here."""
    those = [each for each in happened if each["level"] != "ok" and not each["now"]]
    told = sorted(those, key=lambda each: each["level"] != "bad")
    if not told:
        return ""
    more = f" and {len(told) - _TOLD} more" if len(told) > _TOLD else ""
    return f" In the last 15 minutes: {'; '.join(each['text'] for each in told[:_TOLD])}{more}."


def _percent(summary: Mapping[str, Any]) -> str:
    total = sum(summary["kv"].values())
    return f"{summary['kv'].get('transferred', 0) / total:.0%}" if total else "none"


def recent_of(records: Iterable[RequestRecord], now_s: float) -> list[RequestRecord]:
    """What sentence, figures and findings are about."""
    return [record for record in records if now_s - record.at_s <= WINDOW_S]


def summary_of(recent: Sequence[RequestRecord], reports: Mapping[str, Report]) -> dict[str, Any]:
    """Of these requests, and of the transfers that workers still know."""
    ended = [each for report in reports.values() for each in report.ended if each.side == "sender"]
    ttft = sorted(record.ttft_s for record in recent if record.ttft_s is not None)
    per_token = sorted(record.per_token_s for record in recent if record.per_token_s is not None)
    moving = sum(each.moving_s for each in ended)
    exposed = sum(each.exposed_s for each in ended)
    return {
        "requests": len(recent),
        "ttft_p50_ms": quantile_ms(ttft, 0.5),
        "ttft_p95_ms": quantile_ms(ttft, 0.95),
        "per_token_p50_ms": quantile_ms(per_token, 0.5),
        "queued_p95_ms": quantile_ms(sorted(record.queued_s for record in recent), 0.95),
        "kv": dict(Counter(record.kv.partition(";")[0] for record in recent if record.outcome in ("ok", "broken"))),
        "transfers": len(ended),
        "exposed_ms": exposed / len(ended) * 1000 if ended else None,
        "exposed_share": min(1.0, exposed / moving) if moving else None,
    }


def quantile_ms(ordered: Sequence[float], share: float) -> float | None:
    """Of seconds; None without any."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1000 if ordered else None


def _name(worker: Mapping[str, Any], reports: Mapping[str, Report]) -> str:
    report = reports.get(worker["url"])
    name = report.name if report else (worker["health"] or {}).get("name") or worker["label"]
    engine = worker.get("data_parallel_rank")
    return name if engine is None else f"{name}/dp{engine}"


def _worker(worker: Mapping[str, Any], name: str, report: Report | None) -> dict[str, Any]:
    health = worker["health"] or {}
    return {
        "label": worker["label"],
        "side": worker["side"],
        "name": name,
        "url": worker["url"],
        "state": worker["state"],
        "reason": worker["reason"],
        "in_flight": worker["in_flight"],
        "model": health.get("model"),
        "revision": health.get("revision", ""),
        "version": health.get("version", ""),
        "requests": report.requests if report else None,
        "blocks": report.blocks if report else None,
        "held": _held(report) if report else None,
        "cell": worker["cell"],
    }


def _held(report: Report) -> float | None:
    """The share of its KV pool in use."""
    total = report.blocks.get("total", 0)
    return 1 - report.blocks.get("free", 0) / total if total > 0 else report.held


def _totals(reports: Mapping[str, Report]) -> dict[str, Counter[str]]:
    """Counters of all workers, since each one's start."""
    found: dict[str, Counter[str]] = {}
    for report in reports.values():
        for name, values in report.totals.items():
            if name in _SHOWN_TOTALS:
                found.setdefault(name, Counter()).update(values)
    return found


def _pairs(
    workers: Sequence[Mapping[str, Any]],
    names: Mapping[str, str],
    refused: Iterable[Mapping[str, Any]],
    reports: Mapping[str, Report],
) -> list[dict[str, Any]]:
    """Prefill × decode pairs: the lane and the speed of their last transfers, or why they do not fit. Of many workers
    the first on each side: a table, and the time to make it, grow with the product."""
    unfit = {(pair["prefill"], pair["decode"]): pair for pair in refused}
    sides = {
        side: [worker for worker in workers if worker["side"] == side][:_SHOWN_IN_PAIRS]
        for side in ("prefill", "decode")
    }
    found = []
    known = {names[worker["label"]] for worker in workers if worker["side"] == "decode"}
    for prefill in sides["prefill"]:
        report = reports.get(prefill["url"])
        sessions = {each.peer: each for each in reversed(report.peers)} if report else {}
        names_of_its_own = report is not None and report.held is not None  # not the built-in engine
        strange = [each for peer, each in sessions.items() if names_of_its_own and peer not in known]
        done: dict[str, list[EndedTransfer]] = {}
        for each in report.ended if report else ():
            if each.side == "sender":
                done.setdefault(each.peer, []).append(each)
        for decode in sides["decode"]:
            name = names[decode["label"]]
            session, sent = sessions.get(name), done.get(name, [])
            if session is None and strange and len(known) == 1:
                session = strange[0]
            state = session.state if session else "not told" if strange else "no session"
            moving = sum(each.moving_s for each in sent)
            pair = unfit.get((names[prefill["label"]], name))
            found.append(
                {
                    "prefill": prefill["label"],
                    "decode": decode["label"],
                    "state": "refused" if pair else state,
                    "lane": session.lane or session.transport if session else "",
                    "gb_per_s": sum(each.nbytes for each in sent) / moving / 1e9 if moving else None,
                    "reason": f"{pair['factor']}: {pair['local']} and {pair['remote']}" if pair else "",
                }
            )
    return found


def _live(reports: Mapping[str, Report]) -> list[dict[str, Any]]:
    """Transfers that go on, as their senders see them; the oldest first."""
    found = [
        {**msgspec.structs.asdict(each), "worker": report.name}
        for report in reports.values()
        for each in report.live
        if each.side == "sender"
    ]
    return sorted(found, key=lambda each: -each["age_s"])[:_SHOWN_TRANSFERS]


def _errors(recent: Sequence[RequestRecord]) -> list[dict[str, Any]]:
    """Causes of what did not go the usual way, the most frequent first."""
    causes: Counter[tuple[str, str]] = Counter()
    newest: dict[tuple[str, str], str] = {}
    for record in recent:
        if record.outcome != "ok":
            cause = ("request", record.outcome)
        elif record.kv.startswith("recomputed"):
            cause = ("recomputed", why_of(record.kv))
        else:
            continue
        causes[cause] += 1
        newest[cause] = record.request_id
    return [
        {"kind": kind, "cause": cause, "count": count, "newest": newest[kind, cause]}
        for (kind, cause), count in causes.most_common(20)
    ]
