"""What an invitation to mapped memory may make a worker write to: the memory of who made it, and nothing else.

Invitations come over the control connection from a peer that may be on another host, whatever it says of itself. The
victims are this process, and another one of this user that has not invited the attacker.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from pdlink.errors import ProtocolError
from pdlink.memory.buffers import Buffer
from pdlink.transport.mapped import MappedTransport
from tests.conformance.transports.other_process import OtherProcess
from tests.conformance.transports.side import Side

NBYTES = 1 << 16
SHRINK, GROW = fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW


@pytest.fixture
def writer() -> Iterator[Side]:
    """A worker as it is deployed, with KV of its own; afterwards that must be what it was."""
    with contextlib.closing(Side(MappedTransport())) as side:
        side.add_buffer(NBYTES, seed=1)
        before = side.snapshot()
        yield side
        assert side.snapshot() == before


@pytest.fixture
def neighbour() -> Iterator[OtherProcess]:
    """Another worker of this host, and what it has in its memory must stay there."""
    other = OtherProcess("mapped")
    try:
        other.call("add_buffer", NBYTES, 2)
        before = other.call("digest_of", 0, NBYTES)
        yield other
        assert other.call("digest_of", 0, NBYTES) == before
    finally:
        other.end()


def file_of(fd: int, nbytes: int) -> dict[str, int]:
    status = os.fstat(fd)
    return {"fd": fd, "device": status.st_dev, "inode": status.st_ino, "nbytes": nbytes}


def gate_of(file: dict[str, Any], nonce: bytes = bytes(16)) -> dict[str, Any]:
    """A file that is given out as a gate; by default with what a page of zeros would hold."""
    return {key: file[key] for key in ("fd", "device", "inode")} | {"nonce": nonce}


def told(invitation: bytes | str) -> dict[str, Any]:
    fields = msgspec.msgpack.decode(bytes.fromhex(invitation) if isinstance(invitation, str) else invitation)
    assert isinstance(fields, dict)
    return fields


def refused(writer: Side, fields: dict[str, Any], because: str) -> None:
    with pytest.raises(ProtocolError, match=because):
        writer.transport.connect("attacker", msgspec.msgpack.encode(fields))
    assert writer.transport.lane("attacker") == ""


def test_an_invitation_cannot_name_the_process_that_it_is_given_to(writer: Side) -> None:
    """Its own KV cache as region and as gate: sixteen zero bytes would have been enough."""
    buffer = cast("Buffer", writer.buffers[0])
    buffer.array[:64] = 0
    fields = told(writer.transport.invite("attacker"))
    fields["gate"] = gate_of(file_of(buffer.fd, NBYTES))
    refused(writer, fields, "names this process")
    buffer.array[:] = np.random.default_rng(1).integers(0, 256, NBYTES, dtype=np.uint8)


def test_an_invitation_that_is_sent_back_to_who_made_it_is_refused(writer: Side) -> None:
    """The attacker was invited itself, so it knows a gate of this process and what the page holds."""
    refused(writer, told(writer.transport.invite("attacker")), "names this process")


def test_a_process_that_has_invited_nobody_is_not_written_to(writer: Side, neighbour: OtherProcess) -> None:
    fields = told(neighbour.call("invite", "somebody"))
    fields["gate"] = gate_of(fields["regions"][0])
    refused(writer, fields, "sealed against any other size")


def test_the_gate_of_somebody_else_opens_nothing_and_stays_free(writer: Side, neighbour: OtherProcess) -> None:
    """The attacker guesses descriptor and inode, which are small numbers. It would be the one writer of that gate."""
    invitation = neighbour.call("invite", "honest")
    fields = told(invitation)
    for nonce in (bytes(16), os.urandom(16), bytes([fields["gate"]["nonce"][0] ^ 1]) + fields["gate"]["nonce"][1:]):
        refused(writer, fields | {"gate": gate_of(fields["gate"], nonce)}, "not the one that this invitation")
    with contextlib.closing(Side(MappedTransport())) as honest:
        honest.add_buffer(NBYTES, seed=3)
        honest.connect("neighbour", invitation)
        assert honest.wait_batch(honest.submit_block("neighbour", 0, 0)) == "ok"


@pytest.mark.parametrize(
    ("nbytes", "seals"),
    [(4096, SHRINK), (4096, GROW), (4096, 0), (8192, SHRINK | GROW), (4095, SHRINK | GROW), (0, SHRINK | GROW)],
)
def test_a_gate_is_one_sealed_page(writer: Side, nbytes: int, seals: int) -> None:
    """Another process's, seen from here as this one's: the file is looked at before what is in it."""
    lax = MappedTransport(within_process=True)
    with contextlib.closing(Side(lax)) as side, open_memory(nbytes, seals) as fd:
        side.add_buffer(NBYTES, seed=4)
        fields = told(side.transport.invite("attacker"))
        fields["gate"] = gate_of(file_of(fd, nbytes))
        refused(side, fields, "sealed|bytes, not 4096")


@pytest.mark.parametrize("nbytes", [NBYTES - 4096, NBYTES + 4096])
def test_a_region_is_a_whole_memory_file(nbytes: int) -> None:
    lax = MappedTransport(within_process=True)
    with contextlib.closing(Side(lax)) as side, Buffer(NBYTES) as buffer:
        side.add_buffer(NBYTES, seed=5)
        fields = told(side.transport.invite("attacker"))
        fields["regions"] = [file_of(buffer.fd, nbytes)]
        refused(side, fields, f"{NBYTES} bytes, not {nbytes}")


@contextlib.contextmanager
def open_memory(nbytes: int, seals: int) -> Iterator[int]:
    fd = os.memfd_create("attack", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        yield fd
    finally:
        os.close(fd)
