"""Transfers that are going on, as plain values for people."""

from __future__ import annotations

from typing import NamedTuple


class LiveTransfer(NamedTuple):
    """One side's view of one transfer at one moment."""

    transfer_id: str
    side: str
    """"sender" or "receiver"."""
    state: str
    peer: str
    """Empty until a peer has asked for it."""
    lane: str
    num_tokens: int
    """The sender's prompt; of the receiver, the tokens that it offered for."""
    nbytes: int
    """Visible at the receiver. The receiver learns it at the end."""
    age_s: float
    layers: str
    """One character per layer, of `Sending.stages`; empty on the receiver."""
