"""`Endpoint`: the loop that runs the protocol. Receive, ask the machine, poll the transports, tick, send.

Threads. One thread per endpoint owns the sockets and runs everything below `_loop`. One lock guards machines and
peers, because a forward pass may push a layer from its own thread (`Outgoing.layer_ready`); it is held for short,
non-blocking work only. The worker's callbacks run in this thread without the lock. A long forward pass releases the
GIL, so it delays a heartbeat by milliseconds.

A peer is one session with one life of a remote worker (`sessions.py`). When the session ends, its transfers stop at
once and the transport closes the data connection. When the transport reports the fence (`PeerClosed`), the transfers
end and their blocks go back. The next request opens a new session; only a worker that refused the handshake is left
alone for a while (`known.py`). What others can make fail is guarded (`blame.py`).
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from pdlink.endpoint import liveness
from pdlink.endpoint.blame import Blame
from pdlink.endpoint.channel import Channel, ClientRefused, Disconnected, Received
from pdlink.endpoint.clock import AwakeClock, RecentMaximum
from pdlink.endpoint.half import Common
from pdlink.endpoint.marks import LOOK_S
from pdlink.endpoint.peer import Local
from pdlink.endpoint.receiver import Receiver
from pdlink.endpoint.sender import Sender
from pdlink.endpoint.sessions import Fenced, LostSession, Sessions
from pdlink.endpoint.sharing import Sharing
from pdlink.endpoint.verifying import Verifier
from pdlink.endpoint.work import Work
from pdlink.errors import ConfigError, PdlinkError, TransportUnavailable
from pdlink.protocol import auth
from pdlink.protocol.handshake import fingerprint
from pdlink.reasons import Code, Reason
from pdlink.transport.base import BatchDone, PeerClosed, PeerFailed, TransportNote

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Sequence, Set

    from pdlink.endpoint.channel import Arrival
    from pdlink.endpoint.clock import Clock
    from pdlink.endpoint.data_path import DataPath
    from pdlink.endpoint.known import RefusedPeer
    from pdlink.endpoint.marks import Marks
    from pdlink.endpoint.peer import Peer
    from pdlink.memory.blocks import BlockPool
    from pdlink.memory.checksums import Checksums
    from pdlink.protocol.deadlines import Deadlines
    from pdlink.protocol.messages import Identity
    from pdlink.transport.base import Occurrence, Transport

log = logging.getLogger(__name__)

_FLUSH_S = 0.0005
"""Flush outgoing messages at least this often while callbacks run; it takes 0.02 ms. Without it a long batch of
callbacks would hold back messages and leave the peer, and then this worker, idle."""

_READ_S = 0.005
"""A turn reads frames for this long, then the next turn goes on. Decoding the largest frame takes 35 ms."""

_RETRY_S = 0.005
"""How soon to retry a frame that found a full queue."""


class Reports:
    """Polls the transports and acts upon what they report; closes one that cannot be polled.

    Used by the endpoint's thread, under its lock.
    """

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

    def _on_peer(self, transport: Transport, occurrence: PeerFailed | PeerClosed | TransportNote) -> None:
        match occurrence:
            case TransportNote():
                self._sessions.say(occurrence.peer, occurrence.data)
            case PeerFailed():
                self._sessions.on_failed(occurrence.peer, transport, occurrence.reason)
            case PeerClosed():
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


class Endpoint:
    """One worker's end of every link. The worker uses `sender` and `receiver`."""

    def __init__(
        self,
        name: str,
        identity: Identity,
        transports: Sequence[Transport],
        timeouts: Deadlines,
        *,
        batch_timeout_s: float = 10.0,
        sharing: Sharing | None = None,
        require_lane: str | None = None,
        credentials: auth.Credentials | None = None,
        checksums: Checksums | None = None,
        channel: Callable[[str], Channel] = Channel,
        clock: Clock | None = None,
        on_death: Callable[[], None] = lambda: None,
        short_of_blocks: Callable[[], bool] = lambda: False,
        pool: BlockPool | None = None,
        marks: Marks | None = None,
    ) -> None:
        """transports: opened, with the KV buffers registered, the preferred one first; the endpoint closes them.

        sharing: how transfers share a transport; None takes the defaults.
        credentials: our keys and allow-list; None has sessions with anybody who can reach the control port.
        short_of_blocks: whether requests of this worker wait for blocks.
        pool: counts the blocks; the endpoint then holds those of transfers.
        marks: of device memory.
        on_death: called in the endpoint's thread if its loop dies (a bug).
        channel: makes the control channel of an identity, NAME@EPOCH. With a clock of its own, a caller of `turn`
        needs no sockets and no real time.
        """
        self.name, self.groups = name, identity.groups
        self.fingerprint = fingerprint(identity)
        self._marks, self._marks_fd = marks, -1
        self.local = Local(name, secrets.token_hex(8), identity, credentials)
        self.work = Work()
        self.lock = self.work.lock
        self.clock = clock or AwakeClock(timeouts.heartbeat_s)  # the loop waits for half of that at most
        work, clock = self.work, self.clock
        verifier = self.verifier = Verifier(checksums, self.groups, work.call) if checksums is not None else None
        self.transports = {transport.name: transport for transport in transports}
        """Working transports by name, the preferred one first."""
        for transport in transports:
            transport.guard(self.groups)
        self._opened = list(transports)
        """Also the transports given up since."""
        self._timeouts = timeouts
        self._channel = channel(f"{name}@{self.local.epoch}")
        sessions = self.sessions = Sessions(self.local, work, clock, self._channel, self.transports, require_lane)
        common = Common(self.groups, work, clock, sessions, verifier, timeouts, pool, marks)
        self.receiver = sessions.receiver = Receiver(common)
        self.sender = sessions.sender = Sender(common, batch_timeout_s, sharing or Sharing(), self._short_of_blocks)
        self._blame = Blame(name, clock.now_s)
        data_path = self.sender.data_path
        self.reports = Reports(self.transports, self._channel, sessions, data_path, self._blame, self._settle)
        self._thread: threading.Thread | None = None
        self._stopping = False
        """No new sessions; the loop ends when all are fenced."""
        self._closed = False
        self._next_tick_s = 0.0
        self._on_death, self._ask_short_of_blocks = on_death, short_of_blocks
        self.failure = ""
        """Why the loop died; empty while it runs."""
        self.ticked_s = 0.0
        """Time of the loop's last turn (time.monotonic): the local data path is healthy while this moves."""
        self._absences = RecentMaximum()
        self._returned_s = 0.0
        """When the loop last came back from its wait."""

    # -- life --------------------------------------------------------------------------------------------------------

    def open(self, host: str, port: int, advertise_host: str | None = None) -> None:
        """Bind the control port (0 takes a free port), publish `address`, start the thread.

        Raises ConfigError if it cannot, and TransportUnavailable for a transport that is not open; call `close` then.
        """
        try:
            credentials = self.local.credentials
            bound = self._channel.bind(host, port, credentials)
            public_key = credentials.keys.public if credentials else ""
            self.local.address = str(auth.ControlAddress(advertise_host or host, bound, public_key))
            self.work.open()
            self._channel.watch(self.work.wake_fd)
            self.reports.watch()
            if self._marks is not None:
                self._marks_fd = self._marks.open(self.work)
                self._channel.watch(self._marks_fd)
            self.clock.turn()
            self.ticked_s = self.clock.now_s()
            self._thread = threading.Thread(target=self._main, name=f"pdlink-endpoint-{self.name}", daemon=True)
            self._thread.start()
        except (OSError, RuntimeError, PdlinkError) as error:
            self._thread = None
            self._hang_up()
            if isinstance(error, PdlinkError):
                raise
            raise ConfigError(f"the endpoint cannot be opened: {error}; see ulimit -n and ulimit -u") from error

    def close(self, timeout_s: float = 2.0) -> None:
        """End every session, wait for the fences up to `timeout_s`, stop the thread and close the transports.

        Safe to call twice, from any thread but the endpoint's own.
        """
        if threading.current_thread() is self._thread:
            raise RuntimeError("close() waits for the endpoint's thread and cannot be called in it")
        with self.lock:
            closed, self._closed = self._closed, True
        if closed:
            return
        thread = self._thread
        if thread is not None:
            self.leave()
            thread.join(timeout_s)
        if self.verifier is not None:
            self.verifier.close()
        for transport in self._opened:
            transport.close()
        if thread is not None:
            with self.lock:
                self._stop()
                self.sessions.closing.clear()
                self.work.wake()
            thread.join(timeout_s)
        with self.lock:
            self.sender.data_path.lanes.clear()
        self.transports.clear()  # the last references: native engines end now, not with the interpreter
        self._opened.clear()

    def leave(self) -> None:
        """End every session; the loop stops when the fences hold. For `close`, and for callers of `turn`."""

        def end() -> None:
            for peer in self.peers():
                self.sessions.lose(peer, Reason(Code.SHUTDOWN))
            self.sender.give_up(Reason(Code.SHUTDOWN), self.sender.begun)
            self._stop()

        self.work.call(end)

    def allow(self, allowed: auth.AllowList) -> None:
        """Replace the allow-list. Only sessions whose key is not on the new list end."""

        def exchange() -> None:
            credentials = self.local.credentials
            if credentials is None:
                return
            self.local.credentials = self._channel.credentials = replace(credentials, allowed=allowed)
            self.sessions.known.forget_refusals(auth.KEY_FACTOR)
            for peer in self.peers():
                if peer.public_key not in allowed:
                    reason = Reason.refused(auth.KEY_FACTOR, "it was taken off the allow-list")
                    self.sessions.lose(peer, reason)

        self.work.call(exchange)

    def change_content(self, content: str) -> None:
        """This worker's model has other weights now. Every session ends, so that both sides compare again, and so do
        transfers that were begun with the weights before."""
        with self.lock:
            if content == self.local.identity.content:
                return
            self.local.identity = msgspec.structs.replace(self.local.identity, content=content)
            self.fingerprint = fingerprint(self.local.identity)
            begun, sessions = self.sender.begun, self.sessions.known.sessions()
            self.sessions.known.forget_refusals("content")

        def compare_again() -> None:
            for peer in sessions:
                self.sessions.lose(peer, Reason(Code.WEIGHTS_CHANGED))
            self.sender.give_up(Reason(Code.WEIGHTS_CHANGED), begun)

        self.work.call(compare_again)

    @property
    def address(self) -> str:
        """Control address that peers dial; empty before `open`."""
        return self.local.address

    @property
    def epoch(self) -> str:
        """Names this life of the worker."""
        return self.local.epoch

    def longest_absence_s(self) -> float:
        """Longest time of the last one to two minutes for which the loop was ready but could not run."""
        return self._absences.read(self.clock.now_s())

    def peers(self) -> list[Peer]:
        """Live sessions, for reports."""
        with self.lock:
            return self.sessions.known.sessions()

    def refused(self) -> list[RefusedPeer]:
        """Peers that this worker does not fit, for reports (`docs/wire.md`, Refusals)."""
        with self.lock:
            return self.sessions.known.refusals()

    def queued_nbytes(self) -> int:
        """Bytes of frames that wait for slow peers."""
        return self.sessions.queued_nbytes

    def num_closing(self) -> int:
        """Lost sessions whose fence does not hold yet."""
        return len(self.sessions.closing)

    # -- the loop ----------------------------------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            self._loop()
        except Exception as error:  # noqa: BLE001  the outermost frame: /health reports a dead loop
            self.failure = f"{type(error).__name__}: {error}"
            log.exception("%s: the endpoint's loop has died", self.name)
            self._on_death()
        finally:
            self._hang_up()

    def _hang_up(self) -> None:
        """Close the sockets."""
        with self.lock:
            self._stop()
        self._channel.close()
        self.work.close()

    def _stop(self) -> None:
        self._stopping = True
        code, state = Code.SHUTDOWN, "closed"
        if self.failure:
            code, state = Code.HANDLING_FAILED, f"down: {self.failure}"
        self.sessions.refuses = Reason(code, f"this worker's link is {state}")

    def _loop(self) -> None:
        self._returned_s = self.clock.now_s()
        while self._go_round():
            pass

    def _go_round(self) -> bool:
        """Wait for something to do, and do it; False at the end of the endpoint's life."""
        work, clock, marks = self.work, self.clock, self._marks
        with self.lock:
            work.asleep = not (work.commands or work.callbacks or self.sessions.unsent or (marks and marks.new))
            if work.asleep and self._stopping and not self.sessions.closing:
                work.asleep = False
                return False
        polled_s = clock.now_s()
        wait_s = max(0.0, self._next_tick_s - polled_s) if work.asleep else 0.0
        if self.sessions.waiting:
            wait_s = min(wait_s, _RETRY_S)
        if marks is not None and marks.is_waiting:
            wait_s = min(wait_s, LOOK_S)
        absence_s = polled_s - self._returned_s
        arrived, ready = self._channel.poll(wait_s)
        self._returned_s = clock.now_s()
        absence_s += max(0.0, self._returned_s - polled_s - wait_s)
        self._absences.add(self._returned_s, absence_s)
        work.asleep = False
        if work.wake_fd in ready:
            ready.discard(work.wake_fd)
            os.eventfd_read(work.wake_fd)
        if marks is not None:
            if self._marks_fd in ready:
                ready.discard(self._marks_fd)
                marks.hush()
            if marks.is_waiting:
                marks.look()  # calls the GPU's driver, so without the lock
        self.turn(arrived, ready)
        return True

    def turn(self, arrived: Iterable[Arrival], ready: Set[int] | None = None) -> None:
        """One turn of the loop, without waiting: arrivals, transport reports, commands, deadlines; then send.

        arrived: read for `_READ_S` at most. ready: descriptors of transports with reports; None takes all for ready.
        """
        sessions = self.sessions
        with self.lock:
            self.clock.turn()
            until_s = self.clock.now_s() + _READ_S
            for item in arrived:
                match item:
                    case Received():
                        try:
                            sessions.on_frame(item)
                        except Exception as error:  # noqa: BLE001  as in `Blame.guard`
                            self._blame.charge("frame", error, partial(self._give_up, item))
                    case Disconnected():
                        sessions.on_disconnected(item)
                    case ClientRefused():
                        sessions.greeter.turned_away(item)
                if sessions.ended:
                    self._settle()
                if self.clock.now_s() >= until_s:
                    break
            if ready is None or ready:
                self.reports.poll(ready)
            until_s = self.clock.now_s() + _READ_S
            commands, callbacks = self.work.commands, self.work.callbacks
            while commands:
                command, cost = commands.popleft()
                self._blame.guard("command", command, cost)
                if sessions.ended:
                    self._settle()
                if self.clock.now_s() >= until_s:  # dialing takes a millisecond; the next turn goes on
                    break
            self.ticked_s = self.clock.now_s()
            if self.ticked_s >= self._next_tick_s:
                self._tick(self.ticked_s)
                self._next_tick_s = self.ticked_s + self._timeouts.heartbeat_s / 2
        flush_s = self.clock.now_s() + _FLUSH_S
        while callbacks:
            try:
                callbacks.popleft()()
            except Exception as error:  # noqa: BLE001  as in `Blame.guard`
                self._blame.charge("callback", error)
            if self.clock.now_s() >= flush_s:
                self._flush()
                flush_s = self.clock.now_s() + _FLUSH_S
        self._flush()  # last: answers of the worker's callbacks leave in this turn

    def _flush(self) -> None:
        with self.lock:
            while self.sessions.unsent:
                peer, _ = self.sessions.unsent.popitem()
                try:
                    self.sessions.flush(peer)
                except Exception as error:  # noqa: BLE001  as in `Blame.guard`
                    self._blame.charge("message", error, partial(self.sessions.lose, peer))
            if self.sessions.waiting:
                self.sessions.send_waiting()
            if self.sessions.ended:
                self._settle()

    def _settle(self) -> None:
        """Stop the transfers of lost sessions, and end those of fenced ones. Not guarded, see `Blame`."""
        ended = self.sessions.ended
        while ended:
            match ended.popleft():
                case LostSession(peer, reason):
                    (self.receiver if peer.dialed else self.sender).on_peer_lost(peer, reason)
                case Fenced(peer):
                    (self.receiver if peer.dialed else self.sender).on_fenced(peer)
                    peer.transport = None  # handles of its transfers may outlive this endpoint, not native engines

    def _tick(self, now: float) -> None:
        awake_s = self.clock.awake_s()
        for peer in self.peers():
            liveness.tick(self.sessions, peer, self._timeouts, now_s=now, awake_s=awake_s)
        self._settle()
        self.reports.poll()  # every transport, whatever its descriptor says
        self.sender.tick(awake_s)
        self.receiver.tick(awake_s)
        self._settle()

    def _short_of_blocks(self) -> bool:
        answers: list[bool] = []
        self._blame.guard("callback", lambda: answers.append(self._ask_short_of_blocks()))
        return any(answers)

    def _give_up(self, item: Received, reason: Reason) -> None:
        """End the session of a frame that could not be handled; answer *bye* if it belongs to none."""
        peer = self.sessions.by_route.get(item.route)
        if peer is not None and peer.public_key == item.public_key:
            self.sessions.lose(peer, reason)
        else:
            self._blame.guard("frame", partial(self.sessions.disown, item))
