"""Workers that compute nothing (`pdlink_bench.proxy_stub`) and proxies before them, as real processes."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from socket import socket
from typing import Any

from pdlink.config import ProxyConfig
from pdlink.fleet.child import Child, start, stop
from tests.ports import keep_port
from tests.waiting import until

from .deployment import READY_S, Answer, request


class Stub:
    """A worker of one side; a context manager."""

    def __init__(self, role: str) -> None:
        self.role, self.port = role, 0
        self._kept: socket | None = None
        self.start()

    def start(self) -> None:
        """Also again, on the port that it had."""
        command = [sys.executable, "-m", "pdlink_bench.proxy_stub", self.role, str(self.port)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        with self.process.stdout as told:
            self.port = int(told.readline())
        if self._kept is not None:
            self._kept.close()

    def kill(self) -> None:
        """Its port is kept until it is started again."""
        self.process.kill()
        self.process.wait()
        self._kept = keep_port(self.port)

    def __enter__(self) -> Stub:
        return self

    def __exit__(self, *_: object) -> None:
        if self._kept is not None:
            self._kept.close()
        self.process.kill()
        self.process.wait()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def requests(self) -> int:
        """That it got in this life."""
        return int(request(self.url + "/seen").body["requests"])

    @property
    def running(self) -> int:
        """Requests that neither ended nor were given up."""
        return int(request(self.url + "/seen").body["running"])


@dataclass
class Fleet:
    """Stubs, and one proxy or several before them."""

    prefill: list[Stub]
    decode: list[Stub]
    proxies: list[Child] = field(default_factory=list)

    def add_proxy(self, port: int = 0, **settings: Any) -> Child:
        """A proxy that has heard its workers."""
        urls = {role: [stub.url for stub in getattr(self, role)] for role in ("prefill", "decode")}
        config = ProxyConfig.model_validate(
            {"listen": f"127.0.0.1:{port}", "health_interval_s": 0.1} | urls | settings
        )
        child = start(f"proxy-{len(self.proxies)}", "proxy", config.model_dump(mode="json"))
        self.proxies.append(child)
        child.wait_ready(READY_S)
        until(lambda: request(url_of(child) + "/health").status == 200, "the proxy sees its workers")
        return child

    def idle(self) -> bool:
        """Whether no proxy and no worker has anything to do."""
        return not (
            any(stub.running for stub in (*self.prefill, *self.decode) if stub.process.poll() is None)
            or any(running(proxy) for proxy in self.proxies if proxy.process.poll() is None)
        )


@contextmanager
def fleet_of(num_prefill: int, num_decode: int) -> Iterator[Fleet]:
    """No proxy yet."""
    with ExitStack() as stack:
        fleet = Fleet(
            [stack.enter_context(Stub("prefill")) for _ in range(num_prefill)],
            [stack.enter_context(Stub("decode")) for _ in range(num_decode)],
        )
        try:
            yield fleet
        finally:
            stop(fleet.proxies, 8.0)


def url_of(proxy: Child) -> str:
    return str(proxy.facts["url"])


def running(proxy: Child) -> int:
    """Requests, waiting ones too."""
    return int(request(url_of(proxy) + "/health").body["active_requests"])


def ask(proxy: Child, prompt: str = "hello", **fields: Any) -> Answer:
    """A request that does not stream."""
    return request(url_of(proxy) + "/v1/completions", {"model": "m", "prompt": prompt, "max_tokens": 8, **fields})


@contextmanager
def streaming(proxy: Child, prompt: str) -> Iterator[http.client.HTTPResponse]:
    """A stream whose head is there; leaving closes its connection."""
    with sending(proxy, prompt, stream=True) as connection:
        answer = connection.getresponse()
        assert answer.status == 200
        yield answer


@contextmanager
def sending(proxy: Child, prompt: str, **fields: Any) -> Iterator[http.client.HTTPConnection]:
    """A request that has been sent; leaving closes its connection."""
    connection = http.client.HTTPConnection("127.0.0.1", proxy.facts["port"], timeout=60)
    body = json.dumps({"model": "m", "prompt": prompt, "max_tokens": 8, **fields})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    try:
        yield connection
    finally:
        connection.close()
        if connection.sock is not None:
            connection.sock.close()
