"""Values at every edge, in every field of every message and invitation, from a peer whose word is well formed.

Bytes that are no message are in test_control.py; these are messages, and many of them pass the first checks: an
honest session with something odd in it. Whatever is said, no handler raises, no loop ends, the engine's thread hears
of nothing, and the honest session beside it stays and moves its bytes. The same examples each time; other ones, and
fifty times as many, with `--hypothesis-profile=long`, which prints how to repeat what it has found.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from pdlink.capabilities import Capabilities
from pdlink.errors import LayoutMismatch
from pdlink.kv.layout import KVLayout
from pdlink.kv.plan import bind, template, warm_up
from pdlink.protocol import messages
from pdlink.protocol.messages import Envelope, Identity
from pdlink.transport import mapped, mapped_cuda, tcp, ucx
from pdlink.transport.base import Transport
from tests.conformance.transports.entries import ENTRIES, Entry
from tests.endpoint.conftest import Handler, SenderLog
from tests.endpoint.conftest import layout as small_layout

from .bench import TOKENS, Bench, Stranger
from .values import often_spoiled

LONG = settings.get_current_profile_name() == "long"
TIMES = 50 if LONG else 1
KINDS = {"loopback": 1.0, "mapped": 0.5, "tcp": 0.5, "ucx-tcp": 0.1, "ucx-shm": 0.1, "mapped-cuda-double": 0.25}
"""Transports, and how many examples each gets: what opens a connection costs from 0.1 to 30 ms."""
pytestmark = pytest.mark.timeout(240 * TIMES)


def examples(count: int, kind: str) -> settings:
    return settings(
        max_examples=max(5, int(count * KINDS[kind])) * TIMES,
        derandomize=not LONG,
        database=None,
        deadline=None,
        phases=[Phase.generate],  # examples share a bench: a smaller one proves nothing about a larger one
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )


@pytest.fixture(params=[pytest.param((kind, keyed), id=f"{kind}-{'keys' if keyed else 'plain'}") for kind in KINDS for keyed in (False, True)])  # fmt: skip  # noqa: E501
def bench(request: pytest.FixtureRequest) -> Iterator[tuple[str, Bench]]:
    kind, keyed = request.param
    entry: Entry = ENTRIES[kind]
    probe = entry.probe()
    if not probe.ok:
        pytest.skip(probe.reason)
    warm_up()
    make: Callable[[], Transport] = entry.group()
    logging.disable(logging.CRITICAL)
    with contextlib.closing(Bench(make, keyed=keyed)) as bench:
        yield kind, bench
        bench.transfer()
        bench.check()
    logging.disable(logging.NOTSET)


# -- invitations -----------------------------------------------------------------------------------------------------


def reader(kind: type[Any]) -> Callable[[bytes], Any]:
    return msgspec.msgpack.Decoder(kind).decode


FORMS: dict[str, tuple[Callable[[bytes], Any], Callable[[Any], bytes], frozenset[str]]] = {
    "mapped": (reader(mapped._Invitation), msgspec.msgpack.encode, frozenset()),
    "tcp": (tcp._decode, msgspec.msgpack.encode, frozenset()),
    "mapped-cuda-double": (
        msgspec.msgpack.Decoder(mapped_cuda._Invitation).decode,
        msgspec.msgpack.encode,
        frozenset(),
    ),
    "ucx-tcp": (ucx._unpack, ucx._pack, frozenset({"address", "rkey", "base"})),
    "ucx-shm": (ucx._unpack, ucx._pack, frozenset({"address", "rkey", "base"})),
}
"""How an invitation is read and written, and what is not spoiled: UCX aborts the process, or its peer, for an address
or a key that is made to hurt (docs/security.md)."""


@st.composite
def invitations(draw: st.DrawFn, kind: str, honest: bytes) -> bytes:
    if kind not in FORMS:
        return draw(st.sampled_from([honest, honest, honest, b"", honest[:-1], honest + b"0", b"\xff" * 40]))
    read, write, without = FORMS[kind]
    invitation = read(honest)
    return write(draw(often_spoiled(invitation, type(invitation), without)))


# -- messages --------------------------------------------------------------------------------------------------------


def about(transfer_id: str) -> list[messages.Body]:
    """An honest message of every kind that follows a handshake."""
    done = messages.Done(transfer_id, 0, TOKENS, 3, TOKENS * 192, 42, (messages.Checksum(0, 0, TOKENS, 7),))
    return [
        messages.Expect(transfer_id),
        messages.Offer(transfer_id, 0, TOKENS, ((7, 8),), 3),
        messages.Offer(transfer_id, 0, TOKENS, ((7, 8),), 3, per_layer=True, verify="all"),
        messages.Ack(transfer_id),
        messages.Stop(transfer_id, "because I can"),
        messages.Quiet(transfer_id),
        messages.Landed(transfer_id, 0, TOKENS),
        done,
        messages.Heartbeat(),
        messages.Note(b"a bene"),
        messages.Bye("enough"),
        messages.Refuse("layout", "mine", "yours"),
        messages.Invite(b"to the ball"),
    ]


def layouts(kv: KVLayout) -> st.SearchStrategy[KVLayout]:
    """Layouts that fit, some of them so that a stride of theirs is never used."""
    return st.sampled_from([kv, replace(kv, block_tokens=1), replace(kv, num_blocks=1)])


def identities(bench: Bench) -> st.SearchStrategy[Identity]:
    """Honest ones."""
    return layouts(bench.spare.layout).map(lambda kv: msgspec.structs.replace(bench.spare.identity, layout=kv))


def speak(data: st.DataObject, stranger: Stranger, honest: messages.Body) -> None:
    """Say a message, perhaps spoiled, in an envelope, rarely spoiled."""
    body = data.draw(often_spoiled(honest, type(honest)))
    envelope = stranger.envelope(body)
    if data.draw(st.integers(0, 9)) == 0:
        envelope = data.draw(often_spoiled(envelope, Envelope, frozenset({"bodies"})))
    stranger.say(envelope)


@examples(400, "loopback")
@given(st.data())
def test_a_layout_from_a_peer_is_refused_or_every_byte_of_it_has_a_place(data: st.DataObject) -> None:
    """As a source and as a destination; what is accepted is planned inside of what it says it reaches."""
    ours, honest = small_layout(4), data.draw(layouts(small_layout(8)))
    theirs = data.draw(often_spoiled(honest, KVLayout))
    for src, dst in ((ours, theirs), (theirs, ours)):
        try:
            plan_of = template(src, dst)
        except LayoutMismatch:
            continue
        end = min(TOKENS, 32 * src.block_tokens, 32 * dst.block_tokens)
        with contextlib.suppress(ValueError):  # more blocks than it has: an offer says that, and is refused for it
            plan = bind(plan_of, range(src.blocks_of(0, end).stop), range(dst.blocks_of(0, end).stop), 0, end)
            for one in (one for layer in range(3) for one in plan.run_lists(layer)):
                for kv, region, base, column in ((src, one.src_region, one.src_base, 0), (dst, one.dst_region, one.dst_base, 1)):  # fmt: skip  # noqa: E501
                    first, beyond = (
                        base + one.runs[:, column],
                        base + one.runs[:, column] + one.runs[:, 2],
                    )
                    assert first.min() >= 0
                    assert beyond.max() <= kv.extent(region)
                    assert 0 <= region < 2**31


def test_nothing_that_a_dialer_says_costs_more_than_its_session(bench: tuple[str, Bench]) -> None:
    kind, bench_ = bench
    sender, spare = bench_.prefill.sender, bench_.spare.transport

    def say(data: st.DataObject, stranger: Stranger, transfer_id: str, invitation: bytes) -> None:
        identity = data.draw(identities(bench_))
        both = (spare.capabilities, Capabilities("other", "network", ("host",), "pool"))
        speak(data, stranger, messages.Hello(stranger.name, identity, both, "tcp://x:1"))
        stranger.dst_epoch = bench_.prefill.endpoint.epoch
        stranger.say(stranger.envelope(messages.Invite(data.draw(invitations(kind, invitation)))))
        published = data.draw(st.booleans())
        if published:
            bench_.compute(transfer_id)
        for honest in data.draw(st.lists(st.sampled_from(about(transfer_id)), max_size=4)):
            speak(data, stranger, honest)
        if not published:
            bench_.compute(transfer_id)
        bench_.step()

    @examples(200, kind)
    @given(st.data())
    def attack(data: st.DataObject) -> None:
        stranger, log = bench_.stranger(), SenderLog()
        transfer_id, invited = f"t-{bench_.num_strangers}", f"invited-{bench_.num_strangers}"
        sender.announce(transfer_id, log.failed, log.end)
        try:
            say(data, stranger, transfer_id, spare.invite(invited))
        finally:  # also where hypothesis has drawn enough
            sender.cancel(transfer_id, "the example is over")
            spare.close_peer(invited)
            bench_.send_away()
        assert log.calls[-1:] == ["end"]
        bench_.check()

    attack()


def test_nothing_that_a_listener_says_costs_more_than_its_session(bench: tuple[str, Bench]) -> None:
    kind, bench_ = bench
    receiver = bench_.decode.receiver

    def say(data: st.DataObject, false: Stranger, transfer_id: str) -> None:
        offered = data.draw(st.booleans())
        if offered:
            verify: messages.Verify = data.draw(st.sampled_from(("off", "all", "sample")))
            landed: list[tuple[int, int]] = []
            by_layer = (lambda layer, end, _: landed.append((layer, end))) if data.draw(st.booleans()) else None
            receiver.offer(transfer_id, [11, 3], 0, TOKENS, on_landed=by_layer, verify=verify)
        chosen = bench_.spare.transport.capabilities
        speak(data, false, messages.Welcome(false.name, data.draw(identities(bench_)), chosen))
        for honest in data.draw(st.lists(st.sampled_from(about(transfer_id)), max_size=4)):
            speak(data, false, honest)
        if not offered:
            receiver.offer(transfer_id, [11, 3], 0, TOKENS)
        bench_.step()

    @examples(200, kind)
    @given(st.data())
    def attack(data: st.DataObject) -> None:
        false, handler = bench_.false_prefill(), Handler()
        transfer_id = f"bait-{bench_.num_strangers}"
        false.expect(transfer_id, handler)
        try:
            say(data, false, transfer_id)
        finally:
            bench_.send_away()
        assert [call.split()[0] for call in handler.calls] in (["failed", "released"], ["ready", "released"])
        bench_.check()

    attack()
