"""What became of transfers, from their events."""

from __future__ import annotations

import pytest

from pdlink.events import LayerLanded, LayerWritten, TransferEnded
from pdlink.observe.timeline import Timeline


def written(layer: int, at_s: float, transfer_id: str = "t") -> LayerWritten:
    return LayerWritten(transfer_id=transfer_id, layer=layer, start=0, end=8, at_s=at_s)


def landed(layer: int, submitted_s: float, at_s: float) -> LayerLanded:
    return LayerLanded(transfer_id="t", layer=layer, start=0, end=8, nbytes=64, transport="mapped",
                       submitted_s=submitted_s, asked_s=submitted_s, at_s=at_s)  # fmt: skip


def ended(side: str, at_s: float, state: str = "DONE", reason: str = "", transfer_id: str = "t",
          exposed_s: float | None = None) -> TransferEnded:  # fmt: skip
    return TransferEnded(transfer_id=transfer_id, side=side, peer="p", state=state, reason=reason, nbytes=128,
                         transport="mapped", started_s=10.0, at_s=at_s, exposed_s=exposed_s)  # fmt: skip


def test_an_ended_transfer_is_told_in_durations() -> None:
    timeline = Timeline("w")
    for event in (
        written(0, 11.0),
        landed(0, 11.0, 12.5),
        written(1, 13.0),
        landed(1, 13.0, 13.25),
        ended("sender", 13.5, exposed_s=0.25),
    ):
        timeline(event)
    (found,) = timeline.ended(8)
    assert (found.layers, found.nbytes, found.lane, found.state) == (2, 128, "mapped", "DONE")
    assert (found.life_s, found.moving_s, found.exposed_s) == pytest.approx((3.5, 1.75, 0.25))


def test_time_in_which_layers_overlap_counts_once() -> None:
    timeline = Timeline("w")
    for event in (landed(0, 11.0, 12.0), landed(1, 11.5, 13.0), landed(2, 11.6, 11.7), ended("sender", 13.5)):
        timeline(event)
    assert timeline.ended(8)[0].moving_s == pytest.approx(2.0)


def test_receiver_knows_no_layers_and_claims_none() -> None:
    timeline = Timeline("w")
    timeline(ended("receiver", 12.0, "FAILED", "peer_lost"))
    (found,) = timeline.ended(8)
    assert (found.layers, found.moving_s, found.exposed_s, found.reason) == (0, 0.0, 0.0, "peer_lost")


def test_newest_ended_transfers_come_first_and_live_ones_are_left_out() -> None:
    timeline = Timeline("w")
    for name in ("a", "b", "c"):
        timeline(written(0, 1.0, name))
    for name in ("a", "b"):
        timeline(ended("sender", 12.0, transfer_id=name))
    assert [found.transfer_id for found in timeline.ended(8)] == ["b", "a"]
    assert [found.transfer_id for found in timeline.ended(1)] == ["b"]
