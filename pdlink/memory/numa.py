"""Host memory on a NUMA node, as that of a GPU: copies across sockets share the link between them.

The memory policy belongs to the calling thread and applies when pages are first touched, which `Buffer` does. The
system call goes through ctypes, without libnuma. If it is forbidden (some containers), the kernel chooses the node,
which is only slower.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

log = logging.getLogger(__name__)

_SYS_SET_MEMPOLICY: Final = {"x86_64": 238, "aarch64": 237}
_MPOL_DEFAULT: Final = 0
_MPOL_PREFERRED: Final = 1
_MAX_NODES: Final = 1024


def node_of(pci_address: str, devices: Path = Path("/sys/bus/pci/devices")) -> int | None:
    """The node of a PCI device ("0000:81:00.0"); None if unknown."""
    try:
        node = int((devices / pci_address.lower() / "numa_node").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return node if 0 <= node < _MAX_NODES else None


def nodes(devices: Path = Path("/sys/devices/system/node")) -> list[int]:
    """The NUMA nodes of this machine; none if the system does not tell."""
    return sorted(int(path.name.removeprefix("node")) for path in devices.glob("node[0-9]*"))


@contextlib.contextmanager
def prefer_node(node: int | None) -> Iterator[None]:
    """Prefer `node` for pages that this thread touches first. None changes nothing."""
    changed = node is not None and _set_policy(_MPOL_PREFERRED, node)
    try:
        yield
    finally:
        if changed:
            _set_policy(_MPOL_DEFAULT, None)


def _set_policy(mode: int, node: int | None) -> bool:
    number = _SYS_SET_MEMPOLICY.get(platform.machine())
    if number is None:
        return False
    mask = (ctypes.c_ulong * (_MAX_NODES // 64))()
    if node is not None:
        mask[node // 64] = 1 << node % 64
    libc = ctypes.CDLL(None, use_errno=True)
    # The kernel reads one bit less than maxnode.
    size = _MAX_NODES + 1 if node is not None else 0
    failed = libc.syscall(
        ctypes.c_long(number), ctypes.c_int(mode), mask if node is not None else None, ctypes.c_ulong(size)
    )
    if failed:
        log.info("memory policy for NUMA node %s: errno %d", node, ctypes.get_errno())
    return not failed
