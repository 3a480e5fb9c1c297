"""A whole worker in this process, without HTTP."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from pdlink.config import CacheConfig, ModelConfig, TransportConfig, WorkerConfig
from pdlink.engine.request import SamplingParams
from pdlink.serve.worker import Worker
from pdlink.transport.mapped import MappedTransport

if TYPE_CHECKING:
    import pytest


def test_transports_hear_when_a_prefill_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[bool] = []
    monkeypatch.setattr(MappedTransport, "computing", lambda _transport, on: said.append(on))
    config = WorkerConfig(
        model=ModelConfig(num_layers=1),
        cache=CacheConfig(num_blocks=8),
        transport=TransportConfig(kind="mapped"),
    )
    with contextlib.closing(Worker(config, "alone")) as worker:
        worker.open()

        async def tokens() -> int:
            sampling = SamplingParams(max_tokens=3, ignore_eos=True)
            return len([token async for token in worker.start("r", (1, 2, 3), sampling, None)])

        assert asyncio.run(tokens()) == 3
    assert said == [True, False]
