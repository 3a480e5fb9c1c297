"""What every test may use."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture
def steady_descriptors() -> Iterator[None]:
    """For tests that count descriptors: what earlier tests left is collected before, and not in the middle."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
