"""`pdlink bench serving`: what a client waits for, through prefill and decode, beside the bare prefill.

Each system is a prefill server, a decode server and a proxy. All of them take turns in one run, because timings on a
shared machine drift; those whose turn it is not are stopped (SIGSTOP), because an idle NixlConnector keeps a core
busy, and vLLM steps its engine while a request waits. Every request has a prompt of its own, so no cache answers.
"""

from __future__ import annotations

import argparse
import http.client
import os
import random
import signal
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdlink.commands.parser import positive

from . import harness, plot, resting
from .deployments import Deployment, Options, SystemFailed, launch
from .harness import BenchReport, TextTable, in_turns
from .http_load import StreamedAnswer, WrongAnswer, in_parallel, once, stream
from .measure import Measured, spread, summarise

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.progress import Progress

SYSTEMS = {
    "vllm": ("pdlink", "nixl", "nixl-push"),
    "sglang": ("pdlink", "nixl"),
    "builtin": ("pdlink",),
}


@dataclass(frozen=True, slots=True)
class ServingSettings:
    lengths: tuple[int, ...] = (256, 1024, 4096)
    """Prompt tokens."""
    answer_tokens: int = 16
    rounds: int = 7
    warm_ups: int = 2
    """Requests after each change of turn that do not count: sessions that timed out meanwhile are made again."""
    parallel: int = 4
    """Requests at the same time where requests per second are measured."""
    batch: int = 12
    """How many of them, of the shortest length."""
    seed: int = 0
    rest: bool = False
    """Whether vLLM's and NIXL's threads that spin while they wait sleep instead (`resting.py`)."""


PER_S = "requests per second"
COLUMNS = ("bare", "prefill", "ttft", "over_bare", "over_prefill", "between_tokens")
"""What is measured at each length, in seconds: `bare` is the prefill server alone, one token of another prompt and no
transfer; `prefill` the prefill leg of the request that `ttft` is of, as the proxy saw it (with a push decode may have
its first token before prefill's answer is through: then this is as long), without the time for which SGLang's prefill
holds its answer back until the KV has arrived (its own metric, of the stage prefill_transfer_kv_cache); `over_bare`
and `over_prefill` what `ttft` is longer, in pairs of one turn; `between_tokens` all gaps of an answer, as they
came."""


def column(name: str, length: int) -> str:
    """Under which name the samples of a length of prompt are kept."""
    return f"{name}, {length} tokens"


def measure(
    deployments: Sequence[Deployment], settings: ServingSettings, tick: Callable[[], None]
) -> dict[str, Measured]:
    """Turns of all systems. One that does not answer right has no more turns, and the others go on."""
    found = {deployment.name: Measured() for deployment in deployments}
    for deployment in deployments:
        deployment.stop_time()
    prompts = random.Random(settings.seed)
    for turn, deployment in in_turns(deployments, settings.rounds):
        measured = found[deployment.name]
        if not measured.problem:
            try:
                _turn(deployment, prompts, settings, measured, first=turn == 0)
            except (SystemFailed, WrongAnswer, OSError, http.client.HTTPException) as error:
                why = f"failed in turn {turn + 1}: {error}; its figures, if any, are of the turns before"
                measured.problem, measured.failed = why, True
            deployment.stop_time()
        tick()
    return found


def _turn(
    deployment: Deployment, prompts: random.Random, settings: ServingSettings, measured: Measured, *, first: bool
) -> None:
    deployment.go_on()
    # Kernels are made for every new shape once; after that a turn only has to make its session again.
    shapes = settings.lengths if first else settings.lengths[:1]
    for length in shapes * settings.warm_ups:
        _through(deployment, _prompt(prompts, length), settings)
    taken = [(length, *_one(deployment, prompts, length, settings)) for length in settings.lengths]
    per_s = _batch(deployment, prompts, settings)
    for length, bare_s, streamed in taken:
        over = (streamed.first_s - bare_s, streamed.first_s - streamed.prefill_s)
        for name, seconds in zip(COLUMNS, (bare_s, streamed.prefill_s, streamed.first_s, *over), strict=False):
            measured.add(column(name, length), seconds)
        measured.add(column("between_tokens", length), *streamed.gaps_s)
    measured.add(PER_S, per_s)


