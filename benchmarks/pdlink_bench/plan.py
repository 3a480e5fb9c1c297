"""`pdlink bench plan`: what `pdlink plan` predicts of a fleet, beside what clients of such a fleet measure.

The fleet is real: worker processes with pdlink's HTTP, scheduler, blocks and link, behind a real proxy, asked over
HTTP. What is not real is the arithmetic: engines sleep by the curves (`sleeping.py`), so that many of them
share a machine as if each had its own. With --computes they compute, and the curves must be of this machine.

Prediction and measurement have the same requests at the same times. Two costs are measured in the same run, of
requests that are alone: `overhead_s` and `handoff_s`, which are HTTP's, the proxy's and the link's on this machine.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from pdlink.commands.parser import positive, positive_float
from pdlink.config import ProxyConfig, TimeoutConfig, WorkerConfig
from pdlink.config.proxy import DEFAULT_POLICIES
from pdlink.errors import ConfigError, PdlinkError
from pdlink.fleet.child import Child, start, stop
from pdlink.plan.closed_form import closed_form
from pdlink.plan.curves import Curves, read_curves
from pdlink.plan.fleet import Simulation
from pdlink.plan.sweep import percentiles
from pdlink.plan.traffic import Traffic, from_quantiles, read_trace

from . import harness, plot
from .harness import BenchReport, TextTable
from .http_load import StreamedAnswer, WrongAnswer, stream

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from rich.progress import Progress

    from pdlink.plan.traffic import Seconds, Tokens

SLEEPY = Curves(
    source="made up for engines that sleep",
    prompt_s=0.15,
    token_s=5e-4,
    attention_s=2e-8,
    step_s=0.08,
    sequence_s=2e-3,
    context_s=1e-6,
    kv_nbytes_per_token=4096,
    link_nbytes_per_s=1e9,
    num_layers=4,
    pool_tokens=40_000,
    max_batched_tokens=2048,
    max_running=32,
)
"""Slow enough that a few milliseconds of a shared machine are few percent."""
BARS = (0.10, 0.10, 0.15)
"""Of p50, p90 and p99."""
QUANTILES = ("p50", "p90", "p99")
START_TIMEOUT_S = 300.0
PATIENT = TimeoutConfig(peer_s=45.0, other_leg_s=60.0, request_s=600.0)
GRACE_S = ProxyConfig().kv_header_grace_s
_COSTS = ("prompt_s", "token_s", "attention_s", "step_s", "sequence_s", "context_s")
_WORDS = 250
"""Token ids that every vocabulary has."""
_ALONE = 7
"""Requests that are alone."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `pdlink bench plan`."""
    add = parser.add_argument
    add("--trace", type=Path, metavar="FILE", help="lengths of prompts and answers; default: drawn, p50 600 and 20")
    add("--fleet", type=_fleet, action="append", metavar="P+D", help="workers; several times; default 2+2 and 4+4")
    text = "of `pdlink bench curves`; default: made up, with steps of 80 ms"
    add("--curves", type=Path, metavar="FILE", help=text)
    add("--computes", action="store_true", help="the built-in engine computes; --curves are of this machine")
    add("--requests", type=positive, default=400, metavar="N", help="each fleet's (%(default)s)")
    text = "of the rate that the closed form allows, at random (%(default)s)"
    add("--load", type=positive_float, default=0.7, help=text)
    add("--seed", type=int, default=1, help="of what is drawn (%(default)s)")
    harness.add_output_arguments(parser, draws=True)


def _fleet(text: str) -> tuple[int, int]:
    prefill, _, decode = text.partition("+")
    return positive(prefill), positive(decode)


def run(args: argparse.Namespace) -> int:
    """1 if a request was not answered. Errors beyond the bars are shown, and are no failure: machines differ."""
    return harness.run("plan", args, _report)


@dataclass(frozen=True, slots=True, eq=False)
class FleetRequests:
    """Requests of one fleet."""

    at_s: Seconds
    prompt: Tokens
    answer: Tokens


