"""`pdlink explain`: what a proxy and its workers did with a request, in order, and why."""

from __future__ import annotations

import json
import urllib.parse
from typing import Any, NamedTuple

from rich.table import Table

from pdlink.observe.fetch import CannotFetch, ask, base_url
from pdlink.observe.plain import add_row, plain


class Explained(NamedTuple):
    """Oldest first."""

    decisions: list[dict[str, Any]]
    """The proxy's, as `pdlink_proxy.decisions.Decision` has them."""
    sources: list[dict[str, Any]]
    """The workers', as `pdlink.observe.sources.Sourced` has them, with `worker`; or `worker` and `error`."""


def fetch_explanation(url: str, request_id: str, *, key: str | None = None) -> Explained:
    """What the proxy at `url` and its workers decided about a request. key: of its `api_keys`, if it has some.

    Raises CannotFetch, also for a request that it does not know.
    """
    url = base_url(url)
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    status, text = ask(url, f"/decisions?request={urllib.parse.quote(request_id, safe='')}", headers)
    if status != 200:
        remedy = "give --key-file FILE with one of its api_keys" if status == 401 else "is it a pdlink proxy?"
        raise CannotFetch(f"{url} answered {status}; {remedy}")
    try:
        answer = json.loads(text)
        found = Explained(answer["decisions"], answer["sources"])
    except (ValueError, KeyError, TypeError):
        raise CannotFetch(f"{url} answered with something else; is it a pdlink proxy?") from None
    if not found.decisions:
        raise CannotFetch(
            f"{url} knows no request {request_id!r}; it keeps the last few thousand decisions; give the X-Request-Id "
            "of an answer"
        )
    return found


def table_of(explained: Explained) -> Table:
    """One row per decision, in order."""
    decisions = explained.decisions
    title = plain(f"request {decisions[0]['request_id']}: {decisions[0]['tokens']} tokens")
    table = Table(title=title, title_justify="left")
    for column in ("after s", "what", "prefill (tokens to do)", "decode (tokens to do)", "cached", "why"):
        table.add_column(column, justify="right" if column in ("after s", "cached") else "left")
    rows = []
    for each in decisions:
        legs = [_leg(each[leg], each[f"{leg}_load"]) for leg in ("prefill", "decode")]
        cached = str(each["cached_tokens"]) if each["prefill"] else ""
        why = each["reason"] or (f"attempt: {each['why']}" if each["why"] else "")
        why = "; ".join([why, *(_considered(leg, of) for leg, of in each.get("considered", {}).items())])
        rows.append((each["waited_s"], each["verdict"], *legs, cached, why))
    came_s = decisions[0]["at_s"] - decisions[0]["waited_s"]
    for each in explained.sources:
        is_prefill = each["worker"].startswith("prefill")
        legs = [each["worker"], ""] if is_prefill else ["", each["worker"]]
        if "error" in each:
            rows.append((decisions[-1]["waited_s"], "KV", *legs, "", f"the worker does not say: {each['error']}"))
        else:
            rows.append((max(0.0, each["at_s"] - came_s), "KV", *legs, str(each["cached"]), _sourced(each)))
    for after_s, *texts in sorted(rows, key=lambda row: row[0]):
        add_row(table, f"{after_s:.3f}", *texts)
    return table


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
