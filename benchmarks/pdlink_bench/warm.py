"""`pdlink bench warm`: time to first token of a long prompt that was seen before, beside one that is new.

Two workers of our own engine, each a process with its store. In a round the first one computes a new prompt, and gets
it again from memory, then from its disk; the second one gets it from the memory of the first one; then a conversation
goes on from that prompt, turn by turn. A third worker has a store process (`pdlink store`), which pulls the last
prompt from the first worker. Then each worker is killed and started again, several times: its first request is for
that prompt, from the disk, from the peer or from the store process, and in some lives the tenth is beside it. Blocks
are not shared between requests, so a tier answers or nobody does. What each worker says of the sources of a prompt is
checked, and so is that a repeated prompt has the same answer.

Each figure has its floor beside it: the bytes of KV by bare copies of one core, and from the disk by bare unbuffered
reads before those.
"""

from __future__ import annotations

import http.client
import itertools
import json
import random
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pdlink.commands.parser import positive
from pdlink.config import StoreConfig, WorkerConfig
from pdlink.errors import PdlinkError
from pdlink.fleet.child import start, stop
from pdlink.fleet.ports import free_ports
from pdlink.memory.buffers import Buffer
from pdlink.store.tiers.files import DirectFile

from . import harness, plot
from .harness import BenchReport, TextTable
from .http_load import StreamedAnswer, WrongAnswer, stream
from .measure import Measured, gb_per_s, spread, summarise
from .tier_cold import drop_cached

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from rich.progress import Progress

MODEL = "bench"
CHUNK_TOKENS, BLOCK_TOKENS = 256, 16
HEADS, HEAD_DIM, DTYPE_NBYTES = 4, 64, 4
COLD, MEMORY, DISK, PEER, TURN = "computed", "memory", "disk", "a peer", "next turn"
DISK_FIRST, DISK_TENTH = "disk, first after SIGKILL", "disk, tenth"
PEER_FIRST, PEER_TENTH = "a peer, first after SIGKILL", "a peer, tenth"
STORE_FIRST, STORE_TENTH = "pdlink store, first after SIGKILL", "pdlink store, tenth"
MOST = {MEMORY: 0.03, DISK: 0.03, PEER: 0.03, TURN: 0.1, DISK_FIRST: 0.05, PEER_FIRST: 0.05, STORE_FIRST: 0.05}
"""Of the time of a new prompt."""
_TENTH, _LIVES_WITH_TENTH = 10, 3
"""The request of a life that is beside the first one, and in how many lives: it has no bar."""
_LIFE_ANSWER_TOKENS = 2
"""Of an answer after a restart: what comes behind the first token is not measured, and takes most of a request."""
START_TIMEOUT_S = 120.0
SETTLE_S = 60.0


@dataclass(frozen=True, slots=True)
class WarmSettings:
    tokens: int
    """Of the first prompt of a conversation."""
    turns: int
    message_tokens: int
    answer_tokens: int
    rounds: int
    layers: int
    restarts: int
    seed: int = 0

    @property
    def longest(self) -> int:
        return self.tokens + self.turns * (self.message_tokens + self.answer_tokens) + self.answer_tokens

    @property
    def num_requests(self) -> int:
        """That are measured, or make a worker older."""
        tenths = min(self.restarts, _LIVES_WITH_TENTH)
        return self.rounds * (4 + self.turns) + 3 * (self.restarts + (_TENTH - 1) * tenths)

    @property
    def token_nbytes(self) -> int:
        """Of KV."""
        return self.layers * 2 * HEADS * HEAD_DIM * DTYPE_NBYTES

    @property
    def memory_gib(self) -> float:
        """Of a store, for all that a run keeps."""
        nbytes = self.rounds * (self.longest + 2 * CHUNK_TOKENS) * self.token_nbytes
        return max(0.25, 1.1 * nbytes / 2**30)


