"""No thread of pdlink ends in silence: each has one outermost frame, which says so and fails what the thread served.

One scenario for each loop: an exception comes where nobody expects one. Loops with tests of their own: the endpoint's
(`tests/node`), those of lanes over a GPU (`tests/cuda`), `Line` (`tests/store`).
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

from pdlink import threads
from pdlink.config.tracing import TracingConfig
from pdlink.events import MessageDropped, emit
from pdlink.integrations import trace_file
from pdlink.integrations.sglang_parts.gpu import GpuOrder
from pdlink.observe import otlp
from pdlink.observe.kv_ledger import BlockPlace
from pdlink.observe.kv_publisher import KVPublisher
from pdlink.observe.spans import Span, TraceContext
from pdlink.reasons import Code, Reason
from pdlink.store.client import RemoteStore
from pdlink.store.keeper import Keeper
from pdlink.store.late import Late
from pdlink.store.link import Link
from pdlink.store.server.listener import Listener
from pdlink.transport.handle_door import HandleDoor
from tests.store.process import client, served
from tests.store.test_store import KEYS, put
from tests.waiting import WAIT_S, until

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "pdlink").rglob("*.py")) + sorted((ROOT / "proxy/pdlink_proxy").rglob("*.py"))


def _targets(tree: ast.Module) -> Iterator[str]:
    """Names of what threads of a file run: methods, functions; `run` of a thread's own class."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("threading.Thread", "Thread"):
            (target,) = (each.value for each in node.keywords if each.arg == "target")
            yield ast.unparse(target).removeprefix("self.")
        elif isinstance(node, ast.ClassDef) and "threading.Thread" in map(ast.unparse, node.bases):
            yield "run"


