"""The pair of workers that several files talk to, one for each file."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from .pair import Script, WorkerPair, scripted

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def script() -> Iterator[Script]:
    with scripted() as script:
        yield script


@pytest.fixture(scope="module")
def pair(script: Script) -> Iterator[WorkerPair]:
    with WorkerPair(script) as pair:
        yield pair
