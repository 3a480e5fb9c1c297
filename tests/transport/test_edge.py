"""Whatever an invitation holds and whatever the kernel refuses: `connect` and `invite` raise two errors, no other."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

import msgspec
import pytest

from pdlink.errors import PdlinkError, ProtocolError, TransportFailure
from pdlink.memory import host
from pdlink.memory.buffers import Buffer
from pdlink.transport import tcp, ucx
from pdlink.transport.edge import translated
from pdlink.transport.tcp import TcpTransport
from pdlink.transport.ucx import UcxTransport

UCX = UcxTransport().probe()


@pytest.mark.parametrize(
    ("raised", "becomes", "says"),
    [
        (ValueError("no such thing"), ProtocolError, "peer x: no such thing"),
        (OverflowError("too large"), ProtocolError, "too large"),
        (TypeError("incompatible function arguments"), ProtocolError, "incompatible"),
        (OSError(errno.EMFILE, "Too many open files"), TransportFailure, "ulimit -n"),
        (OSError(errno.EACCES, "Permission denied"), TransportFailure, "same user"),
        (RuntimeError("closed"), TransportFailure, "peer x: closed"),
        (ProtocolError("as it is"), ProtocolError, "^as it is$"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_errors_of_the_edge_get_a_type_and_a_remedy(raised: Exception, becomes: type[PdlinkError], says: str) -> None:
    with pytest.raises(becomes, match=says), translated("peer x"):
        raise raised


@pytest.mark.parametrize("address", ["::1%lo", "::1%1", "fe80::1%lo", "127.0.0.1%lo", "::ffff:127.0.0.1%eth0"])
def test_an_address_with_an_interface_is_refused(address: str) -> None:
    """`ipaddress` takes it, and calls it loopback; the kernel's own reader does not."""
    with contextlib.closing(TcpTransport("::1")) as transport, Buffer(4096) as buffer:
        transport.open()
        transport.register(buffer)
        told = msgspec.structs.replace(tcp._decode(transport.invite("x")), host=address)
        with pytest.raises(ProtocolError, match="cannot be read"):
            transport.connect("y", msgspec.msgpack.encode(told))


@pytest.mark.skipif(not UCX.ok, reason=UCX.reason)
def test_a_gate_that_is_none_is_refused_and_leaves_the_name_free() -> None:
    with contextlib.closing(UcxTransport("shm", devices="lo")) as transport, Buffer(4096) as buffer:
        transport.open()
        transport.register(buffer)
        with open(os.devnull) as nothing:  # noqa: SIM117
            with Path(__file__).open() as unsealed:
                for file in (nothing, unsealed):
                    status = os.fstat(file.fileno())
                    told = msgspec.structs.replace(
                        ucx._unpack(transport.invite(f"inviting {file.name}")),
                        gate_fd=file.fileno(),
                        gate_device=status.st_dev,
                        gate_inode=status.st_ino,
                    )
                    with pytest.raises((ProtocolError, TransportFailure)):
                        transport.connect("x", ucx._pack(told))
        transport.connect("x", transport.invite("honest"))


def test_the_id_of_this_boot_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later there may be no descriptor left to read it with."""
    before = host.boot_id()

    def no_descriptor(*_: object, **__: object) -> str:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Path, "read_text", no_descriptor)
    assert host.boot_id() == before
