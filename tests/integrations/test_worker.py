"""The workers' half of the vLLM connector between two endpoints: steps in, bytes across, results out."""

from __future__ import annotations

import logging
import socketserver
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from pdlink.events import listen
from pdlink.integrations.stats import Counts
from pdlink.integrations.vllm_parts import params
from pdlink.integrations.vllm_parts.layout import CacheGroups
from pdlink.integrations.vllm_parts.requests import RequestBook, Scheduled, StepPlan
from pdlink.integrations.vllm_parts.steps import Steps
from pdlink.integrations.vllm_parts.worker import Results, WorkerHalf
from pdlink.kv.groups import KVGroups
from pdlink.reasons import Code, Reason
from tests.endpoint.conftest import TIMEOUTS, Node, Pair
from tests.integrations.vllm_engine import NO_ADAPTERS
from tests.waiting import WAIT_S, until

PROMPT = list(range(30))
ID = params.transfer_id("a", PROMPT)
NAMES = ("model.0", "model.1", "model.2")


def cache_of(node: Node, ratio: int = 1) -> CacheGroups:
    return CacheGroups(KVGroups((node.layout,)), {name: (index,) for index, name in enumerate(NAMES)}, (ratio,))


def half_of(
    node: Node, ratio: int = 1, *, preemption_s: float = 5.0, news: threading.Event, held_steps: int = 0
) -> WorkerHalf:
    cache = cache_of(node, ratio)
    shards = [(0, node.node, cache)]
    adapters = NO_ADAPTERS
    return WorkerHalf(shards, cache, preemption_s=preemption_s, news=news, adapters=adapters, held_steps=held_steps)


class Server:
    """One vLLM server: a scheduler's half and one worker's, joined by steps."""

    def __init__(self, node: Node, *, ratio: int = 1) -> None:
        self.node = node
        self.book = RequestBook(sends=True, receives=True, shares_prefixes=True)
        news = threading.Event()
        self.half = Steps(news, half_of(node, ratio, news=news))
        self.over: set[str] = set()

    def step(
        self, parts: list[Scheduled] | None = None, preempted: frozenset[str] = frozenset(), *, hooks: bool = True
    ) -> Results:
        """What vLLM does in one step; hooks: whether the layers' hooks run."""
        plan: StepPlan = self.book.step(parts or [], preempted)
        self.half.withdraw(plan)
        self.half.begin(plan)
        for name in NAMES if hooks and parts else ():
            self.half.layer_saved(name)
        self.half.end()
        over, self.over = self.over, set()
        results = self.half.results(over)
        self.book.received(results.received, results.reasons)
        self.book.sent(results.sent)
        return results

    def end(self, request_id: str) -> bool:
        self.over.add(request_id)
        return self.book.ended(request_id)

    def until_reported(self, *, sent: str = "", received: str = "") -> Results:
        """Empty steps, as vLLM makes them while something is awaited."""
        deadline_s = time.monotonic() + WAIT_S
        while time.monotonic() < deadline_s:
            results = self.step()
            if sent in results.sent or received in results.received:
                return results
            self.half.pause(0.02)
        raise AssertionError(f"not reported: {sent or received}")

    def idle(self) -> bool:
        return not (self.half.transfers._requests or self.book._sending or self.book._receiving)


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


@pytest.fixture
def servers(pair: Pair) -> tuple[Server, Server]:
    """Prefill with 4-token blocks, decode with 16-token blocks of two 8-token kernel blocks each."""
    return Server(pair.prefill), Server(pair.decode, ratio=2)


def ask(prefill: Server, decode: Server) -> None:
    control = {"control": prefill.node.node.address}
    prefill.book.arrived("p", {"transfer_id": "a", "leg": "prefill"}, PROMPT)
    decode.book.arrived("d", {"transfer_id": "a", "leg": "decode", "prefill": control}, PROMPT)


