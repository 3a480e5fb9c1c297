"""`pdlink bench bind`: how long the planner takes to turn the block lists of a request into byte runs.

32,768 tokens in scattered blocks, between pairs of layouts from equal to as different as they get. Beside each stands
the same work done with whole-array numpy, in turns; the two must find the same runs. What the planner is held to is
a millisecond for equal layouts, and for short runs and unequal blocks a tenth of what the first planner took (numpy
over one period of both layouts, 2 cores: 13, 36 and 466 ms).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from pdlink.kv.layout import KVLayout, paged_layout
from pdlink.kv.plan import Template, bind, template, warm_up

from . import harness, plot
from .harness import Report, Table, positive
from .measure import median_ratio, spread, summarise

if TYPE_CHECKING:
    import argparse

    from rich.progress import Progress

    from pdlink.kv.plan import IntArray, LayerClass
    from pdlink.kv.plan import Table as Rows

NUM_TOKENS = 32_768


@dataclass(frozen=True, slots=True)
class Pair:
    """Two layouts, and how long `bind` may take for them."""

    name: str
    src: KVLayout
    dst: KVLayout
    allowed_s: float


@dataclass(slots=True)
class Found:
    """What one pair took."""

    num_runs: int
    run_nbytes: int
    bind_s: list[float] = field(default_factory=list)
    numpy_s: list[float] = field(default_factory=list)


def pairs() -> list[Pair]:
    """Those that the planner is held to."""

    def layout(order: str = "LPBTH", block_tokens: int = 16, num_heads: int = 8) -> KVLayout:
        return paged_layout(
            dtype="bfloat16",
            itemsize=2,
            num_layers=1,
            num_blocks=2 * NUM_TOKENS // block_tokens,
            block_tokens=block_tokens,
            num_heads=num_heads,
            head_dim=128,
            order=order,
        )

    def first_heads(whole: KVLayout) -> KVLayout:
        return replace(whole, num_heads=2)

    return [
        Pair("same layout", layout(), layout(), 0.001),
        Pair("one rank to four, HND", first_heads(layout("LPBHT")), layout("LPBHT", num_heads=2), 0.001),
        Pair("blocks 16 to 64", layout(), layout(block_tokens=64), 0.0013),
        Pair("one rank to four, NHD", first_heads(layout()), layout(num_heads=2), 0.0036),
        Pair("NHD to HND", layout(), layout("LPBHT"), 0.0466),
    ]


def measure(pair: Pair, rounds: int, seed: int) -> Found:
    """Turns of both. Raises ValueError if they do not find the same runs."""
    shape = template(pair.src, pair.dst)
    random = np.random.default_rng(seed)
    blocks = [
        random.permutation(layout.num_blocks)[: NUM_TOKENS // layout.block_tokens].astype(np.int64)
        for layout in (pair.src, pair.dst)
    ]
    plan = bind(shape, blocks[0], blocks[1], 0, NUM_TOKENS)
    found = plan.runs[0]
    if not np.array_equal(in_order(found), by_numpy(shape, shape.classes[0], blocks[0], blocks[1])):
        raise ValueError(f"{pair.name}: the planner and numpy find different runs")
    measured = Found(plan.num_runs, int(found[:, 2].mean()))
    for _ in range(rounds):
        began_s = time.perf_counter()
        bind(shape, blocks[0], blocks[1], 0, NUM_TOKENS)
        bound_s = time.perf_counter()
        by_numpy(shape, shape.classes[0], blocks[0], blocks[1])
        measured.bind_s.append(bound_s - began_s)
        measured.numpy_s.append(time.perf_counter() - bound_s)
    return measured


def by_numpy(shape: Template, one: LayerClass, src_blocks: IntArray, dst_blocks: IntArray) -> Rows:
    """The runs of one part: an offset for every (token, head) on both sides, by destination, neighbours joined."""
    tokens = np.arange(NUM_TOKENS, dtype=np.int64)
    heads = np.arange(shape.src.num_heads, dtype=np.int64)
    sides = []
    for layout, blocks in ((shape.src, src_blocks), (shape.dst, dst_blocks)):
        layer, block_tokens = layout.layers[0], layout.block_tokens
        at = blocks[tokens // block_tokens] * layer.block_stride + tokens % block_tokens * layer.token_stride
        sides.append((at[:, None] + heads * layer.head_stride).ravel())
    order = np.argsort(sides[1], kind="stable")
    src, dst = sides[0][order], sides[1][order]
    first = np.ones(len(dst), dtype=bool)
    first[1:] = (np.diff(src) != one.head_nbytes) | (np.diff(dst) != one.head_nbytes)
    starts = np.flatnonzero(first)
    nbytes = np.diff(np.append(starts, len(dst))) * one.head_nbytes
    return np.stack([src[starts], dst[starts], nbytes], axis=1)


def in_order(runs: Rows) -> Rows:
    """By destination, neighbours joined: what two lists of the same copies have in common."""
    runs = runs[np.argsort(runs[:, 1], kind="stable")]
    ends = runs[:-1, :2] + runs[:-1, 2:]
    first = np.append(True, np.any(ends != runs[1:, :2], axis=1))
    nbytes = np.add.reduceat(runs[:, 2], np.flatnonzero(first))
    return np.concatenate([runs[first, :2], nbytes[:, None]], axis=1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `pdlink bench bind`."""
    parser.add_argument("--rounds", type=positive, default=20, help="default %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the blocks")
    harness.add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """1 if the planner is slower than it must be."""
    return harness.run("bind", args, _report)


def _report(args: argparse.Namespace, _progress: Progress) -> Report:
    warm_up()
    results = {pair: measure(pair, args.rounds, args.seed) for pair in pairs()}
    table = Table(
        ("pair", "runs", "bytes/run", "bind ms", "at most", "met", "numpy ms", "times as fast"),
        f"runs of {NUM_TOKENS:,} tokens, 8 heads of 256 B, K and V, in scattered blocks of 16",
    )
    groups, all_met = {}, True
    for pair, found in results.items():
        bound, arrays = summarise(found.bind_s), summarise(found.numpy_s)
        met = bound.median <= pair.allowed_s
        all_met = all_met and met
        table.add(
            pair.name,
            f"{found.num_runs:,}",
            f"{found.run_nbytes:,}",
            spread(bound, digits=2),
            f"{pair.allowed_s * 1e3:.1f}",
            "yes" if met else "[red]no[/]",
            f"{arrays.median * 1e3:.1f}",
            f"{median_ratio(found.numpy_s, found.bind_s):.0f}",
        )
        groups[pair.name] = [
            plot.Bar.of(name, summary, lambda seconds: seconds * 1e3)
            for name, summary in (("bind", bound), ("numpy", arrays))
        ]
    return Report(
        {"pairs": {pair.name: found for pair, found in results.items()}},
        [table],
        [plot.Bars("from block lists to runs", "ms", groups)],
        f"{NUM_TOKENS:,} tokens, one layer",
        ok=all_met,
    )