def _report(args: argparse.Namespace, progress: Progress) -> BenchReport:
    if args.computes and not args.curves:
        raise ConfigError("computes: got no --curves; expected those of this machine; make them with `bench curves`")
    curves = read_curves(args.curves) if args.curves else SLEEPY
    traffic = (
        read_trace(args.trace, args.requests)
        if args.trace
        else from_quantiles({5: 100, 50: 600, 99: 3000}, {5: 6, 50: 20, 99: 60}, args.requests, args.seed)
    )
    shown: list[str | TextTable] = [
        f"{traffic.name}: {args.requests} requests for each fleet, load {args.load:g}, seed {args.seed};"
        f" engines {'compute' if args.computes else 'sleep'}; curves: {curves.source}"
    ]
    kept: dict[str, Any] = {}
    groups: dict[str, list[plot.PlottedBar]] = {}
    try:
        for num_prefill, num_decode in args.fleet or [(2, 2), (4, 4)]:
            name = f"{num_prefill}P{num_decode}D"
            asked = _asked(traffic, curves, num_prefill, num_decode, args)
            with _Fleet(num_prefill, num_decode, curves, asked, computes=args.computes) as fleet:
                learned = fleet.alone(curves, args.seed)
                answers = fleet.play(asked, args.seed, progress)
            row = kept[name] = _compared(learned, num_prefill, num_decode, asked, answers)
            shown += [_table(name, row), row["said"]]
            for what in ("ttft", "per_token"):
                groups[f"{name} {what}"] = [
                    plot.PlottedBar(f"{who} {quantile}", value, value, value)
                    for who in ("measured", "predicted")
                    for quantile, value in zip(QUANTILES, row[what][who], strict=True)
                ]
    except (WrongAnswer, PdlinkError, OSError, http.client.HTTPException) as error:
        return BenchReport(kept, [*shown, f"[red]{error}[/]"], ok=False)
    panels = [plot.Bars("seconds, measured and predicted", "s", groups)]
    return BenchReport({"curves": curves.model_dump(), "fleets": kept}, shown, panels, str(shown[0]))


def _asked(
    traffic: Traffic, curves: Curves, num_prefill: int, num_decode: int, args: argparse.Namespace
) -> FleetRequests:
    prompt, answer = traffic.repeated(args.requests)
    per_s = args.load * closed_form(curves, prompt, answer, None, 10.0).rate(num_prefill, num_decode)
    return FleetRequests(traffic.poisson(args.requests, args.seed) / per_s, prompt, answer)


