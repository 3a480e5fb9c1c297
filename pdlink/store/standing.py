"""`Standing`: what operators have set, in a file that outlives the process: pins, and quotas of memory.

Each is a line of JSON. The file is written anew with each change and takes the place of the one before, so a crash
leaves one of both. A pin names its records by their keys, which say nothing of the prompt; what it stands for after a
restart is what the disk has. Lines that cannot be right are left out, and told.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Collection
from contextlib import closing
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from pdlink import threads
from pdlink.errors import ConfigError
from pdlink.kv.hashing import KEY_NBYTES
from pdlink.store.record import RecordShape  # noqa: TC001  (msgspec reads the annotation at run time)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

log = logging.getLogger(__name__)

_MOST_NBYTES = 16 << 20
"""Of the file: some 350,000 records."""
_START_S = 1.0
"""For the file to be read at the start; a disk that takes longer, or hangs, holds nothing up."""

_Key = Annotated[bytes, Meta(min_length=KEY_NBYTES, max_length=KEY_NBYTES)]


class StandingPin(msgspec.Struct, frozen=True, tag="pin", forbid_unknown_fields=True):
    name: Annotated[str, Meta(min_length=1, max_length=128)]
    shape: RecordShape
    keys: Annotated[tuple[_Key, ...], Meta(min_length=1)]
    """Of the records of one prefix, in order."""

    @property
    def nbytes(self) -> int:
        return self.shape.nbytes * len(self.keys)

    def begins(self, other: StandingPin) -> bool:
        """Whether the other one has all that this one has."""
        same = (self.name, self.shape) == (other.name, other.shape)
        return same and other.keys[: len(self.keys)] == self.keys


class StandingQuota(msgspec.Struct, frozen=True, tag="quota", forbid_unknown_fields=True):
    tenant: Annotated[str, Meta(max_length=64)]
    """As of `Retention`; empty for all that have none of their own."""
    nbytes: Annotated[int, Meta(ge=0, le=2**63 - 1)]


_decoder = msgspec.json.Decoder(StandingPin | StandingQuota)


class Standing:
    """Thread-safe. Without a path nothing outlives the process."""

    def __init__(self, path: Path | None = None, most_nbytes: int = 0) -> None:
        """most_nbytes: of the records that pins name; the disk drops none of them."""
        self._path, self._most_nbytes = path, most_nbytes
        self._lock = threading.Lock()
        self.pins: tuple[StandingPin, ...] = ()
        self.quotas: tuple[StandingQuota, ...] = ()
        self.keys: frozenset[bytes] = frozenset()
        """That pins name."""
        self.ready = threading.Event()
        """The file was read."""
        self._late: list[Callable[[], object]] = []
        """What is done then."""
        if path is None:
            self.ready.set()
        else:
            threads.guarded("pdlink-store-standing", partial(self._read, path), lambda _: self.ready.set()).start()
            self.ready.wait(_START_S)

    def _read(self, path: Path) -> None:
        pins, quotas = _read(path)
        with self._lock:
            self._take(pins, quotas)
            self.ready.set()
        if pins or quotas:
            log.info("%s: %d pins and %d quotas that operators have set", path, len(pins), len(quotas))
        for act in self._late:
            act()

    def pin(self, name: str, shape: RecordShape, keys: Sequence[bytes]) -> bool:
        """Whether the next process pins them, too."""
        if not keys:
            return False
        mine = StandingPin(name, shape, tuple(keys))
        with self._lock:
            if any(mine.begins(each) for each in self.pins):
                return True
            return self._set((*(each for each in self.pins if not each.begins(mine)), mine), self.quotas)

    def unpin(self, name: str) -> None:
        with self._lock:
            if not self.ready.is_set():
                self._late.append(partial(self.unpin, name))
            self._set(tuple(each for each in self.pins if each.name != name), self.quotas)

    def quota(self, tenant: str, nbytes: int | None) -> bool:
        """None: that of all again. Whether the next process has it, too."""
        with self._lock:
            others = tuple(each for each in self.quotas if each.tenant != tenant)
            mine = () if nbytes is None else (StandingQuota(tenant, nbytes),)
            return self._set(self.pins, (*others, *mine))

    def forget(self, keys: Collection[bytes] | None) -> None:
        """These records, or all, were cleared: a pin ends where the first of them was."""
        with self._lock:
            if not self.ready.is_set():
                self._late.append(partial(self.forget, keys))
            gone = self.keys if keys is None else self.keys.intersection(keys)
            if gone:
                cut = (_before(each, gone) for each in self.pins)
                self._set(tuple(each for each in cut if each is not None), self.quotas)

    def _set(self, pins: tuple[StandingPin, ...], quotas: tuple[StandingQuota, ...]) -> bool:
        """Have these stand from now on; whether they do. Under the lock. Nothing before the file was read."""
        if not self.ready.is_set():
            return False
        if (pins, quotas) == (self.pins, self.quotas):
            return self._path is not None
        if self._path is None or sum(each.nbytes for each in pins) > self._most_nbytes:
            return False
        text = b"".join(msgspec.json.encode(each) + b"\n" for each in chain(quotas, pins))
        if len(text) > _MOST_NBYTES:
            return False
        try:
            _write(self._path, text)
        except OSError as error:
            log.warning("%s cannot be written (%s): a restart finds the pins and quotas of before", self._path, error)
            return False
        self._take(pins, quotas)
        return True

    def _take(self, pins: tuple[StandingPin, ...], quotas: tuple[StandingQuota, ...]) -> None:
        self.pins, self.quotas = pins, quotas
        self.keys = frozenset(key for each in pins for key in each.keys)


class KeptBelow(Collection[bytes]):
    """Keys of the records that a disk keeps: of sessions, and of standing pins."""

    def __init__(self, sessions: Collection[bytes], standing: Standing) -> None:
        self._sessions, self._standing = sessions, standing

    def __contains__(self, key: object) -> bool:
        return key in self._sessions or key in self._standing.keys

    def __len__(self) -> int:
        """Of both, added."""
        return len(self._sessions) + len(self._standing.keys)

    def __iter__(self) -> Iterator[bytes]:
        return chain(list(self._sessions), self._standing.keys)


def _before(pin: StandingPin, gone: Collection[bytes]) -> StandingPin | None:
    """What is left of it; None for nothing."""
    end = next((index for index, key in enumerate(pin.keys) if key in gone), len(pin.keys))
    return msgspec.structs.replace(pin, keys=pin.keys[:end]) if end else None


def _write(path: Path, text: bytes) -> None:
    """It is on the disk when this returns. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    fresh.rename(path)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _read(path: Path) -> tuple[tuple[StandingPin, ...], tuple[StandingQuota, ...]]:
    try:
        with closing(path.open("rb")) as file:
            text = file.read(_MOST_NBYTES)
    except FileNotFoundError:
        return (), ()
    except OSError as error:
        log.warning("%s cannot be read (%s): pins and quotas of before are not there", path, error)
        return (), ()
    pins, quotas = list[StandingPin](), dict[str, StandingQuota]()
    for number, line in enumerate(text.splitlines(), 1):
        try:
            found = _decoder.decode(line)
            if isinstance(found, StandingPin):
                found.shape.check()
                pins.append(found)
            else:
                quotas[found.tenant] = found
        except (msgspec.MsgspecError, UnicodeDecodeError, ConfigError) as error:
            log.warning("%s, line %d is left out: %s; pin again, or set the quota again", path, number, error)
    return tuple(pins), tuple(quotas.values())
