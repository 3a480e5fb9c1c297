"""A store that lends to others and borrows from them, in this process or in one of its own."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

from pdlink.config import TransportConfig
from pdlink.config.listen import HostPort, LinkListen
from pdlink.peers.link import PeerLink
from pdlink.peers.routed import RoutedPeers
from pdlink.protocol.deadlines import Deadlines
from pdlink.store.eviction import Lru
from pdlink.store.record import HEADER_NBYTES, Group, RecordShape
from pdlink.store.store import Store
from tests import other_process
from tests.waiting import WAIT_S

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdlink.protocol.auth import Credentials
    from pdlink.store.tiers.base import Tier

TIMEOUTS = Deadlines(heartbeat_s=0.1, peer_s=5.0, connect_s=6.0, lease_s=20.0)


def shape_of(payload_nbytes: int) -> RecordShape:
    return RecordShape("uint8", 4, (Group("full", (0, 1), 2, 1, payload_nbytes // 16),))


def key(number: int) -> bytes:
    return b"%032d" % number


def content(number: int, nbytes: int) -> bytes:
    return random.Random(number).randbytes(nbytes)


class StoreNode:
    def __init__(
        self,
        name: str,
        peers: Sequence[str] = (),
        *,
        kind: str = "tcp",
        records: int = 8,
        payload_nbytes: int = 10_000,
        host: str = "127.0.0.1",
        port: int = 0,
        credentials: Credentials | None = None,
        timeout_s: float = WAIT_S,
        store_class: type[Store] = Store,
        routed: bool = False,
    ) -> None:
        self.shape = shape_of(payload_nbytes)
        self.link = PeerLink(
            name,
            listen=LinkListen(address=str(HostPort(host, port))),
            transport=TransportConfig(kind=kind),
            deadlines=TIMEOUTS,
            credentials=credentials,
            timeout_s=timeout_s,
        )
        self.tiers: list[Tier] = [self.link.tier(peer) for peer in peers]
        if routed:
            self.routed = RoutedPeers(self.link)
            self.tiers.append(self.routed)
        slot_nbytes = -(-self.shape.nbytes // 4096) * 4096
        self.store = store_class(records * slot_nbytes, Lru(), self.tiers, lends=True, tier_deadline_s=WAIT_S)
        self.store.open()
        try:
            self.link.open(self.store)
        except BaseException:
            self.store.close()
            raise

    def address(self) -> str:
        return self.link.address

    def put(self, *numbers: int) -> int:
        slots = self.store.reserve([key(number) for number in numbers], self.shape)
        for slot in slots:
            payload = content(int(slot.key), self.shape.payload_nbytes)
            self.store.array[slot.offset + HEADER_NBYTES : slot.offset + self.shape.nbytes] = memoryview(payload)
        self.store.commit(slots, self.shape)
        return len(slots)

    def read(self, *numbers: int) -> int:
        """How many leading records come, all of them right."""
        keys = [key(number) for number in numbers]
        fetch = self.store.fetch(self.store.lookup(keys, WAIT_S), self.shape, "read")
        slots = fetch.done.result(WAIT_S)
        for number, slot in zip(numbers, slots, strict=False):
            payload = self.store.array[slot.offset + HEADER_NBYTES : slot.offset + self.shape.nbytes]
            assert payload.tobytes() == content(number, self.shape.payload_nbytes), f"record {number} is another one"
        assert fetch.close()
        return len(slots)

    def pull(self, address: str, *numbers: int) -> int:
        """The same, where they are said to come from there."""
        self.store.comes_from(address, [key(number) for number in numbers])
        return self.read(*numbers)

    def forget(self) -> int:
        """Drop what is in memory here, and only here."""
        return self.store.clear(places=["memory"]).records

    def until_idle(self) -> None:
        """Wait until nothing is lent, and check the books."""
        deadline_s = time.monotonic() + WAIT_S
        while self.link.num_lent:
            assert time.monotonic() < deadline_s, f"{self.link.num_lent} records are still lent"
            time.sleep(0.01)
        self.store.check()

    def until_whole(self) -> None:
        """Wait until all of the arena has memory, which comes when half of what has some is used."""
        deadline_s = time.monotonic() + WAIT_S
        while self.store.gauges()["committed"] < self.store.buffer.nbytes:
            assert time.monotonic() < deadline_s, "the arena does not grow"
            time.sleep(0.01)

    def close(self) -> None:
        self.link.close()
        self.store.close()


class OtherNode(other_process.OtherProcess):
    """A `StoreNode` in a process of its own."""

    def __init__(
        self, name: str, *peers: str, kind: str, records: int = 8, payload_nbytes: int = 10_000, port: int = 0
    ):
        super().__init__(__name__, name, kind, str(records), str(payload_nbytes), str(port), *peers)


def serve(arguments: list[str]) -> None:
    name, kind, records, payload_nbytes, port, *peers = arguments
    node = StoreNode(name, peers, kind=kind, records=int(records), payload_nbytes=int(payload_nbytes), port=int(port))
    other_process.answer_calls(node)
    node.close()
