"""The store through its socket: the same verbs, and never a wrong byte, also when a side dies."""

from __future__ import annotations

import multiprocessing
import os
import random
import re
import signal
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from pdlink.errors import ConfigError
from pdlink.store import link, wire
from pdlink.store.interface import MEMORY, Found
from pdlink.store.link import Link, RemoteFetch
from pdlink.store.record import Group, RecordShape
from pdlink.store.server.listener import Listener
from pdlink.store.sessions import SessionTerms
from pdlink.store.slots import Retention, Share, Slot
from tests.waiting import WAIT_S, until

from .process import client, everything_is_free, process, served
from .stubs import SHAPE, StubTier
from .test_store import KEYS, content, fetch, payload, put, read

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pdlink.store.client import RemoteStore


def test_keys_that_do_not_fit_into_a_message_count_as_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(tmp_path, 64) as (_, listener), client(listener.path) as mine:
        assert put(mine, KEYS[:4]) == 4
        until(lambda: read(mine, KEYS[:4]) == 4, "nobody answers a commit")
        monkeypatch.setattr("pdlink.store.wire.MAX_KEYS", 2)
        assert mine.known_at(KEYS[:4], WAIT_S) == (0, 0, -1, -1)
        assert mine.lookup(KEYS[:4], WAIT_S).keys == tuple(KEYS[:2])


def test_more_keys_than_fit_into_a_message_are_all_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(tmp_path, 8) as (_, listener), client(listener.path) as mine:
        assert put(mine, KEYS[:5]) == 5
        until(lambda: read(mine, KEYS) == 5, "nobody answers a commit")
        monkeypatch.setattr("pdlink.store.wire.MAX_KEYS", 2)
        assert mine.clear(KEYS[:5]).records == 5
        monkeypatch.undo()
        assert mine.lookup(KEYS, WAIT_S).keys == ()
        assert mine.clear([]).records == 0


def test_an_arena_that_grows_is_mapped_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdlink.store.store.STEP_NBYTES", 4 * SHAPE.nbytes)
    with served(tmp_path, 100) as (store, listener), client(listener.path) as mine:
        assert mine._touched_nbytes == store.committed_nbytes == 4 * SHAPE.nbytes
        put(mine, KEYS[:3])
        until(lambda: store.committed_nbytes > 4 * SHAPE.nbytes, "memory is added")
        put(mine, KEYS[3:8])
        assert mine._touched_nbytes > 4 * SHAPE.nbytes
        mine._toucher.submit(lambda: None).result(WAIT_S)
        assert read(mine, KEYS) == 8


def _reading(path: str, parent: Any) -> None:
    """A worker that takes its time."""
    with client(path) as mine:
        begun = fetch(mine, KEYS[:2])
        parent.send(len(begun.done.result(WAIT_S)))
        parent.recv()
        parent.send(begun.close())


def test_a_worker_that_was_stopped_while_it_read_is_told_so(tmp_path: Path) -> None:
    with served(tmp_path, 2, lease_s=0.5) as (_, listener), client(listener.path) as mine:
        put(mine, KEYS[:2])
        ours, theirs = multiprocessing.Pipe()
        child = multiprocessing.get_context("spawn").Process(target=_reading, args=(str(listener.path), theirs))
        child.start()
        try:
            assert ours.poll(60)
            assert ours.recv() == 2
            assert child.pid is not None
            os.kill(child.pid, signal.SIGSTOP)
            until(lambda: put(mine, KEYS[2:4]), "others need the room, and the lease is over")
            os.kill(child.pid, signal.SIGCONT)
            ours.send("go on")
            assert ours.poll(WAIT_S)
            assert ours.recv() is False
        finally:
            child.kill()
            child.join()


def test_leases_end_with_the_connection_and_do_not_stand(tmp_path: Path) -> None:
    with served(tmp_path, 2) as (store, listener), client(listener.path) as mine, client(listener.path) as other:
        put(mine, KEYS[:2])
        begun = fetch(mine, KEYS[:2])
        assert len(begun.done.result(WAIT_S)) == 2
        assert mine._link is not None
        mine._link.lose("test")
        until(lambda: put(other, KEYS[2:4]), "the leases of the lost connection are over")
        assert not begun.close()
        until(lambda: mine.connected, "it connects again")
        assert other.flush(WAIT_S), "the store has heard the commit"
        assert read(mine, KEYS[2:4]) == 2
        store.check()


