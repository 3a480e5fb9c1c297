"""Data-parallel engines behind one HTTP port: each listens on ports of its own, and sends what it computed."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch

from pdlink.errors import ConfigError
from pdlink.fleet.ports import free_ports
from pdlink.integrations.vllm_parts import versions
from pdlink.integrations.vllm_parts.requests import Scheduled
from tests.integrations.vllm_engine import DST, HEADS, NAMES, PROMPT, SIZE, SRC, Server
from tests.waiting import WAIT_S

COUNT = len(PROMPT) - 1
NO_OTHER_LEG = {"timeouts": {"other_leg_s": 0.5}}


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[ExitStack]:
    monkeypatch.setattr(versions, "content", lambda _: "digest")
    with ExitStack() as stack:
        yield stack


def engines(closed: ExitStack, port: int, count: int) -> list[Server]:
    found = []
    for number in range(count):
        settings = {"listen": f"127.0.0.1:{port}", **NO_OTHER_LEG}
        found.append(Server(f"p{number}", ranks=2, number=number, settings=settings))
        closed.callback(found[-1].close)
    return found


def test_each_engine_is_where_the_proxy_looks_for_it_and_its_kv_comes_from_there(closed: ExitStack) -> None:
    port = free_ports(4)
    first, second = engines(closed, port, 2)
    assert first.addresses() == [f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{port + 1}"]
    assert second.addresses() == [f"tcp://127.0.0.1:{port + 2}", f"tcp://127.0.0.1:{port + 3}"]
    decode = Server("d", ranks=2)
    closed.callback(decode.close)
    for number, engine in enumerate((first, second)):
        attempt = {"transfer_id": f"a{number}"}
        engine.book.arrived(f"p{number}", {**attempt, "leg": "prefill", "data_parallel_rank": number}, PROMPT)
        _ask(decode, f"d{number}", attempt, engine.addresses())
        engine.step([Scheduled(f"p{number}", (tuple(SRC),), True, 0, len(PROMPT))])
        _until_reported(decode, f"d{number}", engine)
        for (_, theirs), (_, ours) in zip(engine.ranks, decode.ranks, strict=True):
            for name in NAMES:
                sent, got = (
                    cache[name][blocks].transpose(1, 2).reshape(-1, HEADS, 2 * SIZE)[:COUNT]
                    for cache, blocks in ((theirs, SRC), (ours, DST))
                )
                assert torch.equal(got, sent), name


def test_a_leg_at_another_engine_moves_nothing_and_decode_hears_that_none_came(
    closed: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = engines(closed, free_ports(4), 2)
    decode = Server("d", ranks=2, settings=NO_OTHER_LEG)
    closed.callback(decode.close)
    before = [{name: cache[name].clone() for name in NAMES} for _, cache in decode.ranks]
    second.book.arrived("p", {"transfer_id": "a", "leg": "prefill"}, PROMPT)  # vLLM has given it to the second one
    second.step([Scheduled("p", (tuple(SRC),), True, 0, len(PROMPT))])
    assert "data_parallel_rank: got 0 at data-parallel engine 1" in caplog.text
    _ask(decode, "d", {"transfer_id": "a"}, first.addresses())
    reasons: dict[str, str] = {}
    deadline_s = time.monotonic() + WAIT_S
    while len(reasons) == 0:
        assert time.monotonic() < deadline_s
        for rank, _ in decode.ranks:
            rank.steps.pause(0.01)
            reasons |= rank.steps.results(set()).reasons
    assert reasons == {"d": "no_request"}
    for was, (_, cache) in zip(before, decode.ranks, strict=True):
        assert all(torch.equal(was[name], cache[name]) for name in NAMES)


def test_a_port_that_is_taken_is_named_with_the_engine_that_needs_it(closed: ExitStack) -> None:
    port = free_ports(4)
    taken = closed.enter_context(socket.socket())
    taken.bind(("127.0.0.1", port + 2))
    taken.listen()
    with pytest.raises(
        ConfigError,
        match=rf"cannot bind tcp://127\.0\.0\.1:{port + 2}.* Shard 0 of data-parallel engine 1 listens on "
        r"the port of listen \+ 2; give every vLLM server of a host a range of its own",
    ):
        engines(closed, port, 2)


def _ask(decode: Server, request_id: str, attempt: dict[str, str], addresses: list[str]) -> None:
    decode.book.arrived(request_id, {**attempt, "leg": "decode", "prefill": {"control": addresses}}, PROMPT)
    count, parked = decode.book.missing(request_id, 0)
    assert parked
    assert count == COUNT
    decode.book.allocated(request_id, (DST,), count)
    decode.step()


def _until_reported(decode: Server, request_id: str, engine: Server) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not all(request_id in reported for reported in decode.reported):
        assert time.monotonic() < deadline_s, decode.reported
        engine.step()
        decode.step()
        decode.ranks[0][0].steps.pause(0.01)
