"""Where a transport meets a peer's numbers, native code and the kernel: what they raise becomes an error of ours."""

from __future__ import annotations

import contextlib
import errno
from typing import TYPE_CHECKING

from pdlink.errors import PdlinkError, ProtocolError, TransportFailure

if TYPE_CHECKING:
    from collections.abc import Iterator

REMEDIES = {
    errno.EMFILE: "raise the limit on open files of this process (ulimit -n)",
    errno.ENFILE: "raise the limit on open files of this host (fs.file-max)",
    errno.EACCES: "run both processes as the same user",
    errno.EPERM: "run both processes as the same user",
}


@contextlib.contextmanager
def translated(what: str) -> Iterator[None]:
    """Errors in here as those that `Transport.invite` and `Transport.connect` promise; `what` begins their message.

    Numbers of an invitation that no call takes, and a name in use, are the peer's fault (ProtocolError). What the
    kernel or an engine refuses may work later, or over another transport (TransportFailure).
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
