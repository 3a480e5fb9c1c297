"""How much memory this process may still take: what the machine has free, or less where a container has a limit."""

from __future__ import annotations

import errno
import re
from pathlib import Path


def available_nbytes(root: Path = Path("/")) -> int:
    """What can be allocated without swapping: the kernel's estimate, or less where a container has a limit.

    root: where /proc and /sys are. Raises OSError if the kernel says nothing.
    """
    for line in (root / "proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return min([int(line.split()[1]) * 1024, *_cgroup_nbytes(root)])
    raise OSError(errno.ENODATA, "no MemAvailable in /proc/meminfo")


def _cgroup_nbytes(root: Path) -> list[int]:
    """What is left in each control group (version 2) that this process is in, from its own to the top.

    Pages of files that were not used lately count as free: the kernel takes them back before it kills.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    top, found = root / "sys/fs/cgroup", []
    own = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), None)
    for group in () if own is None else (top / own, *(top / own).parents):
        try:
            limit, used = (group / "memory.max").read_text(), int((group / "memory.current").read_text())
            idle = re.search(r"^inactive_file (\d+)", (group / "memory.stat").read_text(), re.MULTILINE)
            if limit.strip() != "max":
                found.append(max(0, int(limit) - used + (int(idle.group(1)) if idle else 0)))
        except (OSError, ValueError):  # the top one has no such files
            continue
        if group == top:
            break
    return found
