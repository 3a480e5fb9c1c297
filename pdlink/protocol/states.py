"""The two state machines of a transfer, as data.

sender    WAITING -offer-> WRITING -complete-> SENT -ack-> DONE
receiver  EXPECTED -offer-> OFFERED -done-> READY
any live state -stop-> DRAINING -quiet | fenced-> FAILED

Blocks are freed only in DONE, READY and FAILED. In DRAINING the transfer is over, but bytes may still be in flight,
so its blocks are quarantined. It ends when the sender reports that nothing is in flight (*quiet*), or when the data
connection is closed (*fenced*).

A receiver in EXPECTED has offered no blocks, so it fails at once.

`sending.py` and `receiving.py` move along these tables only; `tests/protocol/test_states.py` compares them with
`docs/wire.md`. States are strings because those hash without a call of Python code.
"""

from __future__ import annotations

import enum


class SenderState(enum.StrEnum):
    WAITING = "waiting"
    """Announced; no offer yet. Prefill may be computing already."""
    WRITING = "writing"
    """The offer is here: every layer is pushed as soon as it is written."""
    SENT = "sent"
    """Everything offered is visible at the receiver, and *done* is sent."""
    DONE = "done"
    DRAINING = "draining"
    FAILED = "failed"


class SenderEvent(enum.StrEnum):
    OFFER = "offer"
    COMPLETE = "complete"
    """The last byte has landed and the first token is known."""
    ACK = "ack"
    STOP = "stop"
    QUIET = "quiet"
    """Our last push in flight has ended."""
    FENCED = "fenced"
    """The data connection is closed."""


class ReceiverState(enum.StrEnum):
    EXPECTED = "expected"
    """The request is here, its blocks are not reserved yet."""
    OFFERED = "offered"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


class ReceiverEvent(enum.StrEnum):
    OFFER = "offer"
    DONE = "done"
    STOP = "stop"
    QUIET = "quiet"
    FENCED = "fenced"


SENDER: dict[tuple[SenderState, SenderEvent], SenderState] = {
    (SenderState.WAITING, SenderEvent.OFFER): SenderState.WRITING,
    (SenderState.WRITING, SenderEvent.COMPLETE): SenderState.SENT,
    (SenderState.SENT, SenderEvent.ACK): SenderState.DONE,
    (SenderState.WAITING, SenderEvent.STOP): SenderState.DRAINING,
    (SenderState.WRITING, SenderEvent.STOP): SenderState.DRAINING,
    (SenderState.SENT, SenderEvent.STOP): SenderState.DRAINING,
    (SenderState.DRAINING, SenderEvent.QUIET): SenderState.FAILED,
    (SenderState.DRAINING, SenderEvent.FENCED): SenderState.FAILED,
}

RECEIVER: dict[tuple[ReceiverState, ReceiverEvent], ReceiverState] = {
    (ReceiverState.EXPECTED, ReceiverEvent.OFFER): ReceiverState.OFFERED,
    (ReceiverState.OFFERED, ReceiverEvent.DONE): ReceiverState.READY,
    (ReceiverState.EXPECTED, ReceiverEvent.STOP): ReceiverState.FAILED,
    (ReceiverState.OFFERED, ReceiverEvent.STOP): ReceiverState.DRAINING,
    (ReceiverState.DRAINING, ReceiverEvent.QUIET): ReceiverState.FAILED,
    (ReceiverState.DRAINING, ReceiverEvent.FENCED): ReceiverState.FAILED,
}

SENDER_ENDS = frozenset({SenderState.DONE, SenderState.FAILED})
RECEIVER_ENDS = frozenset({ReceiverState.READY, ReceiverState.FAILED})
