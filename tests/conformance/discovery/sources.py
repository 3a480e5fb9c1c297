"""The sources of workers that the suite runs over, each before something that lists workers as a test says."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from typing import TYPE_CHECKING, Any, Protocol

from pdlink_proxy.dialects import DIALECTS
from pdlink_proxy.discovery.dns import DnsSource
from pdlink_proxy.discovery.file import FileSource
from pdlink_proxy.discovery.joined import Discovery, _Told
from pdlink_proxy.discovery.kubernetes import KubernetesSource
from tests.proxy.kubernetes_server import ApiServer, endpoint

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from pdlink_proxy.discovery.base import WorkerSource
    from pdlink_proxy.members import Members

LOOK_S = 0.01


class Seen:
    """A discovery of one source, and what the pools were told."""

    def __init__(self, source: WorkerSource) -> None:
        self.lists: list[Members] = []
        self.discovery = Discovery({"it": _Told(source)}, self.lists.append, pause_s=0.01)

    @property
    def urls(self) -> list[str]:
        return [each.url for each in (*self.lists[-1].prefill, *self.lists[-1].decode)] if self.lists else []

    @property
    def stale(self) -> bool:
        return bool(self.discovery.describe()["it"]["stale"])


@contextlib.asynccontextmanager
async def followed(source: WorkerSource) -> AsyncIterator[Seen]:
    seen = Seen(source)
    task = asyncio.create_task(seen.discovery.follow("it"))
    try:
        yield seen
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled(), task


def write(directory: Path, name: str, **worker: Any) -> None:
    hidden = directory / f".{name}"
    hidden.write_text(json.dumps(worker))
    hidden.rename(directory / f"{name}.json")


class World(Protocol):
    """A source, and what is behind it. Workers have numbers."""

    source: WorkerSource

    def url(self, number: int) -> str: ...
    def put(self, role: str, number: int) -> None: ...
    def remove(self, role: str, number: int) -> None: ...
    def go_down(self) -> None: ...
    def come_back(self) -> None: ...


class Directory:
    """`file:` with a file for each worker."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "workers"
        self._path.mkdir()
        self._away = folder / "away"
        self._now = self._path
        self.source: WorkerSource = FileSource(str(self._path), DIALECTS["pdlink"], look_s=LOOK_S)

    def url(self, number: int) -> str:
        return f"http://w{number}:1"

    def put(self, role: str, number: int) -> None:
        write(self._now, str(number), role=role, url=self.url(number))

    def remove(self, role: str, number: int) -> None:
        (self._now / f"{number}.json").unlink()

    def go_down(self) -> None:
        self._now = self._path.rename(self._away)

    def come_back(self) -> None:
        self._now = self._away.rename(self._path)


class OneFile:
    """`file:` with one file for all."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "workers.json"
        self._listed: dict[str, list[str]] = {"prefill": [], "decode": []}
        self._down = False
        self.source: WorkerSource = FileSource(str(self._path), DIALECTS["pdlink"], look_s=LOOK_S)

    def url(self, number: int) -> str:
        return f"http://w{number}:1"

    def put(self, role: str, number: int) -> None:
        self._listed[role].append(self.url(number))
        self._write()

    def remove(self, role: str, number: int) -> None:
        self._listed[role].remove(self.url(number))
        self._write()

    def _write(self) -> None:
        if not self._down:
            hidden = self._path.with_suffix(".new")
            hidden.write_text(json.dumps(self._listed))
            hidden.rename(self._path)

    def go_down(self) -> None:
        self._down = True
        self._path.unlink()

    def come_back(self) -> None:
        self._down = False
        self._write()


class Names:
    """`dns:`."""

    def __init__(self) -> None:
        self._addresses: dict[str, list[str]] = {"prefill": [], "decode": []}
        self._down = False
        self.source: WorkerSource = DnsSource(
            "prefill=prefill:80,decode=decode:80", resolve=self._resolve, ask_s=LOOK_S
        )

    async def _resolve(self, host: str, _port: int) -> list[str]:
        if self._down:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return self._addresses[host]

    def url(self, number: int) -> str:
        return f"http://10.0.0.{number}:80"

    def put(self, role: str, number: int) -> None:
        self._addresses[role].append(f"10.0.0.{number}")

    def remove(self, role: str, number: int) -> None:
        self._addresses[role].remove(f"10.0.0.{number}")

    def go_down(self) -> None:
        self._down = True

    def come_back(self) -> None:
        self._down = False


class Kubernetes:
    """`kubernetes:`."""

    def __init__(self, api: ApiServer, account: Path) -> None:
        (account / "token").write_text(f"{api.token}\n")
        (account / "namespace").write_text("ns")
        self._api = api
        text = "prefill=prefill,decode=decode,port=http"
        self.source: WorkerSource = KubernetesSource(text, api=api.url, account=account)

    def url(self, number: int) -> str:
        return f"http://10.0.0.{number}:8000"

    def put(self, role: str, number: int) -> None:
        self._api.put(f"slice-{number}", role, endpoint(f"10.0.0.{number}"))

    def remove(self, role: str, number: int) -> None:
        self._api.delete(f"slice-{number}")

    def go_down(self) -> None:
        self._api.down = True
        self._api.cut()

    def come_back(self) -> None:
        self._api.down = False


@contextlib.asynccontextmanager
async def _kubernetes(folder: Path) -> AsyncIterator[World]:
    async with ApiServer() as api:
        yield Kubernetes(api, folder)


@contextlib.asynccontextmanager
async def _directory(folder: Path) -> AsyncIterator[World]:
    yield Directory(folder)


@contextlib.asynccontextmanager
async def _one_file(folder: Path) -> AsyncIterator[World]:
    yield OneFile(folder)


@contextlib.asynccontextmanager
async def _names(_folder: Path) -> AsyncIterator[World]:
    yield Names()


WORLDS: dict[str, Callable[[Path], AbstractAsyncContextManager[World]]] = {
    "directory": _directory,
    "one file": _one_file,
    "dns": _names,
    "kubernetes": _kubernetes,
}
"""A new source joins by one more entry."""
