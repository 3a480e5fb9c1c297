"""`pdlink bench index`: memory of the proxy's index of KV events, and the time of one look-up in it.

Events as vLLM publishes them are applied until the index has so many blocks of 16 tokens; one prompt of 128k tokens
is among them, held by some of the publishers. Then that prompt is looked up, in turns with one that nobody has.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from statistics import quantiles
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from pdlink_proxy.kv_index import KVIndex, Publisher

from . import harness
from .harness import Report, Table, positive

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from rich.progress import Progress

MODEL, BLOCK_TOKENS, EVENT_BLOCKS = "m", 16, 512
BAR_NBYTES_PER_BLOCK = 150.0
"""1.5 GB for ten million."""
BAR_LOOKUP_S = 1e-3
_LOOKUPS = 400


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `pdlink bench index`."""
    parser.add_argument("--blocks", type=positive, default=10_000_000, help="of all publishers; default %(default)s")
    parser.add_argument("--publishers", type=positive, default=100, help="default %(default)s")
    parser.add_argument("--holders", type=positive, default=8, help="publishers with the prompt; default %(default)s")
    parser.add_argument("--tokens", type=positive, default=131_072, help="of the prompt; default %(default)s")
    harness.add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """1 if the index lacks something that it was told."""
    return harness.run("index", args, _report)


def _memory_nbytes() -> int:
    """Of this process, resident."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _events(name: int, tokens: np.ndarray[tuple[int], np.dtype[np.uint32]]) -> Iterator[msgspec.Raw]:
    """Of one prompt, whose blocks are named from `name` on."""
    parent, step = None, EVENT_BLOCKS * BLOCK_TOKENS
    for start in range(0, len(tokens) - BLOCK_TOKENS + 1, step):
        part = tokens[start : start + step]
        blocks = len(part) // BLOCK_TOKENS
        first = name + start // BLOCK_TOKENS
        ids = list(range(first, first + blocks))
        said = {"type": "BlockStored", "block_hashes": ids, "parent_block_hash": parent, "block_size": BLOCK_TOKENS}
        yield msgspec.Raw(msgspec.msgpack.encode({**said, "token_ids": part[: blocks * BLOCK_TOKENS].tolist()}))
        parent = ids[-1]


def _report(args: argparse.Namespace, progress: Progress) -> Report:
    rng, index = np.random.default_rng(1), KVIndex()
    publishers = [Publisher(f"tcp://{number}:1", number) for number in range(args.publishers)]
    holders = publishers[: args.holders]
    prompt = rng.integers(0, 150_000, args.tokens, np.uint32)
    before_nbytes, name, turn, apply_s = _memory_nbytes(), 1, 0, 0.0
    task = progress.add_task("blocks", total=args.blocks)

    def told(publisher: Publisher, tokens: np.ndarray[tuple[int], np.dtype[np.uint32]]) -> None:
        nonlocal name, apply_s
        for event in _events(name, tokens):
            began_s = time.perf_counter()
            index.apply(publisher, MODEL, event)
            apply_s += time.perf_counter() - began_s
        name += len(tokens) // BLOCK_TOKENS
        progress.update(task, completed=len(index))

    for holder in holders:
        told(holder, prompt)
    while len(index) < args.blocks:
        told(publishers[turn % len(publishers)], rng.integers(0, 150_000, 64 * 1024, np.uint32))
        turn += 1
    other = rng.integers(0, 150_000, args.tokens, np.uint32)
    took_s: dict[str, list[float]] = {"held": [], "held by nobody": []}
    ok = True
    for _ in range(_LOOKUPS):
        for what, tokens, num in (("held", prompt, len(holders)), ("held by nobody", other, 0)):
            began_s = time.perf_counter()
            found = index.lookup(MODEL, (), tokens)
            took_s[what].append(time.perf_counter() - began_s)
            ok = ok and len(found) == num and set(found.values()) <= {args.tokens // BLOCK_TOKENS * BLOCK_TOKENS}
    blocks, grown_nbytes = len(index), _memory_nbytes() - before_nbytes
    table = Table(("", "", "limit"), f"{blocks:,} blocks of {args.publishers} publishers")
    table.add("memory of the index", f"{index.nbytes / blocks:.0f} bytes/block", f"{BAR_NBYTES_PER_BLOCK:.0f}")
    table.add("growth of the process", f"{grown_nbytes / 1e9:.2f} GB", f"{BAR_NBYTES_PER_BLOCK * blocks / 1e9:.2f}")
    table.add("a block that is told", f"{1e6 * apply_s / blocks:.2f} us", "")
    cuts = {what: quantiles(each, n=100) for what, each in took_s.items()}
    for what, each in cuts.items():
        limit = f"{1e3 * BAR_LOOKUP_S:g}"
        table.add(f"{args.tokens:,} tokens, {what}: p50", f"{1e3 * each[49]:.3f} ms", limit)
        table.add(f"{args.tokens:,} tokens, {what}: p99", f"{1e3 * each[98]:.3f} ms", "")
    kept = {
        "blocks": blocks,
        "index_nbytes": index.nbytes,
        "grown_nbytes": grown_nbytes,
        "apply_s": apply_s,
        "lookup_s": took_s,
    }
    return Report(kept, [table], ok=ok)
