"""`pdlink bench curves`: how long a server takes for prompts and decode steps, as a file for `pdlink plan`.

Requests go to the server itself, not through a proxy: prompts of several lengths, alone, with and without a part
that it has cached; then answers of several requests at once, whose gaps are the steps. What HTTP costs is in the
costs of a pass and of a step.
"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from pdlink.config import WorkerConfig
from pdlink.errors import ConfigError
from pdlink.plan.curves import Curves
from pdlink.plan.fitting import errors, fit_decode, fit_prefill
from pdlink.serve import up

from . import harness
from .harness import Report, Table, positive, positive_float
from .http_load import BadAnswer, once, stream

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from rich.progress import Progress

START_TIMEOUT_S = 300.0
_WORDS = 250
"""Token ids that every vocabulary has."""


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
    parser.add_argument("--kv-bytes", type=positive_float, metavar="BYTES", help="of a token's KV, for the file")
    parser.add_argument("--link", type=positive_float, metavar="GB_PER_S", help="of one prefill worker, for the file")
    parser.add_argument("--pool-tokens", type=positive, metavar="N", help="KV that a worker holds, for the file")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts (%(default)s)")
    harness.add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """1 if the server does not answer as it must."""
    return harness.run("curves", args, _report)


def _report(args: argparse.Namespace, progress: Progress) -> Report:
    if len(set(args.tokens)) < 2:
        raise ConfigError(f"tokens: got {args.tokens}; limit two lengths at least; name more")
    if args.url:
        return _measured(args, args.url, progress)
    longest = max(args.tokens) * 2 + args.steps
    blocks = -(-longest // 16) * max(args.batch) + 64
    config = WorkerConfig.model_validate(
        {
            "role": "both",
            "name": "bench-curves",
            "model": {"max_tokens": max(8192, longest)},
            "cache": {"num_blocks": blocks},
            "engine": {"max_batched_tokens": max(8192, longest), "max_running": max(64, *args.batch)},
            "summary_s": 0,
        }
    )
    worker = up.start("worker", "both", config.model_dump(mode="json"))
    try:
        worker.wait_ready(START_TIMEOUT_S)
        return _measured(args, str(worker.facts["url"]), progress)
    finally:
        up.stop([worker], 10.0)


def _measured(args: argparse.Namespace, url: str, progress: Progress) -> Report:
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
                prefill.append((2 * tokens - held, held, once(base, body(whole, 1, streamed=False))))
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
                    raise BadAnswer(f"{base} streamed fewer than 4 tokens; set --steps to more")
                decode.append((batch, batch * (tokens + args.steps / 2), median(gaps)))
                progress.advance(task)
    except (BadAnswer, OSError) as error:
        return Report({}, [f"[red]{url}: {error}[/]"], ok=False)
    prefill = [
        (new, held, median(seconds for one, other, seconds in prefill if (one, other) == (new, held)))
        for new, held in dict.fromkeys((new, held) for new, held, _ in prefill)
    ]
    found = fit_prefill(prefill) | fit_decode(decode)
    given = {
        "kv_nbytes_per_token": args.kv_bytes,
        "link_nbytes_per_s": args.link and args.link * 1e9,
        "pool_tokens": args.pool_tokens,
    }
    source = f"pdlink bench curves of {args.model}, prompts of {min(args.tokens)} to {2 * max(args.tokens)} tokens"
    curves = Curves.model_validate({"source": source, **found} | {name: each for name, each in given.items() if each})
    if args.curves:
        args.curves.write_text(curves.model_dump_json(indent=1) + "\n", encoding="utf-8")
    return Report(
        {"curves": curves.model_dump(), "prefill": prefill, "decode": decode}, _shown(curves, prefill, decode)
    )


def _shown(
    curves: Curves,
    prefill: Sequence[tuple[float, float, float]],
    decode: Sequence[tuple[float, float, float]],
) -> list[str | Table]:
    fitted = [curves.prefill_s(int(new), int(held)) for new, held, _ in prefill]
    steps = [curves.decode_step_s(batch, tokens) for batch, tokens, _ in decode]
    prompts = Table(("new tokens", "cached", "ms", "fitted"), "prompts, median of the rounds", num_left=0)
    for (new, held, seconds), each in zip(prefill, fitted, strict=True):
        prompts.add(f"{new:g}", f"{held:g}", f"{seconds * 1e3:.1f}", f"{each * 1e3:.1f}")
    batches = Table(("sequences", "tokens of KV", "ms", "fitted"), "decode steps, median", num_left=0)
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
