"""A router that decides nothing, for `pdlink bench proxy`: what a request in two legs costs Python at least.

`python -m pdlink_bench.proxy_floor PORT PREFILL DECODE` (URLs) reads a request as far as its length, adds
`kv_transfer_params` to its body, writes it to both workers over connections that stay, and passes decode's bytes to
the client as they come. It checks, counts, times and retries nothing, and knows two ways in which an answer ends.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from typing import TypeAlias, cast
from urllib.parse import urlsplit

from pdlink.serve.roles import fast_loop

_PARAMS = b',"kv_transfer_params":{"transfer_id":"xfer-00000000000000000000000000000000","leg":"%b"}}'
_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: worker\r\nContent-Length: %d\r\n\r\n"
_END = b"0\r\n\r\n"


def _length(head: bytes) -> int:
    """-1 if it does not say."""
    at = head.lower().find(b"content-length:")
    return int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else -1


class _Leg(asyncio.Protocol):
    """A connection to a worker."""

    client: _Client
    transport: asyncio.Transport

    def __init__(self, pool: deque[_Leg]) -> None:
        self._pool = pool
        self._left = -1
        """Bytes of the answer that are yet to come; -1: until its last chunk."""
        self._begun = False
        self.passes = False

    def ask(self, client: _Client, request: bytes, *, passes: bool) -> None:
        self.client, self.passes, self._begun = client, passes, False
        self.transport.write(request)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if not self._begun:  # the stand-ins send their heads in one piece
            self._begun = True
            end = data.index(b"\r\n\r\n") + 4
            self._left = _length(data[:end])
            came = len(data) - end
        else:
            came = len(data)
        if self.passes and self.client.transport is not None:
            self.client.transport.write(data)
        if self._left >= 0:
            self._left -= came
        if self._left == 0 or (self._left < 0 and data.endswith(_END)):
            self._pool.append(self)


class _Client(asyncio.Protocol):
    """A connection of a client."""

    def __init__(self, pools: _Pools) -> None:
        self._pools, self._held = pools, b""
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def connection_lost(self, error: Exception | None) -> None:
        self.transport = None

    def data_received(self, data: bytes) -> None:
        data = self._held + data
        end = data.find(b"\r\n\r\n") + 4
        if end < 4 or len(data) < end + _length(data[:end]):
            self._held = data
            return
        self._held = b""
        for number, (host, port, pool) in enumerate(self._pools):
            body = data[end:-1] + _PARAMS % (b"decode" if number else b"prefill")
            request = _HEAD % len(body) + body
            if pool:
                pool.pop().ask(self, request, passes=number == 1)
            else:
                asyncio.get_running_loop().create_task(self._connect(host, port, pool, request, passes=number == 1))

    async def _connect(self, host: str, port: int, pool: deque[_Leg], request: bytes, *, passes: bool) -> None:
        _, leg = await asyncio.get_running_loop().create_connection(lambda: _Leg(pool), host, port)
        leg.ask(self, request, passes=passes)


_Pools: TypeAlias = list[tuple[str, int, deque[_Leg]]]
"""Of each worker its host, its port, and idle connections to it."""


async def serving(port: int, workers: list[str]) -> tuple[asyncio.Server, _Pools]:
    """workers: the prefill worker's URL, then decode's. Returns the connections to both, too."""
    parts = [urlsplit(url) for url in workers]
    pools = [(part.hostname or "", part.port or 80, deque[_Leg]()) for part in parts]
    loop = asyncio.get_running_loop()
    return await loop.create_server(lambda: _Client(pools), "127.0.0.1", port, backlog=4096), pools


async def _serve(port: int, workers: list[str]) -> None:
    server, _ = await serving(port, workers)
    await server.serve_forever()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=fast_loop()) as runner:
        runner.run(_serve(int(sys.argv[1]), sys.argv[2:]))
