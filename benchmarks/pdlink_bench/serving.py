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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import harness, plot, resting
from .deployments import Deployment, Options, SystemFailed, launch
from .harness import Report, Table, in_turns, positive
from .http_load import BadAnswer, Streamed, in_parallel, once, stream
from .measure import Measured, spread, summarise

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.progress import Progress

SYSTEMS = {"vllm": ("pdlink", "nixl", "nixl-push"), "builtin": ("pdlink",)}
BAR = 1 / 3
"""The overhead over the bare prefill is to be at most this share of NixlConnector's, at the longest prompt."""


@dataclass(frozen=True, slots=True)
class Settings:
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


@dataclass(slots=True)
class Times:
    """Seconds, in order of the rounds, of one system and one length of prompt."""

    bare: list[float] = field(default_factory=list)
    """The prefill server alone: one token, no transfer, another prompt of this length."""
    prefill: list[float] = field(default_factory=list)
    """The prefill leg of the request that `ttft` is of, as the proxy saw it. With a push, decode may have its first
    token before prefill's answer is through: then this is as long."""
    ttft: list[float] = field(default_factory=list)
    between_tokens: list[float] = field(default_factory=list)
    """All gaps of an answer, as they came."""

    @property
    def over_bare(self) -> list[float]:
        """What a client waits longer for its first token than a bare prefill takes: pairs of one round."""
        return [ttft - bare for ttft, bare in zip(self.ttft, self.bare, strict=True)]

    @property
    def over_prefill(self) -> list[float]:
        """The same beyond the request's own prefill leg: transfer, hand-over and decode's first step."""
        return [ttft - prefill for ttft, prefill in zip(self.ttft, self.prefill, strict=True)]


@dataclass(slots=True)
class Results:
    engine: str
    settings: Settings
    by_length: dict[str, dict[int, Times]] = field(default_factory=dict)
    """System -> prompt tokens -> times."""
    per_s: dict[str, list[float]] = field(default_factory=dict)
    """Requests per second of a batch, by system."""
    failed: dict[str, str] = field(default_factory=dict)
    """Systems that did not come to the end, and why; their figures are of the turns before."""

    def overhead_s(self, name: str, column: str) -> float:
        """A system's median at the longest prompt; column: over_bare or over_prefill."""
        return summarise(getattr(self.by_length[name][self.settings.lengths[-1]], column)).median

    def _ratio(self, other: str, column: str) -> float | None:
        theirs_s = self.overhead_s(other, column)
        return self.overhead_s("pdlink", column) / theirs_s if theirs_s > 0 else None

    def kept(self) -> dict[str, Any]:
        """Every sample, by system and length."""
        systems = {}
        for name, by_length in self.by_length.items():
            lengths = {}
            for length, times in by_length.items():
                columns = {**asdict(times), "over_bare": times.over_bare, "over_prefill": times.over_prefill}
                lengths[length] = {column: summarise(samples) for column, samples in columns.items()}
            systems[name] = {"prompt_tokens": lengths, "requests_per_s": summarise(self.per_s[name])}
        head = {"engine": self.engine, "settings": self.settings, "failed": self.failed}
        return {**head, "seconds": systems, "ratios": self.ratios()}

    def ratios(self) -> dict[str, dict[str, float | None]]:
        """pdlink's median overheads at the longest prompt as shares of each other system's; None if that has none."""
        others = [name for name in self.by_length if name != "pdlink" and "pdlink" in self.by_length]
        return {
            name: {column: self._ratio(name, column) for column in ("over_bare", "over_prefill")} for name in others
        }


