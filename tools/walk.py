"""Counts the Python calls on the way of one thing through pdlink, while it runs (`sys.setprofile`).

    .venv/bin/python tools/walk.py layer            calls, functions and files of each role
    .venv/bin/python tools/walk.py layer --calls    and the calls in their order
    .venv/bin/python tools/walk.py request          a request through prefill and decode, HTTP to HTTP, by thread
    .venv/bin/python tools/walk.py proxy            a vLLM request through the proxy, whole and as a stream
    .venv/bin/python tools/walk.py put              a chunk through `Cache` to memory and disk, by thread
    .venv/bin/python tools/walk.py get              a chunk from memory through `Cache`

A walk runs something real in this process, records every call of a function of pdlink by thread, and cuts one span
out of each thread: from the call of a first function until a last one returns. A generator counts once for each
resume. What happens several times is walked each time and the shortest span counts, so a heartbeat in between does
not.

A request takes longer than a heartbeat, so its walk says what is its own by a rule of two parts:

1. A *turn* is an outermost call of a thread, with all calls in it. A turn is not the request's if it calls only
   functions that workers without a request call, too: a heartbeat, a look of the store's keeper, an empty step of the
   engine. These functions are known from two seconds in which both workers have nothing to do.
2. What is not in every walk is not the request's: it fell into one of its turns by chance.

`all threads` counts everything between the request's first and its last event.

A new walk is a function in `WALKS` that takes the parsed arguments and returns its spans.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

ROOT = Path(__file__).parents[1]
PACKAGES = [ROOT / "pdlink", ROOT / "proxy/pdlink_proxy"]
DEADLINE_S = 20.0
NUM_WALKS = 8
"""Of a request."""
PEER_S = 150.0
"""Makes heartbeats of 12.5 s: on a busy machine one in half a second falls into every walk."""
USAGE = b'{"prompt_tokens":2,"total_tokens":10,"completion_tokens":8,"prompt_tokens_details":null}'
_TURNS = "pdlink_proxy/polling.py"
"""Those of the proxy's loop, which the client and the stand-ins have, too."""
SETTLE_S, IDLE_S = 0.3, 2.0
"""From the end of a request until nothing of it is left, and how long workers with nothing to do are listened to."""


class Step(NamedTuple):
    """A call that begins (or goes on, of a generator), or its return."""

    file: str
    function: str
    begins: bool


class Span(NamedTuple):
    """The calls of one role, in order."""

    role: str
    calls: list[Step]

    def __str__(self) -> str:
        functions, files = set(self.calls), {call.file for call in self.calls}
        return f"{self.role}: {len(self.calls)} calls, {len(functions)} functions, {len(files)} files"


class Recorder:
    """Steps by name of thread. Make it before the threads: only threads that begin later are seen, and this one."""

    def __init__(self) -> None:
        self.steps: dict[str, list[Step]] = defaultdict(list)
        self._on = False
        self._files: dict[str, str] = {}
        """Name of each source file below its package; empty for those of others."""
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    def start(self) -> None:
        """Forget what was recorded, and record."""
        self.steps.clear()
        self._on = True

    def stop(self) -> None:
        self._on = False

    def wait_for(self, thread: str, function: str, after: str = "") -> None:
        """Until `function` has returned in a thread whose name begins so, after a call of `after`. Raises
        TimeoutError."""
        deadline_s = time.monotonic() + DEADLINE_S

        def has_returned() -> bool:
            for name, steps in list(self.steps.items()):
                called = not after
                for step in list(steps) if name.startswith(thread) else ():
                    called = called or step.function == after
                    if called and step.function == function and not step.begins:
                        return True
            return False

        while not has_returned():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{function} did not return in {thread} within {DEADLINE_S:g} s")
            time.sleep(0.001)

    def span(self, role: str, thread: str, first: str, through: str, last: str) -> Span:
        """From the last call of `first` before `through` until `last` returns. Raises LookupError without one."""
        steps = self.steps[thread]
        middle = _index(steps, through, begins=True, after=0)
        begin = middle
        while not (steps[begin].function == first and steps[begin].begins):
            begin -= 1
            if begin < 0:
                raise LookupError(f"{role}: no call of {first} before {through}")
        end = _index(steps, last, begins=False, after=middle)
        return Span(role, [step for step in steps[begin:end] if step.begins])

    def _profile(self, frame: FrameType, event: str, _argument: object) -> None:
        if not self._on or event not in ("call", "return"):
            return
        code = frame.f_code
        if code.co_filename not in self._files:
            self._files[code.co_filename] = _below_package(code.co_filename)
        file = self._files[code.co_filename]
        if file and not code.co_name.startswith("<"):
            self.steps[threading.current_thread().name].append(Step(file, code.co_qualname, event == "call"))


