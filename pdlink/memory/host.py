"""Which host this process runs on, as far as sharing memory is concerned."""

from __future__ import annotations

import functools
import os
from pathlib import Path


@functools.cache
def boot_id() -> str:
    """Names this boot of this host's kernel. Read once: later there may be no descriptor left for it."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def pid_namespace() -> int:
    """Names the pid namespace of this process on this host."""
    return os.stat("/proc/self/ns/pid").st_ino


def host_id() -> str:
    """Boot id and pid namespace: equal strings mean that two processes can reach each other through /proc.

    Containers with separate pid namespaces get different ids, because they cannot map each other's memory.
    """
    return f"{boot_id()}/{pid_namespace()}"
