"""`pdlink top`: a deployment in a terminal, from the same state as the proxy's page."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pdlink.config import read_key
from pdlink.observe.fetch import CannotFetch, ask, base_url, proxys_remedy
from pdlink.observe.plain import add_row, plain

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from rich.console import JustifyMethod, RenderableType

DESCRIPTION = "Show the workers, transfers and requests behind a proxy, live, until Ctrl-C."
EPILOG = """\
a cell per layer of a transfer:  █ landed   ▓ in flight   ▒ written, waits for the link   ░ not computed yet

exit status: 0 done, 1 the proxy did not answer, or with --once: something is wrong, 2 wrong usage
"""
_GLYPHS = str.maketrans({"l": "█", "f": "▓", "w": "▒", ".": "░"})
_ROWS = 8
_FINDINGS = 4
"""Further ones, below the sentence."""
_WIDE = 116
"""Columns of a terminal from which on ids are whole: what the table of requests takes."""
_SHORT_CHARS = 12
_MAY_WRAP = ("KV", "reason")
"""Columns of words, which give way first where a terminal is narrow."""
_STYLES = {"ok": "green", "idle": "dim", "warn": "yellow", "bad": "red"}
_MARKS = {"ok": "✓", "idle": "·", "warn": "!", "bad": "✗"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", nargs="?", default="127.0.0.1:8000", metavar="URL", help="of the proxy (%(default)s)")
    parser.add_argument(
        "--key-file",
        metavar="FILE",
        help="file with the proxy's API key; where it has several, with one of admin_key_file",
    )
    parser.add_argument("--once", action="store_true", help="one look; exit status 1 if something is wrong")
    parser.add_argument("--json", action="store_true", help="one look, as the proxy answers it")
    parser.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="between two looks (1)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    key = read_key(args.key_file)
    state = fetch_state(args.url, key)
    if args.json:
        print(json.dumps(state, indent=2))
    elif args.once:
        console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
        console.print(picture(state, console.width))
    else:
        with Live(screen=True, auto_refresh=False) as live:
            while True:
                live.update(picture(state, live.console.width), refresh=True)
                time.sleep(max(0.2, args.interval))
                state = fetch_state(args.url, key)
    return 0 if state["verdict"]["level"] in ("ok", "idle") else 1


def fetch_state(url: str, key: str | None) -> dict[str, Any]:
    """GET /pdlink/state of a proxy. Raises CannotFetch."""
    url = base_url(url)
    status, text = ask(url, "/pdlink/state", {} if key is None else {"Authorization": f"Bearer {key}"})
    if status != 200:
        raise CannotFetch(f"{url} answered {status}; {proxys_remedy(status, key)}")
    try:
        state = json.loads(text)
        (
            state["verdict"]["level"],
            state["findings"],
            state["workers"],
            state["live"],
            state["requests"],
            state["summary"]["kv"],
            state["summary"]["per_token_p50_ms"],
        )
    except (ValueError, KeyError, TypeError):
        raise CannotFetch(f"{url} answered with something else; is it a pdlink proxy?") from None
    return state  # type: ignore[no-any-return]


def picture(state: dict[str, Any], width: int) -> RenderableType:
    """All of it. width: of the terminal; a narrow one gets short ids, and fewer columns about requests."""
    verdict, summary = state["verdict"], state["summary"]
    head = plain(f"{_MARKS.get(verdict['level'], '?')} {verdict['text']}", _STYLES.get(verdict["level"], ""))
    exposed = summary["exposed_share"]
    figures = plain(
        f"first token p50 {_ms(summary['ttft_p50_ms'])}, p95 {_ms(summary['ttft_p95_ms'])}   "
        f"each further token p50 {_ms(summary['per_token_p50_ms'])}   "
        f"KV not hidden by prefill {'–' if exposed is None else f'{exposed:.1%}'}   "
        f"running {state['running']}, queued {state['queued']}"
    )
    further = [
        plain(f"{_MARKS[each['level']]} {each['about']}: {each['text']}", _STYLES[each["level"]])
        for each in state["findings"][1 : _FINDINGS + 1]
    ]
    return Group(
        head,
        *further,
        figures,
        Text(),
        _workers(state),
        Text(),
        _pairs(state),
        Text(),
        _live(state, width),
        Text(),
        _requests(state, width),
    )


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in columns:
        justify: JustifyMethod = "right" if name.startswith(">") else "left"
        table.add_column(plain(name.removeprefix(">")), justify=justify, no_wrap=name not in _MAY_WRAP)
    return table


def _workers(state: dict[str, Any]) -> Table:
    table = _table(
        "workers", "worker", "state", ">legs", ">running", ">waits for KV", ">queued", ">blocks held", "reason"
    )
    for worker in state["workers"]:
        counts, share = worker["requests"] or {}, worker["held"]
        held = f"{share:.0%}" if share is not None else "–"
        numbers = [counts.get(key, "–") for key in ("running", "awaiting_kv", "waiting")]
        style = "" if worker["state"] == "ok" else "red"
        add_row(
            table,
            worker["label"],
            worker["state"],
            worker["in_flight"],
            *numbers,
            held,
            worker["reason"],
            style=style,
        )
    return table


def _pairs(state: dict[str, Any]) -> Table:
    decode = list(dict.fromkeys(pair["decode"] for pair in state["pairs"]))
    table = _table("pairs", "", *decode)
    for prefill in dict.fromkeys(pair["prefill"] for pair in state["pairs"]):
        cells = {pair["decode"]: _pair(pair) for pair in state["pairs"] if pair["prefill"] == prefill}
        add_row(table, prefill, *(cells.get(name, "") for name in decode))
    return table


def _pair(pair: dict[str, Any]) -> Text:
    if pair["state"] == "refused":
        return plain(f"✗ {pair['reason']}", "red")
    if not pair["lane"]:
        return plain(pair["state"], "dim")
    speed = f" {pair['gb_per_s']:.1f} GB/s" if pair["gb_per_s"] else ""
    return plain(pair["lane"] + speed)


def _live(state: dict[str, Any], width: int) -> Table:
    table = _table(f"transfers now: {len(state['live'])}", "transfer", "from", "to", "lane", "layers", ">MB", ">age")
    for each in state["live"][:_ROWS]:
        strip, age = each["layers"].translate(_GLYPHS), _s(each["age_s"])
        add_row(
            table,
            each["transfer_id"] if width >= _WIDE else _short(each["transfer_id"]),
            each["worker"],
            each["peer"],
            each["lane"],
            strip,
            f"{each['nbytes'] / 1e6:.1f}",
            age,
        )
    return table


def _requests(state: dict[str, Any], width: int) -> Table:
    wide = width >= _WIDE
    columns: dict[str, Callable[[dict[str, Any]], object]] = {
        "request": lambda each: each["request_id"] if wide else _short(each["request_id"]),
        "end": lambda each: each["outcome"],
        "KV": lambda each: each["kv"],
        ">tokens": lambda each: f"{'≈ ' if each['estimated'] else ''}{each['prompt_tokens']}",
        "prefill": lambda each: each["prefill"] or "–",
        "decode": lambda each: each["decode"] or "–",
        ">queued": lambda each: _s(each["queued_s"]),
        ">first token": lambda each: _s(each["ttft_s"]),
        ">all": lambda each: _s(each["total_s"]),
    }
    if not wide:
        del columns[">tokens"], columns[">queued"]
    table = _table("last requests", *columns)
    for each in state["requests"][:_ROWS]:
        cells = [cell(each) for cell in columns.values()]
        add_row(table, *cells, style="" if each["outcome"] == "ok" else "red")
    return table


def _short(name: str) -> str:
    return name if len(name) <= _SHORT_CHARS else f"{name[: _SHORT_CHARS - 1]}…"


def _s(value: float | None) -> str:
    return _ms(None if value is None else value * 1000)


def _ms(value: float | None) -> str:
    if value is not None and value >= 1000:
        return f"{value / 1000:.2f} s"
    return "–" if value is None else f"{value:.1f} ms" if value < 10 else f"{value:.0f} ms"