def turns(steps: list[Step]) -> list[list[Step]]:
    """The outermost calls of a thread, each with the calls in it. A call that began before the recording is none."""
    found: list[list[Step]] = []
    inside: list[Step] = []
    for step in steps:
        if step.begins:
            if not inside:
                found.append([])
            inside.append(step)
            found[-1].append(step)
        elif inside and inside[-1].function == step.function:  # else it began before, or a closed generator ends
            inside.pop()
    return found


def _index(steps: list[Step], function: str, *, begins: bool, after: int) -> int:
    for at in range(after, len(steps)):
        if steps[at].function == function and steps[at].begins is begins:
            return at
    raise LookupError(f"{function} was not {'called' if begins else 'left'}")


def _below_package(filename: str) -> str:
    path = Path(filename)
    for package in PACKAGES:
        if path.is_relative_to(package):
            return str(path.relative_to(package.parent))
    return ""


def layer(_arguments: argparse.Namespace) -> list[Span]:
    """One layer between two nodes over tcp: handed over, landed, announced and heard.

    engine: the thread of the forward pass, in `layer_ready`. sender: its loop, from the transport's report to the
    frame that leaves. receiver: its loop, from the frame to the layer that may be read.
    """
    recorder = Recorder()
    import pdlink  # noqa: PLC0415  the profile function comes first

    num_layers, num_tokens = 16, 64
    layout = pdlink.paged_layout(
        num_layers=num_layers, num_blocks=64, block_tokens=16, num_heads=4, head_dim=64, itemsize=2, dtype="float16"
    )
    kv = pdlink.KVGroups((layout,))
    shortest: dict[str, Span] = {}
    over = pdlink.TransportConfig(kind="tcp")
    with pdlink.Node("prefill", kv, transport=over) as prefill, pdlink.Node("decode", kv, transport=over) as decode:
        for transfer_id in ("warm", "walked"):
            incoming = decode.receive(transfer_id, prefill.address, [[0, 1, 2, 3]], range(num_tokens))
            outgoing = prefill.send(transfer_id, [[0, 1, 2, 3]], num_tokens)
            if not outgoing.accepted.wait(DEADLINE_S):
                raise TimeoutError("the receiver did not ask for its transfer")
            for index in range(num_layers):
                recorder.start()
                outgoing.layer_ready(index)
                recorder.wait_for("pdlink-endpoint-decode", "Incoming.on_landed")
                recorder.wait_for("pdlink-endpoint-prefill", "Channel.send", after="Sending.landed")
                recorder.stop()
                if transfer_id == "walked":
                    for span in _layer_spans(recorder):
                        known = shortest.get(span.role, span)
                        shortest[span.role] = min(known, span, key=lambda one: len(one.calls))
            outgoing.finish(1)
            incoming.wait(DEADLINE_S)
    return list(shortest.values())


def _layer_spans(recorder: Recorder) -> list[Span]:
    engine, loops = threading.current_thread().name, "pdlink-endpoint-"
    ready, poll, take = "Outgoing.layer_ready", "NativeTransport.poll", "Channel._take"
    return [
        recorder.span("engine", engine, ready, ready, ready),
        recorder.span("sender", f"{loops}prefill", poll, "Sending.landed", "Channel.send"),
        recorder.span("receiver", f"{loops}decode", take, "Receiving.landed", "Incoming.on_landed"),
    ]


def request(_arguments: argparse.Namespace) -> list[Span]:
    """A request through two workers of the built-in engine over tcp, without a proxy: both legs at once.

    By thread what is the request's own, then of all threads everything and what is its own: from the POST until both
    answers and the transfer have ended. The workers' periodic lines are off, and their heartbeats far apart.
    """
    idle, walks = asyncio.run(_requests(Recorder()))
    shortest = min(walks, key=lambda walk: len({step for steps in walk.values() for step in steps if step.begins}))
    everything = [step for _, steps in sorted(shortest.items()) for step in steps if step.begins]
    own = [_own(walk, idle) for walk in walks]
    always = set.intersection(*({step for steps in walk.values() for step in steps} for walk in own))
    spans = [
        Span(thread, [step for step in steps if step in always])
        for thread, steps in sorted(own[walks.index(shortest)].items())
    ]
    total = Span("the request's own", [call for span in spans for call in span.calls])
    return [*(span for span in spans if span.calls), Span("all threads", everything), total]


