"""`NodeReport`: what a node is doing at one moment, as plain values for health and metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdlink.endpoint.driver import Endpoint

MAX_PEERS_SHOWN = 256


class NodeReport(NamedTuple):
    """Made by `Node.report`."""

    epoch: str
    """Names this life of the node."""
    fingerprint: str
    """Equal on two nodes whose KV is of use to each other (`protocol/handshake.py`)."""
    failure: str
    """Why its loop died; empty while it runs."""
    stalled_s: float
    """Since its loop last went round: the data path is healthy while this is short."""
    sending: Mapping[str, int]
    """Transfers by state; `early`: offers whose request has not come."""
    receiving: Mapping[str, int]
    """Transfers by state."""
    quarantined_blocks: int
    """Offered blocks that wait for *quiet* or the fence."""
    num_peers: int
    num_closing: int
    """Lost sessions whose fence does not hold yet."""
    peers: list[dict[str, str]]
    """Live sessions, `MAX_PEERS_SHOWN` at most."""
    refused: list[dict[str, object]]
    """Peers that do not fit this node, with what differs."""
    push_nbytes: Mapping[str, int]
    """KV bytes `waiting` for room on their transport, and those `in_flight`."""
    control_nbytes: Mapping[str, int]
    """Held for peers: `early` offers, and `queued` frames that they do not read."""


def of(endpoint: Endpoint) -> NodeReport:
    peers = endpoint.peers()
    return NodeReport(
        epoch=endpoint.epoch,
        fingerprint=endpoint.fingerprint,
        failure=endpoint.failure,
        stalled_s=endpoint.clock.now_s() - endpoint.ticked_s,
        sending=endpoint.sender.states(),
        receiving=endpoint.receiver.states(),
        quarantined_blocks=endpoint.receiver.num_quarantined(),
        num_peers=len(peers),
        num_closing=endpoint.num_closing(),
        peers=[
            {
                "peer": peer.name,
                "address": peer.address,
                "state": peer.state.value,
                "transport": peer.transport.name if peer.transport else "",
                "lane": peer.lane,
            }
            for peer in peers[:MAX_PEERS_SHOWN]
        ],
        refused=[
            {
                "peer": refused.peer,
                "address": refused.address,
                "factor": refused.factor,
                "local": refused.local,
                "remote": refused.remote,
                "count": refused.count,
                "retry_s": round(refused.retry_s, 3),
            }
            for refused in endpoint.refused()
        ],
        push_nbytes=endpoint.sender.push_nbytes(),
        control_nbytes={"early": endpoint.sender.early_nbytes(), "queued": endpoint.queued_nbytes()},
    )
