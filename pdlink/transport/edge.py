"""Where a transport meets a peer's numbers, native code and the kernel: what they raise becomes an error of ours."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
from typing import TYPE_CHECKING, TypeVar

import msgspec

from pdlink.errors import PdlinkError, ProtocolError, TransportFailure, TransportUnavailable
from pdlink.memory.host import boot_id, pid_namespace

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_INVITATION_NBYTES = 1 << 20
_Invitation = TypeVar("_Invitation")

REMEDIES = {
    errno.EMFILE: "raise the limit on open files of this process (ulimit -n)",
    errno.ENFILE: "raise the limit on open files of this host (fs.file-max)",
    errno.EACCES: "run both processes as the same user",
    errno.EPERM: "run both processes as the same user",
}


@contextlib.contextmanager
def translated(what: str) -> Iterator[None]:
    """Translate errors inside to the errors of `Transport.invite` and `Transport.connect`; `what` begins the message.

    Invalid numbers in an invitation, and a name in use, are the peer's fault (ProtocolError). A refusal of the kernel
    or an engine may succeed later, or over another transport (TransportFailure).
    """
    try:
        yield
    except PdlinkError:
        raise
    except (ValueError, TypeError, OverflowError) as error:  # also of a name in use: `NameTaken` is a ValueError
        raise ProtocolError(f"{what}: {error}") from error
    except OSError as error:
        remedy = REMEDIES.get(error.errno or 0, "")
        raise TransportFailure(f"{what}: {error}{'; ' + remedy if remedy else ''}") from error
    except RuntimeError as error:  # also of a peer that has failed: `PeerUnusable` is one
        raise TransportFailure(f"{what}: {error}") from error


def decoded(invitation: bytes, kind: type[_Invitation], transport: str) -> _Invitation:
    """An invitation of this kind in MessagePack. Raises ProtocolError."""
    if len(invitation) > MAX_INVITATION_NBYTES:
        raise ProtocolError(
            f"invitation over {transport}: got {len(invitation)} bytes; expected at most {MAX_INVITATION_NBYTES}"
        )
    try:
        return msgspec.msgpack.decode(invitation, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"invitation over {transport} cannot be read: {error}") from error


def require_this_host(peer: str, boot: str, namespace: int) -> None:
    """Raises TransportFailure if a peer of another host or pid namespace has invited us; OSError."""
    if boot != boot_id():
        raise TransportFailure(
            f"peer {peer} is on another host (boot id here {boot_id()}, there {boot}); use another transport"
        )
    if namespace != pid_namespace():
        raise TransportFailure(
            f"peer {peer} is in another pid namespace (here {pid_namespace()}, there {namespace}); run both "
            "containers in one (docker --pid, Kubernetes shareProcessNamespace) or use another transport"
        )


def numeric(host: str, transport: str) -> str:
    """The first stream address of a host; a numeric one is itself. Raises TransportUnavailable."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise TransportUnavailable(f"{transport}: no address of {host!r}: {error}") from error
    return str(found[0][4][0])


def require_numeric(host: str, transport: str) -> None:
    """Raises ProtocolError if a peer's invitation names no numeric address: a name would have to be looked up."""
    try:
        if "%" in str(ipaddress.ip_address(host)):  # inet_pton knows no interfaces
            raise ValueError(f"{host} names an interface of another host")
    except ValueError as error:
        raise ProtocolError(f"invitation over {transport} cannot be read: {error}") from error
