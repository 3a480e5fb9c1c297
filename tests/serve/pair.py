"""A prefill and a decode worker with their HTTP in this process, and an engine that says what a test tells it to."""

from __future__ import annotations

import asyncio
import itertools
import threading
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from pdlink.config import CacheConfig, ModelConfig, TransportConfig, WorkerConfig
from pdlink.engine import engine as engine_module
from pdlink.serve.app import build_app
from pdlink.serve.worker import Worker
from tests.waiting import WAIT_S

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator, Mapping, Sequence
    from typing import Self, TypeVar

    import torch

    from pdlink.engine.request import SamplingParams

    T = TypeVar("T")

MODEL = "pdlink-tiny"


@dataclass(frozen=True)
class Reply:
    status: int
    body: bytes
    headers: Mapping[str, str]

    @property
    def events(self) -> list[bytes]:
        return [event + b"\n\n" for event in self.body.split(b"\n\n")[:-1]]


@dataclass
class Script:
    """The tokens that both engines choose for a request, by its seed: what is compared is text, not the model."""

    answers: dict[int, Sequence[int]] = field(default_factory=dict)
    allowed: dict[int, threading.Event] = field(default_factory=dict)
    """The engine waits for it before it chooses the first token of this seed."""
    chosen: dict[int, threading.Event] = field(default_factory=dict)
    """Set when a token of this seed is chosen."""
    numbers: itertools.count[int] = field(default_factory=itertools.count)

    def choose(self, _logits: torch.Tensor, sampling: SamplingParams, index: int) -> int:
        if sampling.seed in self.chosen:
            self.chosen[sampling.seed].set()
        if index == 0 and sampling.seed in self.allowed:
            assert self.allowed[sampling.seed].wait(WAIT_S)
        return self.answers[sampling.seed][index]


@contextmanager
def scripted() -> Iterator[Script]:
    """For all engines of this process."""
    script = Script()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "choose", script.choose)
        yield script


class WorkerPair:
    """Both workers open; an own asyncio loop, in which `run` does what it is given."""

    def __init__(self, script: Script, *, decode: Mapping[str, Any] | None = None, **more: Any) -> None:
        """more: settings of both workers; decode: of the decode worker."""
        self.script = script
        settings: dict[str, Any] = {
            "model": ModelConfig(num_layers=1, max_tokens=1024),
            "cache": CacheConfig(num_blocks=64),
            "transport": TransportConfig(kind="tcp"),
            **more,
        }
        self.prefill = Worker(WorkerConfig(role="prefill", **settings), "prefill")
        self.decode = Worker(WorkerConfig(role="decode", **(settings | dict(decode or {}))), "decode")

    def __enter__(self) -> Self:
        self._runner = asyncio.Runner()
        self._stack = AsyncExitStack()
        self.prefill.open()
        self.decode.open()
        self.http = {role: self.run(self._serve(getattr(self, role))) for role in ("prefill", "decode")}
        return self

    async def _serve(self, worker: Worker) -> TestClient[Any, Any]:
        app = build_app(worker)
        return await self._stack.enter_async_context(TestClient(TestServer(app)))

    def __exit__(self, *_: object) -> None:
        self.run(self._stack.aclose())
        self._runner.close()
        self.decode.close()
        self.prefill.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    def number(self) -> int:
        """A new one: for seeds, salts and transfer ids."""
        return next(self.script.numbers)

    async def post(self, role: str, path: str, body: object, headers: Mapping[str, str] | None = None) -> Reply:
        async with asyncio.timeout(WAIT_S), self.http[role].post(path, json=body, headers=headers) as response:
            return Reply(response.status, await response.read(), response.headers)

    def body(self, seed: int, **fields: Any) -> dict[str, Any]:
        """A request whose KV is nowhere yet."""
        return {"model": MODEL, "seed": seed, "cache_salt": f"{self.number()}", **fields}

    def leg(self, role: str, transfer_id: str, body: dict[str, Any], control: str | None = None) -> dict[str, Any]:
        """The body that a proxy makes of a client's for one leg. control: prefill's address, if not the pair's."""
        params: dict[str, Any] = {"transfer_id": transfer_id, "leg": role, "seed": 1, "created": 1}
        if role == "decode":
            params["prefill"] = {"name": "prefill", "control": control or self.prefill.node.address}
        return {**body, "kv_transfer_params": params}

    async def both(self, path: str, body: dict[str, Any]) -> tuple[Reply, Reply]:
        """Both legs of one request at once: prefill's answer and decode's."""
        transfer_id = f"t-{self.number()}"
        prefill, decode = await asyncio.gather(
            self.post("prefill", path, self.leg("prefill", transfer_id, body)),
            self.post("decode", path, self.leg("decode", transfer_id, body)),
        )
        return prefill, decode
