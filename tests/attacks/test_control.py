"""What a peer, or somebody who pretends to be one, can do with the messages of the control connection: nothing.

The frames come through real sockets; the endpoints live in this process. A peer here is one that was let in, so these
tests also say what one trusted worker can do to the transfers of another.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdlink.endpoint import early
from pdlink.events import MessageDropped, PeerChanged
from pdlink.kv.layout import KVLayout, LayerLayout, Part
from pdlink.protocol import messages
from pdlink.protocol.messages import MAX_FRAME_NBYTES, MAX_HELLO_NBYTES, VERSION, Envelope, Identity
from tests.endpoint.conftest import Handler, Pair, layout
from tests.loopback import LOOPBACK
from tests.waiting import until

from .stranger import FalsePrefill, Stranger

TOKENS = 13
SRC = [3, 0, 9, 4]
DST = [5, 1]

Message = Callable[[str], messages.Body]

ABOUT_A_TRANSFER: dict[str, Message] = {
    "expect": messages.Expect,
    "offer": lambda key: messages.Offer(key, 0, TOKENS, ((7, 8),), 3),
    "ack": messages.Ack,
    "stop": lambda key: messages.Stop(key, "because I can"),
    "quiet": messages.Quiet,
    "landed": lambda key: messages.Landed(key, 0, TOKENS),
    "done": lambda key: messages.Done(key, 0, TOKENS, 3, TOKENS * 192, 66),
}


@pytest.fixture(autouse=True)
def unharmed(pair: Pair) -> Iterator[None]:
    """After every attack both loops live, nothing is held, and a transfer brings the right bytes."""
    yield
    pair.hub.hold = False
    pair.hub.deliver_all()
    assert transfer(pair, "the one after") == ["ready 42", "released"]
    until(pair.idle, "nothing is held")
    assert (pair.prefill.endpoint.failure, pair.decode.endpoint.failure) == ("", "")
    for layer in range(3):
        assert (pair.decode.rows(DST, TOKENS, layer) == pair.prefill.rows(SRC, TOKENS, layer)).all()


def transfer(pair: Pair, transfer_id: str) -> list[str]:
    handler = begin(pair, transfer_id)
    pair.compute(transfer_id, SRC, TOKENS)
    return handler.wait()


def begin(pair: Pair, transfer_id: str) -> Handler:
    """Both sides know of it, decode has offered, prefill computes."""
    return pair.begin(transfer_id, DST, TOKENS)[1]


def dropped(pair: Pair, reason: str) -> int:
    return sum(isinstance(event, MessageDropped) and event.reason == reason for event in pair.events)


def losses(pair: Pair) -> list[str]:
    return [event.reason for event in pair.events if isinstance(event, PeerChanged) and event.state == "lost"]


def resident_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


# -- somebody else's transfer ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ABOUT_A_TRANSFER)
def test_transfer_of_one_receiver_is_out_of_reach_for_another(pair: Pair, kind: str) -> None:
    """sglang#40125: a peer that knows the id of a running transfer still does not own it."""
    handler = begin(pair, "theirs")
    with Stranger(pair).join() as stranger:
        stranger.say(ABOUT_A_TRANSFER[kind]("theirs"))
        stranger.say(messages.Offer("sync", 0, 1, ((99,),), 3))
        assert stranger.hear(messages.Stop).transfer_id in ("theirs", "sync")
        assert handler.calls == []
        pair.compute("theirs", SRC, TOKENS)
        assert handler.wait() == ["ready 42", "released"]


@pytest.mark.parametrize("kind", ["stop", "expect", "offer"])
def test_offer_that_waits_for_its_request_cannot_be_taken_over(pair: Pair, kind: str) -> None:
    handler = pair.expect("theirs")
    pair.decode.receiver.offer("theirs", DST, 0, TOKENS)
    until(lambda: pair.sender_state("early") == 1, "the offer waits")
    with Stranger(pair).join() as stranger:
        stranger.say(ABOUT_A_TRANSFER[kind]("theirs"))
        stranger.say(messages.Offer("sync", 0, 1, ((99,),), 3))
        stranger.hear(messages.Stop)
        pair.announce("theirs")
        pair.compute("theirs", SRC, TOKENS)
        assert handler.wait() == ["ready 42", "released"]


