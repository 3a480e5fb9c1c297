"""Keys on the control plane, over real sockets: who gets in, who is turned away, how fast, and what is left of it."""

from __future__ import annotations

import re
import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
import zmq

from pdlink.endpoint import channel
from pdlink.events import Event, MessageDropped, PeerChanged, listen
from pdlink.protocol import messages
from pdlink.protocol.auth import AllowList, ControlAddress, Credentials, KeyPair
from pdlink.protocol.deadlines import Deadlines
from tests.loopback import LOOPBACK, LoopbackHub
from tests.waiting import WAIT_S, until

from .conftest import Handler, Node, SenderLog, layout

NEVER_S = 2 * WAIT_S
"""Handshake deadline of these tests, beyond the tests' own patience: a test that waits for it fails."""
TIMEOUTS = Deadlines(heartbeat_s=0.05, peer_s=3 * WAIT_S, connect_s=NEVER_S, lease_s=4 * WAIT_S, request_s=5 * WAIT_S)
SRC, DST, TOKENS = [5, 1, 9, 2, 30, 7], [11, 3, 20], 21


def make(name: str) -> KeyPair:
    public, secret = (key.decode() for key in zmq.curve_keypair())
    return KeyPair(name, public, secret)


PREFILL, DECODE, OTHER = make("prefill"), make("decode"), make("other")


def knows(keys: KeyPair, *others: KeyPair) -> Credentials:
    return Credentials(keys, AllowList({other.public: other.name for other in others}))


class Site:
    """A prefill worker with keys that knows `decode`, and what else a test starts."""

    def __init__(self) -> None:
        self.hub = LoopbackHub()
        self.nodes: list[Node] = []
        self.events: list[Event] = []
        self._stop = listen(self.events.append)
        self.prefill = self.node("prefill", knows(PREFILL, DECODE))

    def node(self, name: str, credentials: Credentials | None) -> Node:
        kv = layout(4 if name == "prefill" else 8)
        node = Node(self.hub, name, kv, TIMEOUTS, credentials=credentials)
        self.nodes.append(node.open())
        return node

    def transfer(self, decode: Node, name: str, address: str | None = None) -> list[str]:
        """One transfer from prefill; what the receiver heard."""
        prefill = self.prefill
        log, handler = SenderLog(), Handler()
        prefill.sender.announce(name, log.failed, log.end)
        decode.receiver.expect(name, address or prefill.endpoint.address, handler)
        decode.receiver.offer(name, DST, 0, TOKENS)
        prefill.sender.publish(name, SRC, TOKENS, 0)
        for layer in range(3):
            prefill.sender.layer_ready(name, layer, 0, TOKENS)
        prefill.sender.finish(name, 42)
        heard = handler.wait()
        prefill.sender.cancel(name, "test over")
        log.wait()
        return heard

    def refusals(self) -> list[str]:
        return [event.reason for event in self.events if isinstance(event, PeerChanged) and event.state == "refused"]

    def check_nothing_is_left(self) -> None:
        for node in self.nodes:
            endpoint = node.endpoint
            until(lambda e=endpoint: not e.peers() and not e.num_closing(), "no session is left")  # type: ignore[misc]
            assert not any([*endpoint.sender.states().values(), *endpoint.receiver.states().values()])
            assert not endpoint.failure

    def close(self) -> None:
        for node in self.nodes:
            node.close()
        self._stop()


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    yield site
    site.close()


def keyed(address: str, key: str) -> str:
    place = ControlAddress.parse(address)
    return str(ControlAddress(place.host, place.port, key))


def test_workers_that_know_each_other_move_kv(site: Site) -> None:
    decode = site.node("decode", knows(DECODE, PREFILL))
    assert PREFILL.public in site.prefill.endpoint.address
    assert site.transfer(decode, "t") == ["ready 42", "released"]
    assert site.transfer(decode, "u") == ["ready 42", "released"]
    assert [peer.public_key for peer in site.prefill.endpoint.peers()] == [DECODE.public]
    assert site.refusals() == []


