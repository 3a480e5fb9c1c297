"""`Reports`: polls the transports of an endpoint and acts upon what they report; closes one that cannot be polled."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from pdlink.errors import TransportUnavailable
from pdlink.transport.base import BatchDone, PeerClosed, PeerFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from pdlink.endpoint.blame import Blame
    from pdlink.endpoint.channel import Channel
    from pdlink.endpoint.data_path import DataPath
    from pdlink.endpoint.sessions import Sessions
    from pdlink.reasons import Reason
    from pdlink.transport.base import Occurrence, Transport

log = logging.getLogger(__name__)


class Reports:
    """Used by the endpoint's thread, under its lock."""

    def __init__(
        self,
        transports: dict[str, Transport],
        channel: Channel,
        sessions: Sessions,
        data_path: DataPath,
        blame: Blame,
        settle: Callable[[], None],
    ) -> None:
        """transports: by name; one that fails is removed. settle: ends the transfers of ended sessions."""
        self._transports, self._channel, self._sessions = transports, channel, sessions
        self._data_path, self._blame, self._settle = data_path, blame, settle
        self._watched: dict[str, int] = {}
        """Descriptors, by name of transport."""

    def watch(self) -> None:
        """Let a report end the wait of the channel."""
        for name, transport in self._transports.items():
            self._watched[name] = transport.fileno()
            self._channel.watch(self._watched[name])

    def poll(self, ready: Container[int] | None = None) -> None:
        """Act upon every report that is there. ready: descriptors that are readable; None takes all for ready."""
        for transport in list(self._transports.values()):
            if ready is not None and self._watched[transport.name] not in ready:
                continue
            try:
                occurrences = transport.poll()
            except Exception as error:  # noqa: BLE001  as in `Blame.guard`
                self._blame.charge("transport", error, partial(self._give_up, transport))
                continue
            for occurrence in occurrences:
                try:
                    if isinstance(occurrence, BatchDone):
                        self._data_path.ended(transport, occurrence)
                    else:
                        self._on_peer(transport, occurrence)
                except Exception as error:  # noqa: BLE001  as in `Blame.guard`
                    self._blame.charge("occurrence", error, partial(self._lose, occurrence.peer))
                if self._sessions.ended:
                    self._settle()

    def _on_peer(self, transport: Transport, occurrence: PeerFailed | PeerClosed) -> None:
        if isinstance(occurrence, PeerFailed):
            self._sessions.on_failed(occurrence.peer, transport, occurrence.reason)
        else:
            self._sessions.on_fenced(occurrence.peer, transport)

    def _lose(self, key: str, reason: Reason) -> None:
        peer = self._sessions.of_key(key)
        if peer is not None:
            self._sessions.lose(peer, reason)

    def _give_up(self, transport: Transport, reason: Reason) -> None:
        """Close a transport that cannot be polled, and end its sessions; others go on over the other transports.

        Blocks whose fence it does not report now stay quarantined for good. Raises TransportUnavailable if it was the
        last one: the loop ends, and the worker's supervisor starts it again.
        """
        log.error("transport %s is given up: %s", transport.name, reason.words)
        del self._transports[transport.name]
        if transport.name in self._watched:
            self._channel.unwatch(self._watched.pop(transport.name))
        self._blame.guard("transport", transport.close)
        for peer in self._sessions.known.sessions():
            if peer.transport is transport:
                self._blame.guard("transport", partial(self._sessions.lose, peer, reason))
        last: list[Occurrence] = []
        self._blame.guard("transport", lambda: last.extend(transport.poll()))
        self._settle()
        for occurrence in last:
            if isinstance(occurrence, BatchDone):
                self._data_path.ended(transport, occurrence)
            else:
                self._on_peer(transport, occurrence)
        self._settle()
        if not self._transports:
            raise TransportUnavailable(f"transport {transport.name} was the last one: {reason.words}")