def test_transfer_that_one_receiver_expects_cannot_be_offered_by_another(pair: Pair) -> None:
    handler = pair.expect("theirs")
    until(lambda: pair.sender_state("early") == 1, "prefill knows who waits")
    with Stranger(pair).join() as stranger:
        stranger.say(ABOUT_A_TRANSFER["offer"]("theirs"))
        assert stranger.hear(messages.Stop).reason == "taken_by_another_receiver"
    pair.decode.receiver.offer("theirs", DST, 0, TOKENS)
    pair.announce("theirs")
    pair.compute("theirs", SRC, TOKENS)
    assert handler.wait() == ["ready 42", "released"]


def test_repeated_interest_does_not_take_an_early_offer_back(pair: Pair) -> None:
    with Stranger(pair).join() as stranger:
        stranger.say(messages.Offer("mine", 0, TOKENS, ((5, 1),), 3))
        stranger.say(messages.Expect("mine"))
        until(lambda: pair.sender_state("early") == 1, "the offer waits")
        log = pair.announce("mine")
        pair.compute("mine", SRC, TOKENS)
        assert stranger.hear(messages.Done).first_token == 42
        stranger.say(messages.Ack("mine"))
        assert log.wait() == ["end"]


def test_id_that_was_used_is_refused_the_second_time(pair: Pair) -> None:
    assert transfer(pair, "used") == ["ready 42", "released"]
    with Stranger(pair).join() as stranger:
        stranger.say(ABOUT_A_TRANSFER["offer"]("used"))
        assert stranger.hear(messages.Stop).reason == "already_sent"
        assert stranger.hear(messages.Quiet).transfer_id == "used"


@pytest.mark.parametrize("kind", ["landed", "done", "quiet", "stop"])
def test_news_of_a_transfer_counts_only_from_its_own_sender(pair: Pair, kind: str) -> None:
    handler, trap = begin(pair, "theirs"), Handler()
    with FalsePrefill(pair) as false:
        pair.decode.receiver.expect("bait", false.address, trap)
        false.welcome()
        before = dropped(pair, "unknown_transfer")
        false.say(ABOUT_A_TRANSFER[kind]("theirs"))
        until(lambda: dropped(pair, "unknown_transfer") == before + 1, "it is counted")
        assert handler.calls == []
        pair.compute("theirs", SRC, TOKENS)
        assert handler.wait() == ["ready 42", "released"]
        false.say(messages.Bye("caught"))
        assert trap.wait() == ["failed peer_lost: closed by false: caught", "released"]


@pytest.mark.parametrize(
    "changes",
    [
        {"start": -1},
        {"end": 2**63},
        {"num_layers": 0},
        {"num_layers": 2},
        {"nbytes": 2**64 - 1},
        {"nbytes": -1},
    ],
    ids=str,
)
def test_done_that_promises_anything_else_than_the_offer_is_no_success(pair: Pair, changes: dict[str, int]) -> None:
    trap = Handler()
    with FalsePrefill(pair) as false:
        pair.decode.receiver.expect("bait", false.address, trap)
        pair.decode.receiver.offer("bait", DST, 0, TOKENS)
        false.welcome()
        false.hear(messages.Offer)
        honest = messages.Done("bait", 0, TOKENS, 3, TOKENS * 192, 66)
        false.say(msgspec.structs.replace(honest, **changes))
        assert false.hear(messages.Stop).reason.startswith("incomplete")
        false.say(messages.Quiet("bait"))
        (failed, released) = trap.wait()
        assert failed.startswith("failed incomplete")
        assert released == "released"


# -- under a false name, or in an old life ---------------------------------------------------------------------------


