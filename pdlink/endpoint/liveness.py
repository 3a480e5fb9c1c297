"""What time does to a session: signs of life, and its end by silence, by a slow handshake, or because it is idle."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdlink.endpoint.peer import PeerState
from pdlink.protocol import messages
from pdlink.reasons import Code, Reason

if TYPE_CHECKING:
    from pdlink.endpoint.peer import Peer
    from pdlink.endpoint.sessions import Sessions
    from pdlink.protocol.deadlines import Deadlines


def tick(sessions: Sessions, peer: Peer, timeouts: Deadlines, *, now_s: float, awake_s: float) -> None:
    """Look at a live session. Under the lock. now_s, awake_s: of `Clock`."""
    if peer.state is PeerState.CONNECTING:
        if awake_s - peer.since_s > timeouts.connect_s:
            words = f"no answer to the handshake within {timeouts.connect_s} s"
            sessions.lose(peer, Reason(Code.NOT_CONNECTED, words))
        elif peer.dialed and peer.opened and now_s - peer.beat_s >= timeouts.heartbeat_s:
            peer.beat_s = now_s
            sessions.post(peer, messages.Heartbeat())  # shows a lost invitation by the gap before it
    elif awake_s - peer.heard_s > timeouts.peer_s:
        sessions.lose(peer, Reason(Code.PEER_LOST, f"silent for {timeouts.peer_s} s"))
    elif idle_for_s(peer, awake_s) > timeouts.idle_s > 0:
        sessions.lose(peer, Reason(Code.PEER_LOST, f"idle for {timeouts.idle_s:g} s"))
    elif now_s - peer.beat_s >= timeouts.heartbeat_s:
        peer.beat_s = now_s
        sessions.send(peer, messages.Heartbeat())


def idle_for_s(peer: Peer, awake_s: float) -> float:
    """For how long this session has been of no use; 0 on the side that was dialed.

    The dialing side alone knows: every transfer begins with its *expect*, and ends here when nothing of it can be in
    flight any more. `Sessions.at` is called under the same lock as this, so no request finds a session that is about
    to end: it has the old one, with its transfer in it, or opens another.
    """
    if not peer.dialed or peer.transfers or peer.outbox or peer.queued:
        peer.idle_since_s = None
    elif peer.idle_since_s is None:
        peer.idle_since_s = awake_s
    return awake_s - peer.idle_since_s if peer.idle_since_s is not None else 0.0
