"""What every test may use."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator
from tempfile import TemporaryDirectory

import pytest
from hypothesis import settings

from pdlink.fleet import child

from .nursery import NURSERY
from .store.tiers.server import valkey_server

settings.register_profile("long", settings.get_profile("default"), deadline=None)
"""`--hypothesis-profile=long`: other examples each time, and many more, where a test has a use for them."""

settings.register_profile("usual", settings.get_profile("default"), deadline=None)
settings.load_profile("usual")
"""An example has no deadline: how long one takes on a machine that others use, too, says nothing."""


# A shell's background job ignores Ctrl-C, and so would all children of such a run, also one that a test interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

_spawn = child.spawn


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--pictures", metavar="DIR", help="keep what browsers were shown here; else it is thrown away")
    parser.addoption("--kills", type=int, default=4, metavar="N", help="of stores that others pull from (4)")


def pytest_collection_finish() -> None:
    """What collecting has made stays until the end: no `gc.collect` of a test has to look at it."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or nanobind would tell of what is still there when the interpreter ends


@pytest.fixture
def real_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children of this test are new processes, and nobody's forks."""
    monkeypatch.setattr(child, "spawn", _spawn)


@pytest.fixture(scope="session", autouse=True)
def nursery() -> Iterator[None]:
    """Deployments of the tests start within a second a process, and note what they clear in no user's home."""
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as home:
        patch.setattr(child, "spawn", NURSERY.spawn)
        patch.setenv("XDG_STATE_HOME", home)
        yield
    NURSERY.close()


@pytest.fixture(scope="session", autouse=True)
def end_of_the_valkey_server() -> Iterator[None]:
    yield
    if valkey_server.cache_info().currsize:
        valkey_server().close()


@pytest.fixture
def steady_descriptors() -> Iterator[None]:
    """For tests that count descriptors: what earlier tests left is collected before, and not in the middle."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
