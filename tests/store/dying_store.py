"""A store with a disk in a process of its own, which kills itself (SIGKILL) in the middle of what a test names."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdlink.config import TiersConfig
from pdlink.store.below import GuardedTier
from pdlink.store.opening import make_store
from pdlink.store.server.listener import Listener
from pdlink.store.tiers.files import DirectFile
from tests import other_process

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdlink.store.store import Store


def store_in(directory: Path) -> Store:
    """Open, over the disk that all its lives share."""
    config = TiersConfig(max_local_cpu_size=0.001, local_disk=str(directory / "disk"), max_local_disk_size=0.01)
    store = make_store(config, "store")
    store.open()
    return store


class DyingStore(other_process.OtherProcess):
    def __init__(self, directory: Path) -> None:
        super().__init__(__name__, str(directory))
        self.path = directory / "socket" / "store"
        self.call("ready")

    def ended(self) -> bool:
        """It has killed itself."""
        return self.process.wait(other_process.PATIENCE_S) == -signal.SIGKILL


class _Dying:
    def ready(self) -> bool:
        return True

    def die_in_write(self, number: int) -> None:
        """Of the disk's records, a run of them, once half of the call's bytes are written."""
        right, left = DirectFile.write_run, number

        def write(self: DirectFile, offset: int, run: Sequence[memoryview]) -> None:
            nonlocal left
            left -= 1
            if left:
                right(self, offset, run)
            else:
                os.pwritev(self.fd, _half(run), offset)
                _die()

        DirectFile.write_run = write  # type: ignore[method-assign]

    def die_in_read(self, number: int) -> None:
        """Of the disk's records, a run of them, once the call has filled half of its memory, which is the arena's."""
        right, left = DirectFile.read_run, number

        def read(self: DirectFile, offset: int, run: Sequence[memoryview]) -> bool:
            nonlocal left
            left -= 1
            if left:
                return right(self, offset, run)
            os.preadv(self.fd, _half(run), offset)
            _die()
            return False

        DirectFile.read_run = read  # type: ignore[method-assign]

    def die_before_removing(self) -> None:
        """After a clear is noted, and before the disk forgets."""

        def drop(*_: Any) -> None:
            _die()

        GuardedTier._drop = drop  # type: ignore[assignment, method-assign]


def _half(run: Sequence[memoryview]) -> list[memoryview]:
    middle = run[len(run) // 2]
    return [*run[: len(run) // 2], middle[: len(middle) // 2]]


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def serve(arguments: list[str]) -> None:
    directory = Path(arguments[0])
    store = store_in(directory)
    listener = Listener(store, directory / "socket" / "store")
    listener.open()
    other_process.answer_calls(_Dying())
    listener.close()
    store.close()
