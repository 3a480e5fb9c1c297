"""`pdlink bench agents`: time to first token of an agent's next turn, after a tool call, with sessions and without.

Agents take turns at two workers of our own engine behind a proxy. Each turn has all that was said before, and what
the tool said. Between two turns an agent waits 1 to 60 s, drawn from a seed and scaled; meanwhile other clients send
new prompts at a fixed pace, each of which takes room in memory and on the disk. Both runs get the same turns, pauses
and prompts; requests of the second one name their session. Blocks are not shared between requests, so the tiers have
the KV of a turn or it is computed. The table has what the workers say of where it came from, by the pause before it.
"""

from __future__ import annotations

import http.client
import json
import math
import random
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pdlink.commands.parser import positive, positive_float
from pdlink.config import ProxyConfig, WorkerConfig
from pdlink.errors import PdlinkError
from pdlink.fleet.child import start, stop

from . import harness, plot
from .harness import BenchReport, TextTable
from .http_load import WrongAnswer, stream
from .measure import spread, summarise

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from rich.progress import Progress

MODEL = "bench"
CHUNK_TOKENS, BLOCK_TOKENS = 64, 16
HEADS, HEAD_DIM, DTYPE_NBYTES, LAYERS = 4, 64, 4, 4
TOKEN_NBYTES = LAYERS * 2 * HEADS * HEAD_DIM * DTYPE_NBYTES
SHORTEST_S, LONGEST_S = 1.0, 60.0
PAUSES = ((1.0, 8.0), (8.0, 60.0))
"""Rows of the table: seconds before they are scaled."""
WAYS = ("LRU", "sessions")
NUM_WORKERS = 2
START_TIMEOUT_S = 120.0
MOST_MEMORY = 12
"""Times what a worker's sessions hold at their end, of its disk; memory is a third of that."""


@dataclass(frozen=True, slots=True)
class AgentSettings:
    agents: int
    turns: int
    tokens: int
    """Of an agent's first prompt."""
    message_tokens: int
    """Of what a tool says."""
    answer_tokens: int
    scale: float
    """Of the pauses."""
    others_per_s: float
    others_tokens: int
    seed: int

    @property
    def longest(self) -> int:
        return max(self.others_tokens, self.tokens + self.turns * (self.message_tokens + self.answer_tokens)) + 64

    @property
    def disk_gib(self) -> float:
        """Of each worker: sessions may keep a quarter."""
        held_nbytes = self.agents * self.longest * TOKEN_NBYTES / NUM_WORKERS
        return MOST_MEMORY * held_nbytes / 2**30

    @property
    def memory_gib(self) -> float:
        return self.disk_gib / 3


class AgentTurn(NamedTuple):
    """One that was measured."""

    pause_s: float
    """Before it, not scaled."""
    first_s: float
    prompt_tokens: int
    places: dict[str, int]
    """Tokens that were loaded, by place."""


def plan_of(settings: AgentSettings, agent: int) -> list[tuple[float, list[int]]]:
    """By turn the pause before it, not scaled, and what is new in its prompt."""
    numbers = random.Random(f"{settings.seed} {agent}")
    found = []
    for turn in range(settings.turns + 1):
        pause_s = SHORTEST_S * math.exp(numbers.random() * math.log(LONGEST_S / SHORTEST_S))
        found.append((pause_s, _tokens(numbers, settings.tokens if not turn else settings.message_tokens)))
    return found


