"""A store process for tests, and a second one in this process whose clock the test holds."""

from __future__ import annotations

import os
import signal
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pdlink.config import StoreConfig
from pdlink.fleet.child import Child, start, stop
from pdlink.store.client import RemoteStore
from pdlink.store.eviction import Lru
from pdlink.store.server.listener import Listener
from pdlink.store.store import Store
from tests.other_process import suspend
from tests.waiting import WAIT_S

from .stubs import SHAPE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from pdlink.store.interface import AnyStore
    from pdlink.store.tiers.base import Tier


class Process:
    """`pdlink store`, killed and started again."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        self.path = directory / "socket" / "store"
        given = {"socket": str(self.path), **settings}
        self._settings = StoreConfig.model_validate(given).model_dump(mode="json")
        self.start()

    def start(self) -> None:
        self.child: Child = start("store", "store", self._settings)
        try:
            self.child.wait_ready()
        except BaseException:
            self.kill()
            raise

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.child.process.pid, number)

    def suspend(self) -> None:
        suspend(self.child.process.pid)

    def kill(self) -> None:
        self.child.kill()
        self.child.close()

    def close(self) -> None:
        if self.child.process.poll() is None:
            self.signal(signal.SIGCONT)
        stop([self.child], WAIT_S)


@contextmanager
def process(directory: Path, **settings: Any) -> Iterator[Process]:
    found = Process(directory, **settings)
    try:
        yield found
    finally:
        found.close()


@contextmanager
def client(path: Path | str, name: str = "test", timeout_s: float = WAIT_S) -> Iterator[RemoteStore]:
    found = RemoteStore(str(path), name=name, timeout_s=timeout_s)
    found.open()
    try:
        yield found
    finally:
        found.close()


@contextmanager
def served(
    directory: Path,
    records: int = 4,
    tiers: Sequence[Tier] = (),
    *,
    clock: Callable[[], float] = time.monotonic,
    lease_s: float = 1000.0,
) -> Iterator[tuple[Store, Listener]]:
    """A store with a listener, in this process."""
    store = Store(
        records * SHAPE.nbytes,
        Lru(),
        tiers,
        tier_deadline_s=WAIT_S,
        lease_s=lease_s,
        clock=clock,
        pin_quota_nbytes=2 * SHAPE.nbytes,
    )
    store.open()
    listener = Listener(store, directory / "socket" / "store")
    listener.open()
    try:
        yield store, listener
        store.check()
    finally:
        listener.close()
        store.close()


def everything_is_free(store: AnyStore, records: int) -> bool:
    """Whether nobody writes or leases: the arena takes as many new records as it has room for."""
    keys = [os.urandom(32) for _ in range(records)]
    slots = store.reserve(keys, SHAPE)
    store.abandon(slots)
    return len(slots) == records
