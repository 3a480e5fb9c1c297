"""What an invited writer may say over UCX about runs that it has packed: the owner places none that is not inside.

The liar is an honest writer that was told wrong sizes: its own checks pass, and what it sends names places that the
owner never opened. The stranger has a UCX of its own, and no manners.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest

from pdlink.errors import ProtocolError
from pdlink.kv.layout import Piece
from pdlink.transport import ucx
from pdlink.transport.base import PeerFailed
from pdlink.transport.ucx import UcxTransport
from tests.attacks.ucx_stranger import NOTE, NOTE_MAGIC, REPLY, UcxStranger
from tests.conformance.transports.side import PATIENCE_S, Side, join

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pdlink.kv.layout import RunArray

PROBE = UcxTransport.probe()
pytestmark = pytest.mark.skipif(not PROBE.ok, reason=PROBE.reason)

NBYTES = 1 << 20


@pytest.fixture
def make_side() -> Iterator[Callable[[str], Side]]:
    with contextlib.ExitStack() as stack:

        def make(tls: str) -> Side:
            side = Side(UcxTransport(tls, stage_below_nbytes={"": 4096}))
            stack.callback(side.close)
            side.add_buffer(2 * NBYTES, seed=len(tls))
            return side

        yield make


def notes_refused(side: Side) -> int:
    assert isinstance(side.transport, UcxTransport)
    return side.transport.notes_refused


def short_runs(first: int, count: int = 100) -> RunArray:
    """Every other 256 bytes, from `first` on in the destination."""
    at = np.arange(count, dtype=np.int64) * 512
    return np.stack([at[::-1], first + at, np.full(count, 256)], axis=1).astype(np.int64)


@pytest.mark.parametrize("tls", ["tcp", "shm"])
@pytest.mark.parametrize("what", ["the last of many runs", "a region that is none"])
def test_packed_runs_outside_fail_their_peer_before_a_byte_is_placed(
    make_side: Callable[[str], Side], tls: str, what: str
) -> None:
    owner, liar, honest = make_side(tls), make_side(tls), make_side(tls)
    before = owner.snapshot()
    told = ucx._unpack(owner.transport.invite("liar"))
    real = told.regions[0]
    larger = msgspec.structs.replace(real, nbytes=real.nbytes + 4096)
    liar.transport.connect("owner", ucx._pack(msgspec.structs.replace(told, regions=[larger, real])))
    inside, beyond = short_runs(0), short_runs(owner.buffers[0].nbytes, count=1)
    pieces = {
        "the last of many runs": [Piece(0, 0, 0, 0, inside), Piece(0, 0, 0, 0, beyond)],
        "a region that is none": [Piece(0, 0, 1, 0, inside)],
    }
    ticket = liar.submit("owner", *pieces[what])
    assert "outside region" in owner.wait_failed("liar")
    assert liar.wait_batch(ticket) == "peer_failed"
    assert [type(one) for one in owner.happened] == [PeerFailed]
    assert owner.snapshot() == before
    assert notes_refused(owner) == 1
    owner.close_peer("liar")
    owner.wait_closed("liar")

    join(honest, owner, "honest", "owner")
    assert honest.wait_batch(honest.submit("owner", Piece(0, 0, 0, 0, inside))) == "ok"
    assert notes_refused(owner) == 1
    for src, dst, nbytes in inside.tolist():
        np.testing.assert_array_equal(
            owner.buffers[0].array[dst : dst + nbytes], honest.buffers[0].array[src : src + nbytes]
        )


@pytest.mark.parametrize(
    ("header", "payload", "flags"),
    [
        pytest.param(NOTE.pack(NOTE_MAGIC + 1, 0, 0, 0, 1, 0), b"", REPLY, id="another magic"),
        pytest.param(NOTE.pack(NOTE_MAGIC, 2**32 - 1, 0, 0, 1, 0), b"", REPLY, id="a slot that is none"),
        pytest.param(NOTE.pack(NOTE_MAGIC, 0, 4097, 0, 1, 0), b"", REPLY, id="too many runs"),
        pytest.param(NOTE.pack(NOTE_MAGIC, 0, 2**60, 0, 1, 0), b"", REPLY, id="so many runs that their bytes wrap"),
        pytest.param(NOTE.pack(NOTE_MAGIC, 0, 1, 1 << 20, 1, 0), b"", REPLY, id="a list behind the slot"),
        pytest.param(NOTE.pack(NOTE_MAGIC, 0, 0, 2**64 - 1, 1, 0), b"", REPLY, id="all bytes there are"),
        pytest.param(NOTE.pack(NOTE_MAGIC, 0, 0, 1, 1, 0), b"", REPLY, id="bytes of no run"),
        pytest.param(NOTE.pack(NOTE_MAGIC, 0, 0, 0, 1, 0)[:-1], b"", REPLY, id="cut short"),
        pytest.param(NOTE.pack(NOTE_MAGIC, 0, 0, 0, 1, 0) + b"!", b"", REPLY, id="too long"),
        pytest.param(b"", b"", REPLY, id="nothing at all"),
        pytest.param(NOTE.pack(NOTE_MAGIC, 0, 0, 0, 1, 0), b"more", REPLY, id="with a payload"),
        pytest.param(NOTE.pack(NOTE_MAGIC, 0, 0, 0, 1, 0), b"", 0, id="no way to answer"),
    ],
)
def test_a_malformed_note_fails_its_peer_and_is_counted(
    make_side: Callable[[str], Side], header: bytes, payload: bytes, flags: int
) -> None:
    owner = make_side("tcp")
    before = owner.snapshot()
    with UcxStranger(owner.transport.invite("stranger")) as stranger:
        stranger.say(header, payload, flags)
        deadline = time.monotonic() + PATIENCE_S
        while not any(isinstance(one, PeerFailed) for one in owner.happened):
            assert time.monotonic() < deadline
            stranger.progress()
            owner.closed_within("stranger", 0.01)
    assert "packed runs" in owner.wait_failed("stranger")
    assert notes_refused(owner) == 1
    assert owner.snapshot() == before


@pytest.mark.parametrize("wrong", [{"nbytes": 4096}, {"nbytes": 0}, {"base": 2**64 - 4096}])
def test_an_invitation_with_a_ring_of_another_shape_is_refused(
    make_side: Callable[[str], Side], wrong: dict[str, int]
) -> None:
    owner, writer = make_side("tcp"), make_side("tcp")
    told = ucx._unpack(owner.transport.invite("writer"))
    forged = msgspec.structs.replace(told, ring=msgspec.structs.replace(told.ring, **wrong))
    with pytest.raises(ProtocolError, match="slots"):
        writer.transport.connect("owner", ucx._pack(forged))
