"""Workers for `pdlink bench proxy` that compute nothing: as cheap as Python allows, so that the proxy is what waits.

`python -m pdlink_bench.proxy_stub prefill|decode [PORT]` prints its port. It answers any POST with a small JSON
object, or, where the body streams, with `CHUNKS` events: at once; each `PACE_S` after the one before, if the prompt
begins with "paced" (or as it says, "paced 1500 ms, 10 events"); one and then none, if it begins with "held". After
"crowd 17, 10 events" each event says its stream and its own number, "17.0" to "17.9"; all but the first wait for GET
/open, and are paced. A prompt that begins with "stuck" is never answered. GET /health is that of a worker; GET /seen
counts the requests, and how many run.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from functools import partial
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Callable

EVENT = (
    b'data: {"id":"c","object":"text_completion","model":"m",'
    b'"choices":[{"index":0,"text":" word","finish_reason":null}]}\n\n'
)
WHOLE = json.dumps(
    {
        "id": "c",
        "object": "text_completion",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "text": " word", "finish_reason": "length", "logprobs": None}],
        "usage": {"prompt_tokens": 4, "completion_tokens": 1, "total_tokens": 5},
    }
).encode()


def _answer(kind: str, body: bytes) -> bytes:
    return (
        f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nX-Pdlink-KV: transferred\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode() + body


def _chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


_FINISH = EVENT.replace(b'" word"', b'""').replace(b"null", b'"length"')
_END = _chunk(_FINISH + b"data: [DONE]\n\n") + b"0\r\n\r\n"
_STOPPED = b"HTTP/1.1 202 Accepted\r\nContent-Length: 0\r\n\r\n"
CHUNKS = 128
PACE_S = 0.02
_PACE = re.compile(rb'"paced (\d+) ms, (\d+) events')
_CROWD = re.compile(rb'"crowd (\d+), (\d+) events')


class Stub(asyncio.Protocol):
    role = "both"
    requests = running = 0
    """Of all connections."""
    crowd: ClassVar[list[Callable[[], None]]] = []
    """What goes on when the crowd's door opens."""

    def __init__(self) -> None:
        self._held = b""
        self._running = False
        health = {"status": "ok", "name": self.role, "epoch": str(os.getpid()), "role": self.role, "model": "m"}
        self._health = _answer("application/json", json.dumps({**health, "control": "tcp://127.0.0.1:1"}).encode())
        models = {"object": "list", "data": [{"id": "m", "object": "model"}]}
        self._models = _answer("application/json", json.dumps(models).encode())

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._held += data
        while (end := self._held.find(b"\r\n\r\n")) >= 0:
            head = self._held[:end].lower()
            at = head.find(b"content-length:")
            length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self._held) < end + 4 + length:
                return
            body, self._held = self._held[end + 4 : end + 4 + length], self._held[end + 4 + length :]
            self._serve(head, body)

    def connection_lost(self, error: Exception | None) -> None:
        self._runs(running=False)

    def _runs(self, *, running: bool) -> None:
        Stub.running += running - self._running
        self._running = running

    def _serve(self, head: bytes, body: bytes) -> None:
        if head.startswith(b"get"):
            self._transport.write(self._about(head))
            return
        if b"/stop http" in head:
            self._transport.write(_STOPPED)
            return
        Stub.requests += 1
        if b'"stuck' in body:
            self._runs(running=True)
        elif b'"stream": true' not in body and b'"stream":true' not in body:
            self._transport.write(_answer("application/json", WHOLE))
        else:
            self._transport.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nX-Pdlink-KV: transferred\r\n"
                b"Transfer-Encoding: chunked\r\n\r\n"
            )
            if self.role == "prefill":  # of which only the first event is wanted
                self._transport.write(_chunk(EVENT) + _END)
            elif b'"paced' in body:
                self._runs(running=True)
                said = _PACE.search(body)
                pace_s, number = (int(said[1]) / 1000, int(said[2])) if said else (PACE_S, CHUNKS)
                self._next(pace_s, [EVENT] * number)
            elif b'"held' in body:
                self._runs(running=True)
                self._transport.write(_chunk(EVENT))
            elif (said := _CROWD.search(body)) is not None:
                self._runs(running=True)
                events = [EVENT.replace(b"word", b"%b.%d" % (said[1], number)) for number in range(int(said[2]))]
                self._transport.write(_chunk(events[0]))
                self.crowd.append(partial(self._next, PACE_S, events[1:]))
            else:
                self._transport.write(_chunk(EVENT) * CHUNKS + _END)

    def _about(self, head: bytes) -> bytes:
        if head.startswith(b"get /open"):
            while self.crowd:
                self.crowd.pop()()
        if head.startswith((b"get /seen", b"get /open")):
            counts = {"requests": Stub.requests, "running": Stub.running}
            return _answer("application/json", json.dumps(counts).encode())
        return self._models if b"/v1/models" in head else self._health

    def _next(self, pace_s: float, events: list[bytes]) -> None:
        if self._transport.is_closing():
            return
        self._transport.write(_chunk(events[0]))
        if len(events) > 1:
            asyncio.get_running_loop().call_later(pace_s, self._next, pace_s, events[1:])
        else:
            self._transport.write(_END)
            self._runs(running=False)


async def _serve(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Stub, "127.0.0.1", port, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    Stub.role = sys.argv[1]
    asyncio.run(_serve(int(sys.argv[2]) if len(sys.argv) > 2 else 0))
