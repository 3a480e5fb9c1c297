"""What a request in two legs costs the proxy's own code: `python -m pdlink_bench.proxy_inside [--profile]`.

The proxy is whole, with its settings as they are shipped, but the sockets of clients and workers are played: what is
measured is from the bytes of a request to those of its answer, without a system call for either. Calls of Python are
counted as well: they repeat exactly, whatever else the machine does. `pdlink bench proxy` measures real sockets.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import cProfile
import gc
import pstats
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any, cast

from aiohttp import web

from pdlink.config import ProxyConfig
from pdlink.serve.roles import fast_loop
from pdlink_proxy import http_client
from pdlink_proxy.app import ROUTER, Router, build_app
from pdlink_proxy.front import Doors, Front
from pdlink_proxy.http_connection import Connection
from pdlink_proxy.steps import Leg

from .proxy import LOADS, Stub
from .proxy_stub import EVENT, WHOLE

if TYPE_CHECKING:
    from types import FrameType

_AT_ONCE = 50
_EVENTS = 8
"""Of a stream here: its head and its end, not its length."""
_END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


def _whole(body: bytes) -> bytes:
    return (
        f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nX-Pdlink-KV: transferred\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode() + body


_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nX-Pdlink-KV: transferred\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
_CHUNK = f"{len(EVENT):x}\r\n".encode() + EVENT + b"\r\n"
_ANSWERS = {
    False: (_whole(WHOLE), _whole(WHOLE)),
    True: (_STREAM_HEAD + _CHUNK + _END, _STREAM_HEAD + _CHUNK * _EVENTS + _END),
}
"""Of prefill and decode, by whether they stream."""

_HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:8000\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n"
)


class _Transport:
    """Of a played socket."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.write = self.written.append

    def is_closing(self) -> bool:
        return False

    def get_extra_info(self, _name: str, default: object = None) -> object:
        return default

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def abort(self) -> None:
        pass

    close = abort


class _Player:
    """Asks a proxy, and answers for its workers."""

    def __init__(self, router: Router, app_runner: web.AppRunner) -> None:
        assert app_runner.server is not None
        self._front = Front(Doors(app_runner.server, router, 75.0))
        self._client = _Transport()
        self._front.transport = cast("asyncio.Transport", self._client)
        self._workers: dict[Leg, list[tuple[Connection, _Transport]]] = {leg: [] for leg in Leg}
        for leg, client in router.shared.clients.items():
            for worker in router.pools.workers[leg]:
                connection, transport = Connection(), _Transport()
                connection.connection_made(cast("asyncio.Transport", transport))
                connection.host, _ = client._split("POST", worker.url + "/v1/completions")
                client._keep(connection)
                self._workers[leg].append((connection, transport))

    def one(self, request: bytes, *, stream: bool) -> None:
        """A request, until its answer is written."""
        self._front.data_received(request)
        for leg, answer in zip(Leg, _ANSWERS[stream], strict=True):
            asked = [each for each in self._workers[leg] if each[1].written]
            assert len(asked) == 1, leg
            for connection, transport in asked:
                transport.written.clear()
                connection.data_received(answer)
        answered = self._client.written
        assert answered, "no answer"
        assert answered[0].startswith(b"HTTP/1.1 200"), answered
        assert not self._front.busy, "not at its end"
        answered.clear()


def _calls_of(play: Any) -> tuple[int, int]:
    """Calls of Python, and of C from Python."""
    python = native = 0

    def count(_frame: FrameType, event: str, _arg: object) -> None:
        nonlocal python, native
        python += event == "call"
        native += event == "c_call"

    sys.setprofile(count)
    try:
        play()
    finally:
        sys.setprofile(None)
    return python, native


async def _measure(args: argparse.Namespace) -> None:
    http_client.KEEPALIVE_S = 1e6  # a connection that no load uses is still there for the next one
    with contextlib.ExitStack() as stack:
        workers = {
            role: tuple(stack.enter_context(Stub(role)).url for _ in range(args.workers))
            for role in ("prefill", "decode")
        }
        config = ProxyConfig(prefill=workers["prefill"], decode=workers["decode"])
        app = build_app(config)
        runner = web.AppRunner(app)
        await runner.setup()
        router = app[ROUTER]
        while router.standing()[0] != "ok":  # noqa: ASYNC110 -- its health watchers tell nobody
            await asyncio.sleep(0.05)
        player = _Player(router, runner)
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000, 20, 20)  # as `pdlink proxy` does
        for load in LOADS[:3]:
            stream = b'"stream": true' in load.body
            if args.load and not load.name.startswith(args.load):
                continue
            request = _HEAD % len(load.body) + load.body

            def play(request: bytes = request, *, stream: bool = stream) -> None:
                player.one(request, stream=stream)

            for number in range(2000):
                play()
                if number % _AT_ONCE == 0:
                    await asyncio.sleep(0)
            python, native = _calls_of(play)
            took = []
            for _ in range(args.rounds):
                spent_s = 0.0
                for _ in range(0, args.requests, _AT_ONCE):
                    await asyncio.sleep(0)  # or its health watchers find nobody
                    began_s = time.process_time()
                    for _ in range(_AT_ONCE):
                        play()
                    spent_s += time.process_time() - began_s
                took.append(spent_s / args.requests * 1e6)
            name = f"stream of {_EVENTS} events" if stream else load.name
            print(
                f"{name}: {min(took):.1f} us (median {statistics.median(took):.1f}), "
                f"{python} calls of Python, {native} of C"
            )
            if args.profile:
                profile = cProfile.Profile()
                profile.enable()
                for _ in range(args.requests):
                    play()
                profile.disable()
                pstats.Stats(profile).sort_stats("tottime").print_stats(args.lines)
        await runner.cleanup()


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1000, help="of a round; default %(default)s")
    parser.add_argument("--rounds", type=int, default=20, help="default %(default)s")
    parser.add_argument("--workers", type=int, default=1, help="on each side; default %(default)s")
    parser.add_argument("--load", default="", help="the beginning of the name of one")
    parser.add_argument("--profile", action="store_true", help="which functions take how long")
    parser.add_argument("--lines", type=int, default=70, help="of the profile; default %(default)s")
    with asyncio.Runner(loop_factory=fast_loop()) as runner:
        runner.run(_measure(parser.parse_args()))


if __name__ == "__main__":
    main()