def offer(decode: Server, computed: int = 0) -> None:
    count, parked = decode.book.missing("d", computed)
    assert parked
    assert count is not None
    decode.book.allocated("d", ((5, 2),), count)


def offered(pair: Pair, prefill: Server, decode: Server, computed: int = 0) -> None:
    """Both legs are here, and steps were made until the offer is at the sender."""
    ask(prefill, decode)
    offer(decode, computed)
    prefill.step()
    decode.step()
    until(lambda: pair.sender_state("writing") == 1, "the offer has come")


def same(pair: Pair, src: list[int], dst: list[int], start: int = 0, end: int = 29) -> bool:
    return all(
        np.array_equal(
            pair.prefill.rows(src, end, layer)[:, start:], pair.decode.rows(dst, end, layer)[:, start:]
        )
        for layer in range(3)
    )  # fmt: skip


SRC, DST = [7, 3, 9, 1, 12, 0, 20, 4], [10, 11, 4, 5]
"""Blocks of prefill, and kernel blocks of decode: its blocks 5 and 2."""


@pytest.mark.parametrize("hooks", [True, False])
@pytest.mark.parametrize("decode_first", [True, False])
def test_chunks_cross_and_both_sides_report_once(
    pair: Pair, servers: tuple[Server, Server], hooks: bool, decode_first: bool
) -> None:
    prefill, decode = servers
    ask(prefill, decode)
    offer(decode)
    if decode_first:
        decode.step()
    prefill.step([Scheduled("p", (tuple(SRC[:4]),), True, 0, 16)], hooks=hooks)
    prefill.step([Scheduled("p", (tuple(SRC[4:]),), False, 16, 14)], hooks=hooks)
    assert prefill.end("p"), "its blocks are read"
    received = decode.until_reported(received="d")
    assert (received.failed, received.failed_blocks) == (set(), set())
    prefill.until_reported(sent="p")
    assert same(pair, SRC, DST)
    assert prefill.step() == decode.step() == Results()
    decode.end("d")
    decode.step()
    assert prefill.idle()
    assert decode.idle()


def test_a_step_that_computes_nothing_waits_for_what_vllm_waits_for_and_for_nothing_else(
    pair: Pair, servers: tuple[Server, Server]
) -> None:
    prefill, decode = servers
    long_s = 10 * WAIT_S  # the test's own time limit ends a wait for something that does not come
    decode.half.pause(long_s)  # nothing is awaited
    ask(prefill, decode)
    offer(decode)
    decode.step()
    decode.half.pause(0.01)  # over without news
    assert decode.step() == Results()
    prefill.step([Scheduled("p", (tuple(SRC),), True, 0, 30)])
    decode.half.pause(long_s)
    assert decode.step().received == {"d"}
    prefill.end("p")
    if not prefill.step().sent:
        prefill.half.pause(long_s)
        assert prefill.step().sent == {"p"}


def test_only_the_missing_tokens_are_written(pair: Pair, servers: tuple[Server, Server]) -> None:
    prefill, decode = servers
    ask(prefill, decode)
    offer(decode, 16)
    decode.step()
    prefill.step([Scheduled("p", (tuple(SRC),), True, 8, 22)])
    decode.until_reported(received="d")
    assert same(pair, SRC, DST, 16)
    assert not pair.decode.rows(DST, 16, 0).any(), "what decode has was not touched"


def test_a_prefix_from_the_cache_is_not_read_before_the_step_has_written_it(
    pair: Pair, servers: tuple[Server, Server]
) -> None:
    """vLLM lets a request share blocks that another one computes in the same step."""
    prefill, decode = servers
    offered(pair, prefill, decode)
    prefill.half.begin(prefill.book.step([Scheduled("p", (tuple(SRC),), True, 16, 14)]))
    assert not pair.hub.open_batches
    assert not pair.decode.rows(DST, 29, 0).any()
    pair.prefill.buffer.array[:] = np.random.default_rng(9).integers(0, 256, pair.prefill.buffer.nbytes, np.uint8)
    for name in NAMES:
        prefill.half.layer_saved(name)
    prefill.half.end()
    decode.until_reported(received="d")
    assert same(pair, SRC, DST)


