"""What an owner, or anybody who reaches the port, may say: wrong answers are misses, and the store goes on."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import msgspec
import pytest
import zmq

from pdlink.endpoint.signals import Signal
from pdlink.errors import ConfigError
from pdlink.events import Event, TransferEnded, listen
from pdlink.peers.link import PeerLink
from pdlink.peers.messages import MAX_KEYS, VERSION, PeerAnswer, PeerAsk, Pull, encode
from pdlink.protocol.auth import AllowList, Credentials, KeyPair
from pdlink.store.slots import SlotLease
from pdlink.store.store import Store
from tests.waiting import WAIT_S, until

from .store_node import StoreNode, key


class Liar(Store):
    """Says that it has every record; sends what `lie` makes of the lease."""

    lie = "payload"

    def holds(self, keys: object) -> list[bool]:
        return [True for _ in keys]  # type: ignore[attr-defined]

    def lend(self, key: bytes) -> SlotLease | None:
        lease = super().lend(key)
        if lease is None:
            return None
        slot = lease.slots[0]
        record = self.array[slot.offset : slot.offset + slot.nbytes]
        if self.lie == "payload":
            record[-1] ^= 1
        elif self.lie == "header":
            record[20] ^= 1
        elif self.lie == "nothing":
            record[:] = 0
        elif self.lie == "other":
            other = super().lend(b"%032d" % 7)
            assert other is not None
            return other
        else:
            return lease._replace(slots=(slot._replace(nbytes=slot.nbytes - 4096),))
        return lease


@pytest.mark.parametrize("lie", ["payload", "header", "nothing", "other", "length", "absence"])
def test_an_owner_that_lies_is_a_miss_and_not_asked_for_that_record_again(lie: str, ends: ExitStack) -> None:
    owner = StoreNode("owner", store_class=Liar)
    ends.callback(owner.close)
    assert isinstance(owner.store, Liar)
    owner.store.lie = lie
    owner.put(7, *(() if lie == "absence" else (0,)))
    asker = StoreNode("asker", [owner.address()])
    ends.callback(asker.close)
    assert asker.read(0) == 0
    if lie not in ("absence", "length"):
        assert asker.store.flush(WAIT_S), "the tier's thread notes it"
        assert not asker.store.lookup([key(0)], WAIT_S).keys, "what is damaged there is not pulled again"
    assert asker.put(*range(8)) == 8, "no slot is lost"
    owner.until_idle()


def test_a_slot_is_not_used_again_before_nobody_can_write_to_it(
    ends: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = StoreNode("owner")
    ends.callback(owner.close)
    owner.put(0)
    asker = StoreNode("asker", [owner.address()], records=1)
    ends.callback(asker.close)
    released = Signal()
    waiting = threading.Event()
    receive = asker.link._node.receive

    def slow(*arguments: object, **more: object) -> object:
        """A transfer that fails, while its fence takes until the test says so."""
        incoming = receive(*arguments, **more)  # type: ignore[arg-type]
        incoming.cancel()
        assert incoming.released.wait(WAIT_S), "else the node sets the test's own signal"
        incoming.released = released
        waiting.set()
        return incoming

    monkeypatch.setattr(asker.link._node, "receive", slow)
    found = asker.store.lookup([key(0)], WAIT_S)
    fetch = asker.store.fetch(found, asker.shape, "read")
    assert waiting.wait(WAIT_S)
    fetch.finish()
    assert fetch.close()
    assert asker.put(1) == 0, "its only slot may still be written to"
    released.set()
    until(lambda: asker.put(1), "it is free")


def test_what_another_node_has_is_not_repacked_and_found_all_the_same(ends: ExitStack) -> None:
    owner = StoreNode("owner")
    ends.callback(owner.close)
    owner.put(*range(4))
    asker = StoreNode("asker", [owner.address()])
    ends.callback(asker.close)
    for number in range(4):
        assert asker.store.repack([key(number)], asker.shape, asker.store.places[1], "raw") == 0
    assert asker.read(*range(4)) == 4


def test_more_pulls_than_may_be_lent_are_refused_at_once(ends: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdlink.peers.link._MAX_LENT", 0)
    owner = StoreNode("owner")
    ends.callback(owner.close)
    owner.put(0)
    asker = StoreNode("asker", [owner.address()], timeout_s=WAIT_S)
    ends.callback(asker.close)
    assert asker.read(0) == 0
    assert owner.link.num_lent == 0


def test_a_pull_from_a_store_that_is_closing_is_refused_in_words(ends: ExitStack) -> None:
    owner = StoreNode("owner")
    ends.callback(owner.close)
    owner.put(0)
    asker = StoreNode("asker", [owner.address()], timeout_s=WAIT_S)
    ends.callback(asker.close)
    assert asker.store.lookup([key(0)], WAIT_S).keys, "the owner answers"
    owner.link._lenders.close(WAIT_S)
    told: list[Event] = []
    ends.callback(listen(told.append))
    assert asker.read(0) == 0
    reasons = {event.reason for event in told if isinstance(event, TransferEnded) and event.side == "receiver"}
    assert reasons == {"request_failed: this store is closing"}
    assert owner.link.num_lent == 0


LAST = 1 << 40
"""Of a question: no frame with a few wrong bytes asks by that number."""


def frames(seed: int) -> Iterator[bytes]:
    draw = random.Random(seed)
    right = encode(PeerAsk(1, (key(0),)))
    yield from (b"", b"\xc1", b"\xff" * 100, encode(PeerAnswer(1, b"\1", 1)), right[:-5], right + b"\0")
    yield msgspec.msgpack.encode({"type": "ask", "number": 1, "keys": [key(0)] * (MAX_KEYS + 1)})
    yield msgspec.msgpack.encode({"type": "ask", "number": 2**70 % 2**64, "keys": [b"short"]})
    yield msgspec.msgpack.encode({"type": "pull", "key": key(0), "transfer_id": "x" * 129, "num_pages": 1})
    yield encode(Pull(key(0), "used", 3))
    yield encode(Pull(key(0), "used", 3))
    yield encode(Pull(key(0), "many", 2**63 - 1))
    yield encode(Pull(key(9), "none", 1))
    for _ in range(200):
        frame = bytearray(right)
        for _ in range(draw.randint(1, 4)):
            frame[draw.randrange(len(frame))] = draw.randrange(256)
        yield bytes(frame)


def test_frames_of_a_stranger_cost_nobody_anything(ends: ExitStack) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    owner = StoreNode("owner")
    ends.callback(owner.close)
    owner.put(0, 1)
    context = ends.enter_context(zmq.Context())
    stranger = ends.enter_context(context.socket(zmq.DEALER))
    stranger.connect(owner.address())
    for frame in frames(seed):
        stranger.send(frame)
    stranger.send_multipart([b"two", b"parts"])
    stranger.send(encode(PeerAsk(LAST, (key(1), key(5)))))
    poller = zmq.Poller()
    poller.register(stranger, zmq.POLLIN)
    answers: list[PeerAnswer] = []
    while not answers or answers[-1].number != LAST:
        assert poller.poll(round(WAIT_S * 1000))
        answers.append(msgspec.msgpack.decode(stranger.recv(), type=PeerAnswer))
    assert answers[-1].held == b"\1\0"
    asker = StoreNode("asker", [owner.address()])
    ends.callback(asker.close)
    assert asker.read(0, 1) == 2
    owner.until_idle()


@pytest.mark.parametrize(
    "change",
    [
        lambda answer: replace_(answer, version=VERSION + 1),
        lambda answer: replace_(answer, held=b""),
        lambda answer: replace_(answer, held=b"\1" * 9),
        lambda answer: replace_(answer, number=answer.number + 1),
        lambda answer: replace_(answer, port=1),
    ],
    ids=["another version", "no answer", "too many", "another number", "another port"],
)
def test_a_wrong_answer_is_a_miss(change, ends: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    owner = StoreNode("owner")
    ends.callback(owner.close)
    owner.put(0)
    answer = owner.link._questions._answer
    monkeypatch.setattr(owner.link._questions, "_answer", lambda ask: change(answer(ask)))
    asker = StoreNode("asker", [owner.address()], timeout_s=0.5)
    ends.callback(asker.close)
    assert asker.read(0) == 0
    assert asker.put(*range(8)) == 8


def replace_(answer: PeerAnswer, **fields: object) -> PeerAnswer:
    return msgspec.structs.replace(answer, **fields)


def key_pair(name: str) -> KeyPair:
    public, secret = zmq.curve_keypair()
    return KeyPair(name, public.decode(), secret.decode())


def test_only_holders_of_allowed_keys_are_answered_and_no_longer_when_they_are_taken_off(ends: ExitStack) -> None:
    keys = {name: key_pair(name) for name in ("owner", "friend", "stranger")}
    known = AllowList({keys[name].public: name for name in ("owner", "friend")})
    owner = StoreNode("owner/store", credentials=Credentials(keys["owner"], known))
    ends.callback(owner.close)
    owner.put(0, 1)
    assert "?key=" in owner.address()
    friend = StoreNode("friend/store", [owner.address()], credentials=Credentials(keys["friend"], known))
    ends.callback(friend.close)
    assert friend.read(0) == 1
    everybody = AllowList({pair.public: name for name, pair in keys.items()})
    stranger = StoreNode(
        "stranger/store", [owner.address()], credentials=Credentials(keys["stranger"], everybody), timeout_s=1.0
    )
    ends.callback(stranger.close)
    assert stranger.read(0) == 0
    owner.link.allow(AllowList({keys["owner"].public: "owner"}))
    friend.link.timeout_s = 0.5
    assert friend.read(0, 1) == 1, "what is here stays; nothing more comes"


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("http://x", r"tiers.peers: .*'http://x'; must be tcp://host:port"),
        ("tcp://10.0.0.7:8110", r"tiers.peers: .*10.0.0.7"),
    ],
)
def test_an_address_that_may_not_be_asked_is_refused_by_name(address: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        PeerLink("a").tier(address)
