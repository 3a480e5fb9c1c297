"""`pdlink bench curves`: how long a server takes for prompts and decode steps, as a file for `pdlink plan`.

Requests go to the server itself, not through a proxy: prompts of several lengths, alone, with and without a part
that it has cached; then answers of several requests at once, whose gaps are the steps. What HTTP costs is in the
costs of a pass and of a step. A beginning that the server says it had not cached counts as computed. The link is that
of one pair of a proxy.
"""

from __future__ import annotations

import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from pdlink.commands.parser import positive
from pdlink.config import ProxyConfig, WorkerConfig, read_key
from pdlink.errors import ConfigError
from pdlink.fleet.child import Child, start, stop
from pdlink.observe.fetch import CannotFetch, base_url
from pdlink.observe.fetch import ask as fetch
from pdlink.plan.curves import Curves
from pdlink_proxy.probe import MAX_TOKENS

from . import harness
from .fitting import errors, fit_decode, fit_prefill
from .harness import BenchReport, TextTable
from .http_load import WrongAnswer, once, once_and_cached, stream

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from rich.progress import Progress

START_TIMEOUT_S = 300.0
_WORDS = 250
"""Token ids that every vocabulary has."""
_PROBES = 5
_HEARD_S = 30.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `pdlink bench curves`."""
    parser.add_argument("url", nargs="?", metavar="URL", help="of a server; without it, a built-in worker of its own")
    parser.add_argument("--model", default="pdlink-tiny", metavar="NAME", help="as the server calls it (%(default)s)")
    parser.add_argument("--curves", type=Path, metavar="FILE", help="write them here, for `pdlink plan --curves`")
    parser.add_argument(
        "--tokens", type=positive, nargs="+", default=[64, 256, 1024, 2048], metavar="N", help="lengths of prompts"
    )
    parser.add_argument(
        "--batch", type=positive, nargs="+", default=[1, 4, 16], metavar="N", help="sequences that decode together"
    )
    parser.add_argument("--steps", type=positive, default=24, metavar="N", help="of each answer (%(default)s)")
    parser.add_argument("--rounds", type=positive, default=3, metavar="N", help="of each prompt (%(default)s)")
    text = "a proxy: one of its pairs moves KV, which measures the link and a token's KV; without URL one of its own"
    parser.add_argument("--proxy", metavar="URL", help=text)
    parser.add_argument("--key-file", metavar="FILE", help="with one of the proxy's api_keys")
    parser.add_argument("--pool-tokens", type=positive, metavar="N", help="KV that a worker holds, for the file")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts (%(default)s)")
    harness.add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """1 if the server does not answer as it must."""
    return harness.run("curves", args, _report)


def _report(args: argparse.Namespace, progress: Progress) -> BenchReport:
    try:
        return _of_server(args, progress)
    except CannotFetch as error:
        return BenchReport({}, [f"[red]{error}[/]"], ok=False)


def _of_server(args: argparse.Namespace, progress: Progress) -> BenchReport:
    if len(set(args.tokens)) < 2:
        raise ConfigError(f"tokens: got {args.tokens}; expected two lengths at least; name more")
    if args.url:
        moved = _moved(args.proxy, read_key(args.key_file), max(args.tokens)) if args.proxy else None
        return _measured(args, args.url, moved, progress)
    longest = max(args.tokens) * 2 + args.steps
    blocks = -(-longest // 16) * max(args.batch) + 64
    settings = {
        "model": {"max_tokens": max(8192, longest)},
        "cache": {"num_blocks": blocks},
        "engine": {"max_batched_tokens": max(8192, longest), "max_running": max(64, *args.batch)},
        "summary_s": 0,
    }
    children: list[Child] = []
    try:
        for name, role in (("bench-curves", "both"), ("bench-decode", "decode")):
            config = WorkerConfig.model_validate({**settings, "role": role, "name": name})
            children.append(start(name, role, config.model_dump(mode="json")))
        for child in children:
            child.wait_ready(START_TIMEOUT_S)
        urls = [str(child.facts["url"]) for child in children]
        proxy = ProxyConfig(listen="127.0.0.1:0", summary_s=0).model_dump(mode="json")
        children.append(start("proxy", "proxy", {**proxy, "prefill": urls[:1], "decode": urls[1:]}))
        children[-1].wait_ready(START_TIMEOUT_S)
        moved = _moved(str(children[-1].facts["url"]), None, max(args.tokens))
        stop(children[1:], 10.0)  # nothing else on the machine
        del children[1:]
        return _measured(args, urls[0], moved, progress)
    finally:
        stop(children, 10.0)


@dataclass(frozen=True, slots=True)
class Moved:
    """KV between two workers."""

    kv_nbytes_per_token: float
    link_nbytes_per_s: float
    said: str


def _moved(url: str, key: str | None, num_tokens: int) -> Moved:
    """One pair of a proxy, some times over. Raises CannotFetch."""
    url = base_url(url)
    headers = {"Content-Type": "application/json"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
    deadline_s = time.monotonic() + _HEARD_S
    while True:  # a proxy that has just started has not heard its workers
        health = json.loads(fetch(url, "/health", headers)[1])
        well = {leg: [each for each in health.get(leg, ()) if each["state"] == "ok"] for leg in ("prefill", "decode")}
        if all(well.values()):
            break
        if time.monotonic() > deadline_s:
            raise CannotFetch(f"{url} has no prefill and decode worker that are well; see its /health")
        time.sleep(0.1)
    num_tokens = min(num_tokens, MAX_TOKENS)
    asked = {leg: workers[0]["label"] for leg, workers in well.items()} | {"num_tokens": num_tokens}
    speeds, nbytes, lane = [], 0, ""
    for _ in range(_PROBES):
        status, text = fetch(url, "/pdlink/probe", headers, json.dumps(asked).encode(), timeout_s=60.0)
        probe = json.loads(text)
        if status != 200 or not probe.get("moving_s") or not probe.get("nbytes"):
            why = probe.get("error") or probe.get("kv") or status
            raise CannotFetch(f"{url} moved no KV from {asked['prefill']} to {asked['decode']}: {why}")
        nbytes, lane = probe["nbytes"], probe["lane"]
        speeds.append(probe["nbytes"] / probe["moving_s"])
    said = (
        f"link: {median(speeds) / 1e9:.3g} GB/s over {lane or 'an unnamed lane'}, median of {_PROBES} transfers of"
        f" {nbytes / 1e6:.1f} MB, {asked['prefill']} to {asked['decode']}, layers sent while prefill computes"
    )
    return Moved(nbytes / num_tokens, median(speeds), said)


def _measured(args: argparse.Namespace, url: str, moved: Moved | None, progress: Progress) -> BenchReport:
    draw = random.Random(args.seed)
    base = url.rstrip("/") + "/v1/completions"

    def body(prompt: Sequence[int], answer: int, *, streamed: bool) -> dict[str, Any]:
        return {
            "model": args.model,
            "prompt": [*prompt],
            "max_tokens": answer,
            "ignore_eos": True,
            "temperature": 0,
            "stream": streamed,
        }

    def drawn(num: int) -> list[int]:
        return [draw.randrange(1, _WORDS) for _ in range(num)]

    unsaid = missed = 0
    try:
        once(base, body(drawn(16), 2, streamed=False))
        prefill: list[tuple[float, float, float]] = []
        task = progress.add_task("prompts", total=len(args.tokens) * args.rounds)
        for _ in range(args.rounds):
            for tokens in args.tokens:
                beginning = drawn(tokens)
                prefill.append((tokens, 0, once(base, body(beginning, 1, streamed=False))))
                whole = [*beginning, *drawn(tokens)]
                held = tokens // 16 * 16
                seconds, cached = once_and_cached(base, body(whole, 1, streamed=False))
                unsaid += cached is None
                missed += cached is not None and cached < held
                held = held if cached is None else cached
                prefill.append((2 * tokens - held, held, seconds))
                progress.advance(task)
        decode = []
        task = progress.add_task("steps", total=len(args.batch) * 2)
        for batch in args.batch:
            for tokens in (min(args.tokens), sorted(args.tokens)[-2]):
                prompts = [drawn(tokens) for _ in range(batch)]
                for prompt in prompts:
                    once(base, body(prompt, 1, streamed=False))  # so that no prefill is among the steps
                with ThreadPoolExecutor(batch) as pool:
                    answers = [
                        *pool.map(lambda prompt: stream(base, body(prompt, args.steps, streamed=True)), prompts)
                    ]
                gaps = [gap for answer in answers for gap in answer.gaps_s[1:-1]]
                if not gaps:
                    raise WrongAnswer(f"{base} streamed fewer than 4 tokens; set --steps to more")
                decode.append((batch, batch * (tokens + args.steps / 2), median(gaps)))
                progress.advance(task)
    except (WrongAnswer, OSError) as error:
        return BenchReport({}, [f"[red]{url}: {error}[/]"], ok=False)
    prefill = [
        (new, held, median(seconds for one, other, seconds in prefill if (one, other) == (new, held)))
        for new, held in dict.fromkeys((new, held) for new, held, _ in prefill)
    ]
    found = fit_prefill(prefill) | fit_decode(decode)
    given = {
        "kv_nbytes_per_token": moved and moved.kv_nbytes_per_token,
        "link_nbytes_per_s": moved and moved.link_nbytes_per_s,
        "pool_tokens": args.pool_tokens,
    }
    source = f"pdlink bench curves of {args.model}, prompts of {min(args.tokens)} to {2 * max(args.tokens)} tokens"
    curves = Curves.model_validate({"source": source, **found} | {name: each for name, each in given.items() if each})
    if args.curves:
        args.curves.write_text(curves.model_dump_json(indent=1) + "\n", encoding="utf-8")
    asked = len(args.tokens) * args.rounds
    shown = [*_shown(curves, prefill, decode), _said_of_cached(asked, unsaid, missed)]
    shown.append(moved.said if moved else "link: not measured; name a --proxy, or plan with --link and --kv-bytes")
    return BenchReport({"curves": curves.model_dump(), "prefill": prefill, "decode": decode, "missed": missed}, shown)


def _said_of_cached(asked: int, unsaid: int, missed: int) -> str:
    """Whether the beginnings that had been asked before were cached, by the server's account."""
    if unsaid:
        return (
            f"[yellow]cached: the server does not say (usage.prompt_tokens_details) in {unsaid} of {asked} answers;"
            " they count as cached[/]"
        )
    if missed:
        return f"[yellow]cached: {missed} of {asked} beginnings were not, or not whole, and count as computed[/]"
    return f"cached: all {asked} beginnings that were asked before, by the server's account"


