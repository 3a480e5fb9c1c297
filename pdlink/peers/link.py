"""`PeerLink`: lends what the store of this process has in memory to other nodes' stores, and borrows from theirs.

To borrow, a store asks who has a record (`Questions`), and receives it into a slot that it has reserved: a transfer
between two `Node`s over the arenas, with one layer whose blocks are pages, so that a record is one run of bytes. The
owner leases the record while it is sent. Nobody waits for what another holds: the slot is reserved before the
question, and a lease is had at once or not at all.

The slot is used again only after the fence of the transfer. What came counts when the record's checksum holds.
"""

from __future__ import annotations

import logging
import secrets
import threading
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from pdlink.config import TransportConfig
from pdlink.config.listen import LinkListen
from pdlink.errors import ConfigError, DeadlineExceeded, InvalidRequest, PdlinkError, TransferFailed
from pdlink.kv.groups import KVGroups
from pdlink.kv.layout import KVLayout, LayerLayout, Part
from pdlink.node.node import Node
from pdlink.peers.messages import MAX_KEYS, PeerAnswer, PeerAsk, Pull
from pdlink.peers.questions import Questions
from pdlink.peers.tier import PeerTier
from pdlink.protocol.auth import ControlAddress, check_dial
from pdlink.protocol.deadlines import Deadlines
from pdlink.protocol.handshake import ModelId
from pdlink.reasons import Code, Reason
from pdlink.store.extents import ALIGNMENT_NBYTES as PAGE_NBYTES
from pdlink.store.extents import whole_pages
from pdlink.store.line import Line
from pdlink.store.record import SCHEMA

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdlink.protocol.auth import AllowList, Credentials
    from pdlink.store.slots import SlotLease
    from pdlink.store.store import Store

log = logging.getLogger(__name__)

_MAX_LENT = 256
"""Records that are lent at once; further pulls are refused."""
_NOT_HERE = "not_here"
"""Reason of a transfer that fails because the owner has no such record."""
_LENDERS = 2
_CLOSE_S = 2.0
_LOCAL, _ANY_TRANSPORT, _DEADLINES = LinkListen(), TransportConfig(), Deadlines()


