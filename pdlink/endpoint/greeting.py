"""The handshake that opens a session, for both sides: do the workers fit together, and over which transport?

    dialer                              listener
    hello, identity, capabilities ────►             same factors? a common transport? a plan between the layouts?
                                ◄────── welcome     same question, same answer
    invite, opens our pages     ──────►             connects the transport
                                ◄────── ready

If the transport cannot invite or connect, the listener sends *welcome* again with the next common one, until one
works or none is left. It remembers failed transports for this life of the dialer.

Each message is a frame of its own. Either side may send *refuse* instead, with the factor that differs. A lost
message shows by silence: the session ends after `connect_s`.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Protocol

from pdlink.endpoint.channel import ClientRefused
from pdlink.endpoint.peer import Peer, PeerState
from pdlink.errors import HandshakeRefused, LayoutMismatch, PdlinkError, TransportFailure
from pdlink.events import MessageDropped, PeerChanged, emit
from pdlink.kv.plan import template
from pdlink.logs import printable
from pdlink.protocol import auth, handshake, messages
from pdlink.reasons import Code, Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pdlink.capabilities import Capabilities
    from pdlink.endpoint.channel import Received
    from pdlink.endpoint.clock import Clock
    from pdlink.endpoint.known import KnownPeers
    from pdlink.endpoint.peer import Local
    from pdlink.protocol.messages import Envelope, Identity
    from pdlink.transport.base import Transport

log = logging.getLogger(__name__)

MAX_HANDSHAKES = 1_000
"""Accepted connections in the handshake; further ones are dropped and must try again."""


class Calls(Protocol):
    """What a greeter asks of `Sessions`, which says what each does."""

    @property
    def by_route(self) -> dict[str, Peer]: ...
    @property
    def closing(self) -> Mapping[str, Peer]: ...
    def next_number(self) -> int: ...
    def aside(self, act: Callable[[], None], then: Callable[[Exception | None], None], peer: Peer) -> None: ...
    def answers(self, peer: Peer) -> bool: ...
    def post(self, peer: Peer, *bodies: messages.Body) -> None: ...
    def become_ready(self, peer: Peer) -> None: ...
    def shut(self, peer: Peer) -> None: ...
    def lose(self, peer: Peer, reason: Reason) -> None: ...


class Greeter:
    """Answers handshake messages for one endpoint."""

    def __init__(
        self,
        sessions: Calls,
        known: KnownPeers,
        local: Local,
        clock: Clock,
        transports: Mapping[str, Transport],
        require_lane: str | None,
    ) -> None:
        """transports: by name, the preferred one first. require_lane: the only lane allowed, if set."""
        self._sessions, self._known, self._local, self._clock = sessions, known, local, clock
        self._transports = transports
        self._require_lane = require_lane
        self._num_turned_away = 0
        self._logged_s = float("-inf")

    def hello(self) -> messages.Hello:
        """The first message of a dialer."""
        local = self._local
        usable = (transport for transport in self._transports.values() if not transport.no_invitations)
        able = tuple(transport.capabilities for transport in usable)
        return messages.Hello(local.name, local.identity, able, local.address.partition("?")[0])

    def on_hello(self, item: Received, envelope: Envelope, hello: messages.Hello) -> None:
        """Listener: check factors, transports and layouts; then send Welcome or Refuse."""
        sessions, local, now = self._sessions, self._local, self._clock.awake_s()
        number, key = sessions.next_number(), item.public_key
        peer = Peer(number, item.route, envelope.session, dialed=False, since_s=now, heard_s=now, public_key=key)
        peer.introduce(printable(hello.name, 64), envelope.src_epoch, hello.identity)
        peer.listens_at = printable(hello.control, 64)
        peer.num_taken = envelope.number + 1
        if not auth.is_worker_name(hello.name):
            self._refuse(peer, HandshakeRefused("name", auth.NAME_RULE, peer.name))
            return
        not_theirs = auth.name_problem(local.credentials, item.public_key, hello.name)
        if not_theirs is not None:  # before the name has any effect
            self.turned_away(ClientRefused(f"the key of {not_theirs[0]} came with the name {hello.name!r}"))
            self._refuse(peer, HandshakeRefused(auth.NAME_FACTOR, *not_theirs))
            return
        accepted = self._known.sessions(dialed=False)
        replaced = [old for old in accepted if old.name == peer.name or old.route == peer.route]
        if any((old.name, old.epoch) == (peer.name, peer.epoch) and old.session >= peer.session for old in replaced):
            emit(MessageDropped(reason="old_session"))
            return
        if any(old.is_life_of(peer.name, peer.epoch, peer.session) for old in sessions.closing.values()):
            emit(MessageDropped(reason="old_session"))  # a repeated hello of a closing session
            return
        if sum(old.state is PeerState.CONNECTING for old in accepted) >= MAX_HANDSHAKES:
            emit(MessageDropped(reason="too_many_handshakes"))
            return
        ours = local.identity
        try:
            handshake.compare(ours, hello.identity)
            peer.untried = self._choice(peer, hello)
            pairs = enumerate(zip(ours.groups.layouts, peer.groups.layouts, strict=True))
            peer.templates = tuple(template(mine, theirs, group) for group, (mine, theirs) in pairs)
            self._check_name_is_free(peer, replaced)
        except HandshakeRefused as refusal:
            self._refuse(peer, refusal)
            return
        except LayoutMismatch as mismatch:
            self._refuse(peer, HandshakeRefused("layout", str(mismatch), "see local"))
            return
        for old in replaced:  # only now: a refused dialer replaces nobody
            sessions.lose(old, Reason(Code.PEER_LOST, "replaced by a new session"))
        sessions.by_route[peer.route] = peer
        self._known.begin(peer)
        self._welcome(peer)

    def _choice(self, peer: Peer, hello: messages.Hello) -> list[str]:
        """Transports for this session, in the order to try them. Raises HandshakeRefused if there are none."""
        common = self._common(hello.identity, hello.capabilities)
        unusable = self._known.unusable(peer)
        return [name for name in common if name not in unusable] or common

    def _common(self, identity: Identity, theirs: Sequence[Capabilities]) -> list[str]:
        ours = [transport.capabilities for transport in self._transports.values()]
        return handshake.common_transports(self._local.identity, ours, identity, theirs)

    def _welcome(self, peer: Peer) -> None:
        """Ask the dialer to open its pages to the next transport."""
        peer.transport, peer.invited = self._transports[peer.untried.pop(0)], False
        welcome = messages.Welcome(self._local.name, self._local.identity, peer.transport.capabilities)
        self._sessions.post(peer, welcome)

    def _check_name_is_free(self, peer: Peer, namesakes: Sequence[Peer]) -> None:
        """Raise HandshakeRefused if a live worker has this name already; a restarted one replaces its former life.

        Otherwise two workers of one name would replace each other at every request.
        """
        for other in namesakes:
            if other.epoch != peer.epoch and other.route != peer.route and self._sessions.answers(other):
                emit(PeerChanged(peer=peer.name, state="refused", reason="name_in_use"))
                held = f"{other.name} is connected already, and listens at {other.listens_at or 'an unknown address'}"
                raise HandshakeRefused(
                    "name_in_use", held, f"{peer.name} at {peer.listens_at or 'an unknown address'}"
                )

    def on_welcome(self, peer: Peer, envelope: Envelope, welcome: messages.Welcome) -> None:
        """Dialer: check the listener's answer, and open our pages to it."""
        if not peer.dialed or peer.state is not PeerState.CONNECTING:
            emit(MessageDropped(reason="unexpected_welcome"))
            return
        try:
            if not peer.epoch:
                self._meet(peer, envelope, welcome)
            transport = self._transports[self._common(welcome.identity, [welcome.transport])[0]]
            if transport.name in peer.tried:
                raise HandshakeRefused("transport", f"{transport.name} did not connect", str(welcome.transport))
        except HandshakeRefused as refusal:
            self._refuse(peer, refusal)
            return
        self._sessions.shut(peer)  # the last transport failed at the listener
        peer.transport = transport
        peer.tried.add(transport.name)
        try:
            invite = messages.Invite(transport.invite(peer.key))
            peer.opened = True
        except PdlinkError as error:  # out of descriptors, for one
            invite = messages.Invite(b"", str(error)[: messages.MAX_TEXT])
        self._sessions.post(peer, invite)

    def _meet(self, peer: Peer, envelope: Envelope, welcome: messages.Welcome) -> None:
        """The dialed worker has given its name and identity. Raises HandshakeRefused if we do not fit."""
        local = self._local
        peer.introduce(printable(welcome.name, 64), envelope.src_epoch, welcome.identity)
        if not auth.is_worker_name(welcome.name):
            raise HandshakeRefused("name", auth.NAME_RULE, peer.name)
        not_theirs = auth.name_problem(local.credentials, peer.public_key, welcome.name)
        if not_theirs is not None:
            raise HandshakeRefused(auth.NAME_FACTOR, *not_theirs)
        handshake.compare(local.identity, welcome.identity)

    def on_invite(self, peer: Peer, invite: messages.Invite) -> None:
        """Listener: connect to the dialer's pages."""
        transport = peer.transport
        if peer.dialed or peer.state is not PeerState.CONNECTING or transport is None or peer.invited:
            emit(MessageDropped(reason="unexpected_invite"))
            return
        peer.invited = True
        connect, then = partial(self._connect, peer, transport, invite), partial(self._connected, peer, transport)
        if transport.connects_aside:
            self._sessions.aside(connect, then, peer)
            return
        try:
            connect()
        except PdlinkError as error:
            then(error)
        else:
            then(None)

    def _connect(self, peer: Peer, transport: Transport, invite: messages.Invite) -> None:
        """In any thread. Raises PdlinkError."""
        if invite.problem:
            raise TransportFailure(f"{peer.name} cannot invite: {printable(invite.problem, messages.MAX_TEXT)}")
        try:
            transport.connect(peer.key, invite.invitation)
        except BaseException:
            transport.close_peer(peer.key)  # of what has begun to connect
            raise

    def _connected(self, peer: Peer, transport: Transport, error: Exception | None) -> None:
        """Listener: it is connected, or not because of `error`; its session may be over by now."""
        if error is not None and not isinstance(error, PdlinkError):
            raise error
        if peer.state is not PeerState.CONNECTING:
            if error is None:
                transport.close_peer(peer.key)  # nothing was written
            return
        if error is not None:
            refusal = HandshakeRefused(handshake.CONNECTION_FACTOR, str(error), transport.name)
            self._try_next(peer, transport, refusal)
            return
        peer.opened = True
        lane = transport.lane(peer.key)
        if self._require_lane is not None and lane and lane != self._require_lane:
            self._try_next(peer, transport, HandshakeRefused("transport.require", self._require_lane, lane))
            return
        self._sessions.post(peer, messages.Ready())
        self._sessions.become_ready(peer)

    def _try_next(self, peer: Peer, failed: Transport, refusal: HandshakeRefused) -> None:
        """Go on to the next common transport, or refuse if this was the last."""
        self._sessions.shut(peer)
        if not peer.untried:
            self._refuse(peer, refusal)
            return
        self._remember(peer, failed, refusal.local if refusal.factor == handshake.CONNECTION_FACTOR else str(refusal))
        self._welcome(peer)

    def on_failed(self, peer: Peer, reason: str) -> None:
        """The data connection of a session failed. If no byte ever crossed it, the transport counts as failed."""
        if not peer.dialed and not peer.lane and peer.untried and peer.transport is not None:
            self._remember(peer, peer.transport, reason)

    def _remember(self, peer: Peer, failed: Transport, reason: str) -> None:
        self._known.transport_failed(peer, failed.name)
        log.warning(
            "%s: no %s to %s, which falls back on %s: %s",
            self._local.name,
            failed.name,
            peer.name,
            peer.untried[0],
            printable(reason, messages.MAX_TEXT),
        )

    def on_ready(self, peer: Peer) -> None:
        """Dialer: the listener has connected to our pages."""
        if not peer.dialed or peer.state is not PeerState.CONNECTING or not peer.opened:
            emit(MessageDropped(reason="unexpected_ready"))
            return
        self._sessions.become_ready(peer)

    def on_refuse(self, peer: Peer, envelope: Envelope, refuse: messages.Refuse) -> None:
        """The other side refuses; `local` and `remote` are from its point of view."""
        self._end(peer, peer.name or envelope.src, HandshakeRefused(refuse.factor, refuse.remote, refuse.local))

    def on_key_refused(self, peer: Peer, reason: str) -> None:
        """The listener did not accept our key."""
        credentials = self._local.credentials
        ours = credentials.keys.public if credentials else "none"
        self._end(peer, "", HandshakeRefused(auth.KEY_FACTOR, ours, f"{peer.address}: {reason}"))

    def turned_away(self, item: ClientRefused) -> None:
        """Count a rejected connection. Log at most once a second: rejected connections could fill the disk."""
        emit(PeerChanged(peer=item.host, state="refused", reason=item.reason))
        self._num_turned_away += 1
        if item.public_key:
            refusal = HandshakeRefused(
                auth.KEY_FACTOR, "not on the allow-list", f"{item.public_key} from {item.host}"
            )
            self._known.refused(item.public_key, "", refusal, logged=True)
        now = self._clock.now_s()
        if now - self._logged_s >= 1.0:
            self._logged_s = now
            where = f" from {item.host}" if item.host else ""
            log.warning(
                "%s: turned away a connection%s: %s (%d so far)",
                self._local.name,
                where,
                item.reason,
                self._num_turned_away,
            )

    def _refuse(self, peer: Peer, refusal: HandshakeRefused) -> None:
        local, remote = refusal.local[: messages.MAX_TEXT], refusal.remote[: messages.MAX_TEXT]
        self._sessions.post(peer, messages.Refuse(refusal.factor, local, remote))
        self._end(peer, peer.name, HandshakeRefused(refusal.factor, local, remote))

    def _end(self, peer: Peer, name: str, refusal: HandshakeRefused) -> None:
        """Remember the refusal, and end the session. name: the peer's own, not proven yet."""
        credentials = self._local.credentials
        if credentials is not None and auth.name_problem(credentials, peer.public_key, name) is not None:
            name = credentials.allowed.get(peer.public_key) or ""
        if peer.dialed:
            self._known.refused_by(peer.address, name, refusal)
        else:
            self._known.refused(name or peer.public_key, name, refusal)
        self._sessions.lose(peer, Reason.refused(refusal.factor, str(refusal)))