class LoneWorker:
    """One worker, which serves requests alone."""

    def __init__(self, name: str, model: Path, settings: WarmSettings, **tiers: Any) -> None:
        config = WorkerConfig.model_validate(
            {
                "role": "both",
                "name": name,
                "model": {"path": str(model), "name": MODEL, "max_tokens": settings.longest},
                "cache": {"num_blocks": settings.longest // BLOCK_TOKENS + 8, "share_prefixes": False},
                "engine": {"threads": 2, "max_batched_tokens": 2048},
                "tiers": {
                    "chunk_size": CHUNK_TOKENS,
                    "save_decode_cache": True,
                    "load_if_faster": False,
                    **tiers,
                },
                "summary_s": 0,
            }
        )
        self.child = start(name, "both", config.model_dump(mode="json"))

    @property
    def url(self) -> str:
        return str(self.child.facts["url"])

    def ask(self, path: str, body: object = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=SETTLE_S) as answer:
            found: dict[str, Any] = json.loads(answer.read())
        return found

    def complete(self, prompt: list[int], answer_tokens: int, name: str) -> tuple[StreamedAnswer, dict[str, Any]]:
        """Its answer, and where the worker had the KV of the prompt from."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": answer_tokens, "temperature": 0}
        streamed = stream(self.url, {**body, "stream": True, "ignore_eos": True}, request_id=name)
        (sourced,) = self.ask(f"/pdlink/sources?request={name}")["sources"]
        return streamed, sourced

    def restart(self, directory: Path) -> None:
        """SIGKILL it, drop what the page cache has of the directory, and start it again."""
        self.child.kill()
        drop_cached(directory)
        self.child.again()
        self.child.wait_ready(START_TIMEOUT_S)

    def until_known(self, prompt: list[int], place: str, tokens: int) -> None:
        """Wait until so many tokens are found, all of them in this place."""
        deadline_s = time.monotonic() + SETTLE_S
        while (runs := self.ask("/pdlink/cache/lookup", {"prompt": prompt})["runs"]) != [
            {"place": place, "tokens": tokens}
        ]:
            if time.monotonic() > deadline_s:
                raise WrongAnswer(f"{tokens} tokens are not in {place} after {SETTLE_S:.0f} s; there are {runs}")
            time.sleep(0.05)


def measure(
    settings: WarmSettings, directory: Path, tick: Callable[[], None]
) -> tuple[Measured, dict[str, list[Any]]]:
    """Seconds to first token by where the KV came from, and what the worker said of each prompt."""
    from pdlink.serve.checkpoint import write_checkpoint  # imports torch, and a list of options needs none

    model = directory / "model"
    write_checkpoint(
        model,
        num_layers=settings.layers,
        max_tokens=settings.longest,
        hidden=HEADS * HEAD_DIM,
        heads=HEADS,
        kv_heads=HEADS,
        head_dim=HEAD_DIM,
    )
    port = free_ports(1)
    memory, peers = {"max_local_cpu_size": settings.memory_gib}, [f"tcp://127.0.0.1:{port}"]
    disk = {"local_disk": str(directory / "disk"), "max_local_disk_size": 8.0, "peer_port": port}
    with tempfile.TemporaryDirectory(prefix="pdlink-") as place:  # a socket's path has 107 characters at most
        socket = str(Path(place) / "store")
        shared = StoreConfig.model_validate({"socket": socket, "tiers": {**memory, "peers": peers}})
        first = LoneWorker("first", model, settings, **memory, **disk)
        children = [first.child]
        try:
            first.child.wait_ready(START_TIMEOUT_S)
            second = LoneWorker("second", model, settings, **memory, peers=peers)
            children += [second.child, start("store", "store", shared.model_dump(mode="json"))]
            for child in children[1:]:
                child.wait_ready(START_TIMEOUT_S)
            third = LoneWorker("third", model, settings, store=socket)
            children.append(third.child)
            third.child.wait_ready(START_TIMEOUT_S)
            return _rounds(settings, (first, second, third), directory, tick)
        finally:
            stop(children, 10.0)


def _rounds(
    settings: WarmSettings,
    engines: tuple[LoneWorker, LoneWorker, LoneWorker],
    directory: Path,
    tick: Callable[[], None],
) -> tuple[Measured, dict[str, list[Any]]]:
    first, second, third = engines
    numbers = random.Random(settings.seed)
    measured, sources = Measured(), dict[str, list[Any]]()
    short = _tokens(numbers, 2 * CHUNK_TOKENS + 1)
    for engine in engines:  # the first pass of a process makes its kernels
        engine.complete(short, 2, "warm-up")

    names = itertools.count()

    def one(what: str, engine: LoneWorker, prompt: list[int], tokens: int = settings.answer_tokens) -> StreamedAnswer:
        streamed, sourced = engine.complete(prompt, tokens, f"bench-{next(names)}")
        measured.add(what, streamed.first_s)
        sources.setdefault(what, []).append(sourced)
        tick()
        return streamed

    def same(
        what: str, engine: LoneWorker, prompt: list[int], answer: str, tokens: int = settings.answer_tokens
    ) -> None:
        if one(what, engine, prompt, tokens).text != answer:
            raise WrongAnswer(
                f"the answer to a prompt that came from {what} is another one than when it was computed"
            )

    for _ in range(settings.rounds):
        prompt = _tokens(numbers, settings.tokens)
        whole = len(prompt) // CHUNK_TOKENS * CHUNK_TOKENS
        answer = one(COLD, first, prompt).text
        first.until_known(prompt, "memory", whole)
        for what, engine in ((MEMORY, first), (PEER, second), (DISK, first)):
            if what == DISK:
                first.ask("/pdlink/cache/move", {"prompt": prompt, "source": "memory", "destination": "disk"})
                first.ask("/pdlink/cache/clear", {"everything": True, "places": ["memory"]})
                first.until_known(prompt, "disk", whole)
            same(what, engine, prompt, answer)
        again = prompt, answer
        for _ in range(settings.turns):
            prompt = [*prompt, *answer.encode(), *_tokens(numbers, settings.message_tokens)]
            answer = one(TURN, first, prompt).text
    if third.complete(again[0], settings.answer_tokens, "into-the-store")[0].text != again[1]:
        raise WrongAnswer("the answer to a prompt that a store process pulled is another one than when it was new")
    again = again[0], first.complete(again[0], _LIFE_ANSWER_TOKENS, "answer-of-a-life")[0].text
    for life in range(settings.restarts):
        for engine, first_time, tenth in (
            (first, DISK_FIRST, DISK_TENTH),
            (second, PEER_FIRST, PEER_TENTH),
            (third, STORE_FIRST, STORE_TENTH),
        ):
            engine.restart(directory)
            same(first_time, engine, *again, _LIFE_ANSWER_TOKENS)
            for number in range(2, _TENTH + 1) if life < _LIVES_WITH_TENTH else ():
                if engine is not third:
                    engine.ask("/pdlink/cache/clear", {"everything": True, "places": ["memory"]})
                if number < _TENTH:
                    engine.complete(again[0], _LIFE_ANSWER_TOKENS, f"bench-{next(names)}")
                    tick()
                else:
                    same(tenth, engine, *again, _LIFE_ANSWER_TOKENS)
    for what, found in sources.items():
        _check(what, found, min(settings.tokens - 1, settings.tokens // CHUNK_TOKENS * CHUNK_TOKENS))
    return measured, sources


def _check(what: str, sources: Sequence[dict[str, Any]], whole_tokens: int) -> None:
    """Raise WrongAnswer unless a prompt came from where it should have come from, but for its end.

    whole_tokens: of the first prompt of a conversation, in whole chunks, but for its last token, which is computed.
    """
    in_memory = dict.fromkeys((MEMORY, TURN, STORE_FIRST, STORE_TENTH), "memory")
    on_disk = dict.fromkeys((DISK, DISK_FIRST, DISK_TENTH), "disk")
    place = {COLD: "", **in_memory, **on_disk}.get(what)
    for one in sources:
        loaded = one["loaded"] if place is None else one["places"].get(place, 0)
        if what != COLD and one["loaded"] < whole_tokens:
            raise WrongAnswer(f"{what}: the worker loaded {one['loaded']} of {whole_tokens} tokens: {one}")
        if (one["loaded"] == 0) is not (what == COLD) or loaded != one["loaded"]:
            raise WrongAnswer(f"{what}: the worker had the KV of a prompt from elsewhere: {one}")


def _tokens(numbers: random.Random, count: int) -> list[int]:
    return [numbers.randrange(33, 127) for _ in range(count)]


def copy_s(nbytes: int) -> float:
    """Seconds that one core copies so many bytes in."""
    source, target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
    began_s = time.perf_counter()
    np.copyto(target, source)
    return time.perf_counter() - began_s


def read_s(directory: Path, nbytes: int) -> float:
    """Seconds that bare unbuffered reads of so many bytes take, a record at a time."""
    file, step = DirectFile(directory / "bare"), 4 << 20
    with Buffer(step) as buffer:
        file.grow(nbytes)
        for begin in range(0, nbytes, step):
            file.write(begin, buffer.array[: min(step, nbytes - begin)].data)
        drop_cached(directory)
        began_s = time.perf_counter()
        for begin in range(0, nbytes, step):
            file.read(begin, buffer.array[: min(step, nbytes - begin)].data)
        took_s = time.perf_counter() - began_s
    file.close()
    return took_s


def floors_s(directory: Path, nbytes: int) -> dict[str, float]:
    """By where a prompt of so many bytes comes from: what its bytes take by bare reads and copies."""
    copied_s = min(copy_s(nbytes) for _ in range(3))
    disk_s = min(read_s(directory, nbytes) for _ in range(3)) + copied_s
    return {
        **dict.fromkeys((MEMORY, STORE_FIRST, STORE_TENTH), copied_s),
        **dict.fromkeys((PEER, PEER_FIRST, PEER_TENTH), 2 * copied_s),  # into the store's memory, then into blocks
        **dict.fromkeys((DISK, DISK_FIRST, DISK_TENTH), disk_s),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `pdlink bench warm`."""
    parser.add_argument("--tokens", type=positive, default=25600, help="of a prompt; default %(default)s")
    parser.add_argument("--turns", type=positive, default=4, help="that follow it; default %(default)s")
    parser.add_argument("--message-tokens", type=positive, default=256, help="of a turn; default %(default)s")
    parser.add_argument("--answer-tokens", type=positive, default=32, help="default %(default)s")
    parser.add_argument("--rounds", type=positive, default=2, help="default %(default)s")
    parser.add_argument("--restarts", type=positive, default=5, help="of each worker; default %(default)s")
    parser.add_argument("--layers", type=positive, default=8, help="of the model; default %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts; default %(default)s")
    parser.add_argument("--directory", type=Path, default=Path(), metavar="DIR", help="on the disk to measure (.)")
    harness.add_output_arguments(parser, draws=True)


def run(args: argparse.Namespace) -> int:
    """1 if a bar is missed, or something failed."""
    try:
        return harness.run("warm", args, _report)
    except (WrongAnswer, PdlinkError, OSError, http.client.HTTPException) as error:
        print(error, file=sys.stderr)
        return 1


def _report(args: argparse.Namespace, progress: Progress) -> BenchReport:
    settings = WarmSettings(
        tokens=args.tokens,
        turns=args.turns,
        message_tokens=args.message_tokens,
        answer_tokens=args.answer_tokens,
        rounds=args.rounds,
        layers=args.layers,
        restarts=args.restarts,
        seed=args.seed,
    )
    task = progress.add_task("requests", total=settings.num_requests)
    nbytes = settings.tokens * settings.token_nbytes
    with tempfile.TemporaryDirectory(prefix=".pdlink-bench-", dir=args.directory) as name:
        measured, sources = measure(settings, Path(name), lambda: progress.advance(task))
        floor_s = floors_s(Path(name), nbytes)
    what = (
        f"{settings.tokens:,} tokens, {nbytes / 2**20:,.0f} MiB of KV (copied by one core with "
        f"{gb_per_s(nbytes, floor_s[MEMORY]):.1f} GB/s); "
        f"a Llama of {settings.layers} layers, {HEADS} heads of {HEAD_DIM}, float32; "
        f"{settings.turns} turns of {settings.answer_tokens} + {settings.message_tokens} tokens; "
        f"{settings.rounds} rounds, {settings.restarts} restarts"
    )
    kept = {"settings": settings, "floor_s": floor_s, "measured": measured, "sources": sources}
    report = BenchReport(kept, [what], notes=what.replace("; ", "\n", 1))
    _tell(report, measured, sources, floor_s)
    return report


def _tell(report: BenchReport, measured: Measured, sources: dict[str, list[Any]], floor_s: dict[str, float]) -> None:
    columns = ("prefix from", "TTFT ms", "floor ms", "to computed", "at most", "tokens loaded", "tokens computed")
    table = TextTable(columns)
    cold = summarise(measured.samples[COLD])
    bars, ratios = [], []
    for what, samples in measured.samples.items():
        summary = summarise(samples)
        ratio = summary.median / cold.median
        met = ratio <= MOST.get(what, 1.0)
        report.ok &= met
        counts = [f"{np.median([one[name] for one in sources[what]]):,.0f}" for name in ("loaded", "computed")]
        most = f"{MOST[what]:.2f}: {'met' if met else '[red]missed[/]'}" if what in MOST else ""
        floor = f"{floor_s[what] * 1e3:.0f}" if what in floor_s else ""
        table.add(what, spread(summary, digits=0), floor, f"{ratio:.4f}", most, *counts)
        bars.append(plot.PlottedBar.of(what, summary, lambda seconds: seconds * 1e3))
        if what != COLD:
            ratios.append(plot.PlottedBar.of(what, summary, lambda seconds: seconds / cold.median))
    report.shown.append(table)
    report.panels = [
        plot.Bars("time to first token", "ms", {"": bars}),
        plot.Bars("to a prompt that is computed", "", {"": ratios}, {f"bar: {what}": MOST[what] for what in MOST}),
    ]