def measure(deployments: Sequence[Deployment], engine: str, settings: Settings, tick: Callable[[], None]) -> Results:
    """Turns of all systems. One that does not answer right has no more turns, and the others go on."""
    results = Results(engine, settings)
    for deployment in deployments:
        results.by_length[deployment.name] = {length: Times() for length in settings.lengths}
        results.per_s[deployment.name] = []
        deployment.stop_time()
    prompts = random.Random(settings.seed)
    for turn, deployment in in_turns(deployments, settings.rounds):
        if deployment.name not in results.failed:
            try:
                _turn(deployment, prompts, settings, results, first=turn == 0)
            except (SystemFailed, BadAnswer, OSError, http.client.HTTPException) as error:
                results.failed[deployment.name] = f"turn {turn + 1}: {error}"
            deployment.stop_time()
        tick()
    for name in results.failed:
        if not results.per_s[name]:
            del results.per_s[name], results.by_length[name]
    return results


def _turn(
    deployment: Deployment, prompts: random.Random, settings: Settings, results: Results, *, first: bool
) -> None:
    deployment.go_on()
    # Kernels are made for every new shape once; after that a turn only has to make its session again.
    shapes = settings.lengths if first else settings.lengths[:1]
    for length in shapes * settings.warm_ups:
        _through(deployment, _prompt(prompts, length), settings)
    taken = [(length, *_one(deployment, prompts, length, settings)) for length in settings.lengths]
    per_s = _batch(deployment, prompts, settings)
    for length, bare_s, streamed in taken:
        into = results.by_length[deployment.name][length]
        into.bare.append(bare_s)
        into.ttft.append(streamed.first_s)
        into.prefill.append(streamed.prefill_s)
        into.between_tokens += streamed.gaps_s
    results.per_s[deployment.name].append(per_s)


def _one(deployment: Deployment, prompts: random.Random, length: int, settings: Settings) -> tuple[float, Streamed]:
    body = {"model": deployment.model, "prompt": _prompt(prompts, length), "max_tokens": 1, "temperature": 0}
    bare_s = once(deployment.prefill_url, body)
    return bare_s, _through(deployment, _prompt(prompts, length), settings)


def _through(deployment: Deployment, prompt: list[int], settings: Settings) -> Streamed:
    streamed = stream(deployment.proxy_url, _body(deployment, prompt, settings))
    if not streamed.disaggregated:
        raise SystemFailed(f"{deployment.name}: a request was served without its prefill leg")
    return streamed


def _batch(deployment: Deployment, prompts: random.Random, settings: Settings) -> float:
    bodies = [_body(deployment, _prompt(prompts, settings.lengths[0]), settings) for _ in range(settings.batch)]
    return settings.batch / in_parallel(deployment.proxy_url, bodies, settings.parallel)


def _body(deployment: Deployment, prompt: list[int], settings: Settings) -> dict[str, Any]:
    tokens = settings.answer_tokens
    body = {"model": deployment.model, "prompt": prompt, "temperature": 0, "ignore_eos": True, "stream": True}
    return {**body, "max_tokens": tokens}


def _prompt(prompts: random.Random, length: int) -> list[int]:
    return [prompts.randrange(33, 127) for _ in range(length)]


def _report_of(results: Results) -> Report:
    settings = results.settings
    what = f"engine {results.engine}{', waiting threads rest' if settings.rest else ''}; {settings.rounds} turns"
    compared = [
        _compared(results, other, column, words)
        for other in results.ratios()
        for column, words in (("over_bare", "a bare prefill"), ("over_prefill", "the prefill leg"))
    ]
    failed = {
        name: Measured(problem=f"failed in {reason}; its figures, if any, are of the turns before", failed=True)
        for name, reason in results.failed.items()
    }
    shown: list[str | Table] = [f"{what}; milliseconds, medians", _table(results), *compared]
    return Report(results.kept(), shown, _panels(results) if results.by_length else (), what, failed)


def _table(results: Results) -> Table:
    """One row per system and length; medians, with p10 and p90 of what is compared."""
    table = Table(
        ("system", "prompt", "bare\nprefill", "prefill\nleg", "TTFT", "over bare", "over leg")
        + ("between\ntokens", "requests/s")
    )
    for name, by_length in results.by_length.items():
        for length, times in by_length.items():
            first = length == results.settings.lengths[0]
            table.add(
                name if first else "",
                str(length),
                *(f"{summarise(column).median * 1e3:.0f}" for column in (times.bare, times.prefill, times.ttft)),
                *(spread(summarise(column), digits=0) for column in (times.over_bare, times.over_prefill)),
                f"{summarise(times.between_tokens).median * 1e3:.1f}",
                f"{summarise(results.per_s[name]).median:.2f}" if first else "",
            )
    return table