def test_connection_that_never_shows_a_key_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "_HANDSHAKE_MS", 100)
    with closing(Site()) as site:
        place = ControlAddress.parse(site.prefill.endpoint.address)
        with socket.create_connection((place.host, place.port), WAIT_S) as silent:
            while silent.recv(1024):
                pass


@pytest.mark.parametrize(
    ("name", "credentials", "key", "dialer_hears", "listener_counts"),
    [
        pytest.param(
            "other", knows(OTHER, PREFILL), PREFILL.public,
            "does not have our key on its allow-list", f"key {OTHER.public} is not on the allow-list",
            id="unknown key",
        ),
        pytest.param(
            "decode", knows(DECODE, OTHER), OTHER.public, "its key is not the one in", "no proof of a key",
            id="wrong key of the listener",
        ),
        pytest.param(
            "other", Credentials(DECODE, AllowList({PREFILL.public: "prefill"})), PREFILL.public,
            "name that goes with the key differs", "the key of decode came with the name 'other'",
            id="a name that is not its own",
        ),
    ],
)  # fmt: skip
def test_who_must_not_get_in_is_refused_at_once_and_counted(
    site: Site, name: str, credentials: Credentials, key: str, dialer_hears: str, listener_counts: str
) -> None:
    stranger = site.node(name, credentials)
    heard = site.transfer(stranger, "t", keyed(site.prefill.endpoint.address, key))
    assert heard[0].startswith("failed ")
    assert dialer_hears in heard[0]
    assert heard[1:] == ["released"]
    until(lambda: bool(site.refusals()), "the refusal is counted")
    assert listener_counts in site.refusals()[0]
    site.check_nothing_is_left()


def test_listener_that_took_a_name_of_somebody_else_is_refused(site: Site) -> None:
    """Its key is on our list, under another name than it gives."""
    decode = site.node("decode", Credentials(DECODE, AllowList({PREFILL.public: "another"})))
    heard = site.transfer(decode, "t")
    factor = "name that goes with the key"
    words = f"refused:{factor.replace(' ', '_')}: {factor} differs: local another, remote prefill"
    assert heard == [f"failed {words}", "released"]
    site.check_nothing_is_left()


@pytest.mark.parametrize("credentials", [None, knows(DECODE, PREFILL)], ids=["dialer without", "listener without"])
def test_sides_of_which_only_one_has_keys_fail_before_they_dial(site: Site, credentials: Credentials | None) -> None:
    if credentials is not None:
        site.prefill.close()
        site.nodes.clear()
        site.prefill = site.node("prefill", None)
    decode = site.node("decode", credentials)
    heard = site.transfer(decode, "t")
    assert "only one of the two sides uses keys" in heard[0]
    site.check_nothing_is_left()


def test_listener_without_keys_that_is_said_to_have_one_fails_at_once(site: Site) -> None:
    site.prefill.close()
    site.nodes.clear()
    site.prefill = site.node("prefill", None)
    decode = site.node("decode", knows(DECODE, PREFILL))
    heard = site.transfer(decode, "t", keyed(site.prefill.endpoint.address, PREFILL.public))
    assert re.search("only one of the two sides uses keys|it hung up", heard[0])
    site.check_nothing_is_left()


def test_plain_client_reaches_no_protocol_and_is_counted(site: Site) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as stray:
        stray.setsockopt(zmq.LINGER, 0)
        stray.connect(ControlAddress.parse(site.prefill.endpoint.address).endpoint)
        stray.send(b"\x80\x04\x95")
        until(lambda: bool(site.refusals()), "the refusal is counted")
    assert re.search("no proof of a key|left before", site.refusals()[0])
    assert not [event for event in site.events if isinstance(event, MessageDropped)]


def test_port_scan_is_counted_and_disturbs_nobody(site: Site) -> None:
    place = ControlAddress.parse(site.prefill.endpoint.address)
    for payload in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(64), b"\xff" + bytes(8) + b"\x7f\x03"):
        with socket.create_connection((place.host, place.port), timeout=5) as stray:
            stray.sendall(payload)
    until(lambda: len(site.refusals()) >= 2, "refusals that libzmq tells of are counted")  # it tells of no HTTP
    decode = site.node("decode", knows(DECODE, PREFILL))
    assert site.transfer(decode, "t") == ["ready 42", "released"]


