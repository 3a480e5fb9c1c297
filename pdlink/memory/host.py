"""Which host this process runs on, as far as sharing memory is concerned."""

from __future__ import annotations

import os
from pathlib import Path


def host_id() -> str:
    """Boot id and pid namespace: equal strings mean that two processes can reach each other through /proc.

    Containers on one machine with pid namespaces of their own differ, and rightly so: they cannot.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
