"""The test double of the driver, which every test must leave as it found it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pdlink import _cuda
from pdlink.cuda.driver import Device
from tests.cuda.fake import COMPILER, IMAGE, Fake, fake


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    if COMPILER is None:
        pytest.skip("no C++ compiler for the test double of the driver")
    if not _cuda.fatbin():  # a build without nvcc, as the sanitizers' is: nodes that name no image get one, too
        monkeypatch.setattr(_cuda, "fatbin", lambda: IMAGE)
    fake().take_log()
    fake().take_faults()
    before = fake().counts()
    yield fake()
    assert fake().take_faults() == []
    assert fake().counts() == before, "something was not given back"


@pytest.fixture
def device(double: Fake) -> Iterator[Device]:
    """Open; what a test makes on it, it closes."""
    device = Device(0, double.path)
    device.open()
    yield device
    device.close()
