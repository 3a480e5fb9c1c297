"""The tables are complete, and the picture in the docs is theirs."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdlink.protocol.states import (
    RECEIVER,
    RECEIVER_ENDS,
    SENDER,
    SENDER_ENDS,
    ReceiverEvent,
    ReceiverState,
    SenderEvent,
    SenderState,
)

WIRE = Path(__file__).parents[2] / "docs" / "wire.md"


@pytest.mark.parametrize("table", [SENDER, RECEIVER], ids=["sender", "receiver"])
def test_docs_show_the_tables_as_they_are(table: dict) -> None:  # type: ignore[type-arg]
    lines = [f"{old.name} -{event.value}-> {new.name}" for (old, event), new in table.items()]
    assert "\n".join(lines) in WIRE.read_text()


def test_every_live_state_can_be_stopped() -> None:
    for sender_state in set(SenderState) - SENDER_ENDS - {SenderState.DRAINING}:
        assert (sender_state, SenderEvent.STOP) in SENDER
    for receiver_state in set(ReceiverState) - RECEIVER_ENDS - {ReceiverState.DRAINING}:
        assert (receiver_state, ReceiverEvent.STOP) in RECEIVER


def test_nothing_leads_out_of_an_end() -> None:
    assert not [old for old, _ in SENDER if old in SENDER_ENDS]
    assert not [old for old, _ in RECEIVER if old in RECEIVER_ENDS]


def test_offered_blocks_are_freed_only_after_done_quiet_or_fence() -> None:
    into_ends = {(old, event) for (old, event), new in RECEIVER.items() if new in RECEIVER_ENDS}
    assert into_ends == {
        (ReceiverState.OFFERED, ReceiverEvent.DONE),
        (ReceiverState.EXPECTED, ReceiverEvent.STOP),
        (ReceiverState.DRAINING, ReceiverEvent.QUIET),
        (ReceiverState.DRAINING, ReceiverEvent.FENCED),
    }