def test_a_reservation_outlives_its_connection_but_not_a_call_that_nobody_heard(tmp_path: Path) -> None:
    with served(tmp_path, 4) as (store, listener), client(listener.path) as mine:
        kept = mine.reserve(KEYS[:2], SHAPE)
        mine.reserve(KEYS[2:4], SHAPE)
        with mine._lock:  # as if the answer had never come
            for serial in list(mine._writing)[2:]:
                del mine._writing[serial]
        assert mine._link is not None
        mine._link.lose("test")
        until(
            lambda: mine.connected and store._catalog.num_reservations == 2,
            "it connects again and names those it has",
        )
        for slot in kept:
            mine.array[slot.offset + 4096 : slot.offset + SHAPE.nbytes] = memoryview(content(slot.key))
        mine.commit(kept, SHAPE)
        assert read(mine, KEYS) == 2


def test_a_reservation_that_ends_while_its_client_connects_again_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client has named it, and has no connection to say more."""
    right = link._welcomed
    with served(tmp_path, 4) as (store, listener), client(listener.path) as mine:
        slots = mine.reserve(KEYS[:2], SHAPE)

        def welcomed(*args: Any) -> Any:
            found = right(*args)
            mine.abandon(slots)
            return found

        monkeypatch.setattr(link, "_welcomed", welcomed)
        assert mine._link is not None
        mine._link.lose("test")
        until(lambda: store._catalog.num_reservations == 0, "they are given back")


def test_a_store_that_was_restarted_ends_no_reservation_for_one_of_its_former_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slot that is given out twice is written to by two."""
    said, reserved = Link.say, threading.Event()

    def say(link: Link, message: wire.Request) -> None:
        """What ends reservations comes behind the next one that is asked for."""
        if isinstance(message, wire.Abandon):
            reserved.wait(WAIT_S)
        said(link, message)
        if isinstance(message, wire.Reserve):
            reserved.set()

    with ExitStack() as ends:
        with served(tmp_path) as (_, listener):
            mine = ends.enter_context(client(listener.path))
            old = mine.reserve(KEYS[:1], SHAPE)
        monkeypatch.setattr(Link, "say", say)
        store, listener = ends.enter_context(served(tmp_path))
        until(listener.clients, "it connects again, and names what it writes")
        mine.abandon(old)
        until(lambda: mine.connected, "it has mapped the other arena")
        new = mine.reserve(KEYS[1:2], SHAPE)
        assert new[0].serial != old[0].serial
        assert mine.flush(WAIT_S), "the store has heard all of it"
        assert store.held()["reservations"] == 1
        mine.close()


def test_a_client_that_speaks_to_a_restarted_store_is_told(tmp_path: Path) -> None:
    """What it ends was given to it by the former life, which could have meant another record of this one."""
    with served(tmp_path) as (_, listener), client(listener.path) as mine:
        (old,) = mine.reserve(KEYS[:1], SHAPE)
    with served(tmp_path) as (store, listener):
        link = hello(listener.path)
        link.sendall(wire.frame(wire.Reserve(1, tuple(KEYS[1:3]), SHAPE, Share())))
        link.sendall(wire.frame(wire.Commit((old.serial,))))
        *_, reserved, refused = heard(link)
        assert isinstance(reserved, wire.Reserved)
        assert isinstance(refused, wire.Refused)
        assert "from an earlier run" in refused.reason
        assert store.lookup(KEYS, 0.0).keys == (), "nothing is readable that nobody has filled"


def test_a_client_closes_also_while_it_connects(tmp_path: Path) -> None:
    with served(tmp_path) as (_, listener):
        for _ in range(20):
            with client(listener.path) as mine:
                assert mine._link is not None
                mine._link.lose("test")


def _reserving(path: str, told: Any) -> None:
    """A worker that reserves, loses its connection and lives on."""
    link = socket.socket(socket.AF_UNIX)
    link.connect(path)
    link.sendall(wire.frame(wire.Hello(wire.VERSION, os.urandom(16), "child", ())))
    link.recv(65536)
    link.sendall(wire.frame(wire.Reserve(1, tuple(KEYS[:4]), SHAPE, Share())))
    told.send(len(link.recv(65536)))
    link.close()
    time.sleep(600)