def _own(walk: dict[str, list[Step]], idle: set[Step]) -> dict[str, list[Step]]:
    """By thread, the calls of turns that call a function which is not in `idle`."""
    return {
        thread: [step for turn in turns(steps) if not idle.issuperset(turn) for step in turn]
        for thread, steps in walk.items()
    }


async def _requests(recorder: Recorder) -> tuple[set[Step], list[dict[str, list[Step]]]]:
    """The calls of workers that have nothing to do, and the steps of each of some warm requests."""
    from aiohttp.test_utils import TestClient, TestServer  # noqa: PLC0415  the profile function comes first

    from pdlink.config import WorkerConfig  # noqa: PLC0415
    from pdlink.serve.app import build_app  # noqa: PLC0415
    from pdlink.serve.worker import Worker  # noqa: PLC0415

    workers, walks, idle = [], list[dict[str, list[Step]]](), set[Step]()
    async with contextlib.AsyncExitStack() as stack:
        clients = {}
        for role in ("prefill", "decode"):
            settings = {"transport": {"kind": "tcp"}, "cache": {"num_blocks": 256}, "summary_s": 0}
            settings["timeouts"] = {"peer_s": PEER_S}
            worker = Worker(WorkerConfig.model_validate({"role": role, **settings}), role)
            await asyncio.to_thread(worker.open)
            stack.callback(worker.close)
            workers.append(worker)
            clients[role] = await stack.enter_async_context(TestClient(TestServer(build_app(worker))))

        async def leg(role: str, number: int, prompt: str) -> int:
            params = {"transfer_id": f"walk-{number}", "leg": role, "seed": 1, "created": 1}
            if role == "decode":
                params["prefill"] = {"name": "prefill", "control": workers[0].node.address}
            body = {"model": workers[0].model.name, "prompt": prompt, "max_tokens": 4, "temperature": 0}
            body |= {"stream": True, "kv_transfer_params": params}
            async with clients[role].post("/v1/completions", json=body) as response:
                await response.read()
                return response.status

        for number in range(1 + NUM_WALKS):
            recorder.start()
            statuses = await asyncio.gather(*(leg(role, number, f"Story {number}: " * 8) for role in clients))
            for thread, last in (("endpoint-prefill", "Sender._end"), ("engine-decode", "Worker.ended")):
                await asyncio.to_thread(recorder.wait_for, f"pdlink-{thread}", last)
            recorder.stop()
            if statuses != [200, 200]:
                raise LookupError(f"request: answered with {statuses}")
            if number:  # the first one made the session
                walks.append({thread: list(steps) for thread, steps in recorder.steps.items()})
                continue
            await asyncio.sleep(SETTLE_S)
            recorder.start()
            await asyncio.sleep(IDLE_S)
            recorder.stop()
            idle = {step for steps in recorder.steps.values() for step in steps if step.begins}
    return idle, walks


def proxy(_arguments: argparse.Namespace) -> list[Span]:
    """A request of vLLM's dialect through the proxy, with two stand-ins for servers on each side, in one piece and
    as a stream: from the first byte of the request to the last one of the answer. The stand-ins write as uvicorn
    does: a head, then the body, or each event by itself.
    """
    return asyncio.run(_proxied(Recorder()))