def _has_frame(function: ast.FunctionDef) -> bool:
    """Whether it is, or loops over, one `try` that takes every exception."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    while isinstance(body[-1], ast.While):
        body = body[-1].body
    tries = [each for each in body if isinstance(each, ast.Try)]
    return any(
        handler.type is None or ast.unparse(handler.type) == "Exception"
        for each in tries
        for handler in each.handlers
    )


def test_every_thread_has_an_outermost_frame() -> None:
    """`threads.guarded` has; who makes a thread in another way has a frame of its own."""
    without = []
    for path in SOURCES:
        tree = ast.parse(path.read_text())
        made = {each.name: each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)}
        without += [
            f"{path.relative_to(ROOT)}: {name}"
            for name in _targets(tree)
            if name not in made or not _has_frame(made[name])
        ]
    assert without == []


# -- the frame -------------------------------------------------------------------------------------------------------


def test_a_thread_that_dies_says_so_and_fails_what_it_served(caplog: pytest.LogCaptureFixture) -> None:
    told: list[str] = []

    def failed(why: str) -> None:
        told.append(why)
        raise RuntimeError("there, too")

    thread = threads.guarded("pdlink-test", bug, failed)
    thread.start()
    thread.join(WAIT_S)
    assert told == ["thread pdlink-test has died: ZeroDivisionError: a bug"]
    assert "thread pdlink-test has died" in caplog.text
    assert "what thread pdlink-test served could not be ended" in caplog.text


async def test_a_task_that_dies_says_so(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        bug()

    tasks = [asyncio.create_task(work(), name="pdlink-test"), asyncio.create_task(asyncio.sleep(WAIT_S))]
    for task in tasks:
        task.add_done_callback(threads.tell_failure)
    tasks[1].cancel()
    await asyncio.wait(tasks)
    await asyncio.sleep(0)
    assert [record.getMessage() for record in caplog.records] == ["task pdlink-test has died"]


# -- an exception at every entry -------------------------------------------------------------------------------------


def bug(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError("a bug")


class Once:
    """Raises in its first call, and then does what it stands for."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call, self.raised = call, threading.Event()

    def __get__(self, instance: object, owner: type) -> Callable[..., Any]:
        return lambda *args, **kwargs: self(instance, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.raised.is_set():
            self.raised.set()
            bug()
        return self._call(*args, **kwargs)


@contextmanager
def once(patch: pytest.MonkeyPatch, owner: type, name: str) -> Iterator[Once]:
    made = Once(getattr(owner, name))
    patch.setattr(owner, name, made)
    yield made
    assert made.raised.is_set()


def publisher(patch: pytest.MonkeyPatch, _: Path) -> None:
    """Subscribers lose their connection: they hear that nothing comes any more."""
    patch.setattr(KVPublisher, "_publish_news", bug)
    made = KVPublisher("tcp://127.0.0.1:*", None, topic="kv", buffer_steps=9, incarnation="life")
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        socket.subscribe(b"")
        socket.connect(made.endpoint)
        while not socket.poll(20):
            made.stored(BlockPlace(1, "GPU"), b"k")
            if monitor.poll(0):
                break
        assert monitor.poll(int(WAIT_S * 1000)), "the subscriber has been told"
        socket.disable_monitor()
        monitor.close(linger=0)
    for number in range(10):
        made.stored(BlockPlace(1, "GPU"), b"%d" % number)
    made.close()


def spans(patch: pytest.MonkeyPatch, _: Path) -> None:
    """What comes is dropped and counted, and nothing waits."""

    class Exporter:
        export = bug

        def __init__(self, *_: Any) -> None: ...

        def close(self) -> None: ...

    patch.setattr(otlp, "_Exporter", Exporter)
    patch.setattr(otlp, "_FLUSH_S", 0.01)
    sender = otlp.SpanSender(TracingConfig(endpoint="http://127.0.0.1:1/v1/traces"), "s", "i")
    sender.open()
    context, span = TraceContext("0" * 31 + "1", "0" * 15 + "1"), Span(name="n", begin_s=0.0, end_s=1.0)
    sender.send(context, [span])
    until(lambda: not sender._thread.is_alive(), "it has died")
    sender.send(context, [span] * 3)
    assert sender.num_dropped >= 3
    sender.close()


def timeline(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Events go on without it."""
    patch.setattr(trace_file, "_INTERVAL_S", 0.01)
    file = trace_file.TraceFile("n", str(folder / "t.json"))
    with patch.context() as bad:
        bad.setattr(trace_file.TraceFile, "_write", bug)
        emit(MessageDropped(reason="malformed"))
        until(lambda: not file._thread.is_alive(), "it has died")
    emit(MessageDropped(reason="malformed"))
    file.close()


def gpu_order(patch: pytest.MonkeyPatch, __: Path) -> None:
    """What waits for the GPU fails, and so does what comes later, also after a failure that cannot be told."""
    waits, failed = threading.Event(), list[Reason]()

    def synchronize() -> None:
        assert waits.wait(WAIT_S)
        bug()

    order = GpuOrder(lambda _, __: None, synchronize, 0)
    for _ in range(3):
        order.after_all(bug, failed.append)
    order.after_all(bug, bug)
    waits.set()
    until(lambda: len(failed) == 3, "they have failed")
    order.after_all(bug, failed.append)
    until(lambda: len(failed) == 4, "the last one has failed, too")
    assert all("ZeroDivisionError" in reason.words for reason in failed)
    order.close()


def gpu_acts(patch: pytest.MonkeyPatch, _: Path) -> None:
    """One that fails fails alone."""
    failed, done = list[Reason](), threading.Event()
    order = GpuOrder(lambda _, __: None, lambda: None, 0)
    order.after_all(bug, failed.append)
    order.after_all(done.set, failed.append)
    assert done.wait(WAIT_S)
    assert failed == [Reason(Code.GPU_FAILED, "ZeroDivisionError: a bug")]
    order.close()


def accepting(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """The next client is let in."""
    with once(patch, Listener, "_begin"), served(folder) as (_, listener), client(listener.path) as remote:
        until(lambda: remote.connected, "it is connected")


def connecting(patch: pytest.MonkeyPatch, folder: Path) -> None:
    with served(folder) as (_, listener), once(patch, RemoteStore, "_connect"), client(listener.path) as remote:
        until(lambda: remote.connected, "it is connected")


def hearing(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Its client connects again."""
    with served(folder) as (_, listener), once(patch, Link, "hear"), client(listener.path) as remote:
        until(lambda: remote.connected, "it is connected")


def keeping(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """A store goes on ending leases."""
    with once(patch, Keeper, "_keep"), served(folder) as (store, _):
        put(store, KEYS[:1])
        assert store._keeper._thread.is_alive()


def handles(patch: pytest.MonkeyPatch, __: Path) -> None:
    """The next peer is answered."""
    import socket

    with once(patch, HandleDoor, "_answer"):
        door = HandleDoor()
        for _ in range(2):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
                peer.settimeout(WAIT_S)
                peer.connect("\0" + door.place.name)
                # The door may have closed before it reads, and before this is sent.
                with contextlib.suppress(ConnectionResetError, BrokenPipeError):
                    peer.send(b"?")
                    assert peer.recv(10) == b""
        assert door._thread.is_alive()
        door.close()


def opening(_: pytest.MonkeyPatch, __: Path) -> None:
    """Operators see that what opens late is not used."""
    going = threading.Event()
    late = Late("a disk", lambda: going.wait(WAIT_S))
    late.then(bug)
    going.set()
    until(lambda: "has died: ZeroDivisionError" in late.problem, "it is told")


def attempting(_: pytest.MonkeyPatch, __: Path) -> None:
    """It is not tried again, and who waits for it hears it."""
    late = Late("a disk", bug)
    with pytest.raises(ZeroDivisionError):
        late.wait()
    until(lambda: "has died: ZeroDivisionError" in late.problem, "it is told")


SCENARIOS = [
    publisher, spans, timeline, gpu_order, gpu_acts, accepting, connecting, hearing, keeping, handles,
    opening, attempting,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each.__name__)
def test_an_exception_at_the_entry_of_a_loop_is_loud_and_leaves_nobody_waiting(
    scenario: Callable[[pytest.MonkeyPatch, Path], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    caplog.set_level(logging.WARNING)
    scenario(monkeypatch, tmp_path)
    assert "ZeroDivisionError" in caplog.text
