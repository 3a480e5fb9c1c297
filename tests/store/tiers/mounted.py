"""What a store does on file systems that are small, fail or freeze: programs for a process that may mount them.

unshare --user --map-root-user --mount python -m tests.store.tiers.mounted SCENARIO DIRECTORY
"""

from __future__ import annotations

import fcntl
import os
import random
import signal
import struct
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pdlink.store import below, late
from pdlink.store.eviction import Lru
from pdlink.store.record import HEADER_NBYTES, Group, RecordShape
from pdlink.store.store import Store
from pdlink.store.tiers.striped import Striped
from tests.waiting import WAIT_S, until

from .fuse import mount, mount_at

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SHAPE = RecordShape("uint8", 16, (Group("latent", (0,), 1, 1, 4096),))
"""64 KiB and a header."""
KEYS = [number.to_bytes(32, "big") for number in range(100)]
"""6.6 MiB of records, which memory has room for, and a file system of 4 MiB has not."""
_SHORT_S = 0.5
"""Patience with a file system that is frozen. One that answers has all the time that tests wait."""
CANNOT_MOUNT = 77
"""Exit status where this machine does not let the process mount that file system."""
_REMOUNT = 32
_SHUT_DOWN = 0x8004587D
"""ioctl of ext4: everything fails from now on."""


class CannotMount(Exception):
    """This machine does not let the process mount that file system."""


def tmpfs(place: Path) -> None:
    """A small file system keeps what fits, says so, and is used whole when it grows."""
    with _mounting():
        mount_at("none", place, "tmpfs", "size=4m")
    with _store(place) as store:
        _keeps_what_fits(store)
        mount_at("none", place, "tmpfs", "size=64m", _REMOUNT)
        _put(store, KEYS)
        until(lambda: store.flush(WAIT_S) and not store.problems()["disk"], "it has room again")


def loop(place: Path) -> None:
    """The same of a block device; and one that fails costs what is on it."""
    image = place.parent / "image"
    image.write_bytes(b"")
    os.truncate(image, 5 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", str(image)], check=True)
    done = subprocess.run(["mount", "-o", "loop", str(image), str(place)], capture_output=True, text=True)
    if done.returncode:
        raise CannotMount(done.stderr)
    with _store(place) as store:
        _keeps_what_fits(store)
        fd = os.open(place, os.O_RDONLY)
        fcntl.ioctl(fd, _SHUT_DOWN, struct.pack("<I", 2))
        os.close(fd)
        store.clear(places=["memory"])
        assert _put(store, KEYS) == len(KEYS), "memory goes on"
        until(lambda: "left alone" in store.problems()["disk"], "it is left alone")
        assert _read(store, KEYS) == len(KEYS)


def frozen(place: Path) -> None:
    """A file system that stops answering costs nobody more than the deadline of a call, and is used again."""
    with _served(place) as server:
        with _store(place) as store:
            _put(store, KEYS[:20])
            assert store.flush(WAIT_S)
            os.kill(server, signal.SIGSTOP)
            _have_patience(store, _SHORT_S)
            assert _put(store, KEYS[20:40]) == 20, "memory goes on"
            assert _read(store, KEYS[:40]) == 40
            began_s = time.monotonic()
            assert not store.flush(_SHORT_S)
            assert not store.clear().durable, "nothing can be noted"
            assert store.lookup(KEYS, _SHORT_S).keys == ()
            assert not store.clear(ending=KEYS[0][-4:]).durable
            took_s = time.monotonic() - began_s
            assert took_s < WAIT_S, f"callers waited {took_s:.1f} s"
            until(lambda: not store.health()["disk"], "it is left alone")
            os.kill(server, signal.SIGCONT)
            _have_patience(store, WAIT_S)
            _put(store, KEYS[40:60])
            until(lambda: store.flush(WAIT_S) and store.health()["disk"], "it is used again")
            store.clear(places=["memory"])
            assert _read(store, KEYS[40:60]) == 20
            assert store.lookup(KEYS[:40], WAIT_S).keys == (), "what was cleared stays so"
            os.kill(server, signal.SIGSTOP)
            _have_patience(store, _SHORT_S)
            _put(store, KEYS[60:80])
            began_s = time.monotonic()
        assert time.monotonic() - began_s < WAIT_S, "its end does not wait for it"


def frozen_start(place: Path) -> None:
    """A process that starts while its disk is frozen goes on without it, says so, and uses it when it answers."""
    with _served(place) as server:
        with _store(place) as store:
            _put(store, KEYS[:20])
            assert store.flush(WAIT_S)
        os.kill(server, signal.SIGSTOP)
        late.WAIT_S = below._LEARN_S = _SHORT_S
        began_s = time.monotonic()
        with _store(place) as store:
            _have_patience(store, _SHORT_S)
            assert "does not answer" in store.problems()["disk"]
            assert not store.health()["disk"]
            assert _put(store, KEYS[20:40]) == 20, "memory goes on"
            assert _read(store, KEYS[20:40]) == 20
            assert store.lookup(KEYS[:20], WAIT_S).keys == ()
            assert not store.clear(KEYS[:10]).durable, "nothing can be noted"
            took_s = time.monotonic() - began_s
            assert took_s < WAIT_S, f"callers waited {took_s:.1f} s"
            os.kill(server, signal.SIGCONT)
            _have_patience(store, WAIT_S)
            until(lambda: store.health()["disk"] and not store.problems()["disk"], "it is used")
            until(lambda: store.flush(WAIT_S), "what memory had is on it")
            store.clear(places=["memory"])
            assert _read(store, KEYS[10:40]) == 30
            assert store.lookup(KEYS[:10], WAIT_S).keys == (), "what was cleared stays so"
        os.kill(server, signal.SIGSTOP)
        with _store(place) as store:
            _have_patience(store, _SHORT_S)
            began_s = time.monotonic()
        assert time.monotonic() - began_s < WAIT_S, "its end does not wait for it"


def frozen_worker(place: Path) -> None:
    """A worker that starts while its disk is frozen answers requests, and says what troubles it."""
    # A worker's modules take seconds to import, which the other scenarios have no use for.
    from pdlink.serve.health import health, metrics_of

    from ...serve.tiered import CHUNK, answers, computed_here, opened, prompt_of, store_of

    late.WAIT_S = below._LEARN_S = _SHORT_S
    with _served(place) as server:
        prompts = [prompt_of(4 * CHUNK + 5, seed) for seed in range(2)]
        expected = computed_here(prompts)
        os.kill(server, signal.SIGSTOP)
        with opened(below={"local_disk": str(place / "kv"), "max_local_disk_size": 0.01}) as worker:
            assert answers(worker, prompts, at_once=True) == expected
            assert "does not answer" in health(worker).problems["disk"]
            body, _ = metrics_of(worker).exposition("")
            assert b'pdlink_tier_problem{tier="disk"} 1' in body
            assert b'pdlink_tier_answering{tier="disk"} 0' in body
            os.kill(server, signal.SIGCONT)
            until(lambda: not health(worker).problems, "nothing troubles it")
            store = store_of(worker)
            until(lambda: store.flush(WAIT_S), "what memory had is on the disk")
            store.clear(places=["memory"])
            assert answers(worker, prompts, at_once=True) == expected


def read_only(place: Path) -> None:
    """A file system that becomes read-only is read, says so, and is written to when it can be again."""
    with _served(place) as server, _store(place) as store:
        _put(store, KEYS[:20])
        assert store.flush(WAIT_S)
        os.kill(server, signal.SIGUSR1)
        _put(store, KEYS[20:40])
        until(lambda: "Read-only file system" in store.problems()["disk"], "it is told")
        assert not store.flush(WAIT_S)
        for _ in range(5):  # writes that fail keep nobody from reading
            store.clear(places=["memory"])
            assert _read(store, KEYS[:20]) == 20
            _put(store, KEYS[20:40])
        assert store.health()["disk"]
        os.kill(server, signal.SIGUSR1)
        until(lambda: store.flush(WAIT_S) and not store.problems()["disk"], "it is written to again")
        store.clear(places=["memory"])
        assert _read(store, KEYS[:40]) == 40


@contextmanager
def _served(place: Path) -> Iterator[int]:
    """A file system of a process of ours, which is killed at the end; the process's number."""
    with _mounting():
        server = mount(place)
    try:
        yield server
    finally:
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)


