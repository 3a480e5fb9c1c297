"""Clients that read streams in threads of their own, while servers die."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from typing import Any

from tests.e2e.engine_servers import until
from tests.proxy.said import Said

STREAM_S = 120.0


@dataclass
class Reader:
    """Of one stream, through the proxy at this URL."""

    url: str
    path: str
    body: Mapping[str, Any]
    data: bytearray = field(default_factory=bytearray)
    decode: str = ""
    """The worker that streams first."""
    thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        client = HTTPConnection(self.url.removeprefix("http://"), timeout=STREAM_S)
        body = json.dumps({**self.body, "stream": True})
        client.request("POST", self.path, body, {"Content-Type": "application/json"})
        answer = client.getresponse()
        assert answer.status == 200, answer.read()
        self.decode = answer.headers["X-Pdlink-Decode"]
        try:
            while line := answer.readline():
                self.data += line
        except HTTPException as error:
            self.data += f"\ncut off: {error}\n".encode()
        client.close()

    def placed(self) -> Reader:
        """The same, once it is known where."""
        until(lambda: self.decode, f"a stream of {self.path} begins", STREAM_S)
        return self

    def num_events(self) -> int:
        return self.data.count(b"\ndata:")

    def whole(self) -> bytes:
        """Its stream, once it has ended."""
        self.thread.join(STREAM_S)
        assert not self.thread.is_alive(), (self.path, self.num_events())
        return bytes(self.data)

    def said(self) -> Said:
        """The same as a client understands it; fails for one that ended with an error."""
        return Said.of(self.whole(), self.path)
