"""Fixtures of the incidents."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.endpoint.conftest import Pair


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()