@contextmanager
def _mounting() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CannotMount(str(error)) from error


@contextmanager
def _store(place: Path) -> Iterator[Store]:
    disk = Striped([place], "kv", 8 << 20, record_nbytes=SHAPE.nbytes)
    store = Store(16 << 20, Lru(), [disk], tier_deadline_s=WAIT_S, cleared=[place / "kv" / "cleared"])
    store.open()
    try:
        yield store
    finally:
        store.close()


def _have_patience(store: Store, deadline_s: float) -> None:
    """How long a call of a tier may take from now on, also one that is under way."""
    store._tier_deadline_s = store._below._deadline_s = deadline_s
    for tier in store._below.tiers:
        for breaker in (tier._asking, tier._moving, tier._forgetting):
            breaker._deadline_s = deadline_s


def _keeps_what_fits(store: Store) -> None:
    assert _put(store, KEYS) == len(KEYS)
    assert store.flush(WAIT_S), "the oldest of it make room"
    assert "No space left" in store.problems()["disk"]
    assert store.health()["disk"], "it is read"
    store.clear(places=["memory"])
    kept = [key for key in KEYS if store.lookup([key], WAIT_S).keys]
    assert 20 < len(kept) < len(KEYS)
    assert _read(store, kept) == len(kept)


def _put(store: Store, keys: Sequence[bytes]) -> int:
    slots = store.reserve(keys, SHAPE)
    for slot in slots:
        store.array[slot.offset :][HEADER_NBYTES : SHAPE.nbytes] = memoryview(_content(slot.key))
    store.commit(slots, SHAPE)
    return len(slots)


def _read(store: Store, keys: Sequence[bytes]) -> int:
    fetch = store.fetch(store.lookup(keys, WAIT_S), SHAPE, "request")
    slots = fetch.done.result(WAIT_S)
    for slot in slots:
        assert store.array[slot.offset :][HEADER_NBYTES : SHAPE.nbytes].tobytes() == _content(slot.key)
    assert fetch.close()
    return len(slots)


def _content(key: bytes) -> bytes:
    return random.Random(key).randbytes(SHAPE.payload_nbytes)


SCENARIOS = {
    scenario.__name__: scenario for scenario in (tmpfs, loop, frozen, frozen_start, frozen_worker, read_only)
}

if __name__ == "__main__":
    Path(sys.argv[2]).mkdir()
    try:
        SCENARIOS[sys.argv[1]](Path(sys.argv[2]))
    except CannotMount as error:
        print(error, file=sys.stderr)
        sys.exit(CANNOT_MOUNT)
