"""Every number of every message at every edge, on every way into a process; an honest request is answered after it.

The messages are found in the types of the readers (`edges.py`), so a new message is covered. Values of other types,
and numbers within honest sessions, are in test_values.py; requests to the proxy are in tests/proxy/test_edges.py.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import socket
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from aiohttp.test_utils import TestClient, TestServer

from pdlink.api.legs import AnyParams
from pdlink.errors import InvalidRequest, ProtocolError
from pdlink.integrations.sglang_parts import wire as sglang
from pdlink.integrations.vllm_parts import params as vllm
from pdlink.peers import messages as peers
from pdlink.protocol import messages
from pdlink.serve import cache_routes, openai
from pdlink.serve.store_app import build_app
from pdlink.store import wire
from pdlink.transport import handle_door
from pdlink.transport.handle_door import HandleDoor
from pdlink.transport.staging import wire as staging
from pdlink_proxy.kv_index import KVIndex
from tests.e2e.deployment import Deployment, request
from tests.endpoint.conftest import Handler, SenderLog
from tests.loopback import LoopbackHub, LoopbackTransport
from tests.peers.store_node import StoreNode
from tests.proxy.events import types as kv_events
from tests.proxy.test_kv_index import apply, batch, tokens_in
from tests.store.process import client, served
from tests.store.test_store import KEYS, put, read
from tests.waiting import WAIT_S

from . import edges
from .bench import Bench

ROOT = Path(__file__).parents[2]
packed, packed_json = msgspec.msgpack.encode, msgspec.json.encode


def read_event(raw: bytes) -> None:
    apply(KVIndex(), 1, "m", batch(msgspec.Raw(raw)))


READERS: dict[str, tuple[Any, Callable[[bytes], object], tuple[type[Exception], ...]]] = {
    "session frames": (messages.Envelope, messages.decode, (ProtocolError,)),
    "peers' questions": (peers.Body, peers.decode, (ProtocolError,)),
    "requests to a store": (wire.Request, wire.REQUESTS.decode, (msgspec.ValidationError,)),
    "answers of a store": (wire.Reply, wire.REPLIES.decode, (msgspec.ValidationError,)),
    "notes of a staged lane": (staging.Note, staging.decode, (ProtocolError,)),
    "questions at the door": (
        handle_door._Question,
        msgspec.msgpack.Decoder(handle_door._Question).decode,
        (msgspec.ValidationError,),
    ),
    "answers at the door": (
        handle_door._Answer,
        msgspec.msgpack.Decoder(handle_door._Answer).decode,
        (msgspec.ValidationError,),
    ),
    "KV events": (kv_events.Event, read_event, (ValueError,)),
    "KV events as arrays": (kv_events.EventArray, read_event, (ValueError,)),
    "SGLang's rooms": (
        sglang.Message,
        lambda raw: sglang.decode([sglang.TAG, raw]),
        (sglang.BadMessage,),
    ),
}
"""Name, what it reads, how, and what it says of anything else."""
ELSEWHERE = {
    "preimages._Entry": "a file of ours",
    "record.RecordHeader": "a file of ours, with a checksum",
    "edge.kind": "invitations: test_values.py",
    "ucx._Invitation": "invitations: test_values.py",
    "siblings.?": "a socket of our own user's",
    "records._Kept": "packed by the same process",
    "records.EndedHead": "packed by the same process",
    "records.?": "packed by the same process",
    "decisions.?": "packed by the same process",
}


@pytest.mark.parametrize("name", READERS)
def test_every_number_is_read_or_refused(name: str) -> None:
    kind, read_it, errors = READERS[name]
    for one in edges.members(kind):
        read_it(packed(edges.honest(one)))
    for what, value in edges.spoiled(kind):
        with contextlib.suppress(*errors):
            try:
                read_it(packed(value))
            except errors:
                raise
            except Exception as error:
                raise AssertionError(f"{what}: {error!r}") from error


def test_no_reader_is_left_out() -> None:
    """Every reader of MessagePack is in `READERS`, or says why not."""
    found = set()
    for folder in (ROOT / "pdlink", ROOT / "proxy/pdlink_proxy"):
        for path in folder.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if not isinstance(node, ast.Call):
                    continue
                called = ast.unparse(node.func)
                if called == "msgspec.msgpack.Decoder":
                    found.add(f"{path.stem}.{ast.unparse(node.args[0])}")
                elif called == "msgspec.msgpack.decode":
                    kinds = [ast.unparse(each.value) for each in node.keywords if each.arg == "type"]
                    found.add(f"{path.stem}.{kinds[0] if kinds else '?'}")
    walked = {
        "messages.Envelope", "messages.Body", "wire.Request", "wire.Reply", "wire.Note", "handle_door._Question",
        "handle_door._Answer", "wire.Message",
    }  # fmt: skip
    assert found == walked | set(ELSEWHERE)


# -- what the processes do with them ---------------------------------------------------------------------------------


@pytest.fixture
def bench() -> Iterator[Bench]:
    hub = LoopbackHub()
    with contextlib.closing(Bench(lambda: LoopbackTransport(hub), keyed=False)) as bench:
        yield bench
        bench.transfer()


def test_no_number_in_a_session_costs_more_than_the_session(bench: Bench) -> None:
    """As a dialer, who is past its handshake, and as a listener that was dialed."""
    for _, value in edges.spoiled(messages.Body):
        stranger, false, handler, log = bench.stranger(), bench.false_prefill(), Handler(), SenderLog()
        name = f"t-{bench.num_strangers}"
        bench.prefill.sender.announce(name, log.failed, log.end)
        false.expect(name, handler)
        honest = messages.Hello(
            stranger.name, bench.spare.identity, (bench.spare.transport.capabilities,), "tcp://x:1"
        )
        stranger.say(stranger.envelope(honest))
        stranger.dst_epoch = bench.prefill.endpoint.epoch
        if "transfer_id" in value:
            value["transfer_id"] = name
        for one in (stranger, false):
            fields = msgspec.to_builtins(one.envelope())
            fields[-1] = [value]
            one.say(fields)
        bench.step()
        bench.prefill.sender.cancel(name, "the test")
        bench.send_away()
        assert handler.calls[-1:] == ["released"]
        assert log.calls[-1:] == ["end"]
        bench.check()
    for _, value in edges.spoiled(messages.Envelope):
        bench.stranger().say(value)
        bench.step()
        bench.send_away()
        bench.check()


def test_no_number_in_a_request_costs_a_store_more_than_a_connection(tmp_path: Path) -> None:
    with served(tmp_path) as (store, listener), client(listener.path) as honest:
        assert put(honest, KEYS[:2]) == 2
        hello = wire.Hello(wire.VERSION, b"", "liar", ())
        for number, (_, value) in enumerate(edges.spoiled(wire.Request)):
            with socket.socket(socket.AF_UNIX) as link:
                link.connect(str(listener.path))
                token = struct.pack("<QQ", 7, number)
                link.sendall(wire.frame(msgspec.structs.replace(hello, client=token)))
                body = packed(value)
                with contextlib.suppress(OSError):
                    link.sendall(wire._LENGTH.pack(len(body)) + body + wire.frame(wire.Ping(3)))
                    link.settimeout(WAIT_S)
                    link.shutdown(socket.SHUT_WR)
                    while link.recv(65536):
                        pass
        honest_keys = [os.urandom(32) for _ in range(2)]
        assert put(honest, honest_keys) == 2
        assert read(honest, honest_keys) == 2
        store.check()


def test_no_number_in_a_question_keeps_a_store_from_its_peers() -> None:
    with contextlib.closing(StoreNode("owner")) as owner, zmq.Context() as context:
        owner.put(0)
        with context.socket(zmq.DEALER) as stranger:
            stranger.linger = 0
            stranger.connect(owner.address())
            for _, value in edges.spoiled(peers.Body):
                stranger.send(packed(value))
            stranger.send(packed(edges.honest(edges.members(peers.Body)[0])))
            assert stranger.poll(int(WAIT_S * 1000)), "it answers still"
        with contextlib.closing(StoreNode("asker", [owner.address()])) as asker:
            assert asker.read(0) == 1


def test_no_number_at_the_door_keeps_the_next_peer_out() -> None:
    with contextlib.closing(HandleDoor()) as door:
        questions = [value for _, value in edges.spoiled(handle_door._Question)]
        for value in [*questions, edges.honest(handle_door._Question)]:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
                peer.settimeout(WAIT_S)
                peer.connect("\0" + door.place.name)
                peer.send(packed([door.place.secret if isinstance(each, bytes) else each for each in value]))
                answer = peer.recv(65536)
        assert b"no such memory" in answer, "the honest one is answered"


def test_no_number_in_a_kv_event_spoils_what_others_have_said() -> None:
    index, honest, liar = KVIndex(), 1, 2
    tokens = np.arange(16, dtype=np.uint32)
    said = {
        "type": "BlockStored",
        "block_hashes": [7],
        "parent_block_hash": None,
        "token_ids": tokens.tolist(),
        "block_size": 16,
    }
    apply(index, honest, "m", batch(said))
    for kind in (kv_events.Event, kv_events.EventArray):
        for _, value in edges.spoiled(kind):
            with contextlib.suppress(ValueError):
                apply(index, liar, "m", batch(value))
            for name, edge in (("block_hashes", [7, 2**64 - 1]), ("token_ids", tokens.tolist())):
                if isinstance(value, dict) and name in value:
                    with contextlib.suppress(ValueError):
                        apply(index, liar, "m", batch({**value, name: edge}))
    index.forget(liar)
    assert tokens_in(index, "m", (), tokens) == {honest: 16}


def test_no_number_in_a_leg_of_vllm_is_more_than_a_wrong_parameter() -> None:
    for _, params in edges.spoiled(AnyParams):
        with contextlib.suppress(InvalidRequest):
            vllm.parse(params)


# -- HTTP of workers -------------------------------------------------------------------------------------------------

JSON_EDGES = ("0", "-1", "2147483648", "9007199254740992", "9223372036854775807", "1" + "0" * 30, "NaN", "1e308")
GENERATING = {"/v1/completions": openai.CompletionRequest, "/v1/chat/completions": openai.ChatRequest}
BODIES: dict[str, Any] = {
    **GENERATING,
    "/tokenize": openai.CompletionRequest,
    **{
        f"{cache_routes.PATH}/{name}": getattr(cache_routes, verb.__annotations__["asked"])
        for name, verb in vars(cache_routes.CacheDesk).items()
        if name[0] != "_" and "asked" in getattr(verb, "__annotations__", {})
    },
}
"""By path, the type of its body."""


def bodies(path: str) -> Iterator[bytes]:
    """Honest in all but one number, at each edge; nested ones, too."""
    said = [{"role": "user", "content": "a"}]
    base: dict[str, Any] = {"messages": said} if "chat" in path else {"prompt": "a"}
    if path in GENERATING:
        base |= {"model": "pdlink-tiny", "max_tokens": 1}
    kind, mark = BODIES[path], 1234567.5
    for field in msgspec.structs.fields(kind):
        for nested in edges.numbers(field.type):
            spoiled = {**base, field.encode_name: edges.with_number(field.type, nested, mark)}
            text = json.dumps(spoiled)
            for edge in JSON_EDGES:
                yield text.replace(str(mark), edge).encode()


async def test_no_number_of_a_request_to_a_store_is_more_than_a_wrong_request(tmp_path: Path) -> None:
    with served(tmp_path) as (store, listener):
        async with TestClient(TestServer(build_app("s", store, listener))) as http:
            for path in BODIES:
                for body in bodies(path) if path.startswith(cache_routes.PATH) else ():
                    async with http.post(path, data=body) as answer:
                        assert answer.status < 500, (path, body)
            async with http.get(cache_routes.PATH) as answer:
                assert answer.status == 200
        with client(listener.path) as honest:
            assert put(honest, KEYS[:2]) == read(honest, KEYS[:2]) == 2


@pytest.fixture
def warm(deployment: Deployment) -> None:
    """Threads that a worker has from its first such request on are nobody's leak."""
    for label in ("prefill", "decode"):
        for path in ("/tokenize", f"{cache_routes.PATH}/lookup"):
            request(deployment.url(label) + path, {"prompt": "a" * 20_000, "model": "pdlink-tiny"})


@pytest.mark.e2e
@pytest.mark.usefixtures("warm")  # before `victims` counts
@pytest.mark.parametrize("path", BODIES)
def test_no_number_of_a_request_to_a_worker_is_more_than_a_wrong_request(path: str, victims: Deployment) -> None:
    def ask(label: str, body: bytes) -> tuple[str, bytes, int]:
        return label, body, request(victims.url(label) + path, body).status

    asked = [(label, body) for label in ("prefill", "decode") for body in bodies(path)]
    with ThreadPoolExecutor(4) as threads:
        for label, body, status in threads.map(lambda each: ask(*each), asked):
            # 502: a leg whose other one never came. 503: more than a queue holds.
            assert status < 500 or status in (502, 503), (label, body[:300], status)
