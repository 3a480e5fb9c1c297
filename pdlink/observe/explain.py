"""`pdlink explain`: what a proxy and its workers did with a request, in order, and why."""

from __future__ import annotations

import json
import time
import urllib.parse
from typing import Any, NamedTuple

from rich.table import Table
from rich.text import Text

from pdlink.observe.fetch import CannotFetch, ask, base_url, proxys_remedy
from pdlink.observe.findings import RECOMPUTED
from pdlink.observe.plain import add_row, plain
from pdlink.reasons import Reason

_NOTICED_S = 0.1
"""A shorter wait is not worth advice."""


class Explained(NamedTuple):
    """Oldest first."""

    decisions: list[dict[str, Any]]
    """The proxy's, as `pdlink_proxy.decisions.Decision` has them."""
    sources: list[dict[str, Any]]
    """The workers', as `pdlink.observe.sources.Sourced` has them, with `worker`; or `worker` and `error`."""
    record: dict[str, Any] | None = None
    """As `pdlink_proxy.records.RequestRecord`; None of a request that goes on, or ended long ago."""
    slower_than: float | None = None
    """Share of the last requests whose first token came sooner."""
    transfers: list[dict[str, Any]] = []
    """Of both sides, as `pdlink.observe.timeline.EndedTransfer`, as far as the workers still know them."""


def fetch_explanation(url: str, request_id: str, *, key: str | None = None) -> Explained:
    """What the proxy at `url` and its workers decided about a request. key: of its `api_keys`, if it has some.

    Raises CannotFetch, also for a request that it does not know.
    """
    url = base_url(url)
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    status, text = ask(url, f"/decisions?request={urllib.parse.quote(request_id, safe='')}", headers)
    if status != 200:
        raise CannotFetch(f"{url} answered {status}; {proxys_remedy(status, key)}")
    try:
        answer = json.loads(text)
        found = Explained(*(answer[name] for name in Explained._fields))
    except (ValueError, KeyError, TypeError):
        raise CannotFetch(f"{url} answered with something else; is it a pdlink proxy?") from None
    if not found.decisions:
        raise CannotFetch(
            f"{url} knows no request {request_id!r}; it keeps those of the last 1000 requests; give the X-Request-Id "
            "of an answer"
        )
    return found


def table_of(explained: Explained) -> Table:
    """One row per decision, in order. In brackets: tokens that a worker had to do already."""
    decisions = explained.decisions
    record = explained.record
    said = f"about {decisions[0]['tokens']}" if record is None else str(record["prompt_tokens"])
    if record is not None and record["estimated"]:
        said = f"about {said}"
    title = plain(f"request {decisions[0]['request_id']}: {said} tokens")
    table = Table(title=title, title_justify="left")
    for column in ("after s", "what", "worker (tokens)", "cached", "why"):
        table.add_column(column, justify="right" if column in ("after s", "cached") else "left")
    rows = []
    for each in decisions:
        legs = [_leg(each[leg], each[f"{leg}_load"]) for leg in ("prefill", "decode")]
        cached = str(each["cached_tokens"]) if each["prefill"] else ""
        why = each["reason"] or (f"attempt: {each['why']}" if each["why"] else "")
        considered = [_considered(leg, of) for leg, of in each.get("considered", {}).items()]
        why = "; ".join([*filter(None, (each.get("session"), each.get("source"), why)), *considered])
        rows.append((each["waited_s"], each["verdict"], *legs, cached, why))
    came_s = decisions[0]["at_s"] - decisions[0]["waited_s"]
    for each in explained.sources:
        is_prefill = each["worker"].startswith("prefill")
        legs = [each["worker"], ""] if is_prefill else ["", each["worker"]]
        if "error" in each:
            rows.append((decisions[-1]["waited_s"], "KV", *legs, "", f"the worker does not say: {each['error']}"))
        else:
            rows.append((max(0.0, each["at_s"] - came_s), "KV", *legs, str(each["cached"]), _sourced(each)))
    if record is not None:
        rows += [_moved(record, each) for each in explained.transfers if each["side"] == "sender"]
        if record["ttft_s"] is not None:
            rows.append((record["ttft_s"], "first token", "", "", "", _until_first(record, explained.slower_than)))
    for after_s, what, prefill, decode, cached, why in sorted(rows, key=lambda row: row[0]):
        workers = Text("\n").join(plain(leg) for leg in (prefill, decode) if leg)
        add_row(table, f"{after_s:.3f}", what, workers, cached, why)
    return table