def _one(
    deployment: Deployment, prompts: random.Random, length: int, settings: ServingSettings
) -> tuple[float, StreamedAnswer]:
    body = {"model": deployment.model, "prompt": _prompt(prompts, length), "max_tokens": 1, "temperature": 0}
    bare_s = once(deployment.prefill_url, body | deployment.alone)
    before_s = deployment.waited_s()
    streamed = _through(deployment, _prompt(prompts, length), settings)
    return bare_s, replace(streamed, prefill_s=streamed.prefill_s - (deployment.waited_s() - before_s))


def _through(deployment: Deployment, prompt: list[int], settings: ServingSettings) -> StreamedAnswer:
    streamed = stream(deployment.proxy_url, _body(deployment, prompt, settings))
    if not streamed.disaggregated:
        raise SystemFailed(f"{deployment.name}: a request was served without its prefill leg")
    return streamed


def _batch(deployment: Deployment, prompts: random.Random, settings: ServingSettings) -> float:
    bodies = [_body(deployment, _prompt(prompts, settings.lengths[0]), settings) for _ in range(settings.batch)]
    return settings.batch / in_parallel(deployment.proxy_url, bodies, settings.parallel)


def _body(deployment: Deployment, prompt: list[int], settings: ServingSettings) -> dict[str, Any]:
    tokens = settings.answer_tokens
    body = {"model": deployment.model, "prompt": prompt, "temperature": 0, "ignore_eos": True, "stream": True}
    return {**body, "max_tokens": tokens}


def _prompt(prompts: random.Random, length: int) -> list[int]:
    return [prompts.randrange(33, 127) for _ in range(length)]


def _report_of(results: dict[str, Measured], engine: str, settings: ServingSettings) -> BenchReport:
    rest = ", waiting threads rest" if settings.rest else ""
    what = f"engine {engine}{rest}; {settings.rounds} turns; milliseconds, medians"
    kept = {"engine": engine, "settings": settings, "systems": results}
    return BenchReport(kept, [what, _table(results, settings)], _panels(results, settings), what, problems=results)


def _table(results: dict[str, Measured], settings: ServingSettings) -> TextTable:
    """One row per system and length; medians, with p10 and p90 of what is compared."""
    table = TextTable(
        ("system", "prompt", "bare\nprefill", "prefill\nleg", "TTFT", "over bare", "over leg")
        + ("between\ntokens", "requests/s")
    )
    for name, measured in results.items():
        for length in settings.lengths if PER_S in measured.samples else ():
            first = length == settings.lengths[0]
            *times, over_bare, over_prefill, between = (
                summarise(measured.samples[column(one, length)]) for one in COLUMNS
            )
            table.add(
                name if first else "",
                str(length),
                *(f"{summary.median * 1e3:.0f}" for summary in times),
                *(spread(summary, digits=0) for summary in (over_bare, over_prefill)),
                f"{between.median * 1e3:.1f}",
                f"{measured.median(PER_S):.2f}" if first else "",
            )
    return table


