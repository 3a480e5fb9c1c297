"""The Unix socket of a store process: a path that this user alone can reach, and that no second store takes."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import struct
from pathlib import Path

from pdlink.errors import ConfigError

_MAX_PATH_NBYTES = 107
"""sun_path, without its last zero."""
_CREDENTIALS = struct.Struct("3i")


def store_path(setting: str, given: str) -> Path:
    """The path that a setting names, as it is or as ipc://PATH; {uid} in it is this user's. Raises ConfigError."""
    path = Path(given.removeprefix("ipc://").replace("{uid}", str(os.geteuid())))
    if not path.is_absolute() or len(os.fsencode(path)) > _MAX_PATH_NBYTES:
        raise ConfigError(
            f"{setting}: got {given!r}; expected an absolute path of {_MAX_PATH_NBYTES} bytes, with or without "
            "ipc:// before it; name another"
        )
    return path


def listen(path: Path, setting: str) -> tuple[socket.socket, int]:
    """A listening socket, and the descriptor of the lock that keeps the path ours until it is closed.

    Its directory is made if it is not there. What a store that has died left behind is replaced.
    Raises ConfigError if other users can enter the directory, or a store that runs has the path.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.parent.stat()
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise ConfigError(
                f"{setting}: got {str(path.parent)!r}, which other users can enter or own; expected a directory of "
                "this user's with mode 0700, because clients write into the store's memory; name another"
            )
        lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise ConfigError(
            f"{setting}: got {str(path)!r}, which cannot be used ({error.strerror}); name another"
        ) from None
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
        bound.bind(str(path))
        bound.listen(64)
    except OSError as error:
        bound.close()
        os.close(lock)
        reason = "another store listens there" if isinstance(error, BlockingIOError) else error.strerror
        raise ConfigError(f"{setting}: got {str(path)!r}; {reason}; name another") from None
    return bound, lock


def peer_of(link: socket.socket) -> tuple[int, int]:
    """Process id and user id of the other end, as the kernel says; the id is 0 for a process that we cannot see."""
    pid, uid, _ = _CREDENTIALS.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid
