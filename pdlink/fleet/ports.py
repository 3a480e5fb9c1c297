"""Free TCP ports for processes that bind them later."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

from pdlink.errors import LocalError

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST = 10_000
_ATTEMPTS = 200


def free_ports(count: int) -> int:
    """The first of `count` consecutive ports that are free now on 127.0.0.1.

    They lie below the range from which the kernel takes ports of outgoing connections: one of those, made by any
    process, would take a port between this call and its use. Raises LocalError if there are none.
    """
    end = _outgoing() - count
    for _ in range(_ATTEMPTS):
        first = random.randint(_FIRST, end)  # at random, because another process may look at the same time
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            for port in range(first, first + count):
                held.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
    raise LocalError(f"ports: found no {count} free in a row from {_FIRST} to {end}; end processes that listen there")


def _outgoing() -> int:
    try:
        first = int(_RANGE.read_text().split()[0])
    except (OSError, ValueError):  # no Linux, or a hidden /proc
        first = 32_768
    return first if first > _FIRST + 1_000 else 65_536