class Impostor:
    """An allowed worker that sends what it likes: a bare DEALER, with the keys of `decode`'s neighbour `other`."""

    def __init__(self, site: Site, identity: bytes, keys: KeyPair = OTHER) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        if identity:
            self.socket.setsockopt(zmq.IDENTITY, identity)
        self.socket.setsockopt(zmq.RCVTIMEO, 5000)
        self.socket.setsockopt_string(zmq.CURVE_SERVERKEY, PREFILL.public)
        self.socket.setsockopt_string(zmq.CURVE_PUBLICKEY, keys.public)
        self.socket.setsockopt_string(zmq.CURVE_SECRETKEY, keys.secret)
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self.socket.connect(ControlAddress.parse(site.prefill.endpoint.address).endpoint)

    def is_connected(self) -> bool:
        return bool(self.monitor.poll(0))

    def send(self, envelope: messages.Envelope) -> None:
        self.socket.send(messages.encode(envelope))

    def receive(self) -> messages.Body:
        return messages.decode(self.socket.recv()).bodies[0]

    def close(self) -> None:
        self.socket.disable_monitor()
        self.context.destroy(linger=0)


@pytest.fixture
def settled() -> Iterator[tuple[Site, Node]]:
    """Prefill and decode with a session between them; prefill also knows `other`."""
    site = Site()
    site.prefill.endpoint.allow(AllowList({DECODE.public: "decode", OTHER.public: "other"}))
    decode = site.node("decode", knows(DECODE, PREFILL))
    assert site.transfer(decode, "t") == ["ready 42", "released"]
    yield site, decode
    site.close()


def test_allowed_worker_cannot_take_the_place_of_another(settled: tuple[Site, Node]) -> None:
    """smg#2503 turned around: a hello in somebody's name would otherwise replace his session."""
    site, decode = settled
    victim = site.prefill.endpoint.peers()[0]
    hello = messages.Hello("decode", decode.endpoint.local.identity, (LOOPBACK,))
    with closing(Impostor(site, b"x")) as impostor:
        impostor.send(
            messages.Envelope(messages.VERSION, "decode", victim.epoch, "", victim.session + 1, 0, (hello,))
        )
        refusal = impostor.receive()
    assert isinstance(refusal, messages.Refuse)
    assert (refusal.local, refusal.remote) == ("other", "decode")
    assert site.prefill.endpoint.peers() == [victim]
    assert site.transfer(decode, "u") == ["ready 42", "released"]


@pytest.mark.parametrize("stolen", [False, True], ids=["own route", "route of another"])
def test_frames_count_for_the_key_that_sent_them(settled: tuple[Site, Node], stolen: bool) -> None:
    """Name, epochs, session and even the route of a connection can be known; its key cannot be used."""
    site, decode = settled
    victim = site.prefill.endpoint.peers()[0]
    to_epoch, bye = site.prefill.endpoint.epoch, messages.Bye("go away")
    with closing(Impostor(site, bytes.fromhex(victim.route) if stolen else b"x")) as impostor:
        impostor.send(
            messages.Envelope(messages.VERSION, "decode", victim.epoch, to_epoch, victim.session, 0, (bye,))
        )
        impostor.send(messages.Envelope(messages.VERSION, "x", "x", "x", 1, 0, (messages.Heartbeat(),)))
        if stolen:  # a route stays with its owner: the second connection is made, and not heard
            until(impostor.is_connected, "the handshake is over")
        else:
            assert isinstance(impostor.receive(), messages.Bye)
        assert site.transfer(decode, "u") == ["ready 42", "released"]
        assert site.prefill.endpoint.peers() == [victim]


