"""A link of any speed on one machine: two processes, each in a network namespace of its own, and a shaped cable.

The namespaces have no name: each belongs to one process and is gone, with its end of the cable, when that process
ends, whatever ends it. There is nothing to clean up after a crash. What the kernel needs is CAP_SYS_ADMIN, veth and
the token bucket filter (sch_tbf); `ip` and `tc` are iproute2's.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

from .lanes import Receiver, Sender

if TYPE_CHECKING:
    from collections.abc import Sequence

CLONE_NEWNS, CLONE_NEWNET = 0x00020000, 0x40000000  # linux/sched.h
MS_REC, MS_PRIVATE = 0x4000, 0x40000  # linux/mount.h
DEVICE = "pdlink0"
SENDER_ADDRESS, RECEIVER_ADDRESS = "10.77.0.1", "10.77.0.2"
BURST_S = 0.0005
MIN_BURST_NBYTES = 128 * 1024
"""Of the token bucket: what passes at once after a pause. Two of TCP's largest segments, or 0.5 ms of the link."""
QUEUE_NBYTES = 32 << 20
"""Waits in front of the cable; so much that nothing is ever dropped."""
COMMAND_TIMEOUT_S = 20.0


class LinkUnavailable(RuntimeError):
    """No such link on this machine; the message says why."""


def check_tools() -> None:
    """Raise LinkUnavailable if `ip` or `tc` is missing."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise LinkUnavailable(f"there is no `{tool}`: install iproute2")


class _Namespaced:
    """A role that moves its process into a network namespace of its own before anything else."""

    def enter(self) -> int:
        """The process id, by which others can reach the new namespace."""
        libc = ctypes.CDLL(None, use_errno=True)
        # /sys/class/net shows the interfaces of the namespace that /sys was mounted in, and UCX looks there.
        # Only this thread and its later threads move: transports start theirs in open().
        for what, call, arguments in (
            ("unshare", libc.unshare, (CLONE_NEWNET | CLONE_NEWNS,)),
            ("mount /", libc.mount, (b"none", b"/", None, MS_REC | MS_PRIVATE, None)),
            ("mount /sys", libc.mount, (b"sysfs", b"/sys", b"sysfs", 0, None)),
        ):
            if call(*arguments) != 0:
                reason = os.strerror(ctypes.get_errno())
                raise LinkUnavailable(f"a network namespace needs CAP_SYS_ADMIN (root): {what}: {reason}")
        return os.getpid()

    def command(self, words: Sequence[str]) -> None:
        done = subprocess.run(list(words), capture_output=True, text=True, check=False, timeout=COMMAND_TIMEOUT_S)
        if done.returncode != 0:
            raise LinkUnavailable(f"{' '.join(words)}: {done.stderr.strip() or done.returncode}")

    def wait_for_cable(self) -> None:
        """Until the device is running: the kernel notices some time after both ends are up (6.18: up to 1 s)."""
        state = Path(f"/sys/class/net/{DEVICE}/operstate")
        deadline_s = time.monotonic() + COMMAND_TIMEOUT_S
        while state.read_text(encoding="ascii").strip() != "up":
            if time.monotonic() > deadline_s:
                raise LinkUnavailable(f"{DEVICE} has no carrier after {COMMAND_TIMEOUT_S:g} s")
            time.sleep(0.01)

    def shape(self, bits_per_s: float) -> None:
        """Let no more than that leave through the cable."""
        burst = max(MIN_BURST_NBYTES, int(bits_per_s / 8 * BURST_S))
        tbf = f"root handle 1: tbf rate {int(bits_per_s)}bit burst {burst} limit {QUEUE_NBYTES + burst}"
        self.command(["tc", "qdisc", "replace", "dev", DEVICE, *tbf.split()])


class ShapedSender(_Namespaced, Sender):
    def lay_cable(self, receiver_pid: int) -> None:
        """Between this namespace and that of another process."""
        self.command([*f"ip link add {DEVICE} type veth peer name {DEVICE} netns".split(), str(receiver_pid)])


class ShapedReceiver(_Namespaced, Receiver): ...


def plug_in(address: str) -> list[list[str]]:
    """Commands for one end once the cable is there."""
    return [
        line.split()
        for line in (
            "ip link set lo up",
            f"ip addr add {address}/24 dev {DEVICE}",
            f"ip link set {DEVICE} up",
        )
    ]