class _Fleet:
    """Real processes."""

    def __init__(
        self, num_prefill: int, num_decode: int, curves: Curves, asked: FleetRequests, *, computes: bool
    ) -> None:
        self._children: list[Child] = []
        self._nums = {"prefill": num_prefill, "decode": num_decode}
        longest = int((asked.prompt + asked.answer).max())
        self._settings = {
            "model": {"num_layers": curves.num_layers if not computes else 8, "max_tokens": max(8192, longest)},
            "cache": {"num_blocks": max(curves.pool_tokens, longest + 16) // 16},
            "engine": {
                "max_batched_tokens": curves.max_batched_tokens,
                "max_running": curves.max_running,
                "max_waiting": 10_000,
            },
            "tiers": {"max_local_cpu_size": 0},
            "timeouts": PATIENT.model_dump(),
            "summary_s": 0,
        }
        from . import sleeping  # with torch

        self._module = "pdlink" if computes else sleeping.__name__
        self._costs = {sleeping.COSTS: json.dumps({name: getattr(curves, name) for name in _COSTS})}
        self._url = ""

    def __enter__(self) -> _Fleet:
        os.environ.update(self._costs)  # children inherit it
        try:
            for role, num in self._nums.items():
                for number in range(num):
                    name = f"{role}-{number}"
                    config = WorkerConfig.model_validate({**self._settings, "role": role, "name": name})
                    self._children.append(start(name, role, config.model_dump(mode="json"), self._module))
            for child in self._children:
                child.wait_ready(START_TIMEOUT_S)
            urls = {
                role: [child.facts["url"] for child in self._children if child.role == role] for role in self._nums
            }
            proxy = ProxyConfig(listen="127.0.0.1:0", connect_timeout_s=10.0, summary_s=0).model_dump(mode="json")
            self._children.append(start("proxy", "proxy", {**proxy, **urls}))
            self._children[-1].wait_ready(START_TIMEOUT_S)
            self._url = str(self._children[-1].facts["url"])
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in self._costs:
            os.environ.pop(name, None)
        stop(self._children, 10.0)

    def _ask(self, draw: random.Random, prompt: int, answer: int) -> StreamedAnswer:
        body = {
            "model": "pdlink-tiny",
            "prompt": [draw.randrange(1, _WORDS) for _ in range(prompt)],
            "max_tokens": answer,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
        return stream(self._url, body)

    def alone(self, curves: Curves, seed: int) -> Curves:
        """The same curves, with what HTTP, the proxy and the link take here."""
        draw, pairs = random.Random(seed), 3 * self._nums["prefill"] * self._nums["decode"]
        with ThreadPoolExecutor(16) as pool:  # every pair makes its session
            list(pool.map(lambda number: self._ask(random.Random(number), 16, 2), range(pairs)))
        prompt, answer = 400, 8
        alone_s = curves.prefill_s(prompt, 0)
        steps_s = sum(curves.decode_step_s(1, prompt + 1 + step) for step in range(answer - 1))
        taken = [self._ask(draw, prompt, answer) for _ in range(_ALONE)]
        # Below the grace the first token waits for decode to have it, and what the hand-off takes is in the overhead.
        handoff_s = max(0.0, median(each.total_s - each.first_s for each in taken) - steps_s)
        held_s = min(GRACE_S, curves.tail_s(prompt, alone_s) + handoff_s)
        overhead_s = max(0.0, median(each.first_s for each in taken) - alone_s - held_s)
        return curves.model_copy(update={"overhead_s": overhead_s, "handoff_s": handoff_s, "grace_s": GRACE_S})

    def play(self, asked: FleetRequests, seed: int, progress: Progress) -> list[StreamedAnswer]:
        """Each request at its time. Raises WrongAnswer."""
        num = len(asked.at_s)
        found: list[StreamedAnswer | Exception | None] = [None] * num
        task = progress.add_task(f"{self._nums['prefill']}P{self._nums['decode']}D", total=num)
        begin_s = time.monotonic() + 0.5

        def one(number: int) -> None:
            try:
                draw = random.Random(f"{seed} {number}")
                found[number] = self._ask(draw, int(asked.prompt[number]), int(asked.answer[number]))
            except Exception as error:  # noqa: BLE001  (raised below, in the caller's thread)
                found[number] = error
            progress.advance(task)

        threads = [threading.Thread(target=one, args=(number,), daemon=True) for number in range(num)]
        for thread, at_s in zip(threads, asked.at_s.tolist(), strict=True):
            time.sleep(max(0.0, begin_s + at_s - time.monotonic()))
            thread.start()
        for thread in threads:
            thread.join(PATIENT.request_s)
        answers = [each for each in found if isinstance(each, StreamedAnswer)]
        if len(answers) < num:
            why = next((str(each) for each in found if isinstance(each, Exception)), "no answer in time")
            raise WrongAnswer(f"{num - len(answers)} of {num} requests were not answered: {why}")
        return answers


def _compared(
    curves: Curves, num_prefill: int, num_decode: int, asked: FleetRequests, answers: Sequence[StreamedAnswer]
) -> dict[str, Any]:
    policies = DEFAULT_POLICIES["prefill"], DEFAULT_POLICIES["decode"]
    fleet = Simulation(policies, num_prefill, num_decode, curves=curves, cache_tokens=(0, 0))
    routed = fleet.run(Traffic("", asked.at_s, asked.prompt, asked.answer)).played
    ttft_s = np.array([each.first_s for each in answers])
    with np.errstate(divide="ignore", invalid="ignore"):
        rest_s = np.array([each.total_s - each.first_s for each in answers])
        per_token_s = np.where(asked.answer > 1, rest_s / (asked.answer - 1), np.nan)
    per_s = len(answers) / float(asked.at_s[-1])
    apart = sum(each.disaggregated for each in answers) / len(answers)
    return {
        "overhead_s": curves.overhead_s,
        "handoff_s": curves.handoff_s,
        "per_s": per_s,
        "disaggregated": apart,
        "prefill_busy": routed.prefill_busy,
        "ttft": _row(ttft_s, routed.ttft_s),
        "per_token": _row(per_token_s, routed.per_token_s),
        "said": f"{len(answers)} requests at {per_s:.2f}/s, {apart:.0%} of them in two legs;"
        f" prefill {routed.prefill_busy:.0%} and decode {routed.decode_busy:.0%} busy, batch {routed.batch:.1f},"
        f" as predicted; alone a request takes {curves.overhead_s * 1e3:.0f} ms before its first token and"
        f" {curves.handoff_s * 1e3:.0f} ms behind it that are not in the curves",
    }


def _row(measured: Seconds, routed: Seconds) -> dict[str, tuple[float, float, float]]:
    return {"measured": percentiles(measured), "predicted": percentiles(routed)}


def _table(name: str, row: dict[str, Any]) -> TextTable:
    heads = ("", "measured", "predicted", "error", "bar")
    table = TextTable(heads, f"{name}: clients beside pdlink plan, by the proxy's policies")
    for what, label in (("ttft", "first token"), ("per_token", "per token")):
        of = row[what]
        for quantile, bar, measured, predicted in zip(QUANTILES, BARS, of["measured"], of["predicted"], strict=True):
            error = predicted / measured - 1
            colour = "green" if abs(error) <= bar else "red"
            table.add(
                f"{label} {quantile}, ms",
                f"{measured * 1e3:,.1f}",
                f"{predicted * 1e3:,.1f}",
                f"[{colour}]{error:+.1%}[/]",
                f"{bar:.0%}",
            )
    return table