def test_decode_goes_on_while_prefill_still_computes_what_follows_the_last_attention(
    pair: Pair, servers: tuple[Server, Server]
) -> None:
    prefill, decode = servers
    offered(pair, prefill, decode)
    prefill.half.begin(prefill.book.step([Scheduled("p", (tuple(SRC),), True, 0, 30)]))
    for name in NAMES[:-1]:
        prefill.half.layer_saved(name)
    assert decode.step() == Results()
    prefill.half.layer_saved(NAMES[-1])
    assert decode.until_reported(received="d").failed == set()
    assert same(pair, SRC, DST)
    prefill.half.end()
    prefill.end("p")
    prefill.until_reported(sent="p")
    decode.end("d")
    decode.step()
    assert prefill.idle()
    assert decode.idle()


def test_a_prompt_that_decode_has_ends_both_without_a_push(servers: tuple[Server, Server]) -> None:
    """vllm#36958: every shard of prefill hears that it is not needed."""
    prefill, decode = servers
    ask(prefill, decode)
    assert decode.book.missing("d", 29) == (0, False)
    decode.book.allocated("d", ((5, 2),), 0)
    decode.step()
    prefill.step([Scheduled("p", (tuple(SRC),), True, 28, 2)])
    prefill.end("p")
    prefill.until_reported(sent="p")
    decode.end("d")
    assert decode.step() == Results(), "a request that was not parked is not reported"
    assert decode.idle()


@pytest.mark.parametrize("decode_first", [True, False])
@pytest.mark.parametrize("aborted", [True, False])
def test_a_prompt_that_decode_has_is_no_failure_of_anybody(
    pair: Pair, servers: tuple[Server, Server], caplog: pytest.LogCaptureFixture, decode_first: bool, aborted: bool
) -> None:
    """aborted: the proxy has its answer, and closes prefill's leg in the middle of the prompt."""
    prefill, decode = servers
    counts = Counts()
    stop = listen(counts)
    ask(prefill, decode)
    decode.book.allocated("d", ((5, 2),), 0)
    if decode_first:
        decode.step()
        until(lambda: pair.prefill.node.why_stopped(ID) == Reason(Code.NOT_NEEDED), "prefill has heard it")
    prefill.step([Scheduled("p", (tuple(SRC[:4]),), True, 0, 16)])
    if not decode_first:
        until(lambda: pair.prefill.node.report().sending["waiting"] == 1, "it is announced")
        decode.step()
        until(lambda: pair.prefill.node.why_stopped(ID) == Reason(Code.NOT_NEEDED), "prefill has heard it")
    if not aborted:
        prefill.step([Scheduled("p", (tuple(SRC[4:]),), False, 16, 14)])
    prefill.end("p")
    prefill.until_reported(sent="p")
    decode.end("d")
    assert decode.step() == Results(), "a request that was not parked is not reported"
    until(decode.idle, "nothing is left")
    stop()
    assert prefill.idle()
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert not any("failed" in name or "failures" in name for name in counts.take())


def test_another_prompt_under_one_id_is_told_at_once_and_in_words(
    servers: tuple[Server, Server], caplog: pytest.LogCaptureFixture
) -> None:
    """Two chat templates, for example. Both legs waited until a lease of 30 s had ended."""
    prefill, decode = servers
    control = {"control": prefill.node.node.address}
    prefill.book.arrived("p", {"transfer_id": "a", "leg": "prefill", "num_prompts": 1}, [1, *PROMPT])
    decode.book.arrived("d", {"transfer_id": "a", "leg": "decode", "prefill": control}, PROMPT)
    offer(decode)
    prefill.step([Scheduled("p", (tuple(SRC),), True, 0, 31)])
    prefill.end("p")
    started_s = time.monotonic()
    results = decode.until_reported(received="d")
    prefill.until_reported(sent="p")
    assert time.monotonic() - started_s < TIMEOUTS.peer_s
    assert (results.failed, results.reasons) == ({"d"}, {"d": "other_prompt"})
    assert decode.book.path("d") == "recomputed;reason=other_prompt"
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(said) == 2
    assert all("another prompt" in line and "chat template" in line for line in said)