def _shown(
    curves: Curves,
    prefill: Sequence[tuple[float, float, float]],
    decode: Sequence[tuple[float, float, float]],
) -> list[str | TextTable]:
    fitted = [curves.prefill_s(int(new), int(held)) for new, held, _ in prefill]
    steps = [curves.decode_step_s(batch, tokens) for batch, tokens, _ in decode]
    prompts = TextTable(("new tokens", "cached", "ms", "fitted"), "prompts, median of the rounds", num_left=0)
    for (new, held, seconds), each in zip(prefill, fitted, strict=True):
        prompts.add(f"{new:g}", f"{held:g}", f"{seconds * 1e3:.1f}", f"{each * 1e3:.1f}")
    batches = TextTable(("sequences", "tokens of KV", "ms", "fitted"), "decode steps, median", num_left=0)
    for (batch, tokens, seconds), each in zip(decode, steps, strict=True):
        batches.add(f"{batch:g}", f"{tokens:g}", f"{seconds * 1e3:.2f}", f"{each * 1e3:.2f}")
    shares = [errors(fitted, [row[2] for row in prefill]), errors(steps, [row[2] for row in decode])]
    return [
        prompts,
        batches,
        f"prefill {curves.prompt_s * 1e3:.2f} ms + {curves.token_s * 1e6:.2f} us a token"
        f" + {curves.attention_s * 1e9:.3f} ns a pair; decode {curves.step_s * 1e3:.2f} ms"
        f" + {curves.sequence_s * 1e6:.1f} us a sequence + {curves.context_s * 1e9:.2f} ns a token of KV",
        f"error of the fit, mean and largest: prefill {shares[0][0]:.1%}, {shares[0][1]:.1%};"
        f" decode {shares[1][0]:.1%}, {shares[1][1]:.1%}",
    ]
