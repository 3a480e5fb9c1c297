"""Stores of this process and of others that a test makes, and ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from .store_node import StoreNode

MakeNode = Callable[..., StoreNode]


@pytest.fixture
def ends() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def make_node(ends: ExitStack) -> MakeNode:
    def make(name: str, *peers: str, **more: object) -> StoreNode:
        node = StoreNode(name, peers, **more)  # type: ignore[arg-type]
        ends.callback(node.close)
        return node

    return make
