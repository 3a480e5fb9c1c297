"""The suite of `AnyStore`: each test runs over a store of this process, and over one that clients reach."""

from __future__ import annotations

import itertools
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from pdlink.store import wire
from pdlink.store.client import RemoteStore
from tests.store import test_store
from tests.store.process import client, served

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from pdlink.store.interface import AnyStore
    from pdlink.store.store import Store

    Reach = Callable[..., AbstractContextManager["Reached"]]

_pings = itertools.count(1 << 40)
"""Calls that no client makes, one for each ping: a second thread's would take the answer of the first one."""


class Reached(NamedTuple):
    store: Store
    """Where the records are."""
    mine: AnyStore
    other: AnyStore
    """Somebody else's way to it."""


@pytest.fixture(params=["store", "client"])
def reach(request: pytest.FixtureRequest, tmp_path: Any) -> Reach:
    """Makes a store, as `served`, and two ways to it."""

    @contextmanager
    def reached(*args: Any, **kwargs: Any) -> Iterator[Reached]:
        with ExitStack() as ends:
            store, listener = ends.enter_context(served(tmp_path, *args, **kwargs))
            if request.param == "store":
                yield Reached(store, store, store)
            else:
                yield Reached(store, *(ends.enter_context(client(listener.path)) for _ in range(2)))

    return reached


def put(store: AnyStore, keys: Sequence[bytes]) -> int:
    """Put records, and wait until the store has heard it."""
    count = test_store.put(store, keys)
    heard(store)
    return count


def heard(store: AnyStore) -> None:
    """Wait until the store has done what it was told: this call has an answer, and a commit has none."""
    if isinstance(store, RemoteStore) and store._link is not None:
        store._link.ask(wire.Ping(next(_pings)), wire.Count)


def disturb(store: AnyStore) -> None:
    """Lose the connection, if there is one."""
    if isinstance(store, RemoteStore) and store._link is not None:
        store._link.lose("test")