class AgentFleet:
    """Two workers and a proxy, each a process."""

    def __init__(self, settings: AgentSettings, model: Path, directory: Path) -> None:
        self.children = []
        try:
            for number in range(NUM_WORKERS):
                config = WorkerConfig.model_validate(
                    {
                        "role": "both",
                        "name": f"w{number}",
                        "model": {"path": str(model), "name": MODEL, "max_tokens": settings.longest},
                        "cache": {"num_blocks": 8 * settings.longest // BLOCK_TOKENS, "share_prefixes": False},
                        "engine": {"threads": 1},
                        "tiers": {
                            "chunk_size": CHUNK_TOKENS,
                            "save_decode_cache": True,
                            "load_if_faster": False,
                            "max_local_cpu_size": settings.memory_gib,
                            "local_disk": str(directory / "{name}"),
                            "max_local_disk_size": settings.disk_gib,
                        },
                        "summary_s": 0,
                    }
                )
                self.children.append(start(f"w{number}", "both", config.model_dump(mode="json")))
            for child in self.children:
                child.wait_ready(START_TIMEOUT_S)
            urls = [child.facts["url"] for child in self.children]
            proxy = ProxyConfig(listen="127.0.0.1:0", summary_s=0).model_dump(mode="json")
            self.children.append(start("proxy", "proxy", {**proxy, "prefill": [], "decode": [], "both": urls}))
            self.children[-1].wait_ready(START_TIMEOUT_S)
            self.url = str(self.children[-1].facts["url"])
        except BaseException:
            self.close()
            raise

    def sourced(self, request_id: str) -> dict[str, Any]:
        """Where the KV of a request's prompt came from."""
        asked = urllib.parse.quote(request_id, safe="")
        with urllib.request.urlopen(f"{self.url}/decisions?request={asked}", timeout=30) as answer:
            sources = json.loads(answer.read())["sources"]
        if len(sources) != 1 or "error" in sources[0]:
            raise WrongAnswer(f"{request_id}: expected one worker to say where its KV came from; got {sources}")
        found: dict[str, Any] = sources[0]
        return found

    def close(self) -> None:
        stop(self.children, 10.0)


def take_turns(settings: AgentSettings, fleet: AgentFleet, way: str, tick: Callable[[], None]) -> list[AgentTurn]:
    """All agents and the others at the same time; the turns behind a pause."""
    over = threading.Event()

    def one_agent(agent: int) -> list[AgentTurn]:
        prompt, measured = list[int](), list[AgentTurn]()
        for turn, (pause_s, more) in enumerate(plan_of(settings, agent)):
            time.sleep(pause_s * settings.scale)
            prompt += more
            name = f"{way}-{agent}-{turn}"
            body = {"model": MODEL, "prompt": prompt, "max_tokens": settings.answer_tokens, "temperature": 0}
            body |= {"stream": True, "ignore_eos": True}
            if way == "sessions":
                body |= {"session_id": f"agent-{agent}", "session_ttl_s": 600}
            answered = stream(fleet.url, body, request_id=name)
            if turn:
                said = fleet.sourced(name)
                measured.append(AgentTurn(pause_s, answered.first_s, len(prompt), said["places"]))
                tick()
            prompt += answered.text.encode()
        return measured

    def others(client: int) -> None:
        numbers = random.Random(f"{settings.seed} other {client}")
        clients, due_s = NUM_WORKERS, time.monotonic()
        while not over.is_set():
            body = {"model": MODEL, "prompt": _tokens(numbers, settings.others_tokens), "max_tokens": 1}
            stream(fleet.url, {**body, "stream": True})
            due_s += clients / settings.others_per_s
            over.wait(max(0.0, due_s - time.monotonic()))

    with ThreadPoolExecutor(settings.agents + NUM_WORKERS) as threads:
        pushing = [threads.submit(others, client) for client in range(NUM_WORKERS)]
        running = [threads.submit(one_agent, agent) for agent in range(settings.agents)]
        try:
            found = [turn for each in running for turn in each.result()]
        finally:
            over.set()
        for each in pushing:
            each.result()
    return found


def measure(settings: AgentSettings, directory: Path, tick: Callable[[], None]) -> dict[str, list[AgentTurn]]:
    """By way."""
    from pdlink.serve.checkpoint import write_checkpoint  # imports torch, and a list of options needs none

    model = directory / "model"
    write_checkpoint(
        model,
        num_layers=LAYERS,
        max_tokens=settings.longest,
        hidden=HEADS * HEAD_DIM,
        heads=HEADS,
        kv_heads=HEADS,
        head_dim=HEAD_DIM,
    )
    found = {}
    for way in WAYS:
        fleet = AgentFleet(settings, model, directory / way)
        try:
            for number in range(2 * NUM_WORKERS):  # the first pass of a process makes its kernels
                stream(fleet.url, {"model": MODEL, "prompt": [40 + number] * 99, "max_tokens": 2, "stream": True})
            found[way] = take_turns(settings, fleet, way, tick)
        finally:
            fleet.close()
    return found


def _tokens(numbers: random.Random, count: int) -> list[int]:
    return [numbers.randrange(33, 127) for _ in range(count)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `pdlink bench agents`."""
    parser.add_argument("--agents", type=positive, default=6, help="default %(default)s")
    parser.add_argument("--turns", type=positive, default=6, help="of each, after its first; default %(default)s")
    parser.add_argument("--tokens", type=positive, default=768, help="of a first prompt; default %(default)s")
    parser.add_argument("--message-tokens", type=positive, default=96, help="of a tool; default %(default)s")
    parser.add_argument("--answer-tokens", type=positive, default=16, help="default %(default)s")
    parser.add_argument(
        "--scale", type=positive_float, default=0.3, help="of the pauses of 1 to 60 s; default %(default)s"
    )
    parser.add_argument("--others", type=positive_float, default=10.0, help="prompts a second; default %(default)s")
    parser.add_argument("--others-tokens", type=positive, default=512, help="of each; default %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of turns, pauses and prompts; default %(default)s")
    parser.add_argument("--directory", type=Path, default=Path(), metavar="DIR", help="on the disk to measure (.)")
    harness.add_output_arguments(parser, draws=True)


def run(args: argparse.Namespace) -> int:
    """1 if something failed, or sessions computed more of the turns than LRU."""
    try:
        return harness.run("agents", args, _report)
    except (WrongAnswer, PdlinkError, OSError, http.client.HTTPException) as error:
        print(error, file=sys.stderr)
        return 1


def _report(args: argparse.Namespace, progress: Progress) -> BenchReport:
    settings = AgentSettings(
        agents=args.agents,
        turns=args.turns,
        tokens=args.tokens,
        message_tokens=args.message_tokens,
        answer_tokens=args.answer_tokens,
        scale=args.scale,
        others_per_s=args.others,
        others_tokens=args.others_tokens,
        seed=args.seed,
    )
    task = progress.add_task("turns", total=len(WAYS) * settings.agents * settings.turns)
    with tempfile.TemporaryDirectory(prefix=".pdlink-bench-", dir=args.directory) as name:
        measured = measure(settings, Path(name), lambda: progress.advance(task))
    what = (
        f"{settings.agents} agents, {settings.turns} turns each of {settings.message_tokens} + "
        f"{settings.answer_tokens} tokens behind {settings.tokens}, pauses of 1 to 60 s times {settings.scale:g}; "
        f"beside them {settings.others_per_s:g} new prompts of {settings.others_tokens} tokens a second; "
        f"proxy, {NUM_WORKERS} workers of the built-in engine (a Llama of {LAYERS} layers, CPU), each with "
        f"{settings.memory_gib * 1024:.0f} MiB of memory and {settings.disk_gib * 1024:.0f} MiB of disk"
    )
    report = BenchReport({"settings": settings, "turns": measured}, [what], notes=what.replace("; ", "\n", 1))
    _tell(report, measured)
    return report


def _tell(report: BenchReport, measured: dict[str, list[AgentTurn]]) -> None:
    columns = ("turns of", "pause s", "turns", "TTFT ms", "from memory", "from disk", "not computed")
    table, bars = TextTable(columns, num_left=2), dict[str, list[plot.PlottedBar]]()
    for begin_s, end_s in (*PAUSES, (SHORTEST_S, LONGEST_S)):
        for way in WAYS:
            turns = [turn for turn in measured[way] if begin_s <= turn.pause_s <= end_s]
            if not turns:
                continue
            summary, total = summarise([turn.first_s for turn in turns]), sum(turn.prompt_tokens for turn in turns)
            loaded = {place: sum(turn.places.get(place, 0) for turn in turns) for place in ("memory", "disk")}
            shares = [f"{tokens / total:.0%}" for tokens in (*loaded.values(), sum(loaded.values()))]
            table.add(way, f"{begin_s:g} to {end_s:g}", str(len(turns)), spread(summary, digits=0), *shares)
            bar = plot.PlottedBar.of(f"{begin_s:g} to {end_s:g} s", summary, lambda seconds: seconds * 1e3)
            bars.setdefault(way, []).append(bar)
    report.shown.append(table)
    report.panels = [plot.Bars("time to first token of the next turn", "ms", bars)]
    computed = {way: sum(turn.prompt_tokens - sum(turn.places.values()) for turn in measured[way]) for way in WAYS}
    report.ok = computed["sessions"] <= computed["LRU"]
    ratio = np.median([turn.first_s for turn in measured["sessions"]]) / np.median(
        [turn.first_s for turn in measured["LRU"]]
    )
    report.shown.append(f"median TTFT with sessions: {ratio:.2f} of LRU's")