def test_frames_of_another_life_or_session_change_nothing(pair: Pair) -> None:
    handler = begin(pair, "theirs")
    with Stranger(pair).join() as stranger:
        forged: list[dict[str, Any]] = [
            {"src": "decode"},
            {"src_epoch": pair.decode.endpoint.epoch},
            {"dst_epoch": "an older life"},
            {"dst_epoch": ""},
            {"session": 0},
            {"session": 2**63},
        ]
        for fields in forged:
            stranger.say(messages.Stop("theirs", "forged"), **fields)
        until(lambda: dropped(pair, "old_session") == len(forged), "each is dropped")
        pair.compute("theirs", SRC, TOKENS)
        assert handler.wait() == ["ready 42", "released"]


@pytest.mark.parametrize("number", [-1, 0, 1])
def test_repeated_frame_is_dropped(pair: Pair, number: int) -> None:
    """Its own stop, said again after its transfer has gone on, for one."""
    with Stranger(pair).join() as stranger:
        stranger.say(messages.Expect("mine"))
        until(lambda: pair.sender_state("early") == 1, "it is expected")
        stranger.say(messages.Stop("mine", "again"), number=number)
        until(lambda: dropped(pair, "repeated") == 1, "it is dropped")
        assert pair.sender_state("early") == 1
        stranger.say(messages.Stop("mine", "now"))
        assert stranger.hear(messages.Quiet).transfer_id == "mine"


@pytest.mark.parametrize("number", [3, 2**62])
def test_gap_in_the_frames_of_one_peer_costs_its_session_and_no_other(pair: Pair, number: int) -> None:
    handler = begin(pair, "theirs")
    with Stranger(pair).join() as stranger:
        stranger.say(messages.Expect("mine"), number=number)
        assert stranger.hear(messages.Bye).reason.startswith("lost frame 2 of stranger")
        pair.compute("theirs", SRC, TOKENS)
        assert handler.wait() == ["ready 42", "released"]


def test_replayed_hello_of_a_live_session_is_dropped(pair: Pair) -> None:
    handler = begin(pair, "theirs")
    with Stranger(pair, name="decode") as stranger:
        stranger.epoch = pair.decode.endpoint.epoch
        stranger.hello()
        until(lambda: dropped(pair, "old_session") == 1, "it is dropped")
        pair.compute("theirs", SRC, TOKENS)
        assert handler.wait() == ["ready 42", "released"]


def test_hello_that_is_refused_takes_nobodys_place(pair: Pair) -> None:
    handler = begin(pair, "theirs")
    with Stranger(pair, name="decode", model="another") as stranger:
        stranger.hello()
        assert stranger.hear(messages.Refuse).factor == "model"
        pair.compute("theirs", SRC, TOKENS)
        assert handler.wait() == ["ready 42", "released"]


def test_session_whose_fence_is_pending_cannot_be_replayed(pair: Pair) -> None:
    """Its transfers end under the key of that session; a second peer of this key would leave them for ever."""
    pair.hub.hold = True
    log = pair.announce("mine")
    pair.compute("mine", SRC, TOKENS)
    stranger = Stranger(pair)
    with stranger.join():
        stranger.say(messages.Offer("mine", 0, TOKENS, ((5, 1),), 3))
        until(lambda: len(pair.hub.open_batches) == 1, "three layers are in flight, together")
        pair.hub.stop(pair.prefill.transport)  # in the middle of a run: the fence has to wait
        stranger.say(messages.Bye("gone"))
        until(lambda: pair.prefill.endpoint.num_closing() == 1, "the fence is pending")
        before = dropped(pair, "old_session")
        stranger.hello()
        until(lambda: dropped(pair, "old_session") > before, "the replay is dropped")
        pair.hub.resume(pair.prefill.transport)
        assert log.wait()[-1] == "end"