@pytest.mark.parametrize("stopped", [False, True])
def test_a_reservation_ends_when_its_process_has_ended_and_not_before(stopped: bool, tmp_path: Path) -> None:
    """It may write as long as it lives, whatever became of its connection."""
    with served(tmp_path, 4) as (store, listener), client(listener.path) as mine:
        heard, told = multiprocessing.Pipe()
        child = multiprocessing.get_context("spawn").Process(target=_reserving, args=(str(listener.path), told))
        child.start()
        try:
            assert heard.poll(60)
            until(
                lambda: [client["connected"] for client in listener.clients()] == [True, False],
                "it left",
            )
            if stopped:
                assert child.pid is not None
                os.kill(child.pid, signal.SIGSTOP)
            store._catalog.expire(float("inf"))
            assert put(mine, KEYS[4:5]) == 0, "it may still write"
        finally:
            child.kill()
        until(lambda: everything_is_free(mine, 4), "its process has ended")
        child.join()


def test_a_client_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    with served(tmp_path, 4) as (_, listener), client(listener.path) as mine:
        heard, told = multiprocessing.Pipe()
        child = multiprocessing.get_context("spawn").Process(target=_leasing, args=(str(listener.path), told))
        child.start()
        assert heard.poll(60)
        assert not everything_is_free(mine, 4)
        child.kill()
        until(lambda: everything_is_free(mine, 4), "its process has ended")
        until(lambda: len(listener.clients()) == 1, "it is forgotten")
        child.join()


def _leasing(path: str, told: Any) -> None:
    """A worker that reads and writes."""
    with client(path) as mine:
        put(mine, KEYS[:2])
        begun = fetch(mine, KEYS[:2])
        begun.done.result(WAIT_S)
        mine.reserve(KEYS[2:4], SHAPE)
        told.send(1)
        time.sleep(600)


def test_everything_is_a_miss_at_once_while_the_store_is_away(tmp_path: Path) -> None:
    with process(tmp_path) as store, client(store.path) as mine:
        put(mine, KEYS[:4])
        begun = fetch(mine, KEYS[:2])
        slots = begun.done.result(WAIT_S)
        written = mine.reserve(KEYS[4:6], SHAPE)
        old = mine.array
        store.kill()
        until(lambda: not mine.connected, "the client sees it")
        began_s = time.monotonic()
        assert mine.lookup(KEYS, WAIT_S).keys == ()
        assert fetch(mine, KEYS).done.result(0) == ()
        assert mine.reserve(KEYS, SHAPE) == ()
        assert (mine.clear(), mine.flush(1.0)) == ((0, False), False)
        assert mine.health() == {"store": False}
        assert time.monotonic() - began_s < WAIT_S / 2, "nothing waits for it"
        assert [payload(mine, slot) for slot in slots] == [content(slot.key) for slot in slots], "no SIGBUS"
        assert not begun.close(), "nobody says that the lease stood"

        store.start()
        time.sleep(0.3)
        assert mine.array is old, "somebody may still write into its slots"
        mine.array[written[0].offset] = 1
        mine.commit(written[:1], SHAPE)
        mine.abandon(written[1:])
        until(lambda: mine.connected, "it connects again")
        assert mine.array is not old
        assert mine.lookup(KEYS, WAIT_S).keys == (), "memory went with the process, and the late commit is void"
        assert put(mine, KEYS[:2]) == 2
        assert read(mine, KEYS[:2]) == 2


def test_a_restarted_store_finds_its_disk_again(tmp_path: Path) -> None:
    tiers = {"local_disk": str(tmp_path / "disk"), "max_local_disk_size": 0.01}
    with process(tmp_path, tiers=tiers) as store, client(store.path) as mine:
        put(mine, KEYS[:4])
        assert mine.flush(WAIT_S)
        store.kill()
        until(lambda: not mine.connected, "the client sees it")
        store.start()
        until(lambda: mine.connected, "it connects again")
        assert read(mine, KEYS) == 4


def test_what_was_found_in_a_tier_that_a_restarted_store_has_not_is_a_miss(tmp_path: Path) -> None:
    tier = StubTier()
    with ExitStack() as ends:
        with served(tmp_path, tiers=[tier]) as (_, listener):
            mine = ends.enter_context(client(listener.path))
            put(mine, KEYS[:1])
            assert mine.flush(WAIT_S)
            mine.clear(KEYS[:1], [MEMORY])
            found = mine.lookup(KEYS[:1], WAIT_S)
            assert found.places == (1,)
        _, listener = ends.enter_context(served(tmp_path))
        until(lambda: mine.connected and listener.clients(), "it connects again")
        link = mine._link
        begun = mine.fetch(found, SHAPE, "request")
        assert begun.done.result(WAIT_S) == ()
        begun.close()
        assert put(mine, KEYS[1:3]) == 2
        assert mine._link is link, "it keeps its connection"


