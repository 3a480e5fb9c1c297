"""Workers for `pdlink bench join` that compute nothing: each has a socket of its own, beats, and answers probes.

`python -m pdlink_bench.join_fleet ADDRESS KEY_FILE COUNT BEAT_S` prints its port. Then it does what it reads, a
word a line, and prints a line of JSON when that is done: `join` (dial, and beat from then on), `again` (end all
connections, and dial at once), `count` (probes and beats so far).
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from pathlib import Path

import msgspec
import zmq
from aiohttp import web

from pdlink.protocol import presence
from pdlink.protocol.auth import ControlAddress, KeyPair, parse_key_file
from pdlink.serve.process import raise_descriptor_limit

_TURN_S = 0.01
_RENEWED_BEATS = 10
"""A worker's curves are others than before with one beat in so many: then a proxy reads all of it."""


class Fleet:
    """All of them, behind one HTTP port: the path tells which one is meant."""

    def __init__(self, address: str, keys: KeyPair, count: int, beat_s: float) -> None:
        self._target, self._keys, self._beat_s = ControlAddress.parse(address), keys, beat_s
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 4 * count + 64)
        self._sockets: list[zmq.Socket[bytes]] = []
        self._due_s: list[float] = []
        self._started_s = time.monotonic()
        self.count = count
        self.probed: set[int] = set()
        self.num_probes = self.num_beats = 0
        self.port = 0

    def health(self, number: int, load: presence.Load | None = None) -> bytes:
        """As large as that of a worker. load: told apart from it, if at all."""
        curve = [0.0021, 1.3e-5, 2.1e-10 * (1 + self.num_beats // (_RENEWED_BEATS * self.count))]
        said = {
            **{"status": "ok", "reason": "", "name": f"{self._keys.name}/{number}", "epoch": f"{number:016x}"},
            **{"role": "prefill" if number % 2 else "decode", "roles": [], "model": "a-model", "store": ""},
            **{"control": f"tcp://10.0.0.1:{1024 + number}?key={self._keys.public}", "num_blocks": 4096},
            **{"block_tokens": 16, "refused": [], "kv_events": [], "curves": {"prefill": curve, "decode": curve}},
            **{"fingerprint": "3.0123456789abcdef.bfloat16.01234567"},
            **(msgspec.structs.asdict(load) if load is not None else {}),
        }
        return msgspec.json.encode(said)

    def load(self) -> presence.Load:
        """Another one each time, as of workers that have requests."""
        busy = random.randrange(1, 64)
        tokens = 1000 * busy
        return presence.Load(busy, busy % 7, tokens, 4096 - 32 * busy, tokens, 512 * busy, time.monotonic(), 0.0)

    def beat(self, number: int, port: int, age_s: float) -> presence.Beat:
        """What the worker says now."""
        url = f"http://127.0.0.1:{port}/w{number}"
        body = self.health(number)
        return presence.Beat(presence.VERSION, url, body, self._beat_s, age_s, load=self.load())

    def dial(self) -> None:
        """All at once."""
        now_s = time.monotonic()
        for socket in self._sockets:
            socket.close(linger=0)
        self._sockets = [self._dialed() for _ in range(self.count)]
        self._due_s = [now_s] * self.count  # the first beat leaves with the handshake

    def _dialed(self) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 2)
        socket.setsockopt_string(zmq.CURVE_SERVERKEY, self._target.public_key)
        socket.setsockopt_string(zmq.CURVE_PUBLICKEY, self._keys.public)
        socket.setsockopt_string(zmq.CURVE_SECRETKEY, self._keys.secret)
        socket.connect(self._target.endpoint)
        return socket

    async def beat_on(self) -> None:
        """Each once an interval, in no step with the others after the first time."""
        while True:
            now_s = time.monotonic()
            for number, due_s in enumerate(self._due_s):
                if due_s > now_s:
                    continue
                first = due_s == self._due_s[number] and self.num_beats < self.count
                self._due_s[number] = now_s + self._beat_s * (random.random() if first else 1.0)
                beat = self.beat(number, self.port, now_s - self._started_s)
                try:
                    self._sockets[number].send(presence.encode(beat), zmq.NOBLOCK)
                    self.num_beats += 1
                except zmq.Again:
                    pass
            await asyncio.sleep(_TURN_S)

    async def answer(self, request: web.Request) -> web.Response:
        """GET /wN/health and GET /wN/v1/models."""
        number = int(request.match_info["number"])
        self.probed.add(number)
        self.num_probes += 1
        return web.Response(body=self.health(number, self.load()), content_type="application/json")


async def _serve(fleet: Fleet) -> None:
    app = web.Application()
    app.router.add_get("/w{number}/{path:.*}", fleet.answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
    fleet.port = runner.addresses[0][1]
    print(fleet.port, flush=True)
    beating: asyncio.Task[None] | None = None
    while word := (await asyncio.to_thread(sys.stdin.readline)).strip():
        if word in ("join", "again"):
            fleet.probed.clear()
            began_s = time.monotonic()
            fleet.dial()
            beating = beating or asyncio.create_task(fleet.beat_on())
            while len(fleet.probed) < fleet.count:  # noqa: ASYNC110
                await asyncio.sleep(_TURN_S)
            print(json.dumps({"took_s": time.monotonic() - began_s}), flush=True)
        else:
            print(json.dumps({"probes": fleet.num_probes, "beats": fleet.num_beats}), flush=True)


if __name__ == "__main__":
    raise_descriptor_limit()
    path = Path(sys.argv[2])
    keys = parse_key_file(path.read_text(), str(path))
    asyncio.run(_serve(Fleet(sys.argv[1], keys, int(sys.argv[3]), float(sys.argv[4]))))
