"""Fixtures of the proxy's tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from tests.proxy.fakes import FakeWorker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest_asyncio.fixture
async def prefills() -> AsyncIterator[list[FakeWorker]]:
    """Two healthy prefill workers."""
    async for workers in _started("prefill"):
        yield workers


@pytest_asyncio.fixture
async def decodes() -> AsyncIterator[list[FakeWorker]]:
    """Two healthy decode workers."""
    async for workers in _started("decode"):
        yield workers


@pytest.fixture
def prefill(prefills: list[FakeWorker]) -> FakeWorker:
    return prefills[0]


@pytest.fixture
def decode(decodes: list[FakeWorker]) -> FakeWorker:
    return decodes[0]


async def _started(role: str) -> AsyncIterator[list[FakeWorker]]:
    workers = [await FakeWorker(role).start() for _ in range(2)]
    yield workers
    for worker in workers:
        await worker.stop()
