"""`pdlink bench replay TRACE`: hit rates of eviction policies on a trace of requests, beside the best there can be.

A trace has one JSON object a line, as Mooncake's (FAST 2025): `input_length` in tokens and `hash_ids`, the chained
ids of its blocks of 512 tokens. A request hits the longest prefix whose blocks are all there; then all its blocks are
inserted or touched, suffix first. Nothing is computed or moved, so sizes are in blocks.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import statistics
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from pdlink.commands.parser import positive
from pdlink.errors import ConfigError
from pdlink.store.ingestion import INGESTIONS, make_ingestion
from pdlink.store.policies.registry import DEFAULT_POLICY, POLICIES, make_policy

from . import harness, plot
from .harness import BenchReport, TextTable

if TYPE_CHECKING:
    from collections.abc import Container, Mapping, Sequence

    from rich.progress import Progress

    from pdlink.store.ingestion import Ingestion
    from pdlink.store.policies.base import EvictionPolicy, Key

BLOCK_TOKENS = 512
SIZES = (500, 1_000, 2_000, 4_000, 8_000, 16_000, 32_000, 64_000)
ADAPTIVE_AT_LEAST = 0.97
"""Mean over sizes of the adaptive policy's hit rate to the best fixed policy's at each."""


@dataclass(frozen=True, slots=True)
class ReplayedRequest:
    """One prompt."""

    num_tokens: int
    keys: tuple[Key, ...]
    """Of its blocks, first to last; the last one may be partial."""

    def tokens_of(self, num_blocks: int) -> int:
        return min(num_blocks * BLOCK_TOKENS, self.num_tokens)


def read_trace(path: Path) -> list[ReplayedRequest]:
    """Raises ConfigError with the number of the line that is wrong."""
    requests = []
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    row = json.loads(line)
                    requests.append(ReplayedRequest(int(row["input_length"]), tuple(map(_key, row["hash_ids"]))))
                except (ValueError, TypeError, KeyError) as error:
                    raise ConfigError(
                        f"{path}:{number}: got {line.strip()[:80]!r} ({error!r}); expected an object with "
                        "`input_length` and `hash_ids`; use a trace in Mooncake's format"
                    ) from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; name a file that can be read") from None
    if not requests:
        raise ConfigError(f"{path}: got no request; expected 1 at least; name a trace")
    return requests


def made_up_trace(seed: int, num_requests: int = 3_000) -> list[ReplayedRequest]:
    """Conversations that come back with a longer prompt, some over a shared system prompt, and prompts asked once."""
    draw = random.Random(seed)
    shared = [[f"system {number}.{block}" for block in range(4)] for number in range(8)]
    talks: list[list[str]] = []
    requests = []
    for number in range(num_requests):
        if talks and draw.random() < 0.4:
            talk = talks[-1 - min(int(draw.expovariate(1 / 60)), len(talks) - 1)]
        else:
            talk = list(draw.choice(shared)) if draw.random() < 0.6 else []
            talks.append(talk)
        talk += [f"{number}.{block}" for block in range(1 + int(draw.expovariate(1 / 8)))]
        requests.append(
            ReplayedRequest(len(talk) * BLOCK_TOKENS - draw.randrange(BLOCK_TOKENS), tuple(map(_key, talk)))
        )
    return requests


def _key(block: object) -> Key:
    return blake2b(str(block).encode(), digest_size=16).digest()


class ReplayedCache:
    """As many blocks as fit, under one policy."""

    def __init__(self, policy: EvictionPolicy, num_blocks: int) -> None:
        self.policy = policy
        self.num_blocks = num_blocks
        self.resident: set[Key] = set()
        self.num_inserted = 0

    def use(self, key: Key) -> Key | None:
        """The block is wanted and stored; the one that had to go for it."""
        victim = None
        if key in self.resident:
            self.policy.touch(key)
            return None
        if len(self.resident) >= self.num_blocks:
            victim = self.policy.evict(_any)
            if victim is None:
                return None
            self.resident.remove(victim)
        self.resident.add(key)
        self.policy.insert(key, 1)
        self.num_inserted += 1
        return victim


def _any(_: Key) -> bool:
    return True


def leading(keys: Sequence[Key], *resident: Container[Key]) -> int:
    """How many from the first one on are in any of them."""
    for index, key in enumerate(keys):
        if not any(key in one for one in resident):
            return index
    return len(keys)


def hit_rate(requests: Sequence[ReplayedRequest], policy: EvictionPolicy, num_blocks: int) -> float:
    """Tokens of leading blocks that were there, of all tokens."""
    cache, hits = ReplayedCache(policy, num_blocks), 0
    for request in requests:
        hits += request.tokens_of(leading(request.keys, cache.resident))
        for key in reversed(request.keys):
            cache.use(key)
    return hits / num_tokens(requests)


def num_tokens(requests: Sequence[ReplayedRequest]) -> int:
    return sum(request.num_tokens for request in requests)


@dataclass(frozen=True, slots=True)
class TwoTiers:
    """RAM and a tier below it."""

    hit_rate: float
    written_share: float
    """Blocks written below, of the blocks that came into RAM."""


def two_tiers(
    requests: Sequence[ReplayedRequest], policy: str, ingestion: Ingestion, ram: int, below: int
) -> TwoTiers:
    """Of `ram` and `below` blocks, the lower one under LRU; a hit below comes back into RAM."""
    upper, lower, hits = ReplayedCache(make_policy(policy), ram), ReplayedCache(make_policy("lru"), below), 0
    for request in requests:
        hits += request.tokens_of(leading(request.keys, upper.resident, lower.resident))
        for key in reversed(request.keys):
            wanted = (ingestion.on_hit if key in upper.resident else ingestion.on_put)(key)
            victim = upper.use(key)
            if wanted or key in lower.resident:
                lower.use(key)
            if victim is not None and ingestion.on_evict(victim):
                lower.use(victim)
    return TwoTiers(hits / num_tokens(requests), lower.num_inserted / upper.num_inserted)


def best_hit_rate(requests: Sequence[ReplayedRequest], num_blocks: int) -> float:
    """Belady's: what is used again last goes first, also what has just come; of a prompt the last block first.

    Exact for prefixes: what uses a block uses all before it, so these are never wanted later.
    """
    never = len(requests)
    next_use: list[tuple[int, ...]] = []
    coming: dict[Key, int] = {}
    for index in range(never - 1, -1, -1):
        keys = requests[index].keys
        next_use.append(tuple(coming.get(key, never) for key in keys))
        coming.update(dict.fromkeys(keys, index))
    next_use.reverse()
    resident: dict[Key, int] = {}
    heap: list[tuple[int, int, Key]] = []
    hits = 0
    for request, uses in zip(requests, next_use, strict=True):
        hits += request.tokens_of(leading(request.keys, resident))
        for depth, (key, use) in enumerate(zip(request.keys, uses, strict=True)):
            resident[key] = use
            heapq.heappush(heap, (-use, -depth, key))
        while len(resident) > num_blocks:
            use, _, key = heapq.heappop(heap)
            if resident.get(key) == -use:
                del resident[key]
    return hits / num_tokens(requests)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `pdlink bench replay`."""
    parser.add_argument("trace", nargs="?", type=Path, help="JSON lines as Mooncake's; made up without one")
    parser.add_argument("--policy", nargs="+", default=list(POLICIES), metavar="NAME", help="default all of them")
    parser.add_argument("--sizes", nargs="+", type=positive, default=SIZES, metavar="BLOCKS", help="of RAM")
    parser.add_argument(
        "--tiers",
        nargs="+",
        type=_pair,
        default=((1_000, 8_000), (2_000, 32_000)),
        metavar="RAM:BELOW",
        help="blocks of two tiers, for each way of ingestion",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the made-up trace")
    harness.add_output_arguments(parser, draws=True)


def _pair(text: str) -> tuple[int, int]:
    ram, colon, below = text.partition(":")
    if not colon:
        raise argparse.ArgumentTypeError(f"takes RAM:BELOW in blocks, got {text!r}")
    return positive(ram), positive(below)


def run(args: argparse.Namespace) -> int:
    """1 if the adaptive policy is further behind the best than it may be."""
    return harness.run("replay", args, _report)


def _report(args: argparse.Namespace, progress: Progress) -> BenchReport:
    for name in args.policy:
        make_policy(name)  # a wrong name ends the run here
    requests = read_trace(args.trace) if args.trace else made_up_trace(args.seed)
    footprint = len({key for request in requests for key in request.keys})
    sizes = [size for size in sorted(args.sizes) if size < footprint] or [footprint]
    task = progress.add_task("replay", total=len(sizes) * (len(args.policy) + 1) + len(args.tiers))
    rates = {
        name: [hit_rate(requests, make_policy(name), size) for size in progress.track(sizes, task_id=task)]
        for name in args.policy
    }
    belady = [best_hit_rate(requests, size) for size in progress.track(sizes, task_id=task)]
    unlimited = best_hit_rate(requests, footprint)
    tiers = {
        f"{ram:,} / {below:,}": {
            name: two_tiers(requests, DEFAULT_POLICY, make_ingestion(name), ram, below) for name in INGESTIONS
        }
        for ram, below in progress.track(args.tiers, task_id=task)
    }
    facts = (
        f"{args.trace.name if args.trace else f'made-up trace, seed {args.seed}'}: {len(requests):,} requests, "
        f"{num_tokens(requests):,} tokens, {footprint:,} different blocks of {BLOCK_TOKENS} tokens; without limit "
        f"{unlimited:.3f} of the tokens hit"
    )
    heads = [f"{size:,}\n({size / footprint:.1%})" for size in sizes]
    table = TextTable(("policy", *heads), "token hit rate, by blocks in RAM (share of the footprint)")
    for name, row in rates.items():
        table.add(name, *(f"{rate:.3f}" for rate in row))
    table.add()
    table.add("Belady", *(f"{rate:.3f}" for rate in belady))
    below_table = TextTable(("RAM / below", *INGESTIONS), "two tiers: token hit rate (writes per block into RAM)")
    for pair, found in tiers.items():
        below_table.add(pair, *(f"{one.hit_rate:.3f} ({one.written_share:.2f})" for one in found.values()))
    ratio = adaptive_to_best(rates)
    verdict = (
        ""
        if ratio is None
        else (
            f"adaptive to the best fixed policy, mean over sizes: {ratio:.3f}, at least {ADAPTIVE_AT_LEAST}: "
            + ("met" if ratio >= ADAPTIVE_AT_LEAST else "[red]missed[/]")
        )
    )
    lines = [plot.PlottedLine(name, sizes, row) for name, row in rates.items()]
    curves = [*lines, plot.PlottedLine("Belady", sizes, belady, dashed=True)]
    ticks = {float(size): f"{size / 1000:g}k" for size in sizes}
    return BenchReport(
        {"rates": rates, "belady": belady, "sizes": sizes, "unlimited": unlimited, "ratio": ratio, "tiers": tiers},
        [facts, table, verdict, below_table],
        [plot.Lines("token hit rate", "blocks in RAM", "of all tokens", curves, log_x=True, x_ticks=ticks)],
        facts.replace("; ", ";\n").replace(" tokens, ", " tokens,\n"),
        ok=ratio is None or ratio >= ADAPTIVE_AT_LEAST,
    )


def adaptive_to_best(rates: Mapping[str, Sequence[float]]) -> float | None:
    """Mean over sizes of the adaptive policy's hit rate to the best other's; None if there is nothing to compare."""
    others = [row for name, row in rates.items() if name != "adaptive"]
    best = [max(column) for column in zip(*others, strict=True)]
    if "adaptive" not in rates or not best or not all(best):
        return None
    return statistics.fmean(ours / other for ours, other in zip(rates["adaptive"], best, strict=True))
