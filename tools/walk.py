"""Counts the Python calls on the way of one thing through pdlink, while it runs (`sys.setprofile`).

    .venv/bin/python tools/walk.py layer            calls, functions and files of each role
    .venv/bin/python tools/walk.py layer --calls    and the calls in their order
    .venv/bin/python tools/walk.py request          a request through prefill and decode, HTTP to HTTP, by thread

A walk runs something real in this process, records every call of a function of pdlink by thread, and cuts one span
out of each thread: from the call of a first function until a last one returns. A generator counts once for each
resume. What happens several times is walked each time and the shortest span counts, so a heartbeat in between does
not.

A new walk is a function in `WALKS` that takes the parsed arguments and returns its spans.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
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
    """Steps by name of thread. Make it before the threads: only those that begin later are seen, and this one."""

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
        """Until `function` has returned in `thread`, after a call of `after`. Raises TimeoutError."""
        deadline_s = time.monotonic() + DEADLINE_S

        def has_returned() -> bool:
            called = not after
            for step in list(self.steps[thread]):
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
    kv = pdlink.paged_layout(
        num_layers=num_layers, num_blocks=64, block_tokens=16, num_heads=4, head_dim=64, itemsize=2, dtype="float16"
    )
    shortest: dict[str, Span] = {}
    with pdlink.Node("prefill", kv, transport="tcp") as prefill, pdlink.Node("decode", kv, transport="tcp") as decode:
        for transfer_id in ("warm", "walked"):
            incoming = decode.receive(transfer_id, prefill.address, [0, 1, 2, 3], range(num_tokens))
            outgoing = prefill.send(transfer_id, [0, 1, 2, 3], num_tokens)
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

    By thread, and of all threads together, from the POST until both answers and the transfer have ended. The workers'
    periodic lines are off, and it is walked several times: the time of the loops' own turns is in it.
    """
    recorder = Recorder()
    spans: dict[str, Span] = {}
    for steps in asyncio.run(_requests(recorder)):
        calls = {thread: [step for step in all_steps if step.begins] for thread, all_steps in steps.items()}
        walked = [Span(thread, of_thread) for thread, of_thread in sorted(calls.items()) if of_thread]
        walked.append(Span("all threads", [call for span in walked for call in span.calls]))
        for span in walked:
            known = spans.get(span.role, span)
            spans[span.role] = min(known, span, key=lambda one: len(set(one.calls)))
    return list(spans.values())


async def _requests(recorder: Recorder) -> list[dict[str, list[Step]]]:
    """The steps of some warm requests."""
    from aiohttp.test_utils import TestClient, TestServer  # noqa: PLC0415  the profile function comes first

    from pdlink.config import WorkerConfig  # noqa: PLC0415
    from pdlink.serve.app import build_app  # noqa: PLC0415
    from pdlink.serve.worker import Worker  # noqa: PLC0415

    workers, found = [], []
    async with contextlib.AsyncExitStack() as stack:
        clients = {}
        for role in ("prefill", "decode"):
            settings = {"transport": {"kind": "tcp"}, "cache": {"num_blocks": 256}, "summary_s": 0}
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

        for number, first in enumerate(("Once", "Twice", "Thrice", "Never")):
            recorder.start()
            statuses = await asyncio.gather(*(leg(role, number, f"{first} upon a time " * 8) for role in clients))
            for thread, last in (("endpoint-prefill", "Sender._end"), ("engine-decode", "Worker.ended")):
                await asyncio.to_thread(recorder.wait_for, f"pdlink-{thread}", last)
            recorder.stop()
            if statuses != [200, 200]:
                raise LookupError(f"request: answered with {statuses}")
            if number:  # the first one made the session
                found.append({thread: list(steps) for thread, steps in recorder.steps.items()})
    return found


WALKS: dict[str, Callable[[argparse.Namespace], list[Span]]] = {"layer": layer, "request": request}


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
