"""Ports of processes that have ended, kept for their successors."""

from __future__ import annotations

import socket

from tests.waiting import until


def keep_port(port: int) -> socket.socket:
    """Bound until it is closed: no connection of this machine is given the port, and who connects to it is refused.

    A successor that listens with SO_REUSEADDR, as servers do, gets it all the same.
    """
    kept = socket.socket()
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)

    def bound() -> bool:
        try:
            kept.bind(("127.0.0.1", port))
        except OSError:  # its process is still ending
            return False
        return True

    until(bound, f"port {port} is free")
    return kept
