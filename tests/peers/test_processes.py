"""Stores of two processes as each other's tiers: what one has the other finds, and whatever dies is a miss."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from pdlink.fleet.ports import free_ports
from tests.other_process import PATIENCE_S
from tests.ports import keep_port
from tests.waiting import WAIT_S, until

from .conftest import MakeNode
from .store_node import OtherNode, key

KINDS = ["mapped", "tcp"]

MakeOther = Callable[..., OtherNode]


@pytest.fixture
def make_other(ends: ExitStack) -> MakeOther:
    def make(name: str, *peers: str, kind: str = "tcp", **more: int) -> OtherNode:
        other = OtherNode(name, *peers, kind=kind, **more)
        ends.callback(other.end)
        return other

    return make


@pytest.mark.parametrize("kind", KINDS)
def test_what_another_process_has_is_found_and_stays(kind: str, make_other: MakeOther, make_node: MakeNode) -> None:
    owner = make_other("owner", kind=kind)
    assert owner.call("put", 0, 1, 2, 4) == 4
    asker = make_node("asker", owner.call("address"), kind=kind)
    assert asker.read(0, 1, 2, 3, 4) == 3
    owner.call("until_idle")
    owner.kill()
    assert asker.read(0, 1, 2, 3, 4) == 3, "what was pulled is in memory here"
    asker.store.check()


def test_stores_find_each_other_over_ipv6(make_node: MakeNode) -> None:
    owner = make_node("owner", host="::1")
    assert owner.put(0, 1) == 2
    asker = make_node("asker", owner.address(), host="::1")
    assert owner.address().startswith("tcp://[::1]:")
    assert asker.read(0, 1) == 2


def test_an_arena_that_gets_its_memory_later_is_written_to_where_it_has_some(
    make_other: MakeOther, make_node: MakeNode
) -> None:
    owner = make_other("owner", kind="mapped", payload_nbytes=12 << 20)
    asker = make_node("asker", owner.call("address"), kind="mapped", payload_nbytes=12 << 20)
    assert asker.store.gauges()["committed"] == 64 << 20 < asker.store.buffer.nbytes
    assert owner.call("put", 0, 1, 2) == asker.read(0, 1, 2) == 3
    owner.call("until_whole")
    asker.until_whole()
    assert owner.call("put", 3, 4, 5, 6) == asker.read(3, 4, 5, 6) == 4
    assert asker.read(0, 1, 2, 3, 4, 5, 6) == 7, "84 MiB are in memory here"


@pytest.mark.parametrize("kind", KINDS)
def test_an_owner_killed_while_records_are_on_their_way_is_a_miss(
    kind: str, make_other: MakeOther, make_node: MakeNode
) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    draw = random.Random(seed)
    for turn in range(4):
        owner = make_other(f"owner-{turn}", kind=kind, records=4, payload_nbytes=8 << 20)
        owner.call("put", 0, 1, 2, 3)
        asker = make_node(f"asker-{turn}", owner.call("address"), kind=kind, records=4, payload_nbytes=8 << 20)
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(asker.read, 0, 1, 2, 3)
            time.sleep(draw.random() * 0.05)
            owner.kill()
            print(f"{reading.result(PATIENCE_S)} came")
        # The last pull may have just failed.
        until(lambda asker=asker: asker.forget() >= 0 and asker.put(0, 1, 2, 3) == 4, "no slot is lost")  # type: ignore[misc]
        asker.store.check()
        asker.close()


@pytest.mark.parametrize("kind", KINDS)
def test_an_owner_that_stands_still_is_a_miss_and_is_asked_again_when_it_goes_on(
    kind: str, make_other: MakeOther, make_node: MakeNode
) -> None:
    owner = make_other("owner", kind=kind)
    owner.call("put", 0, 1)
    asker = make_node("asker", owner.call("address"), kind=kind)
    assert asker.read(0) == 1
    found = asker.store.lookup([key(0), key(1)], PATIENCE_S)
    assert len(found.keys) == 2
    owner.stop()
    asker.link.timeout_s = 0.5
    fetch = asker.store.fetch(found, asker.shape, "read")
    assert len(fetch.done.result(PATIENCE_S)) == 1
    assert fetch.close()
    assert asker.read(0, 1) == 1
    owner.resume()
    asker.link.timeout_s = WAIT_S
    until(lambda: asker.read(0, 1) == 2, "it is asked again, after a pause of its own")


def test_an_owner_that_was_started_again_is_found_at_its_address(make_other: MakeOther, make_node: MakeNode) -> None:
    owner = make_other("owner")
    owner.call("put", 0, 1)
    address = owner.call("address")
    asker = make_node("asker", address)
    assert asker.read(0) == 1
    owner.kill()
    port = int(address.rpartition(":")[2])
    with keep_port(port):
        again = make_other("owner", port=port)
    again.call("put", 1, 2)
    until(lambda: asker.read(0, 1, 2) == 3, "it is found again")


@pytest.mark.parametrize("kind", KINDS)
def test_two_full_stores_that_pull_from_each_other_wait_for_nothing(
    kind: str, make_other: MakeOther, make_node: MakeNode
) -> None:
    """Neither has room for what the other has beside its own; what does not fit is a shorter prefix."""
    port = free_ports(1)
    here = make_node("here", f"tcp://127.0.0.1:{port}", kind=kind, records=12, payload_nbytes=1 << 20)
    there = make_other("there", here.link.address, kind=kind, records=12, payload_nbytes=1 << 20, port=port)
    for _ in range(5):
        here.forget()
        there.call("forget")
        assert (here.put(*range(8)), there.call("put", *range(20, 28))) == (8, 8)
        there.send("read", *range(8))
        assert here.read(*range(20, 28)) >= 4, "what it had room for"
        assert there.answer() >= 4
        there.call("until_idle")
        here.until_idle()