def test_a_peers_words_cannot_forge_lines_of_the_log(
    servers: tuple[Server, Server], caplog: pytest.LogCaptureFixture
) -> None:
    prefill, decode = servers
    ask(prefill, decode)
    offer(decode)
    decode.step()
    prefill.step()
    until(lambda: prefill.node.node.report().sending["writing"] == 1, "the offer has come")
    prefill.node.node.other_side_failed(ID, "x\n" * 100 + "WARNING all is lost\x1b[31m")
    assert decode.until_reported(received="d").reasons == {"d": "request_failed"}
    said = [record.getMessage() for record in caplog.records]
    assert said
    assert all(line.isprintable() for line in said)


def test_steps_that_are_planned_one_ahead_send_the_same(pair: Pair, servers: tuple[Server, Server]) -> None:
    """Asynchronous scheduling puts the next step together while the last one runs."""
    prefill, decode = servers
    ask(prefill, decode)
    offer(decode)
    decode.step()
    plans = [
        prefill.book.step([Scheduled("p", (tuple(SRC[:4]),), True, 0, 16)]),
        prefill.book.step([Scheduled("p", (tuple(SRC[4:]),), False, 16, 14)]),
        prefill.book.step([Scheduled("p", ((),), False, 30, 1)]),
    ]
    for plan in plans:
        prefill.half.begin(plan)
        for name in NAMES:
            prefill.half.layer_saved(name)
        prefill.half.end()
    assert decode.until_reported(received="d").failed == set()
    assert same(pair, SRC, DST)


def test_a_preempted_prompt_is_sent_from_its_new_blocks(pair: Pair, servers: tuple[Server, Server]) -> None:
    prefill, decode = servers
    offered(pair, prefill, decode)
    prefill.step([Scheduled("p", (tuple(SRC[:4]),), True, 0, 16)])
    prefill.step(preempted=frozenset({"p"}))
    pair.prefill.buffer.array[:] = np.random.default_rng(8).integers(0, 256, pair.prefill.buffer.nbytes, np.uint8)
    other = [block + 1 for block in SRC]  # computed again, elsewhere
    prefill.step([Scheduled("p", (tuple(other[:2]),), True, 0, 8)])
    prefill.step([Scheduled("p", (tuple(other[2:]),), False, 8, 22)])
    decode.until_reported(received="d")
    assert same(pair, other, DST), "what landed before the preemption came from blocks that may have been zeroed"


@pytest.mark.parametrize("num_stages", [1, 3])
def test_where_vllm_zeroes_blocks_a_prompt_is_complete_when_no_step_in_flight_has_taken_its_blocks(
    pair: Pair, servers: tuple[Server, Server], num_stages: int
) -> None:
    """Model runner V2 zeroes blocks before it says whose they were, while the last pushes may be in flight."""
    prefill, decode = servers
    news = threading.Event()
    prefill.half = Steps(news, half_of(pair.prefill, news=news, held_steps=num_stages))
    offered(pair, prefill, decode)
    prefill.step([Scheduled("p", (tuple(SRC),), True, 0, 30)])
    until(lambda: same(pair, SRC, DST), "all has landed")
    for _ in range(num_stages - 1):
        prefill.step()
    pair.prefill.buffer.array[:] = 0
    prefill.step(preempted=frozenset({"p"}))
    assert decode.step() == Results(), "decode was not told that it has all"
    pair.prefill.buffer.array[:] = np.random.default_rng(8).integers(0, 256, pair.prefill.buffer.nbytes, np.uint8)
    prefill.step([Scheduled("p", (tuple(SRC),), True, 0, 30)])
    assert prefill.end("p")
    prefill.step()
    assert decode.until_reported(received="d").failed == set()
    assert same(pair, SRC, DST)
    prefill.until_reported(sent="p")


