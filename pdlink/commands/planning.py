"""What `pdlink plan` does: reads, simulates, prints. Imported when the command runs."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from pdlink.commands.plan import MOST_WORKERS
from pdlink.config import ProxyConfig, read_key
from pdlink.errors import ConfigError
from pdlink.plan.curves import Curves, read_curves
from pdlink.plan.hits import cached_tokens
from pdlink.plan.report import PlanReport, sentences
from pdlink.plan.sweep import NEIGHBOURS, Promise, best, bottleneck, demand_of, fewest_workers, sweep
from pdlink.plan.traffic import from_quantiles, read_trace

if TYPE_CHECKING:
    import argparse

    from pdlink.plan.sweep import Split
    from pdlink.plan.traffic import Traffic


def run(args: argparse.Namespace) -> int:
    """1 if no split keeps the promise."""
    curves, traffic = _curves(args), _traffic(args)
    live = None
    if args.live:
        from pdlink.plan.live import watch

        key = read_key(args.key_file)
        live = watch(args.live, key, args.live_s)
    cached = cached_tokens(traffic, args.cache_tokens) if args.cache_tokens else None
    promise = Promise(args.ttft, args.per_token, args.share)
    prefill, _, decode = args.policy.partition(",")
    asked = demand_of(
        traffic,
        curves,
        promise,
        cached,
        num=args.requests,
        as_traced=args.as_traced,
        seed=args.seed,
        policies=(prefill, decode or prefill),
        cache_tokens=args.cache_tokens or 0,
    )
    per_s = args.rate or (live.per_s if live else 0.0) or (traffic.per_s if args.trace else 0.0)
    with Console(stderr=True).status("simulating fleets"):
        fewest = fewest_workers(asked, per_s, MOST_WORKERS) if per_s else None
        workers = args.workers or (live.workers if live else 0) or max(2, fewest or 0)
        splits = sweep(asked, workers)
        limit = bottleneck(asked, best(splits))
    plan = PlanReport(traffic.name, asked, asked.closed_form(), splits, limit, per_s, fewest)
    lines = sentences(plan)
    if live is not None:
        lines += live.compared(asked)
    if args.json:
        text = json.dumps(_kept(plan, lines), indent=1) + "\n"
        if str(args.json) == "-":
            print(text, end="")
        else:
            args.json.write_text(text, encoding="utf-8")
    if str(args.json) != "-":
        _show(plan, lines)
    return 0 if plan.best.per_s else 1


def _curves(args: argparse.Namespace) -> Curves:
    curves = read_curves(args.curves) if args.curves else Curves()
    given = {"link_nbytes_per_s": args.link and args.link * 1e9, "kv_nbytes_per_token": args.kv_bytes}
    if "grace_s" not in curves.model_fields_set:
        given["grace_s"] = ProxyConfig().kv_header_grace_s
    return curves.model_copy(update={name: value for name, value in given.items() if value})


def _traffic(args: argparse.Namespace) -> Traffic:
    if args.trace is not None:
        if args.prompt or args.answer:
            raise ConfigError("prompt, answer: got them beside a trace; expected one of both; leave one out")
        return read_trace(args.trace)
    if not (args.prompt and args.answer):
        raise ConfigError("trace: got none; expected a TRACE, or both --prompt and --answer; name one")
    if args.cache_tokens:
        raise ConfigError("cache-tokens: got percentiles of lengths; expected a trace with `hash_ids`; leave it out")
    return from_quantiles(args.prompt, args.answer, args.requests, args.seed)


def _near(plan: PlanReport) -> list[Split]:
    at = plan.splits.index(plan.best)
    return plan.splits[max(0, at - NEIGHBOURS) : at + NEIGHBOURS + 1]


_HEADS = (
    "split",
    "requests/s",
    "TTFT s\np50 / p90 / p99",
    "ms per token\np50 / p90 / p99",
    "prefill\nbusy",
    "decode\nbusy",
    "batch",
    "missed first",
)


def _show(plan: PlanReport, lines: list[str]) -> None:
    console = Console(soft_wrap=True)
    for line in lines:
        console.print(line, highlight=False, markup=False)
    if plan.best.per_s:
        title = "at the highest rate that keeps the promise: the best split and its neighbours"
        table = Table(title=title, title_justify="left")
        for number, head in enumerate(_HEADS):
            table.add_column(head, justify="right" if number else "left")
        for split in _near(plan):
            mark = "*" if split is plan.best else ""
            table.add_row(
                f"{split.name}{mark}",
                f"{split.per_s:.1f}",
                " / ".join(f"{each:.2f}" for each in split.ttft_s),
                " / ".join(f"{each * 1e3:.1f}" for each in split.per_token_s),
                f"{split.prefill_busy:.0%}",
                f"{split.decode_busy:.0%}",
                f"{split.batch:.0f}",
                split.limit,
            )
        Console(width=None if console.is_terminal else 140).print(table)
    console.print(f"curves: {plan.asked.curves.source}", highlight=False, markup=False)


def _kept(plan: PlanReport, lines: list[str]) -> dict[str, Any]:
    form = asdict(plan.form)
    form["decode_per_s"] = form["decode_per_s"] if form["decode_per_s"] < float("inf") else None
    return {
        "said": lines,
        "traffic": plan.name,
        "requests": len(plan.asked.prompt),
        "promise": asdict(plan.asked.promise),
        "curves": plan.asked.curves.model_dump(),
        "closed_form": {**form, "num_prefill": plan.form.num_prefill(plan.workers), "loses": plan.form.link_loses},
        "workers": plan.workers,
        "best": asdict(plan.best) if plan.best.per_s else None,
        "usable": plan.usable,
        "limit": plan.limit,
        "splits": [asdict(split) for split in plan.splits],
        "policies": ",".join(plan.asked.policies),
        "rate": plan.per_s or None,
        "fewest_workers": plan.fewest,
    }
