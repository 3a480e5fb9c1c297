"""The token of a deployment that is started by one process: made at its start, kept in memory, gone with it.

An operator of many hosts would have to bring a file to all of them. This one travels with the settings of each worker
instead, through the cluster's own channels, so it is as secret as those: with Ray, `RAY_USE_TLS=1` or a private
network. A process that reads settings finds it as a file that has no name in any directory.
"""

from __future__ import annotations

import os


class Unnamed:
    """A file with a secret, for this process and its children, until `close`."""

    def __init__(self, text: str) -> None:
        self._fd = os.memfd_create("pdlink-token", os.MFD_CLOEXEC)
        os.fchmod(self._fd, 0o600)
        os.write(self._fd, text.encode())
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}"
        """Processes of this user can open it."""

    def close(self) -> None:
        os.close(self._fd)