@pytest.mark.parametrize("verb", ["hold", "end_session"])
def test_a_client_is_served_while_its_store_looks_at_the_records_of_a_long_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    begun, may_end = threading.Event(), threading.Event()
    session = SessionTerms("agent", "", 60.0)
    with served(tmp_path) as (store, listener), client(listener.path) as mine, ThreadPoolExecutor(1) as caller:
        assert mine.hold(session, KEYS[:1], [SHAPE.nbytes], waits=False) == 1
        do = getattr(store, verb)

        def slow(*given: Any, **more: Any) -> Any:
            begun.set()
            assert may_end.wait(WAIT_S)
            return do(*given, **more)

        monkeypatch.setattr(store, verb, slow)
        if verb == "hold":
            asked = caller.submit(mine.hold, session, KEYS[:1], [SHAPE.nbytes], waits=True)
        else:
            asked = caller.submit(mine.end_session, "agent", "")
        try:
            assert begun.wait(WAIT_S)
            assert put(mine, KEYS[:1]) == 1
        finally:
            may_end.set()
        assert asked.result(WAIT_S) == 1


def test_a_hold_of_a_session_waits_for_no_look_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_end = threading.Semaphore(0), threading.Event()

    def slow(*_: Any) -> Found:
        begun.release()
        assert may_end.wait(WAIT_S)
        return Found((), ())

    with (
        served(tmp_path, tiers=[StubTier()]) as (store, listener),
        client(listener.path) as mine,
        ThreadPoolExecutor(2) as callers,
    ):
        monkeypatch.setattr(store, "lookup", slow)
        asked = [callers.submit(mine.lookup, KEYS[:1], WAIT_S) for _ in range(2)]
        try:
            assert all(begun.acquire(timeout=WAIT_S) for _ in asked)
            assert mine.hold(SessionTerms("agent", "", 60.0), KEYS[:1], [SHAPE.nbytes], waits=False) == 1
        finally:
            may_end.set()
        for each in asked:
            each.result(WAIT_S)


def test_a_store_that_is_late_with_a_session_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_end = threading.Event()
    with served(tmp_path) as (store, listener), client(listener.path, timeout_s=2.0) as mine:
        until(lambda: mine.connected, "it connects")
        link = mine._link
        monkeypatch.setattr(store, "hold", lambda *_, **__: may_end.wait(WAIT_S))
        assert mine.hold(SessionTerms("agent", "", 60.0), KEYS[:1], [SHAPE.nbytes], waits=False) == 0
        assert mine._link is link
        assert mine.connected
        may_end.set()


def test_a_stopped_store_costs_each_call_its_deadline_at_most(tmp_path: Path) -> None:
    with process(tmp_path) as store, client(store.path) as patient, client(store.path, timeout_s=0.5) as mine:
        assert put(patient, KEYS[:2]) == read(patient, KEYS) == 2
        until(lambda: mine.connected, "it connects")
        store.suspend()
        begun = mine.fetch(mine.lookup(KEYS[:2], 0.1)._replace(keys=tuple(KEYS[:2]), places=(0, 0)), SHAPE, "r")
        assert begun.done.result(WAIT_S) == (), "a fetch is given up without an answer"
        assert not mine.connected
        assert not mine.reserve(KEYS, SHAPE)
        store.signal(signal.SIGCONT)
        until(lambda: mine.connected, "it connects again")
        until(lambda: read(mine, KEYS) == 2, "it is the same store")


def test_a_store_that_comes_late_is_found(tmp_path: Path) -> None:
    with client(tmp_path / "socket" / "store", timeout_s=0.1) as mine:
        assert put(mine, KEYS[:1]) == 0
        assert mine.places == (MEMORY,)
        with served(tmp_path):
            until(lambda: put(mine, KEYS[:1]), "it connects")


def hello(path: Path | str, version: int = wire.VERSION, token: bytes | None = None) -> socket.socket:
    link = socket.socket(socket.AF_UNIX)
    link.connect(str(path))
    link.settimeout(WAIT_S)
    link.sendall(wire.frame(wire.Hello(version, token or os.urandom(16), "liar", ())))
    return link


def heard(link: socket.socket) -> list[wire.Reply]:
    """All until the end of the connection."""
    frames = wire.Frames(wire.REPLIES)
    found: list[wire.Reply] = []
    with link:
        while more := link.recv(65536):
            found += frames.take(more)
    return found


LIES: dict[str, bytes] = {
    "no frame": b"\xff" * 64,
    "a long frame": struct.pack("<I", wire.MAX_FRAME_NBYTES + 1),
    "an unknown message": struct.pack("<I", 7) + b"\x92\xa4liar\x01",
    "a nested one": struct.pack("<I", 3000) + b"\x91" * 3000,
    "a short key": wire.frame(wire.Lookup(1, (b"short",), 1.0)),
    "too many keys": wire.frame(wire.Lookup(1, (bytes(32),) * (wire.MAX_KEYS + 1), 1.0)),
    "a long wait": wire.frame(wire.Flush(1, 1e9)),
    "a place that is not there": wire.frame(wire.FetchRecords(1, (bytes(32),), (9,), SHAPE, "r")),
    "a name of no place": wire.frame(wire.Clear(1, None, ("moon",))),
    "fewer places than keys": wire.frame(wire.FetchRecords(1, (bytes(32),), (), SHAPE, "r")),
    "a fetch twice": 2 * wire.frame(wire.FetchRecords(1, (bytes(32),), (0,), SHAPE, "r")),
    "a priority above all": wire.frame(wire.Reserve(1, (bytes(32),), SHAPE, Share(), Retention(priority=101))),
    "no time": wire.frame(wire.FetchRecords(1, (bytes(32),), (0,), SHAPE, "r", Retention(ttl_s=float("nan")))),
    "a tenant of a megabyte": wire.frame(wire.Reserve(1, (bytes(32),), SHAPE, Share(), Retention("t" * 2**20))),
    "a share of nothing": wire.frame(wire.Reserve(1, (bytes(32),), SHAPE, Share(0, 0, 1))),
    "a share of too many": wire.frame(wire.Reserve(1, (bytes(32),), SHAPE, Share(0, 1, 1 << 62))),
    "a record of no bytes": wire.frame(wire.Reserve(1, (bytes(32),), RecordShape("uint8", 0, SHAPE.groups), Share())),
    "a negative record": wire.frame(
        wire.Reserve(1, (bytes(32),), RecordShape("uint8", 4, (Group("full", (0,), -2, 1, 512),)), Share())
    ),
    "a header that does not fit": wire.frame(
        wire.Reserve(1, (bytes(32),), RecordShape("x" * 5000, 4, SHAPE.groups), Share())
    ),
    "a second hello": wire.frame(wire.Hello(wire.VERSION, bytes(16), "liar", ())),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_client_that_lies_costs_itself_only(lie: str, tmp_path: Path) -> None:
    with served(tmp_path, 4) as (store, listener), client(listener.path) as mine:
        put(mine, KEYS[:2])
        begun = fetch(mine, KEYS[:2])
        link = hello(listener.path)
        link.sendall(LIES[lie])
        replies = heard(link)
        assert isinstance(replies[-1], wire.Refused), replies
        assert re.search(r"expected|limit|send it once", replies[-1].reason)
        assert begun.close()
        assert read(mine, KEYS) == 2
        until(lambda: len(listener.clients()) == 1, "the liar is forgotten")
        assert everything_is_free(mine, 4)
        store.check()


@pytest.mark.parametrize("seed", range(40))
def test_damaged_messages_cost_their_sender_only(seed: int, shared_listener: Listener) -> None:
    rng = random.Random(seed)
    keys = tuple(KEYS[:3])
    whole = [
        wire.Reserve(1, keys, SHAPE, Share()),
        wire.FetchRecords(2, keys, (0, 0, 0), SHAPE, "request"),
        wire.Lookup(3, keys, 0.0),
        wire.Clear(4, keys, (MEMORY,)),
        wire.Release(5, 2),
        wire.Flush(6, 0.0),
    ]
    rng.shuffle(whole)
    damaged = bytearray(b"".join(map(wire.frame, whole)))
    for _ in range(rng.randint(1, 6)):
        damaged[rng.randrange(len(damaged))] = rng.randrange(256)
    link = hello(shared_listener.path)
    link.sendall(damaged)
    link.shutdown(socket.SHUT_WR)
    heard(link)
    with client(shared_listener.path) as mine:
        slots = mine.reserve([os.urandom(32)], SHAPE)
        assert len(slots) == 1, "the store serves others"
        mine.abandon(slots)
    shared_listener._store.check()


@pytest.fixture(scope="module")
def shared_listener(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Listener]:
    with served(tmp_path_factory.mktemp("shared"), 64) as (_, listener):
        yield listener


def test_nobody_ends_what_is_another_ones(tmp_path: Path) -> None:
    with served(tmp_path, 4) as (store, listener), client(listener.path) as mine:
        put(mine, KEYS[:2])
        begun = fetch(mine, KEYS[:2])
        (slot,) = mine.reserve(KEYS[2:3], SHAPE)
        link = hello(listener.path)
        serials = tuple(range(slot.serial - 2, slot.serial + 50))
        link.sendall(wire.frame(wire.Commit(serials)) + wire.frame(wire.Abandon(serials)))
        link.sendall(b"".join(wire.frame(wire.Release(number, number)) for number in range(100)))
        link.sendall(wire.frame(wire.Ping(1000)))
        frames = wire.Frames(wire.REPLIES)
        replies: list[wire.Reply] = []
        while len(replies) < 102:
            replies += frames.take(link.recv(65536))
        assert all(reply.value == 0 for reply in replies[1:-1] if isinstance(reply, wire.Count))
        assert store._catalog.num_reservations == 1
        assert mine.lookup(KEYS, WAIT_S).keys == tuple(KEYS[:2]), "nobody has committed it"
        mine.commit([slot], SHAPE)
        assert begun.close()
        link.close()


def test_another_process_does_not_take_over_a_client(tmp_path: Path) -> None:
    """Its number is no secret that protects it: the kernel says who asks."""
    with served(tmp_path, 4) as (_, listener), client(listener.path) as mine:
        kept = mine.reserve(KEYS[:2], SHAPE)
        told, tell = multiprocessing.Pipe()
        child = multiprocessing.get_context("spawn").Process(
            target=_taking_over, args=(str(listener.path), mine._token, tell)
        )
        child.start()
        assert told.poll(60)
        assert "another process" in told.recv()
        child.join()
        assert mine.connected
        mine.commit(kept, SHAPE)
        assert len(mine.lookup(KEYS, WAIT_S).keys) == 2


def _taking_over(path: str, token: bytes, tell: Any) -> None:
    (reply,) = heard(hello(path, token=token))
    assert isinstance(reply, wire.Refused)
    tell.send(reply.reason)


def test_a_client_of_another_version_is_refused_with_both(tmp_path: Path) -> None:
    with served(tmp_path) as (_, listener):
        (reply,) = heard(hello(listener.path, version=wire.VERSION + 1))
        assert isinstance(reply, wire.Refused)
        assert f"got {wire.VERSION + 1}; expected {wire.VERSION}" in reply.reason


def test_a_client_that_reads_nothing_keeps_nobody_waiting(tmp_path: Path) -> None:
    tier = StubTier()
    with served(tmp_path, 4, [tier]) as (_, listener), client(listener.path) as mine:
        link = hello(listener.path)
        link.setblocking(False)
        one = wire.frame(wire.Lookup(1, tuple(os.urandom(32) for _ in range(1000)), 0.0))
        sent = 0
        while sent < 64 << 20:
            try:
                sent += link.send(one)
            except OSError:
                break
        put(mine, KEYS[:2])
        assert read(mine, KEYS[:2]) == 2
        link.close()


def test_a_look_up_that_waits_for_a_tier_delays_no_other_verb(tmp_path: Path) -> None:
    tier, going = StubTier(), threading.Event()
    with served(tmp_path, 4, [tier]) as (store, listener), client(listener.path) as mine:
        store._below.tiers[0].askers.put(going.wait)  # type: ignore[arg-type]
        asking = threading.Thread(target=mine.lookup, args=(KEYS[:1], WAIT_S))
        asking.start()
        assert put(mine, KEYS[1:3]) == 2
        assert asking.is_alive()
        going.set()
        asking.join(WAIT_S)


def test_an_answer_that_comes_late_is_no_loss(tmp_path: Path) -> None:
    tier, going = StubTier(), threading.Event()
    with served(tmp_path, 4, [tier]) as (store, listener), client(listener.path, timeout_s=2.0) as mine:
        link = mine._link
        assert link is not None
        lookup = store.lookup
        store.lookup = lambda keys, _: going.wait(WAIT_S) and lookup(keys, 0.0)  # type: ignore[method-assign,return-value,assignment]
        assert mine.lookup(KEYS[:1], 0.0).keys == ()
        going.set()
        link._timeout_s = WAIT_S
        assert put(mine, KEYS[:2]) == 2
        assert mine._link is link
        assert mine.lookup(KEYS[:2], 0.0).places == (0, 0)
        assert mine._link is link


def test_a_path_is_one_stores_and_no_other_users(tmp_path: Path) -> None:
    with served(tmp_path) as (store, listener):
        second = Listener(store, listener.path)
        with pytest.raises(ConfigError, match="another store listens there"):
            second.open()
        second.close()
        link = hello(listener.path)
        assert link.recv(65536), "the first one is as it was"
        link.close()
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(tmp_path / "socket" / "store"))
    left.close()
    with served(tmp_path):
        pass
    (tmp_path / "socket").chmod(0o755)
    with pytest.raises(ConfigError, match="socket: .*mode 0700"):
        Listener(store, tmp_path / "socket" / "store").open()
    for path in ("relative", "/" + "x" * 200):
        with pytest.raises(ConfigError, match="tiers.store: .*expected an absolute path of 107 bytes"):
            client_at(path)


