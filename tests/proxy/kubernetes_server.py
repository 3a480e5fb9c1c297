"""What the proxy needs of a Kubernetes API server: EndpointSlices in pages, watches, bookmarks, 410, tokens.

It behaves as the API concepts page says: every change has a number, a watch sends the changes behind its number, and
answers 410 where those were forgotten.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

SERVICE = "kubernetes.io/service-name"


def endpoint(address: str, **conditions: bool | None) -> dict[str, Any]:
    return {"addresses": [address], "conditions": {"ready": True, **conditions}}


@dataclass
class ApiServer:
    """Holds the slices of one namespace."""

    token: str = "t1"
    down: bool = False
    """Answer everything with 503."""
    garbage: bytes = b""
    """Answer this with status 200."""
    page: int = 500
    """Most slices in an answer, whatever is asked."""
    lists: int = 0
    """Whole lists that were begun."""
    watches: int = 0
    mute: bool = False
    """Changes are not told to the watches that are open: events get lost."""
    port: int = 0
    _version: int = 1
    _oldest: int = 1
    _slices: dict[str, dict[str, Any]] = field(default_factory=dict)
    _log: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _cut: asyncio.Event = field(default_factory=asyncio.Event)
    _runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> ApiServer:
        app = web.Application()
        app.router.add_get("/apis/discovery.k8s.io/v1/namespaces/ns/endpointslices", self._answer)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    def put(self, name: str, service: str, *endpoints: dict[str, Any], port: int | None = 8000) -> None:
        labels = {SERVICE: service}
        kind = "MODIFIED" if name in self._slices else "ADDED"
        said = {"metadata": {"name": name, "labels": labels}, "endpoints": list(endpoints)}
        self._slices[name] = {**said, "ports": [{"name": "metrics", "port": 9}, {"name": "http", "port": port}]}
        self._tell(kind, self._slices[name])

    def delete(self, name: str) -> None:
        self._tell("DELETED", self._slices.pop(name))

    def forget(self) -> None:
        """Compact the log: older numbers are answered 410."""
        self._log.clear()
        self._oldest = self._version

    def cut(self) -> None:
        """End every watch."""
        self._cut.set()
        self._cut = asyncio.Event()

    def say(self, kind: str, thing: dict[str, Any]) -> None:
        """An event of another kind in every watch: BOOKMARK, ERROR."""
        self._version += 1
        self._log.append((self._version, {"type": kind, "object": thing}))
        self._wake()

    def _tell(self, kind: str, thing: dict[str, Any]) -> None:
        self._version += 1
        if self.mute:
            return
        stamped = {**thing, "metadata": {**thing["metadata"], "resourceVersion": str(self._version)}}
        self._log.append((self._version, {"type": kind, "object": stamped}))
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if self.down:
            return web.Response(status=503)
        if self.garbage:
            return web.Response(body=self.garbage)
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            return web.Response(status=401)
        services = request.query["labelSelector"].partition("(")[2].rstrip(")").split(",")
        if request.query.get("watch") == "1":
            return await self._watch(request, services)
        begin = int(request.query.get("continue", 0))
        self.lists += begin == 0
        fit = [each for each in self._slices.values() if each["metadata"]["labels"][SERVICE] in services]
        size = min(self.page, int(request.query["limit"]))
        meta = {"resourceVersion": str(self._version)}
        if begin + size < len(fit):
            meta["continue"] = str(begin + size)
        return web.json_response({"metadata": meta, "items": fit[begin : begin + size]})

    async def _watch(self, request: web.Request, services: list[str]) -> web.StreamResponse:
        since = int(request.query["resourceVersion"])
        if since < self._oldest:
            return web.json_response({"kind": "Status", "code": 410}, status=410)
        response = web.StreamResponse()
        await response.prepare(request)
        self.watches += 1
        cut = asyncio.create_task(self._cut.wait())
        ends_s = asyncio.get_running_loop().time() + float(request.query["timeoutSeconds"])
        try:
            while not cut.done() and (left_s := ends_s - asyncio.get_running_loop().time()) > 0:
                changed = self._changed
                for version, event in self._log:
                    labels = event["object"].get("metadata", {}).get("labels", {})
                    if version > since and labels.get(SERVICE, services[0]) in services:
                        data = json.dumps(event).encode() + b"\n"
                        await response.write(data[:7])  # an event does not come in one piece
                        await response.write(data[7:])
                since = self._version
                woken = asyncio.create_task(changed.wait())
                await asyncio.wait([cut, woken], timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                woken.cancel()
        finally:
            cut.cancel()
        return response
