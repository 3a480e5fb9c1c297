"""How the transfers of one transport share it: the numbers of `pdlink/endpoint/order.py`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sharing:
    """The defaults are right for links of 1 to 50 GB/s. push_nbytes <= peer_window_nbytes <= window_nbytes."""

    window_nbytes: int = 64 * 2**20
    """In-flight limit over all peers that are not slow consumers."""
    peer_window_nbytes: int = 32 * 2**20
    """In-flight limit per peer. Too small and the link idles between completions: keep it above 5 ms of bandwidth
    (32 MiB at 6 GB/s), because Python code may delay a completion by that much (`sys.getswitchinterval`). Too large
    and new transfers to the peer queue behind it."""
    push_nbytes: int = 4 * 2**20
    """Larger pushes are cut, between blocks, into pushes of about this size."""
    ageing: float = 0.05
    """Bytes of advantage for every byte that the link moves while a transfer waits: a transfer of S bytes is
    overtaken only by smaller ones that come while the link moves the next S / ageing. Less ageing favours small
    transfers, and lets large ones wait longer. Simulated, lognormal lengths, 80 % load: the mean time to ready is
    30 % of that of first come, first served without ageing and with 0.05, 36 % with 0.2, 73 % with 1."""
