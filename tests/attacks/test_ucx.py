"""What an invited writer may say over UCX about runs that it has packed: the owner places none that is not inside.

The liar is an honest writer that was told wrong sizes: its own checks pass, and what it sends names places that the
owner never opened.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest

from pdlink.errors import ProtocolError
from pdlink.kv.layout import Piece
from pdlink.transport import ucx
from pdlink.transport.base import PeerFailed
from pdlink.transport.ucx import UcxTransport
from tests.conformance.transports.side import Side, join

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
    owner.close_peer("liar")
    owner.wait_closed("liar")

    join(honest, owner, "honest", "owner")
    assert honest.wait_batch(honest.submit("owner", Piece(0, 0, 0, 0, inside))) == "ok"
    for src, dst, nbytes in inside.tolist():
        np.testing.assert_array_equal(
            owner.buffers[0].array[dst : dst + nbytes], honest.buffers[0].array[src : src + nbytes]
        )


@pytest.mark.parametrize("wrong", [{"nbytes": 4096}, {"nbytes": 0}, {"base": 2**64 - 4096}])
def test_an_invitation_with_a_ring_of_another_shape_is_refused(
    make_side: Callable[[str], Side], wrong: dict[str, int]
) -> None:
    owner, writer = make_side("tcp"), make_side("tcp")
    told = ucx._unpack(owner.transport.invite("writer"))
    forged = msgspec.structs.replace(told, ring=msgspec.structs.replace(told.ring, **wrong))
    with pytest.raises(ProtocolError, match="slots"):
        writer.transport.connect("owner", ucx._pack(forged))