@pytest.mark.parametrize("chosen", [b"known", b""], ids=["its own route", "a route of libzmq's"])
def test_session_of_a_worker_that_died_is_not_inherited_with_its_route(
    settled: tuple[Site, Node], chosen: bytes
) -> None:
    """The route is free again before the listener has missed a heartbeat; who comes on it next is somebody else."""
    site, decode = settled
    prefill = site.prefill.endpoint
    decode.close()
    until(lambda: not prefill.peers(), "the session is over")
    with closing(Impostor(site, chosen, DECODE)) as dying:
        hello = messages.Hello("decode", decode.endpoint.local.identity, (LOOPBACK,))
        dying.send(messages.Envelope(messages.VERSION, "decode", "e", "", 7, 0, (hello,)))
        assert isinstance(dying.receive(), messages.Welcome)
    (victim,) = prefill.peers()
    answered = False
    while not answered:  # until libzmq has noticed the death, nobody is heard on this route
        with closing(Impostor(site, bytes.fromhex(victim.route))) as impostor:
            until(impostor.is_connected, "the handshake is over")
            bye = messages.Bye("go away")
            impostor.send(messages.Envelope(messages.VERSION, "decode", "e", prefill.epoch, 7, 0, (bye,)))
            impostor.send(messages.Envelope(messages.VERSION, "decode", "e", "other", 7, 0, (messages.Heartbeat(),)))
            answered = bool(impostor.socket.poll(200)) and isinstance(impostor.receive(), messages.Bye)
    assert prefill.peers() == [victim]


def test_key_taken_off_the_list_ends_its_session_and_no_other(settled: tuple[Site, Node]) -> None:
    site, decode = settled
    other = site.node("other", knows(OTHER, PREFILL))
    assert site.transfer(other, "u") == ["ready 42", "released"]
    site.prefill.endpoint.allow(AllowList({OTHER.public: "other"}))
    until(lambda: [peer.name for peer in site.prefill.endpoint.peers()] == ["other"], "decode's session ends")
    until(lambda: not decode.endpoint.peers(), "decode has heard of it")
    assert "allow-list" in site.transfer(decode, "v")[0]
    assert site.transfer(other, "w") == ["ready 42", "released"]


def test_forged_key_for_a_good_address_does_not_disturb_its_session(settled: tuple[Site, Node]) -> None:
    site, decode = settled
    heard = site.transfer(decode, "u", keyed(site.prefill.endpoint.address, OTHER.public))
    assert "it ended just now; or, if it runs, its key is not the one in the address" in heard[0]
    assert [peer.state.value for peer in decode.endpoint.peers()] == ["ready"]
    assert site.transfer(decode, "v") == ["ready 42", "released"]


def test_control_plane_is_encrypted() -> None:
    """What crosses the wire does not show what is said on it."""
    seen = _relay_between_sites(lambda: knows(DECODE, PREFILL), knows(PREFILL, DECODE))
    assert b"CURVE" in seen
    assert b"transfer-in-the-clear" not in seen
    assert b"heartbeat" not in seen
    plain = _relay_between_sites(lambda: None, None)
    assert b"transfer-in-the-clear" in plain


def _relay_between_sites(decode: Callable[[], Credentials | None], prefill: Credentials | None) -> bytes:
    """Every byte of one transfer's control connection, from dialer to listener."""
    site = Site()
    site.prefill.close()
    site.nodes.clear()
    site.prefill = site.node("prefill", prefill)
    target = ControlAddress.parse(site.prefill.endpoint.address)
    seen = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def relay() -> None:
            near, _ = server.accept()
            with near, socket.create_connection((target.host, target.port), timeout=10) as far:
                other = {near: far, far: near}
                while True:
                    readable, _, _ = select.select([near, far], [], [], 10)
                    if not readable:
                        return
                    for end in readable:
                        try:
                            data = end.recv(65536)
                            other[end].sendall(data)
                        except ConnectionError:  # the other end is being closed
                            return
                        if not data:
                            return
                        if end is near:
                            seen.extend(data)

        thread = threading.Thread(target=relay)
        thread.start()
        node = site.node("decode", decode())
        through = str(ControlAddress("127.0.0.1", server.getsockname()[1], target.public_key))
        assert site.transfer(node, "transfer-in-the-clear", through) == ["ready 42", "released"]
        node.close()
        thread.join(WAIT_S)
    site.close()
    return bytes(seen)