def _panels(results: dict[str, Measured], settings: ServingSettings) -> list[plot.Bars]:
    def bars(name: str, length: int) -> list[plot.PlottedBar]:
        found = {system: measured.samples.get(column(name, length)) for system, measured in results.items()}
        return [
            plot.PlottedBar.of(system, summarise(s), lambda seconds: seconds * 1e3)
            for system, s in found.items()
            if s
        ]

    titles = {"over_bare": "TTFT beyond a bare prefill", "over_prefill": "TTFT beyond the prefill leg"}
    return [
        plot.Bars(title, "ms", {f"{length} tokens": bars(name, length) for length in settings.lengths})
        for name, title in titles.items()
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    how = ServingSettings()
    parser.add_argument("--engine", choices=sorted(SYSTEMS), default="vllm", help="default %(default)s")
    parser.add_argument(
        "--system",
        action="append",
        choices=SYSTEMS["vllm"],
        help="repeat for several; default pdlink and, with vLLM or SGLang, nixl. Each is two servers in memory",
    )
    parser.add_argument(
        "--model", metavar="DIR", help="default: a Llama of 16 layers, hidden size 512, written on the spot"
    )
    for engine, name in (("vllm", "vLLM"), ("sglang", "SGLang")):
        parser.add_argument(f"--{engine}", metavar="FILE", help=f"the `{engine}` command, if {name} is elsewhere")
        parser.add_argument(
            f"--{engine}-arg", action="append", metavar="ARG", help="of its servers, not those for CPUs; repeatable"
        )
    parser.add_argument("--dtype", default="bfloat16", help="default %(default)s")
    parser.add_argument(
        "--tokens", type=positive, nargs="+", default=list(how.lengths), metavar="N", help="prompt lengths"
    )
    parser.add_argument("--rounds", type=positive, default=how.rounds, help="default %(default)s")
    parser.add_argument("--answer-tokens", type=positive, default=how.answer_tokens, help="default %(default)s")
    parser.add_argument("--parallel", type=positive, default=how.parallel, help="default %(default)s")
    parser.add_argument(
        "--batch", type=positive, default=how.batch, help="requests of each throughput run (%(default)s)"
    )
    parser.add_argument(
        "--rest",
        action=argparse.BooleanOptionalAction,
        default=(os.cpu_count() or 1) < resting.FEW_CORES,
        help="let vLLM's and NIXL's threads sleep where they would spin, in all systems alike; the default with "
        f"fewer than {resting.FEW_CORES} cores, which they would take from the threads that compute",
    )
    parser.add_argument("--log-dir", type=Path, metavar="DIR", help="keep the output of the servers here")
    harness.add_output_arguments(parser, draws=True)


def run(args: argparse.Namespace) -> int:
    """1 if a system failed; what the others did is kept."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers that stand still are to be ended, too
    try:
        return harness.run("serving", args, _report)
    except (SystemFailed, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        signal.signal(signal.SIGTERM, before)


def _report(args: argparse.Namespace, progress: Progress) -> BenchReport:
    settings = ServingSettings(
        lengths=tuple(sorted(args.tokens)),
        answer_tokens=args.answer_tokens,
        rounds=args.rounds,
        parallel=args.parallel,
        batch=args.batch,
        rest=args.rest and args.engine != "builtin",
    )
    names = tuple(args.system or SYSTEMS[args.engine][:2])
    if strange := set(names) - set(SYSTEMS[args.engine]):
        raise SystemFailed(
            f"--system: got {min(strange)}; expected {', '.join(SYSTEMS[args.engine])} of {args.engine}"
        )
    more = getattr(args, f"{args.engine}_arg", None)
    longest = settings.lengths[-1] + settings.answer_tokens
    deployments: list[Deployment] = []
    with tempfile.TemporaryDirectory(prefix="pdlink-bench-") as directory:
        options = Options(
            args.engine, Path(directory), args.log_dir or Path(directory), longest, model=args.model,
            executable=getattr(args, args.engine, None), args=tuple(more) if more else None, dtype=args.dtype,
            rest=settings.rest,
        )  # fmt: skip
        try:
            starting = progress.add_task("starting servers", total=None)
            launch(names, options, deployments)
            progress.update(starting, visible=False)
            turns = progress.add_task("turns", total=settings.rounds * len(deployments))
            results = measure(deployments, settings, lambda: progress.advance(turns))
            return _report_of(results, args.engine, settings)
        finally:
            for deployment in deployments:
                deployment.close()