def test_blocks_are_offered_when_the_steps_that_may_write_them_have_ended(
    pair: Pair, servers: tuple[Server, Server]
) -> None:
    """vLLM up to 0.23 gives a block away while a step under way writes to it."""
    prefill, decode = servers
    news = threading.Event()
    half = half_of(pair.decode, 2, news=news)
    asked: list[bool] = []
    decode.half = Steps(news, half, settle=lambda: asked.append(half._requests["d"].asked))
    ask(prefill, decode)
    decode.step()
    assert asked == []
    offer(decode)
    decode.step()
    assert asked == [False]
    prefill.step([Scheduled("p", (tuple(SRC),), True, 0, 30)])
    decode.until_reported(received="d")
    assert same(pair, SRC, DST)
    assert asked == [False]


@pytest.mark.parametrize("said", [True, False], ids=["V1", "V2"])
def test_a_forward_pass_that_fails_publishes_nothing_and_ends_its_transfers(
    pair: Pair, servers: tuple[Server, Server], said: bool
) -> None:
    """Model runner V1 says that it has ended; V2 says nothing, and the next step begins."""
    prefill, decode = servers
    offered(pair, prefill, decode)
    plan = prefill.book.step([Scheduled("p", (tuple(SRC),), True, 0, 30)])
    prefill.half.begin(plan)
    prefill.half.layer_saved(NAMES[0])
    if said:
        prefill.half.abandon()
    prefill.step()
    assert decode.until_reported(received="d").reasons == {"d": "request_failed"}
    assert not same(pair, SRC, DST)
    assert prefill.end("p")
    prefill.until_reported(sent="p")


