"""What is wrong with a deployment, as its proxy sees it: one list for /health, page, `top` and doctor. Pure."""

from __future__ import annotations

import shlex
from collections import Counter
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

from pdlink.api import kv_path
from pdlink.config import is_loopback
from pdlink.observe.findings import CHOSEN, Finding, of_places, of_recomputed, remedy_of, worst_first

from .worker import State

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from .records import EndedHead, RequestRecord

    Described = Mapping[str, Any]
    """A worker as `Worker.describe` says, with its `side`."""

_MOST_OF_A_KIND = 16
_MANY_RECOMPUTED = 0.02
_EXPOSED_SHARE = 0.25
"""Of the time in which KV moved: from there on the link, and not prefill, makes requests wait."""
_ENOUGH_TRANSFERS = 10
"""Fewer say nothing of the link: the first ones shake hands and compile."""
_NOTICED_SHARE, _NOTICED_MS = 0.05, 10.0
"""Of the time to the first token, and at least: what is less than that of a transfer no client notices."""
_START = "start it again, or correct its URL in the proxy's settings; `pdlink up` does so by itself"
_AWAY = {
    State.UNKNOWN: "start it, or correct its URL in the proxy's settings",
    State.FAILED: "read its log, and start it again",
    State.UNREACHABLE: _START,
    State.WRONG_ROLE: "list it on its own side in the proxy's settings, or start it with the other role",
    State.INVALID: "another program answers at this URL; correct it in the proxy's settings",
    State.BARRED: "give the proxy's worker_key_file the secret of the worker's security.http_key_file",
}
"""States of workers that serve nothing and should, with what to do."""
PROXY, REQUESTS = "proxy", "requests"
"""What a finding is about that is no worker's: its text says it all."""
AWAY = frozenset(state.value for state in _AWAY)


def find(
    *,
    status: str,
    reason: str,
    workers: Sequence[Described],
    refused_pairs: Sequence[Mapping[str, Any]],
    mismatched: Sequence[Mapping[str, Any]],
    recent: Sequence[RequestRecord],
    summary: Mapping[str, Any],
) -> list[Finding]:
    """What is wrong now, the worst first; of each kind the first ones.

    status, reason: of `Services.standing`. refused_pairs, mismatched: as in GET /health. recent: requests of the last
    minutes. summary: of them and of the transfers that workers still know (`page.view.summary_of`).
    """
    found = [*_of_proxy(status, reason, workers), *_of_failures(recent)]
    misfits: dict[str, Finding] = {}
    for misfit in (*_models(workers), *_refused(refused_pairs, mismatched), *_mismatched(mismatched)):
        misfits.setdefault(misfit.about, misfit)
    found += misfits.values()
    for each in (_away, _left_alone, _unreachable_control, _places, _silent):
        found += (finding for worker in workers for finding in each(worker))
    found += [*_names_twice(workers), *_of_recomputed(recent), *_of_link(summary)]
    return _first_ones(worst_first(found))


def sentence(findings: Sequence[Finding], num_workers: int) -> str:
    """The worst of it, for people; empty without any."""
    if not findings:
        return ""
    first = findings[0]
    if first.kind == "away":
        away = first.others + 1
        are = "is" if away == 1 else "are"
        told = f"{away} of {many(num_workers, 'worker')} {are} away: {first.about}, {first.text}"
    elif first.about in (PROXY, REQUESTS):
        told = first.text[:1].upper() + first.text[1:]
    else:
        told = f"{first.about}: {first.text}" + (f", and {first.others} more like it" if first.others else "")
    return f"{told}. What to do: {first.remedy}."