async def _proxied(recorder: Recorder) -> list[Span]:
    from aiohttp import web  # noqa: PLC0415  the profile function comes first

    from pdlink.config import ProxyConfig  # noqa: PLC0415
    from pdlink_proxy import build_app  # noqa: PLC0415
    from pdlink_proxy.front import FrontRunner  # noqa: PLC0415

    thread = threading.current_thread().name
    async with contextlib.AsyncExitStack() as stack:
        urls = []
        for _ in range(4):
            server = await stack.enter_async_context(await asyncio.start_server(_stand_in, "127.0.0.1", 0))
            urls.append(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        config = ProxyConfig(
            prefill=urls[:2],
            decode=urls[2:],
            dialect="vllm",
            control=dict.fromkeys(urls[:2], "tcp://127.0.0.1:1"),
            health_interval_s=DEADLINE_S,
        )
        runner = FrontRunner(build_app(config), access_log=None)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        reader, writer = await asyncio.open_connection(*runner.addresses[0])
        spans = []
        for role, stream, last in (
            ("whole", b"false", b'"kv_transfer_params":null}'),
            ("stream", b"true", b"0\r\n\r\n"),
        ):
            body = b'{"model":"m","prompt":"hello","max_tokens":8,"stream":%b}' % stream
            asked = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            asked += b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
            walks = []
            for number in range(-NUM_WALKS, NUM_WALKS):  # before the first ones nobody has a connection
                recorder.start()
                writer.write(asked)
                answer = await reader.readuntil(last)
                recorder.stop()
                if number >= 0 and b" 200 OK" in answer:
                    steps = [step for step in recorder.steps[thread] if step.begins and step.file != _TURNS]
                    walks.append(Span(role, steps))
            if not walks:
                raise LookupError(f"{role}: answered with {answer!r}")
            spans.append(min(walks, key=lambda walk: len(walk.calls)))
        writer.close()
    return spans


async def _stand_in(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers as a vLLM server would, but for its words."""
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
        while head := (await reader.readuntil(b"\r\n\r\n")).lower():
            length = int(head.partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
            body = await reader.readexactly(length)
            choice = b'{"choices":[{"index":0,"text":" word","finish_reason":%b}]'
            pieces = [choice % b'"length"' + b',"usage":%b,"kv_transfer_params":{"pdlink_kv":"transferred"}}' % USAGE]
            kind = b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(pieces[0])
            if b"/models" in head:
                pieces = [b'{"data":[{"id":"m"}]}']
                kind = b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(pieces[0])
            if b'"stream":true' in body:
                events = [b"data: %b}\n\n" % (choice % end) for end in [b"null"] * 8 + [b'"length"']]
                pieces = [b"%x\r\n%b\r\n" % (len(event), event) for event in [*events, b"data: [DONE]\n\n"]]
                pieces[-1] += b"0\r\n\r\n"
                kind = b"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
            writer.write(b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\n" + kind)
            for piece in pieces:
                await asyncio.sleep(0.002)  # or several are one read
                writer.write(piece)
    writer.close()


def put(_arguments: argparse.Namespace) -> list[Span]:
    """A chunk that `Cache.store` puts into memory, and the thread of the disk onto it."""
    return _cache_spans("put")


def get(_arguments: argparse.Namespace) -> list[Span]:
    """A chunk that is in memory, through `Cache.retrieve`."""
    return _cache_spans("get")


def _cache_spans(verb: str) -> list[Span]:
    """By thread, and of all together; the shortest of some warm calls."""
    recorder = Recorder()
    import pdlink  # noqa: PLC0415  the profile function comes first

    layout = pdlink.paged_layout(
        num_layers=16, num_blocks=64, block_tokens=16, num_heads=4, head_dim=64, itemsize=2, dtype="float16"
    )
    blocks, best = list(range(16)), list[Span]()
    with (
        tempfile.TemporaryDirectory() as disk,
        pdlink.Cache(layout, nbytes=256 << 20, disk=disk, disk_nbytes=1 << 30, model="walk") as cache,
    ):
        for number in range(8):
            prompt = [number] * 256
            if verb == "get":
                cache.store(prompt, blocks)
                cache.flush(DEADLINE_S)
            recorder.start()
            if verb == "put":
                cache.store(prompt, blocks)
                recorder.wait_for("pdlink-write-disk-", "WriteThrough._write")
            elif cache.retrieve(prompt, blocks) != len(prompt):
                raise LookupError("get: the chunk is not in memory")
            recorder.stop()
            calls = {thread: [step for step in steps if step.begins] for thread, steps in recorder.steps.items()}
            spans = [Span(thread, of_thread) for thread, of_thread in sorted(calls.items()) if of_thread]
            spans.append(Span("all threads", [call for span in spans for call in span.calls]))
            if number and (not best or len(spans[-1].calls) < len(best[-1].calls)):
                best = spans
    return best


WALKS: dict[str, Callable[[argparse.Namespace], list[Span]]] = {
    "layer": layer,
    "request": request,
    "proxy": proxy,
    "put": put,
    "get": get,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Count the Python calls on the way of one thing through pdlink.")
    parser.add_argument("walk", choices=WALKS)
    parser.add_argument("--calls", action="store_true", help="print the calls, too")
    arguments = parser.parse_args()
    for span in WALKS[arguments.walk](arguments):
        print(span)
        if arguments.calls:
            for call in span.calls:
                print(f"    {call.file}: {call.function}")


if __name__ == "__main__":
    main()
