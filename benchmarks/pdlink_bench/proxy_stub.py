"""Workers for `pdlink bench proxy` that compute nothing: as cheap as Python allows, so that the proxy is what waits.

`python -m pdlink_bench.proxy_stub prefill|decode [PORT] [DIALECT [events]]` prints its port, and then where it
publishes KV events if it is to. It answers any POST with a small JSON object, or, where the body streams, with
`CHUNKS` events: at once; each `PACE_S` after the one before, if the prompt begins with "paced" (or as it says, "paced
1500 ms, 10 events"); one and then none, if it begins with "held". After "crowd 17, 10 events" each event says its
stream and its own number, "17.0" to "17.9"; all but the first wait for GET /open, and are paced. A prompt that begins
with "stuck" is never answered. GET /seen counts the requests, and how many run; other GETs tell of the worker.

Answers are those of vLLM 0.32 and SGLang 0.5.23 to /v1/completions, in the writes of uvicorn 0.54 (recorded): the
head, then the body; each event as a chunk of its own, and the last chunk by itself. A connection that is idle for 5 s
is closed, as both let uvicorn do.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import msgspec
import zmq

if TYPE_CHECKING:
    from collections.abc import Callable

MODEL = "m"
WORD = b'"text":" word"'
"""In each event with a token, and in a whole answer."""
CHUNKS = 128
PACE_S = 0.02
_PACE = re.compile(rb'"paced (\d+) ms, (\d+) events')
_CROWD = re.compile(rb'"crowd (\d+), (\d+) events')
_BLOCK_TOKENS = 16
_BLOCK_NBYTES = 256
"""A body with less than that has no whole block."""
_STEP_S = 0.01
_KEEPALIVE_S = 5.0
_KEPT = 4096
"""Blocks of which a worker says that it has them."""

_HEAD = (
    b'"object":"text_completion","created":1795647678,"model":"m","choices":[{"index":0,'
    + WORD
    + b',"logprobs":null,'
)
_USAGE = b'{"prompt_tokens":4,"total_tokens":5,"completion_tokens":1'
_EVENTS = {
    "pdlink": b'{"id":"cmpl-8cb869b5",' + _HEAD + b'"finish_reason":null}]}',
    "vllm": b'{"id":"cmpl-8cb869b510438e72",'
    + _HEAD
    + b'"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,"token_ids":null}]}',
    "sglang": b'{"id":"a08c2f18486f425ea13881e2cc1cfda8",'
    + _HEAD
    + b'"finish_reason":null,"matched_stop":null}],"usage":null}',
}
_ANSWERS = {
    "pdlink": b'{"id":"cmpl-8cb869b5",' + _HEAD + b'"finish_reason":"length"}],"usage":' + _USAGE + b"}}",
    "vllm": b'{"id":"cmpl-8cb869b510438e72",'
    + _HEAD
    + b'"finish_reason":"length","stop_reason":null,"token_ids":null,"prompt_logprobs":null,'
    b'"prompt_token_ids":null}],"service_tier":null,"system_fingerprint":"vllm-0.32.0-bed23265","usage":'
    + _USAGE
    + b',"prompt_tokens_details":null},"kv_transfer_params":{"pdlink_kv":"transferred"}}',
    "sglang": b'{"id":"a08c2f18486f425ea13881e2cc1cfda8",'
    + _HEAD
    + b'"finish_reason":"length","matched_stop":null}],"usage":'
    + _USAGE
    + b',"prompt_tokens_details":null,"reasoning_tokens":0}}',
}
DIALECTS = tuple(_EVENTS)
_STOPPED = b"HTTP/1.1 202 Accepted\r\nContent-Length: 0\r\n\r\n"


def _chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


class StubPublisher:
    """Publishes KV events as vLLM does, in one batch for each step: for each prompt a block that is there now, and
    one that is gone."""

    def __init__(self) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUB)
        self.port: int = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint = f"tcp://127.0.0.1:{self.port}"
        self._events: list[dict[str, object]] = []
        self._num_blocks = self._num_batches = 0

    def computed(self) -> None:
        number = self._num_blocks
        self._num_blocks += 1
        about = {"lora_id": None, "medium": "GPU", "lora_name": None, "block_size": _BLOCK_TOKENS}
        stored = {"block_hashes": [number], "parent_block_hash": None, "token_ids": [number % 50_000] * _BLOCK_TOKENS}
        if not self._events:
            asyncio.get_running_loop().call_later(_STEP_S, self._tell)
        self._events.append({"type": "BlockStored", **stored, **about})
        if number >= _KEPT:
            self._events.append({"type": "BlockRemoved", "block_hashes": [number - _KEPT], "medium": "GPU"})

    def _tell(self) -> None:
        batch = msgspec.msgpack.encode([0.0, self._events, 0])
        self._socket.send_multipart((b"", self._num_batches.to_bytes(8, "big"), batch), zmq.NOBLOCK)
        self._num_batches += 1
        self._events = []


class Stub(asyncio.Protocol):
    role = "both"
    dialect = "pdlink"
    publisher: StubPublisher | None = None
    requests = running = 0
    """Of all connections."""
    crowd: ClassVar[list[Callable[[], None]]] = []
    """What goes on when the crowd's door opens."""
    connections: ClassVar[set[Stub]] = set()

    def __init__(self) -> None:
        self._held = b""
        self._running = False
        self._used_s = time.monotonic()
        self._event = b"data: " + _EVENTS[self.dialect] + b"\n\n"
        finish = self._event.replace(b'" word"', b'""').replace(b'"finish_reason":null', b'"finish_reason":"length"')
        self._end = (_chunk(finish), _chunk(b"data: [DONE]\n\n"), b"0\r\n\r\n")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.connections.add(self)

    def data_received(self, data: bytes) -> None:
        self._held += data
        self._used_s = time.monotonic()
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
        self.connections.discard(self)

    def end_idle(self, before_s: float) -> None:
        """Close it if nobody has used it since."""
        if not self._running and self._used_s < before_s:
            self._transport.close()

    def _runs(self, *, running: bool) -> None:
        Stub.running += running - self._running
        self._running, self._used_s = running, time.monotonic()

    def _serve(self, head: bytes, body: bytes) -> None:
        if head.startswith(b"get"):
            self._whole(self._about(head))
            return
        if b"/stop http" in head:
            self._transport.write(_STOPPED)
            return
        if b"/tokenize http" in head:
            self._whole(json.dumps({"count": len(body) // 4, "tokens": list(range(len(body) // 4))}).encode())
            return
        Stub.requests += 1
        if self.publisher is not None and len(body) > _BLOCK_NBYTES:
            self.publisher.computed()
        if b'"stuck' in body:
            self._runs(running=True)
        elif b'"stream": true' not in body and b'"stream":true' not in body:
            self._whole(_ANSWERS[self.dialect])
        else:
            self._head("text/event-stream; charset=utf-8", "transfer-encoding: chunked")
            if self.role == "prefill":  # of which only the first event is wanted
                self._write(_chunk(self._event), *self._end)
            elif b'"paced' in body:
                self._runs(running=True)
                said = _PACE.search(body)
                pace_s, number = (int(said[1]) / 1000, int(said[2])) if said else (PACE_S, CHUNKS)
                self._next(pace_s, [self._event] * number)
            elif b'"held' in body:
                self._runs(running=True)
                self._transport.write(_chunk(self._event))
            elif (said := _CROWD.search(body)) is not None:
                self._runs(running=True)
                events = [
                    self._event.replace(b"word", b"%b.%d" % (said[1], number)) for number in range(int(said[2]))
                ]
                self._transport.write(_chunk(events[0]))
                self.crowd.append(partial(self._next, PACE_S, events[1:]))
            else:
                self._write(*[_chunk(self._event)] * CHUNKS, *self._end)

    def _write(self, *pieces: bytes) -> None:
        for piece in pieces:
            self._transport.write(piece)

    def _head(self, kind: str, length: str) -> None:
        told = "X-Pdlink-KV: transferred\r\n" if self.dialect == "pdlink" else ""
        self._transport.write(
            f"HTTP/1.1 200 OK\r\ndate: Thu, 26 Nov 2026 18:35:13 GMT\r\nserver: uvicorn\r\n{told}{length}\r\n"
            f"content-type: {kind}\r\n\r\n".encode()
        )

    def _whole(self, body: bytes) -> None:
        self._head("application/json", f"content-length: {len(body)}")
        self._transport.write(body)

    def _about(self, head: bytes) -> bytes:
        if head.startswith(b"get /open"):
            while self.crowd:
                self.crowd.pop()()
        if head.startswith((b"get /seen", b"get /open")):
            return json.dumps({"requests": Stub.requests, "running": Stub.running}).encode()
        if b"/v1/models" in head:
            return json.dumps({"object": "list", "data": [{"id": MODEL, "object": "model"}]}).encode()
        if b"/server_info" in head or b"/get_server_info" in head:
            return json.dumps(self._server_info()).encode()
        health = {"status": "ok", "name": self.role, "epoch": str(os.getpid()), "role": self.role, "model": MODEL}
        events = [self.publisher.endpoint] if self.publisher is not None else []
        return json.dumps({**health, "control": "tcp://127.0.0.1:1", "kv_events": events}).encode()

    def _server_info(self) -> dict[str, object]:
        said: dict[str, object] = {"disaggregation_mode": self.role, "model_path": MODEL, "served_model_name": MODEL}
        if self.publisher is not None:
            said["kv_events"] = {"endpoint_host": "127.0.0.1", "endpoint_port_base": self.publisher.port}
        return {**said, "page_size": _BLOCK_TOKENS, "max_total_num_tokens": 500_000}

    def _next(self, pace_s: float, events: list[bytes]) -> None:
        if self._transport.is_closing():
            return
        self._transport.write(_chunk(events[0]))
        if len(events) > 1:
            asyncio.get_running_loop().call_later(pace_s, self._next, pace_s, events[1:])
        else:
            self._write(*self._end)
            self._runs(running=False)


async def close_idle() -> None:
    """Of all connections those that nobody uses any more."""
    while True:
        before_s = time.monotonic() - _KEEPALIVE_S
        for each in list(Stub.connections):
            each.end_idle(before_s)
        await asyncio.sleep(_KEEPALIVE_S / 20)


async def _serve(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Stub, "127.0.0.1", port, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    if Stub.publisher is not None:
        print(Stub.publisher.endpoint, flush=True)
    await asyncio.gather(server.serve_forever(), close_idle())


if __name__ == "__main__":
    Stub.role, port, Stub.dialect, events = (*sys.argv[1:], *("", "0", "pdlink", "")[len(sys.argv) - 1 :])
    Stub.publisher = StubPublisher() if events else None
    asyncio.run(_serve(int(port)))