def client_at(path: str) -> RemoteStore:
    from pdlink.store.client import RemoteStore

    return RemoteStore(path, name="test")


def test_slots_are_checked_against_the_shape_that_was_asked_for(tmp_path: Path) -> None:
    """A record that another client has begun in another shape must not be filled beyond its end."""
    large = RecordShape("uint8", 4, (Group("full", (0, 1), 2, 1, 2048),))
    with served(tmp_path, 8) as (_, listener), client(listener.path) as one, client(listener.path) as two:
        small = one.reserve(KEYS[:1], SHAPE, share=Share(0, 1, 2))
        assert isinstance(small[0], Slot)
        assert two.reserve(KEYS[:1], large, share=Share(1, 2, 2)) == ()
        one.abandon(small)
        one.commit(one.reserve(KEYS[1:2], large), large)
        until(lambda: two.lookup(KEYS[1:2], WAIT_S).keys, "it is there")
        assert read(two, KEYS[1:2]) == 0, "a record of another shape is none of ours"


def test_a_link_is_lost_when_a_store_that_owes_an_answer_gives_no_sign_of_life() -> None:
    """Nobody asks it anything else, so nothing but its silence says so."""
    mine, theirs = socket.socketpair()
    welcome = wire.Welcome(wire.VERSION, b"life", 1 << 20, 1 << 20, (MEMORY,))
    with theirs:
        link = Link(mine, wire.Frames(wire.REPLIES), 0.1, welcome)
        begun = RemoteFetch(link, 1, KEYS[:1], SHAPE.nbytes)
        link.begin(begun, wire.FetchRecords(1, tuple(KEYS[:1]), (0,), SHAPE, "request"))
        heard = list[str]()
        thread = threading.Thread(target=lambda: heard.append(link.hear()), daemon=True)
        thread.start()
        thread.join(WAIT_S)
        link.lose("the test is over")
        thread.join(WAIT_S)
        link.close()
    assert heard == ["no sign of life within 0.1 s"]
    assert begun.done.result(0) == ()


def test_a_client_that_keeps_its_reservations_leaves_room_for_others(tmp_path: Path) -> None:
    with served(tmp_path, 16) as (_, listener), client(listener.path) as hog, client(listener.path) as other:
        held = [slot for _ in range(20) for slot in hog.reserve([os.urandom(32) for _ in range(8)], SHAPE)]
        assert len(held) == 14
        assert put(other, KEYS[:2]) == read(other, KEYS[:2]) == 2


def test_a_client_with_records_of_a_fifth_of_the_arena_leaves_room_for_one(tmp_path: Path) -> None:
    with served(tmp_path, 5) as (_, listener), client(listener.path) as hog, client(listener.path) as other:
        assert len([*hog.reserve(KEYS[:3], SHAPE), *hog.reserve(KEYS[3:5], SHAPE)]) == 4
        assert put(other, KEYS[5:6]) == read(other, KEYS[5:6]) == 1
