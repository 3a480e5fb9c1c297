"""What every test may use."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("long", settings.get_profile("default"))
"""`--hypothesis-profile=long`: other examples each time, and many more, where a test has a use for them."""


@pytest.fixture
def steady_descriptors() -> Iterator[None]:
    """For tests that count descriptors: what earlier tests left is collected before, and not in the middle."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