class PeerLink:
    """Of one store. Make it, give its tiers to the store, open the store, then this; close it before the store."""

    def __init__(
        self,
        name: str,
        *,
        listen: LinkListen = _LOCAL,
        transport: TransportConfig = _ANY_TRANSPORT,
        deadlines: Deadlines = _DEADLINES,
        credentials: Credentials | None = None,
        insecure: bool = False,
        timeout_s: float = 5.0,
    ) -> None:
        """name: of this store among the stores that meet. listen: for questions; records take other ports there.

        timeout_s: of an answer, and of a record. The rest as in `Node`.
        """
        self._name, self._listen, self.timeout_s = name, listen, timeout_s
        self._transport, self._deadlines = transport, deadlines
        self._credentials, self._insecure = credentials, insecure
        self._questions = Questions(f"{name}@{secrets.token_hex(8)}", self._on_ask, self._on_pull)
        self._lenders = Line("pdlink-lend", _LENDERS)
        self._opened = threading.Event()
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._num_lent = 0
        self._ports: dict[str, int] = {}
        """Of the nodes that send records, by the address that questions go to."""
        self.address = ""
        """What other stores name as a peer; empty before `open`."""

    def tier(self, address: str, named_by: str = "tiers.peers") -> PeerTier:
        """The store at this address, as a tier of this one. Raises ConfigError for one that may not be asked.

        named_by: the setting, for people.
        """
        try:
            check_dial(ControlAddress.parse(address), self._credentials, insecure=self._insecure)
        except InvalidRequest as error:  # an address of none, or of one that may not be dialed
            raise ConfigError(f"{named_by}: {error}") from error
        return PeerTier(self, address)

    def hang_up(self, address: str) -> None:
        """Close the connection to this store, unless something is asked on it. The next question dials it again."""
        self._ports.pop(address, None)
        self._questions.hang_up(address)

    def open(self, store: Store) -> None:
        """Begin to lend and to borrow. Raises what `Node` raises."""
        self._store = store
        num_pages = store.buffer.nbytes // PAGE_NBYTES
        layer = LayerLayout((Part(0, 0),), PAGE_NBYTES, PAGE_NBYTES, PAGE_NBYTES)
        self._node = Node(
            self._name,
            KVGroups((KVLayout("uint8", 1, num_pages, 1, PAGE_NBYTES, (layer,)),)),
            [store.buffer],
            listen=self._listen.on_port(0),
            model=ModelId("pdlink records", str(SCHEMA)),
            transport=self._transport,
            deadlines=self._deadlines,
            credentials=self._credentials,
            insecure=self._insecure,
        )
        self._node_port = ControlAddress.parse(self._node.address).port
        try:
            bound = self._questions.open(self._listen.control_host, self._listen.control_port, self._credentials)
        except BaseException:
            self._node.close()
            raise
        self.address = store.lends_at = str(replace(ControlAddress.parse(self._node.address), port=bound))
        self._opened.set()

    def allow(self, allowed: AllowList) -> None:
        """Replace the allow-list of the credentials."""
        self._questions.allow(allowed)
        self._node.allow(allowed)

    def close(self) -> None:
        """End every transfer, and wait for their fences as `Node.close` does. Safe to call twice."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._questions.close()
        self._lenders.close(_CLOSE_S)
        if self._opened.is_set():
            self._node.close()

    @property
    def num_lent(self) -> int:
        """Records that other nodes read now."""
        with self._lock:
            return self._num_lent

    # --- Borrowing, in the threads of the store's tiers

    def ask(self, address: str, keys: Sequence[bytes], timeout_s: float | None = None) -> list[bool]:
        """Which of them a peer has in memory. timeout_s: None is the link's. Raises OSError."""
        if not self._opened.is_set() or self._closed.is_set():
            return [False] * len(keys)
        held, timeout_s = b"", self.timeout_s if timeout_s is None else timeout_s
        for begin in range(0, len(keys), MAX_KEYS):
            answer = self._questions.ask(address, keys[begin : begin + MAX_KEYS], timeout_s)
            self._ports[address] = answer.port
            held += answer.held
        return [bool(one) for one in held]

    def pull(self, address: str, key: bytes, into: memoryview) -> bool:
        """Bring a record into a slot of the arena; whether it came. Returns after the fence. Raises OSError."""
        if not self._opened.is_set() or self._closed.is_set():
            return False
        port = self._ports.get(address)  # once: another thread may find the peer gone, and take it out
        if port is None:
            port = self._ports[address] = self._questions.ask(address, (), self.timeout_s).port
        peer = str(replace(ControlAddress.parse(address), port=port))
        pages = self._pages(into)
        transfer_id = f"record-{secrets.token_hex(16)}"
        try:
            incoming = self._node.receive(transfer_id, peer, [pages], range(len(pages)), by_layer=False)
        except PdlinkError as error:
            raise self._gone(address, error) from None
        try:
            pull = Pull(key, transfer_id, len(pages))
            self._questions.tell(address, pull, lambda why: incoming.cancel(Reason(Code.NOT_CONNECTED, why)))
            incoming.wait(self.timeout_s)
        except (TransferFailed, DeadlineExceeded) as error:
            if error.reason.words == _NOT_HERE:
                return False
            raise self._gone(address, error) from None
        finally:
            incoming.cancel()
            while not incoming.released.wait(0.5) and not self._closed.is_set():
                pass  # somebody may still write to the slot
        return True

    def _gone(self, address: str, error: PdlinkError) -> OSError:
        self._ports.pop(address, None)  # a restarted one has another
        return ConnectionError(f"{address}: {error}")

    def _pages(self, slot: memoryview) -> range:
        begin = np.frombuffer(slot, np.uint8).__array_interface__["data"][0] - self._store.buffer.ptr
        if begin % PAGE_NBYTES or not 0 <= begin <= self._store.buffer.nbytes - len(slot):
            raise ValueError("a record is pulled into a slot of the arena")
        return range(begin // PAGE_NBYTES, (begin + whole_pages(len(slot))) // PAGE_NBYTES)

    # --- Lending, in the thread of the questions

    def _on_ask(self, ask: PeerAsk) -> PeerAnswer:
        return PeerAnswer(ask.number, bytes(self._store.holds(ask.keys)), self._node_port)

    def _on_pull(self, pull: Pull) -> None:
        with self._lock:
            full = self._num_lent >= _MAX_LENT
            self._num_lent += not full
        if full:
            self._refuse(pull, "too many records are lent")
        elif not self._lenders.put(partial(self._lend, pull)):
            self._take_back(None)
            self._refuse(pull, "this store is closing")

    def _lend(self, pull: Pull) -> None:
        """In a thread of its own: a record is hashed before it leaves."""
        lease = self._store.lend(pull.key)
        back = partial(self._take_back, lease)
        if lease is None:
            back()
            self._refuse(pull, _NOT_HERE)
            return
        slot = lease.slots[0]
        first, num_pages = slot.offset // PAGE_NBYTES, whole_pages(slot.nbytes) // PAGE_NBYTES
        try:
            if num_pages != pull.num_pages:
                raise InvalidRequest(f"a record of {num_pages} pages was asked for with {pull.num_pages}")
            outgoing = self._node.send(
                pull.transfer_id, [range(first, first + num_pages)], num_pages, num_cached_tokens=num_pages
            )
        except PdlinkError as error:
            back()
            self._refuse(pull, str(error))
            return
        outgoing.released.then(back)
        outgoing.finish()

    def _take_back(self, lease: SlotLease | None) -> None:
        if lease is not None:
            self._store.take_back(lease)
        with self._lock:
            self._num_lent -= 1

    def _refuse(self, pull: Pull, words: str) -> None:
        """Announce the transfer and end it: its receiver may not be here yet."""
        with suppress(PdlinkError):  # an id that was used before
            self._node.send(pull.transfer_id).cancel(Reason(Code.REQUEST_FAILED, words))
