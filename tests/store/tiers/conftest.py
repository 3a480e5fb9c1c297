"""What the tests of tiers share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .server import valkey_server


@pytest.fixture(scope="session", autouse=True)
def end_of_the_server() -> Iterator[None]:
    yield
    if valkey_server.cache_info().currsize:
        valkey_server().close()