def advice(explained: Explained) -> list[str]:
    """What to do about the request, if anything; sentences for a terminal."""
    last, record = explained.decisions[-1], explained.record
    if record is None:
        if last["verdict"] == "ended":
            return []
        what = "It waits for a worker" if last["verdict"] == "waits" else "It goes on"
        since_s = max(0.0, time.time() - last["at_s"])
        return [f"{what}, since {since_s:.1f} s; `pdlink top` shows its transfer and its workers."]
    found = []
    path, _, reason = str(record["kv"]).partition(";reason=")
    if path == "recomputed":
        remedy = RECOMPUTED.get(reason) or "`pdlink doctor` tries this pair and says what is wrong"
        found.append(f"Decode computed the prompt itself, for {reason or 'no stated reason'}: {remedy}.")
    failed = {each["reason"] for each in explained.transfers if Reason.of(each["reason"]).label != reason} - {""}
    found += [
        f"Its transfer ended with: {each}; docs/troubleshooting.md says what that means." for each in sorted(failed)
    ]
    ttft_s = record["ttft_s"]
    if ttft_s and record["queued_s"] > ttft_s / 2 and record["queued_s"] > _NOTICED_S:
        found.append(
            "Most of the time to its first token it waited for workers: add some, or raise cache.num_blocks."
        )
    return found


def _until_first(record: dict[str, Any], slower_than: float | None) -> str:
    """What the time to the first token went into, on the proxy's clock."""
    queued_s, lost_s, ttft_s = record["queued_s"], record.get("lost_s", 0.0), record["ttft_s"]
    parts = [f"{1000 * queued_s:,.1f} ms queued"]
    if lost_s:
        parts.append(f"{1000 * lost_s:,.1f} ms in attempts that were lost")
    left_s = ttft_s - queued_s - lost_s
    if record["prefill_s"] is not None:
        leg_s = min(record["prefill_s"], ttft_s) - queued_s - lost_s
        parts += [f"{1000 * leg_s:,.1f} ms in prefill's leg", f"{1000 * (left_s - leg_s):,.1f} ms then"]
    else:
        parts.append(f"{1000 * left_s:,.1f} ms until decode answered")
    later = (
        f"; slower than {slower_than:.0%} of the last requests"
        if slower_than is not None and slower_than >= 0.5
        else ""
    )
    return f"{', '.join(parts)}{later}"


def _moved(record: dict[str, Any], transfer: dict[str, Any]) -> tuple[float, str, str, str, str, str]:
    """A row about one transfer. It has no time on the proxy's clock, so it stands where prefill's leg ended."""
    legs = [
        leg for leg in record["legs"] if leg["transfer_id"] == transfer["transfer_id"] and leg["leg"] == "prefill"
    ]
    ended_s = next((leg["ended_s"] for leg in legs if leg["ended_s"] is not None), record["total_s"])
    words = f"{transfer['nbytes'] / 1e6:,.1f} MB over {transfer['lane'] or 'no lane'}, {transfer['layers']} layers"
    if transfer["moving_s"]:
        words += f", {transfer['nbytes'] / transfer['moving_s'] / 1e9:,.2f} GB/s while it moved"
    words += f", {1000 * transfer['exposed_s']:,.1f} ms not hidden by prefill"
    if transfer["reason"]:
        words += f"; {transfer['state'].lower()}: {transfer['reason']}"
    return (ended_s, "transfer", legs[0]["worker"] if legs else "", transfer["peer"], "", words)


def _considered(leg: str, considered: dict[str, Any]) -> str:
    """The workers that a policy chose from, the best first."""
    scores = considered["scores"]
    more = considered["of"] - len(scores)
    shown = ", ".join(f"{label} {score:,.0f}" for label, score in scores)
    return f"{leg} by {considered['policy']}: {shown}{f' and {more} more' if more else ''}"


def _sourced(source: dict[str, Any]) -> str:
    """Where the tokens of a prompt came from, and why."""
    parts = [f"{source['cached']} in blocks"] if source["cached"] else []
    parts += [f"{tokens} loaded from {place}" for place, tokens in source["places"].items() if tokens]
    parts += [f"{source[what]} {what}" for what in ("received", "computed") if source[what]]
    why = source["reason"].replace("_", " ")
    if source["load_s"] or source["other_s"]:
        why += f", {1000 * source['load_s']:,.1f} ms to load, {1000 * source['other_s']:,.1f} ms else"
    return f"{', '.join(parts)}; store had {source['found']}: {why}"


def _leg(label: str | None, load: float | None) -> str:
    return "" if label is None else label if load is None else f"{label} ({load:,.0f})"