def many(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def why_of(kv: str) -> str:
    """The reason in X-Pdlink-KV: `recomputed;reason=peer_lost`."""
    return kv.partition("reason=")[2].partition(";")[0] or "no stated reason"


def recomputed(records: Iterable[EndedHead | RequestRecord]) -> Counter[str]:
    """By reason, requests whose prompt decode computed although it was to be transferred."""
    why = Counter(why_of(record.kv) for record in records if kv_path.path_of(record.kv) == kv_path.RECOMPUTED)
    return Counter({reason: count for reason, count in why.items() if reason not in CHOSEN})


def _first_ones(findings: Iterable[Finding]) -> list[Finding]:
    by_kind: dict[str, list[Finding]] = {}
    for each in findings:
        by_kind.setdefault(each.kind, []).append(each)
    found = []
    for same in by_kind.values():
        found += [msgspec.structs.replace(same[0], others=len(same) - 1), *same[1:_MOST_OF_A_KIND]]
    return worst_first(found)


def _of_proxy(status: str, reason: str, workers: Sequence[Described]) -> Iterable[Finding]:
    if status not in ("ok", "degraded"):
        yield Finding(
            level="bad",
            about=PROXY,
            text=f"no request can be served: {reason or status}",
            remedy="wait until it has started again" if status == "draining" else "start what is missing",
            kind="proxy",
        )
    for side in ("prefill", "decode"):
        served = side == "prefill" and any(worker["plain"] for worker in workers)  # by plain servers alone
        if not served and not any(worker["side"] == side for worker in workers):
            remedy = f"start it with --{side} URL, or {side} in its file"
            text = f"the proxy lists no {side} worker"
            yield Finding(level="bad", about=PROXY, text=text, remedy=remedy, kind="proxy")


def _of_failures(recent: Sequence[RequestRecord]) -> Iterable[Finding]:
    for outcome in ("failed", "broken"):
        those = [record for record in recent if record.outcome == outcome]
        if those:
            explain = _explain(those[-1])
            yield Finding(
                level="bad",
                about=REQUESTS,
                text=f"{len(those) / len(recent):.0%} of {many(len(recent), 'request')} ended as {outcome} in five "
                "minutes",
                remedy=f"`{explain}` tells of the newest",
                kind="failed",
                command=f"{explain} --proxy PROXY",
            )


def _explain(record: RequestRecord) -> str:
    """A command. Clients choose ids, and people copy the command into a shell."""
    return f"pdlink explain {shlex.quote(record.request_id)}"


def _models(workers: Sequence[Described]) -> Iterable[Finding]:
    """Models that one side serves alone."""
    models: dict[str, set[str]] = {"prefill": set(), "decode": set()}
    for worker in workers:
        if worker["state"] == State.OK.value and worker["health"] and not worker["plain"]:
            models[worker["side"]].add(worker["health"]["model"])
    for side, other in (("decode", "prefill"), ("prefill", "decode")):
        alone = models[side] - models[other]
        if models[other] and alone:
            yield Finding(
                level="bad",
                about=f"{side} workers",
                text=f"they serve {', '.join(sorted(alone))}, and no {other} worker does: those serve "
                f"{', '.join(sorted(models[other]))}",
                remedy="start both sides with the same --model, and the same model.name if they set it",
                kind="misfit",
            )


def _refused(pairs: Iterable[Mapping[str, Any]], kinds: Iterable[Mapping[str, Any]]) -> Iterable[Finding]:
    stranded = {(each["prefill"], each["decode"]) for each in kinds if each["stranded"]}
    for pair in pairs:
        yield Finding(
            level="bad" if (pair["prefill"], pair["decode"]) in stranded else "warn",
            about=f"{pair['prefill']} → {pair['decode']}",
            text=f"they do not fit together, {pair['factor']} differs: {pair['local']} and {pair['remote']}; answers "
            "are right, but decode computes the prompts of this pair",
            remedy=remedy_of(pair["factor"]),
            kind="misfit",
        )


def _mismatched(kinds: Iterable[Mapping[str, Any]]) -> Iterable[Finding]:
    for each in kinds:
        stranded = each["stranded"]
        yield Finding(
            level="bad" if stranded else "warn",
            about=f"{each['prefill']} → {each['decode']}",
            text=f"they do not fit together, {each['factor']} differs"
            + (f"; such {stranded} workers fit nobody, and decode computes prompts again" if stranded else ""),
            remedy=remedy_of(each["factor"]),
            kind="misfit",
        )


def _away(worker: Described) -> Iterable[Finding]:
    state = worker["state"]
    if state not in AWAY:
        return
    reason = f"{state}: {worker['reason']}" if worker["reason"] and worker["reason"] != state else state
    remedy = _AWAY[State(state)]
    if state == State.UNREACHABLE.value and worker["health"] is None:
        remedy = _AWAY[State.UNKNOWN]
    yield Finding(
        level="warn",
        about=worker["label"],
        text=f"{worker['url']} is {reason}",
        remedy=remedy,
        kind="away",
        command=f"curl -s {worker['url']}/health",
    )


def _left_alone(worker: Described) -> Iterable[Finding]:
    if worker["state"] != State.OK.value or not (worker["fails"] or worker["left_out"]):
        return
    why = worker["left_out"] or "its requests failed lately"
    text = f"{worker['url']} answers GET /health, but the proxy leaves it alone for a while: {why}"
    yield Finding(level="warn", about=worker["label"], text=text, remedy="read its log", kind="left alone")


def _unreachable_control(worker: Described) -> Iterable[Finding]:
    control = (worker["health"] or {}).get("control") or ()
    for address in (control,) if isinstance(control, str) else control:
        if is_loopback(_host_of(address)) and not is_loopback(_host_of(worker["url"])):
            yield Finding(
                level="bad",
                about=worker["label"],
                text=f"{worker['url']} says that other workers reach it at {address.partition('?')[0]}, which is "
                "loopback",
                remedy="set listen or listen.advertise to an address that other hosts reach",
                kind="control",
            )


def _host_of(url: str) -> str:
    """Empty for what is no URL: a worker may say anything."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _places(worker: Described) -> Iterable[Finding]:
    problems = (worker["health"] or {}).get("problems") or {}
    return of_places(worker["label"], problems, worker["url"]) if worker["state"] not in AWAY else ()


def _silent(worker: Described) -> Iterable[Finding]:
    if worker["no_kv_events"]:
        yield Finding(
            level="warn",
            about=worker["label"],
            text=f"{worker['url']}: {worker['no_kv_events']}; placement guesses what KV it has",
            remedy="compare the proxy's kv_events with the worker's (--kv-events-config of vLLM and SGLang)",
            kind="kv events",
            command=f"curl -s {worker['url']}/health",
        )


def _names_twice(workers: Sequence[Described]) -> Iterable[Finding]:
    urls: dict[str, set[str]] = {}
    for worker in workers:
        if (health := worker["health"]) and health["name"] and health["control"]:
            urls.setdefault(health["name"], set()).add(worker["url"])
    for name, of in urls.items():
        if len(of) > 1:
            text = f"{' and '.join(sorted(of))} have one name; each replaces the other's sessions"
            yield Finding(level="bad", about=name, text=text, remedy="set `name`", kind="name")


def _of_recomputed(recent: Sequence[RequestRecord]) -> Iterable[Finding]:
    found = recomputed(recent)
    if found.total() <= _MANY_RECOMPUTED * len(recent):
        return
    for label, count in found.most_common():
        explain = next(_explain(record) for record in reversed(recent) if label in recomputed([record]))
        why, remedy = of_recomputed(label)
        yield Finding(
            level="warn",
            about=REQUESTS,
            text=f"{count / len(recent):.0%} of {many(len(recent), 'request')} computed their prompt on decode: "
            f"{why}",
            remedy=remedy or f"`{explain}` tells of the newest",
            kind="recomputed",
            command=f"{explain} --proxy PROXY",
        )


def _of_link(summary: Mapping[str, Any]) -> Iterable[Finding]:
    """Much of a transfer comes after prefill, and a client would notice."""
    if summary["transfers"] < _ENOUGH_TRANSFERS or (summary["exposed_share"] or 0.0) <= _EXPOSED_SHARE:
        return
    if summary["exposed_ms"] > max(_NOTICED_MS, _NOTICED_SHARE * (summary["ttft_p50_ms"] or 0.0)):
        yield Finding(
            level="warn",
            about=REQUESTS,
            text=f"requests wait for the link: {summary['exposed_share']:.0%} of the time in which KV moves comes "
            f"after prefill, {summary['exposed_ms']:.1f} ms a transfer",
            remedy="compare the lanes in Pairs with what `pdlink check` says on each host",
            kind="link",
            command="pdlink bench transfer",
        )
