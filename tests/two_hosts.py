"""Two hosts on one machine: network namespaces with a cable between them, and processes of their own."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from .tools import tool


class Host:
    def __init__(self, namespace: str, address: str) -> None:
        self._namespace, self.address = namespace, address

    @property
    def inside(self) -> list[str]:
        """What puts a program into it, so that it shares no memory with the other one."""
        return [*self._entered, "unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]

    @property
    def _entered(self) -> list[str]:
        return ["ip", "netns", "exec", self._namespace]

    def received_nbytes(self) -> int:
        """Over the cable."""
        counter = "/sys/class/net/pdl0/statistics/rx_bytes"
        told = subprocess.run(
            [*self._entered, "cat", counter], check=True, capture_output=True, text=True, timeout=20
        )
        return int(told.stdout)


@contextmanager
def two_hosts(first: str, second: str) -> Iterator[tuple[Host, Host]]:
    """With these addresses of one /24. Skips the test where there are no namespaces to be had."""
    newcomer = tool("newcomer")
    if os.geteuid() != 0:
        pytest.skip("network namespaces take root")
    with ExitStack() as stack:
        try:
            names = stack.enter_context(newcomer.cabled(first, second))
        except (OSError, newcomer.Failed) as error:
            pytest.skip(f"no network namespaces here: {error}")
        yield Host(names[0], first), Host(names[1], second)
