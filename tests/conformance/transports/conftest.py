"""Fixtures of the suite: each test runs once per entry, or is skipped for the reason its probe gives."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest

from tests.conformance.transports.entries import ENTRIES, Entry
from tests.conformance.transports.other_process import OtherProcess
from tests.conformance.transports.side import Side

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(params=[pytest.param(one.name, marks=[pytest.mark.gpu] * one.on_gpu) for one in ENTRIES.values()])
def entry(request: pytest.FixtureRequest) -> Entry:
    entry = ENTRIES[request.param]
    probe = entry.probe()
    if not probe.ok:
        pytest.skip(probe.reason)
    return entry


@pytest.fixture
def make_side(entry: Entry) -> Iterator[Callable[[], Side]]:
    """Makes sides in this process that can reach each other; they are closed at the end."""
    make = entry.group()
    with contextlib.ExitStack() as stack:

        def make_one() -> Side:
            side = entry.side(make)
            stack.callback(side.close)
            return side

        yield make_one


@pytest.fixture
def other(entry: Entry) -> Iterator[OtherProcess]:
    """A side in a second process."""
    if not entry.between_processes:
        pytest.skip(f"{entry.name} works inside one process")
    process = OtherProcess(entry.name)
    yield process
    process.end()