def test_one_connection_is_one_peer_however_many_names_it_gives(pair: Pair) -> None:
    with Stranger(pair) as stranger:
        for number in range(300):
            stranger.name = f"name-{number}"
            stranger.hello()
        until(lambda: [peer.name for peer in pair.prefill.endpoint.peers()] == ["name-299"], "one is left")
        stranger.hear(messages.Welcome)  # Welcomes that found the queue full went with their session
        until(lambda: pair.prefill.endpoint.num_closing() == 0, "the others are closed")
        assert losses(pair) == ["replaced by a new session"] * 299


def test_handshakes_under_way_are_bounded(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdlink.endpoint.greeting.MAX_HANDSHAKES", 5)
    strangers = [Stranger(pair, name=f"stranger-{number}") for number in range(8)]
    try:
        for stranger in strangers:
            stranger.hello()
        until(lambda: dropped(pair, "too_many_handshakes") == 3, "three are turned away")
        assert len(pair.prefill.endpoint.peers()) == 5
    finally:
        for stranger in strangers:
            stranger.say(messages.Bye("enough"))
        until(lambda: not pair.prefill.endpoint.peers(), "they have left")
        for stranger in strangers:
            stranger.__exit__()


def test_listener_cannot_turn_the_session_of_its_dialer_around(pair: Pair) -> None:
    trap = Handler()
    with FalsePrefill(pair) as false:
        pair.decode.receiver.expect("bait", false.address, trap)
        hello = false.hear(messages.Hello)
        false.say(messages.Hello("false", hello.identity, (LOOPBACK,)), dst_epoch="")
        false.say(messages.Bye("instead"))
        assert trap.wait() == ["failed peer_lost: closed by " + false.address + ": instead", "released"]


# -- out of order, nonsense, and too much ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*ABOUT_A_TRANSFER, "heartbeat", "note", "invite", "welcome"])
def test_nothing_counts_before_the_handshake(pair: Pair, kind: str) -> None:
    other: dict[str, messages.Body] = {
        "heartbeat": messages.Heartbeat(),
        "note": messages.Note(b"x"),
        "invite": messages.Invite(b"\0" * 64),
        "welcome": messages.Welcome("x", pair.decode.endpoint.local.identity, LOOPBACK),
    }
    handler = begin(pair, "theirs")
    with Stranger(pair) as stranger:
        stranger.say(other.get(kind) or ABOUT_A_TRANSFER[kind]("theirs"))
        assert stranger.hear(messages.Bye).reason == "unknown session"
        pair.compute("theirs", SRC, TOKENS)
        assert handler.wait() == ["ready 42", "released"]


@pytest.mark.parametrize("kind", ABOUT_A_TRANSFER)
def test_nothing_about_transfers_counts_in_the_middle_of_the_handshake(pair: Pair, kind: str) -> None:
    with Stranger(pair) as stranger:
        stranger.hello()
        stranger.hear(messages.Welcome)
        before = dropped(pair, "before_handshake")
        stranger.say(ABOUT_A_TRANSFER[kind]("t"))
        until(lambda: dropped(pair, "before_handshake") == before + 1, "it is dropped")
        assert not any(pair.prefill.endpoint.sender.states().values())


@pytest.mark.parametrize("invitation", [b"", b"\x80\x04\x95", b"\xff" * 1000, b"\0" * 2**20], ids=len)
def test_invitation_that_is_none_is_refused(pair: Pair, invitation: bytes) -> None:
    with Stranger(pair) as stranger:
        stranger.hello()
        stranger.hear(messages.Welcome)
        stranger.say(messages.Invite(invitation))
        assert stranger.hear(messages.Refuse).factor == "data connection"


class _Touch:
    """Unpickling this makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return (Path.touch, (Path(self.path),))  # type: ignore[return-value]


def hostile_frames(path: Path) -> list[bytes]:
    random_ = random.Random(11)
    body = messages.encode(Envelope(VERSION, "s", "e", "d", 1, 0, (messages.Stop("t", "r"),)))
    return [
        b"",
        pickle.dumps(_Touch(path)),
        msgspec.msgpack.encode([1, "s", "e", "d", 1, 0, [{"type": "stop", "reason": pickle.dumps(_Touch(path))}]]),
        *(random_.randbytes(random_.randrange(1, 2000)) for _ in range(200)),
        *(body[:end] for end in range(len(body))),
        b"\xdd\xff\xff\xff\xff",  # an array of 4 billion
        b"\xdf\xff\xff\xff\xff",  # a map
        b"\xc6\xff\xff\xff\xff",  # bytes
        b"\x91" * 100_000,
        msgspec.msgpack.encode([1, "s", "e", "d", 1])[:-1] + b"\x01\x82\xa4type\xa3bye\xa1x" + b"\x91" * 100_000,
        msgspec.msgpack.encode([1, "s", "e", "d", float("nan"), {"type": "heartbeat"}]),
        msgspec.msgpack.encode([1, "s" * 300, "e", "d", 1, {"type": "heartbeat"}]),
        msgspec.msgpack.encode([1, "s", "e", "d", 1, {"type": "ack", "transfer_id": "x" * 129}]),
        b"\x96\x01\xa1s\xa1e\xa1d\x01\x82\xa4type\xa3ack\xabtransfer_id\xa3\xed\xa0\x80",  # a lone surrogate
    ]


def test_hostile_frames_execute_nothing_and_are_counted(pair: Pair, tmp_path: Path) -> None:
    """vllm#17192, lightllm#1213: nothing that comes over a socket is unpickled."""
    frames = hostile_frames(tmp_path / "executed")
    with Stranger(pair).join() as stranger:
        for frame in frames:
            stranger.raw(frame)
        stranger.socket.send_multipart([b"a", b"b", b"c"])
        stranger.say(messages.Offer("sync", 0, 1, ((99,),), 3))
        stranger.hear(messages.Stop)
    assert dropped(pair, "malformed") >= len(frames) - 20
    assert not (tmp_path / "executed").exists()


def test_frame_over_the_limit_ends_its_connection_only(pair: Pair) -> None:
    with Stranger(pair).join() as stranger, Stranger(pair, name="another").join() as another:
        stranger.raw(b"\0" * (MAX_FRAME_NBYTES + 1))
        another.say(messages.Offer("sync", 0, 1, ((99,),), 3))
        another.hear(messages.Stop)


def every(kv: KVLayout, **fields: Any) -> KVLayout:
    """Every layer with these fields."""
    return replace(kv, layers=tuple(replace(layer, **fields) for layer in kv.layers))


SMALL = LayerLayout((Part(0, 0), Part(0, 64)), 32, 8, 4)
ABSURD: dict[str, Callable[[KVLayout], KVLayout]] = {
    "negative blocks": lambda kv: replace(kv, num_blocks=-1),
    "no blocks": lambda kv: replace(kv, num_blocks=0),
    "no tokens in a block": lambda kv: replace(kv, block_tokens=0),
    "2^63 blocks": lambda kv: replace(kv, num_blocks=2**63),
    "2^62 tokens in a block": lambda kv: replace(kv, block_tokens=2**62),
    "2^40 tokens in a block": lambda kv: replace(kv, block_tokens=2**40),
    "negative stride": lambda kv: replace(kv, layers=(replace(kv.layers[0], block_stride=-64), *kv.layers[1:])),
    "stride of 2^62": lambda kv: replace(kv, layers=(replace(kv.layers[0], token_stride=2**62), *kv.layers[1:])),
    "stride of 2^63, never used": lambda kv: replace(every(kv, token_stride=2**63), block_tokens=1),
    "stride of 2^64 - 1, never used": lambda kv: replace(every(kv, block_stride=2**64 - 1), num_blocks=1),
    "region 2^63": lambda kv: every(kv, parts=(Part(2**63, 0), Part(2**63, 64))),
    "stride of 0": lambda kv: replace(kv, layers=(replace(kv.layers[0], block_stride=0), *kv.layers[1:])),
    "negative offset": lambda kv: replace(kv, layers=(replace(SMALL, parts=(Part(0, -8),) * 2), *kv.layers[1:])),
    "region -1": lambda kv: replace(kv, layers=(replace(SMALL, parts=(Part(2**62, 0), Part(-1, 0))), *kv.layers[1:])),
    "no parts": lambda kv: replace(kv, layers=(replace(kv.layers[0], parts=()), *kv.layers[1:])),
    "all layers in one place": lambda kv: replace(kv, layers=(kv.layers[0],) * 3),
    "no layers": lambda kv: replace(kv, layers=()),
    "50,000 layers": lambda kv: replace(kv, layers=(SMALL,) * 50_000),
    "100,000 parts": lambda kv: replace(kv, layers=(replace(SMALL, parts=(Part(0, 0),) * 100_000), SMALL, SMALL)),
    "3 MB of type": lambda kv: replace(kv, dtype="float" * 600_000),
    "negative heads": lambda kv: replace(kv, num_heads=-2),
    "2^63 - 1 bytes a head": lambda kv: replace(kv, head_nbytes=2**63 - 1),
}  # fmt: skip


@pytest.mark.parametrize("absurd", ABSURD)
def test_absurd_layouts_are_refused_by_both_sides(pair: Pair, absurd: str) -> None:
    kv = ABSURD[absurd](layout(8))
    with Stranger(pair, layout=kv) as stranger:
        stranger.hello()
        nbytes = len(messages.encode(envelope_of(kv)))
        if nbytes <= MAX_HELLO_NBYTES:
            refusal = stranger.hear(messages.Refuse)
            assert len(refusal.local) + len(refusal.remote) <= 2 * messages.MAX_TEXT
        elif nbytes <= MAX_FRAME_NBYTES:
            until(lambda: dropped(pair, "too_long") == 1, "it is dropped before it is decoded")
    trap = Handler()
    with FalsePrefill(pair) as false:
        false.layout = kv
        pair.decode.receiver.expect("bait", false.address, trap)
        false.hear(messages.Hello)
        false.say(messages.Welcome("false", Identity(VERSION, "m", "main", 1, kv, "host"), LOOPBACK))
        false.say(messages.Bye("enough"))
        assert trap.wait()[-1] == "released"


def envelope_of(kv: KVLayout) -> Envelope:
    hello = messages.Hello("s", Identity(VERSION, "m", "main", 1, kv, "host"), ())
    return Envelope(VERSION, "s", "e" * 16, "", 1, 0, (hello,))


@pytest.mark.parametrize(
    "offer",
    [
        messages.Offer("t", 0, 2**63, ((1,),), 3),
        messages.Offer("t", -(2**63), 0, ((),), 3),
        messages.Offer("t", 5, 4, ((1,),), 3),
        messages.Offer("t", 0, TOKENS, ((1, 2**63),), 3),
        messages.Offer("t", 0, TOKENS, ((1, -1),), 3),
        messages.Offer("t", 0, TOKENS, ((1, 1),), 3),
        messages.Offer("t", 0, 8_000_000, (tuple(range(700_000)),), 3),
        messages.Offer("t", 0, 8_000_000, ((1,) * 1_000_000,), 3),
        messages.Offer("t", 0, TOKENS, ((1, 2),), -3),
        messages.Offer("t", 0, TOKENS, ((1, 2),), 2**63),
    ],
    ids=["end", "start", "empty", "block", "negative", "twice", "million", "million equal", "layers", "huge layers"],
)
@pytest.mark.parametrize("when", ["before the request", "after it"])
def test_impossible_offer_is_stopped(pair: Pair, offer: messages.Offer, when: str) -> None:
    with Stranger(pair).join() as stranger:
        if when == "after it":
            log = pair.announce("t")
            stranger.say(offer)
            assert stranger.hear(messages.Stop).transfer_id == "t"
        else:
            stranger.say(offer)
            stranger.say(messages.Offer("sync", 0, 1, ((99,),), 3))
            stranger.hear(messages.Stop)
            if offer.transfer_id == "t" and pair.sender_state("early"):
                log = pair.announce("t")
                assert stranger.hear(messages.Stop).transfer_id == "t"
            else:
                return
        assert log.wait()[-1] == "end"


FLOOD = 100_000


@pytest.mark.parametrize("kind", ["ack", "stop", "expect", "offer", "quiet"])
def test_hundred_thousand_messages_about_unknown_transfers_neither_grow_nor_delay(pair: Pair, kind: str) -> None:
    """vllm#50674: acks for transfers that were never mapped were kept for ever and rescanned at each step."""
    make = ABOUT_A_TRANSFER[kind]
    with Stranger(pair).join() as stranger:
        for number in range(FLOOD // 10):  # what is bounded fills up once
            stranger.say(make(f"unknown-{number}"))
        stranger.say(messages.Offer("sync", 0, 1, ((99,),), 3))
        stranger.hear(messages.Stop)
        before = resident_nbytes()
        for number in range(FLOOD // 10, FLOOD):
            stranger.say(make(f"unknown-{number}"))
            if number == FLOOD // 2 and kind not in ("expect", "offer"):
                assert transfer(pair, "in between") == ["ready 42", "released"]
        stranger.say(messages.Offer("sync", 0, 1, ((99,),), 3))
        while stranger.hear(messages.Stop).transfer_id != "sync":
            pass
        assert pair.prefill.endpoint.sender.early_nbytes() <= early.MAX_PEER_NBYTES
        assert resident_nbytes() - before < 64 * 2**20
        stranger.say(messages.Bye("enough"))
        until(pair.idle, "nothing is left of it")


def test_early_offers_of_one_peer_are_bounded_in_bytes(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early, "MAX_PEER_NBYTES", 10 * (early.ENTRY_NBYTES + 2 * 8))
    with Stranger(pair).join() as stranger:
        for number in range(11):
            stranger.say(messages.Offer(f"t-{number}", 0, TOKENS, ((1, 2),), 3))
        assert stranger.hear(messages.Stop).reason == "too_many_early_offers"
        assert pair.sender_state("early") == 10
        stranger.say(messages.Bye("enough"))
        until(pair.idle, "nothing is left of it")
        assert losses(pair) == ["closed by stranger: enough"]


def test_offers_of_unknown_transfers_keep_no_text_of_any_length(pair: Pair) -> None:
    """What is not one of three words is no `verify`: such a frame is malformed."""
    with Stranger(pair).join() as stranger:
        offer = messages.Offer("t", 0, 1, ((1,),), 3, verify="x" * 1000)  # type: ignore[arg-type]
        before = dropped(pair, "malformed")
        stranger.say(offer)
        until(lambda: dropped(pair, "malformed") == before + 1, "it is dropped")
        assert pair.sender_state("early") == 0


def test_ten_thousand_early_offers_of_one_peer_do_not_refuse_another(pair: Pair) -> None:
    with Stranger(pair).join() as stranger:
        for number in range(40):
            bodies = tuple(messages.Expect(f"s-{number}-{index}") for index in range(1000))
            to = stranger.victim.endpoint.epoch
            frame = Envelope(VERSION, stranger.name, stranger.epoch, to, stranger.session, stranger.num_said, bodies)
            stranger.raw(messages.encode(frame))
            stranger.num_said += 1
        assert stranger.hear(messages.Stop).reason == "too_many_early_offers"
        handler = pair.expect("theirs")
        pair.decode.receiver.offer("theirs", DST, 0, TOKENS)
        until(lambda: pair.prefill.endpoint.sender._early.get("theirs") is not None, "it is kept")
        pair.announce("theirs")
        pair.compute("theirs", SRC, TOKENS)
        assert handler.wait() == ["ready 42", "released"]
        stranger.say(messages.Bye("enough"))