def _compared(results: Results, other: str, column: str, words: str) -> str:
    """One bar, in a sentence."""
    mine_ms, theirs_ms = (1e3 * results.overhead_s(name, column) for name in ("pdlink", other))
    share = results.ratios()[other][column]
    said = "no share can be told" if share is None else f"{max(0.0, share):.2f} of it"
    tokens = results.settings.lengths[-1]
    return (
        f"{tokens} tokens: pdlink's first token comes {_when(mine_ms)} {words}, {other}'s {_when(theirs_ms)}: "
        f"{said} (bar {BAR:.2f})"
    )


def _when(ms: float) -> str:
    return f"{abs(ms):.0f} ms {'before' if ms < 0 else 'after'}"


def _panels(results: Results) -> list[plot.Bars]:
    def bars(title: str, samples: Callable[[Times], Sequence[float]]) -> plot.Bars:
        groups = {
            f"{length} tokens": [
                plot.Bar.of(name, summarise(samples(by_length[length])), lambda s: s * 1e3)
                for name, by_length in results.by_length.items()
            ]
            for length in results.settings.lengths
        }
        return plot.Bars(title, "ms", groups)

    return [
        bars("TTFT beyond a bare prefill", lambda times: times.over_bare),
        bars("TTFT beyond the prefill leg", lambda times: times.over_prefill),
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `pdlink bench serving`."""
    how = Settings()
    parser.add_argument("--engine", choices=sorted(SYSTEMS), default="vllm", help="default %(default)s")
    parser.add_argument(
        "--system",
        action="append",
        choices=SYSTEMS["vllm"],
        help="repeat for several; default pdlink and, with vLLM, nixl. Each is two servers, and all are in memory",
    )
    parser.add_argument(
        "--model", metavar="DIR", help="default: a Llama of 16 layers, hidden size 512, written on the spot"
    )
    parser.add_argument("--vllm", metavar="FILE", help="the `vllm` command, if it is in another environment")
    parser.add_argument(
        "--vllm-arg", action="append", metavar="ARG", help="of `vllm serve`, instead of those for CPUs; repeatable"
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
    parser.add_argument("--log-dir", type=Path, metavar="DIR", help="keep the output of vLLM's servers here")
    harness.add_output_arguments(parser)


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


def _report(args: argparse.Namespace, progress: Progress) -> Report:
    settings = Settings(
        lengths=tuple(sorted(args.tokens)),
        answer_tokens=args.answer_tokens,
        rounds=args.rounds,
        parallel=args.parallel,
        batch=args.batch,
        rest=args.rest and args.engine == "vllm",
    )
    names = tuple(args.system or ("pdlink", "nixl")) if args.engine == "vllm" else ("pdlink",)
    longest = settings.lengths[-1] + settings.answer_tokens
    deployments: list[Deployment] = []
    with tempfile.TemporaryDirectory(prefix="pdlink-bench-") as directory:
        options = Options(
            args.engine, Path(directory), args.log_dir or Path(directory), longest, model=args.model, vllm=args.vllm,
            vllm_args=tuple(args.vllm_arg) if args.vllm_arg else None, dtype=args.dtype,
            rest=settings.rest,
        )  # fmt: skip
        try:
            starting = progress.add_task("starting servers", total=None)
            launch(names, options, deployments)
            progress.update(starting, visible=False)
            turns = progress.add_task("turns", total=settings.rounds * len(deployments))
            return _report_of(measure(deployments, args.engine, settings, lambda: progress.advance(turns)))
        finally:
            for deployment in deployments:
                deployment.close()
