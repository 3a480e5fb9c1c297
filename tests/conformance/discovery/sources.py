"""The sources of workers that the suite runs over, each before something that lists workers as a test says."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from typing import TYPE_CHECKING, Any

from pdlink_proxy.dialects import DIALECTS
from pdlink_proxy.discovery.dns import DnsSource
from pdlink_proxy.discovery.file import FileSource
from pdlink_proxy.discovery.joined import Discovery, _Told
from pdlink_proxy.discovery.kubernetes import KubernetesSource
from tests.proxy.kubernetes_server import ApiServer, endpoint

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
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


class World:
    """A source, and what is behind it while this is entered. Workers have numbers."""

    source: WorkerSource

    def __init__(self, folder: Path) -> None:
        """folder: for its files."""
        raise NotImplementedError

    async def __aenter__(self) -> World:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    def url(self, number: int) -> str:
        return f"http://10.0.0.{number}:80"

    def put(self, role: str, number: int) -> None:
        raise NotImplementedError

    def remove(self, role: str, number: int) -> None:
        raise NotImplementedError

    def go_down(self) -> None:
        raise NotImplementedError

    def come_back(self) -> None:
        raise NotImplementedError


class Directory(World):
    """`file:` with a file for each worker."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "workers"
        self._path.mkdir()
        self._away = folder / "away"
        self._now = self._path
        self.source = FileSource(str(self._path), DIALECTS["pdlink"], look_s=LOOK_S)

    def put(self, role: str, number: int) -> None:
        write(self._now, str(number), role=role, url=self.url(number))

    def remove(self, role: str, number: int) -> None:
        (self._now / f"{number}.json").unlink()

    def go_down(self) -> None:
        self._now = self._path.rename(self._away)

    def come_back(self) -> None:
        self._now = self._away.rename(self._path)


class OneFile(World):
    """`file:` with one file for all."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "workers.json"
        self._listed: dict[str, list[str]] = {"prefill": [], "decode": []}
        self._down = False
        self.source = FileSource(str(self._path), DIALECTS["pdlink"], look_s=LOOK_S)

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


class Names(World):
    """`dns:`."""

    def __init__(self, _folder: Path) -> None:
        self._addresses: dict[str, list[str]] = {"prefill": [], "decode": []}
        self._down = False
        self.source = DnsSource("prefill=prefill:80,decode=decode:80", resolve=self._resolve, ask_s=LOOK_S)

    async def _resolve(self, host: str, _port: int) -> list[str]:
        if self._down:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return self._addresses[host]

    def put(self, role: str, number: int) -> None:
        self._addresses[role].append(f"10.0.0.{number}")

    def remove(self, role: str, number: int) -> None:
        self._addresses[role].remove(f"10.0.0.{number}")

    def go_down(self) -> None:
        self._down = True

    def come_back(self) -> None:
        self._down = False


class Kubernetes(World):
    """`kubernetes:`."""

    def __init__(self, folder: Path) -> None:
        self._api, self._account = ApiServer(), folder

    async def __aenter__(self) -> World:
        (self._account / "token").write_text(f"{self._api.token}\n")
        (self._account / "namespace").write_text("ns")
        api = await self._api.__aenter__()
        text = "prefill=prefill,decode=decode,port=http"
        self.source = KubernetesSource(text, api=api.url, account=self._account)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._api.__aexit__()

    def put(self, role: str, number: int) -> None:
        self._api.put(f"slice-{number}", role, endpoint(f"10.0.0.{number}"), port=80)

    def remove(self, role: str, number: int) -> None:
        self._api.delete(f"slice-{number}")

    def go_down(self) -> None:
        self._api.down = True
        self._api.cut()

    def come_back(self) -> None:
        self._api.down = False


WORLDS: dict[str, type[World]] = {
    "directory": Directory,
    "one file": OneFile,
    "dns": Names,
    "kubernetes": Kubernetes,
}
"""A new source joins by one more entry."""