def test_transports_hear_when_a_prompt_is_computed_for_others(
    pair: Pair, servers: tuple[Server, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = servers
    transport = prefill.node.transport
    said: list[bool] = []
    monkeypatch.setattr(transport, "computing", said.append)
    ask(prefill, decode)
    prefill.step()
    assert not said
    prefill.step([Scheduled("p", (tuple(SRC[:4]),), True, 0, 16)])
    prefill.step([Scheduled("p", (tuple(SRC[4:]),), False, 16, 14)])
    prefill.step()
    assert said == [True, False] * 2


def test_a_preemption_waits_for_pushes_in_flight(pair: Pair, servers: tuple[Server, Server]) -> None:
    prefill, decode = servers
    offered(pair, prefill, decode)
    pair.hub.hold = True
    prefill.step([Scheduled("p", (tuple(SRC[:4]),), True, 0, 16)])
    until(lambda: len(pair.hub.open_batches) == 3, "a push of every layer is in flight")
    preempting = threading.Thread(target=prefill.step, kwargs={"preempted": frozenset({"p"})})
    preempting.start()
    preempting.join(0.2)
    assert preempting.is_alive(), "the old blocks are still being read"
    pair.hub.hold = False
    pair.hub.deliver_all()
    preempting.join(WAIT_S)
    assert not preempting.is_alive()
    prefill.step([Scheduled("p", (tuple(SRC),), True, 0, 30)])
    assert decode.until_reported(received="d").failed == set()
    assert same(pair, SRC, DST)


def test_a_preemption_that_waits_too_long_ends_the_transfer(pair: Pair, servers: tuple[Server, Server]) -> None:
    prefill, decode = servers
    news = threading.Event()
    transfers = half_of(pair.prefill, preemption_s=0.1, news=news)
    prefill.half = Steps(news, transfers)
    offered(pair, prefill, decode)
    pair.hub.hold = True
    prefill.step([Scheduled("p", (tuple(SRC[:4]),), True, 0, 16)])
    until(lambda: len(pair.hub.open_batches) == 3, "a push of every layer is in flight")
    prefill.step(preempted=frozenset({"p"}))
    assert decode.step() == Results(), "what is in flight may still be written"
    pair.hub.hold = False
    pair.hub.deliver_all()
    assert decode.until_reported(received="d").failed == {"d"}


def test_a_failed_load_is_reported_when_nothing_can_write_any_more(
    pair: Pair, servers: tuple[Server, Server]
) -> None:
    prefill, decode = servers
    offered(pair, prefill, decode, 16)
    pair.hub.hold = True  # pushes stay in flight
    prefill.step([Scheduled("p", (tuple(SRC[:6]),), True, 0, 24)])
    prefill.end("p")
    prefill.step()
    deadline_s = time.monotonic() + 0.3
    while time.monotonic() < deadline_s:
        assert decode.step() == Results(), "a push is still in flight"
    pair.hub.hold = False
    pair.hub.deliver_all()
    results = decode.until_reported(received="d")
    assert results.failed == {"d"}
    assert results.failed_blocks == {2}, "the block of the cached prefix is good"
    prefill.until_reported(sent="p")


def test_an_aborted_receive_is_reported_after_the_fence(servers: tuple[Server, Server]) -> None:
    prefill, decode = servers
    ask(prefill, decode)
    offer(decode)
    decode.step()
    decode.end("d")
    results = decode.until_reported(received="d")
    assert results.failed == {"d"}
    prefill.step([Scheduled("p", (tuple(SRC),), True, 0, 30)])
    prefill.end("p")
    prefill.until_reported(sent="p")
    assert prefill.idle()
    assert decode.idle()


def test_a_request_aborted_before_its_blocks_were_reserved_is_not_reported(servers: tuple[Server, Server]) -> None:
    prefill, decode = servers
    ask(prefill, decode)
    decode.step()
    decode.end("d")
    assert decode.step() == Results()
    prefill.step([Scheduled("p", (tuple(SRC),), True, 0, 30)])
    prefill.end("p")
    prefill.until_reported(sent="p")
    assert decode.idle()


@pytest.mark.parametrize("control", ["nonsense", "tcp://192.0.2.1:9", "tcp://127.0.0.1:1"])
def test_a_prefill_server_that_cannot_be_reached_fails_the_load(servers: tuple[Server, Server], control: str) -> None:
    _, decode = servers
    decode.book.arrived("d", {"transfer_id": "a", "leg": "decode", "prefill": {"control": control}}, PROMPT)
    decode.step()
    offer(decode)
    results = decode.until_reported(received="d")
    assert results.failed == {"d"}
    decode.end("d")
    decode.step()
    assert decode.idle()


class _Http(socketserver.BaseRequestHandler):
    """What an HTTP server says to somebody who speaks ZeroMQ."""

    def handle(self) -> None:
        self.request.recv(100)
        self.request.sendall(b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\r\nInvalid HTTP request received.")


def test_an_http_port_for_a_control_port_is_told_as_such(
    servers: tuple[Server, Server], caplog: pytest.LogCaptureFixture
) -> None:
    """The likely slip: the prefill server's own port."""
    _, decode = servers
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Http) as http:
        threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True).start()
        control = {"control": f"tcp://127.0.0.1:{http.server_address[1]}"}
        decode.book.arrived("d", {"transfer_id": "a", "leg": "decode", "prefill": control}, PROMPT)
        offer(decode)  # with the same step, as vLLM does it
        results = decode.until_reported(received="d")
        http.shutdown()
    assert results.reasons == {"d": "not_connected"}
    (said,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "not a control port of pdlink" in said


def test_an_id_that_was_used_before_is_not_sent_and_still_reported(servers: tuple[Server, Server]) -> None:
    prefill, decode = servers
    for name in ("p", "q"):
        prefill.book.arrived(name, {"transfer_id": "a", "leg": "prefill"}, PROMPT)
        prefill.step()
        prefill.end(name)
        prefill.until_reported(sent=name)
    assert prefill.idle()
