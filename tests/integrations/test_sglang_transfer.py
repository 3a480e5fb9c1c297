"""The transfer backend: SGLang's own managers, senders, receivers and bootstrap in two processes, without a model.

Run with `make test-sglang`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pdlink.fleet.ports import free_ports

from ..nursery import WHOLE_END
from .sglang_process import Engine

if importlib.util.find_spec("sglang") is None:
    pytest.skip("needs SGLang", allow_module_level=True)

pytestmark = [pytest.mark.sglang, pytest.mark.engines, pytest.mark.e2e, pytest.mark.timeout(300)]

FAILED, BOOTSTRAPPING, WAITING, SUCCESS = 0, 1, 2, 4
ROW, OTHER_ROW = 3, 5


class Pair:
    def __init__(self, folder: Path, **environment: str) -> None:
        self.folder, self.port, self._environment = folder, free_ports(2), environment
        self.address = f"127.0.0.1:{self.port}"
        self._room = 1000
        self.prefill, self.decode = self._start("prefill", 0), self._start("decode", 0)
        for rank in (self.prefill, self.decode):
            rank.answer()

    def _start(self, mode: str, life: int) -> Engine:
        rank = Engine("sglang_rank", self.folder / f"{mode}{life}.log", SGLANG_PLUGINS="pdlink", **self._environment)
        rank.send("open", mode=mode, port=self.port)
        return rank

    def again(self, mode: str) -> None:
        """The rank starts anew, on the same ports."""
        rank = self._start(mode, 1)
        rank.answer()
        setattr(self, mode, rank)

    def open(self) -> int:
        """A request on both sides; its room."""
        self._room += 1
        self.prefill("sender", room=self._room)
        assert self.decode("receiver", room=self._room, address=self.address) == {"status": WAITING}
        return self._room

    def wait(self, room: int, prefill: int, decode: int) -> None:
        assert self.decode("wait", room=room, status=[FAILED, SUCCESS]) == {"status": decode}
        assert self.prefill("wait", room=room, status=[FAILED, SUCCESS]) == {"status": prefill}

    def ready(self, room: int, pages: list[int], *, num_pages: int, seed: int, prefix: int = 0) -> None:
        """Decode has pages, and prefill has heard so."""
        self.decode("ask", room=room, pages=pages, row=OTHER_ROW, prefix=prefix)
        assert self.prefill("wait", room=room, status=[WAITING]) == {"status": WAITING}
        assert self.prefill("init", room=room, num_pages=num_pages, row=ROW, seed=seed) == {"prefix": prefix}

    def close(self) -> None:
        for rank in (self.prefill, self.decode):
            rank.close()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pair = Pair(tmp_path_factory.mktemp("pair"))
    try:
        yield pair
    finally:
        pair.close()


def right(pages: list[int], source: list[int], seed: int) -> dict[str, Any]:
    return {"pages": pages, "source": source, "seed": seed, "row": OTHER_ROW}


def test_chunks_land_in_their_pages_and_the_row_with_the_last(pair: Pair) -> None:
    room, source, target = pair.open(), [9, 2, 30, 31, 7], [100, 4, 77, 78, 12]
    pair.ready(room, target, num_pages=5, seed=17)
    pair.prefill("send", room=room, pages=source[:3], seed=17)
    assert pair.decode("poll", room=room) == {"status": WAITING}
    pair.prefill("send", room=room, pages=source[3:], seed=17)
    pair.wait(room, SUCCESS, SUCCESS)
    assert pair.decode("check", **right(target, source, 17)) == {"wrong": 0, "aux": [17, 17]}
    for rank in (pair.prefill, pair.decode):
        rank("clear", room=room)
        assert rank("live") == {"transfers": 0, "rooms": 0}


def test_prefill_may_be_done_before_decode_has_pages(pair: Pair) -> None:
    """SGLang computes optimistically then, and sends all at once."""
    room, source, target = pair.open(), [*range(40, 60)], [*range(300, 320)]
    pair.decode("ask", room=room, pages=target, row=OTHER_ROW)
    assert pair.prefill("wait", room=room, status=[WAITING]) == {"status": WAITING}
    pair.prefill("init", room=room, num_pages=20, row=ROW, seed=5)
    pair.prefill("send", room=room, pages=source, seed=5)
    pair.wait(room, SUCCESS, SUCCESS)
    assert pair.decode("check", **right(target, source, 5)) == {"wrong": 0, "aux": [5, 5]}
    pair.prefill("clear", room=room)
    pair.decode("clear", room=room)


def test_only_what_is_behind_decodes_cached_prefix_travels(pair: Pair) -> None:
    room, source, target = pair.open(), [61, 62], [350, 351]
    pair.ready(room, target, num_pages=2, seed=7, prefix=3 * 4)
    pair.prefill("send", room=room, pages=source, seed=7)
    pair.wait(room, SUCCESS, SUCCESS)
    assert pair.decode("check", **right(target, source, 7)) == {"wrong": 0, "aux": [7, 7]}
    pair.prefill("clear", room=room)
    pair.decode("clear", room=room)


def test_a_prompt_that_decode_has_cached_only_sends_the_row(pair: Pair) -> None:
    room = pair.open()
    pair.ready(room, [], num_pages=0, seed=9, prefix=4 * 4)
    pair.prefill("send", room=room, pages=[], seed=9)
    pair.wait(room, SUCCESS, SUCCESS)
    assert pair.decode("check", **right([], [], 9)) == {"wrong": 0, "aux": [9, 9]}
    pair.prefill("clear", room=room)
    pair.decode("clear", room=room)


def test_a_room_can_be_used_again(pair: Pair) -> None:
    pair.open()
    room, source, target = pair._room, [70], [360]
    for seed in (21, 22):
        if seed == 22:
            pair.prefill("sender", room=room)
            pair.decode("receiver", room=room, address=pair.address)
        pair.ready(room, target, num_pages=1, seed=seed)
        pair.prefill("send", room=room, pages=source, seed=seed)
        pair.wait(room, SUCCESS, SUCCESS)
        assert pair.decode("check", **right(target, source, seed)) == {"wrong": 0, "aux": [seed, seed]}
        pair.prefill("clear", room=room)
        pair.decode("clear", room=room)


@pytest.mark.parametrize("phase", ["asked", "half", "unsent"])
def test_decode_aborts_and_its_pages_are_its_own_once_it_is_quiet(pair: Pair, phase: str) -> None:
    room, source, target = pair.open(), [80, 81], [400, 401]
    if phase != "unsent":
        pair.ready(room, target, num_pages=2, seed=33)
    if phase == "half":
        pair.prefill("send", room=room, pages=source[:1], seed=33)
    pair.decode("abort", room=room)
    assert pair.decode("wait", room=room, status=[FAILED]) == {"status": FAILED}
    assert pair.decode("quiet", room=room) == {"quiet": True}
    pair.decode("fill", pages=target, value=3)
    assert pair.prefill("wait", room=room, status=[FAILED]) == {"status": FAILED}
    if phase == "half":
        pair.prefill("send", room=room, pages=source[1:], seed=33)
    assert "Aborted" in pair.decode("failure", room=room)["why"]
    assert pair.prefill("failure", room=room)["why"]
    assert pair.decode("untouched", pages=target, value=3) == {"untouched": True}
    for rank in (pair.prefill, pair.decode):
        assert rank("live") == {"transfers": 0, "rooms": 0}


@pytest.mark.parametrize("half", [False, True])
def test_prefill_aborts_and_decode_hears_why(pair: Pair, half: bool) -> None:
    room = pair.open()
    pair.ready(room, [410, 411], num_pages=2, seed=41)
    if half:
        pair.prefill("send", room=room, pages=[82], seed=41)
    pair.prefill("abort", room=room)
    assert pair.decode("wait", room=room, status=[FAILED]) == {"status": FAILED}
    assert "aborted" in pair.decode("failure", room=room)["why"]
    assert "Abort" in pair.prefill("failure", room=room)["why"]


def test_decode_asks_for_a_request_that_prefill_has_ended_and_hears_so(pair: Pair) -> None:
    room = pair.open()
    pair.prefill("abort", room=room)
    pair.prefill("failure", room=room)
    pair.decode("ask", room=room, pages=[415], row=OTHER_ROW)
    assert pair.decode("wait", room=room, status=[FAILED]) == {"status": FAILED}
    assert "aborted" in pair.decode("failure", room=room)["why"]
    assert pair.prefill("live") == {"transfers": 0, "rooms": 0}


def test_fewer_pages_than_decode_asked_for_are_a_failure_on_both_sides(pair: Pair) -> None:
    room = pair.open()
    pair.ready(room, [420, 421, 422], num_pages=2, seed=43)
    pair.prefill("send", room=room, pages=[83, 84], seed=43)
    pair.wait(room, FAILED, FAILED)
    pair.decode("failure", room=room)
    assert "pdlink" in pair.prefill("failure", room=room)["why"]


def test_decode_dies_and_prefill_fails_its_requests_and_serves_the_next_one(pair: Pair) -> None:
    room = pair.open()
    pair.ready(room, [430, 431], num_pages=2, seed=45)
    pair.prefill("send", room=room, pages=[85], seed=45)
    pair.decode.kill()
    assert pair.prefill("wait", room=room, status=[FAILED]) == {"status": FAILED}
    assert "pdlink" in pair.prefill("failure", room=room)["why"]
    pair.decode.close()
    pair.again("decode")
    test_chunks_land_in_their_pages_and_the_row_with_the_last(pair)


def test_prefill_dies_and_decode_fails_its_requests_and_uses_the_next_life(pair: Pair) -> None:
    room = pair.open()
    pair.ready(room, [440, 441], num_pages=2, seed=47)
    pair.prefill("send", room=room, pages=[86], seed=47)
    pair.prefill.kill()
    assert pair.decode("wait", room=room, status=[FAILED]) == {"status": FAILED}
    assert pair.decode("abort", room=room) == {}
    assert pair.decode("quiet", room=room) == {"quiet": True}
    assert pair.decode("failure", room=room)["why"]
    pair.prefill.close()
    pair.again("prefill")
    test_chunks_land_in_their_pages_and_the_row_with_the_last(pair)


@pytest.mark.parametrize("kind", ["tcp", "ucx"])
def test_a_process_that_ends_has_closed_its_node(tmp_path: Path, kind: str) -> None:
    """SGLang calls nothing of a manager's then. The interpreter finds no native thread and no object of ours."""
    pair = Pair(tmp_path, PDLINK_TRANSPORT__KIND=kind, **{WHOLE_END: "1"})
    try:
        room = pair.open()
        pair.ready(room, [1, 2], num_pages=2, seed=9)
        pair.prefill("send", room=room, pages=[3, 4], seed=9)
        pair.wait(room, SUCCESS, SUCCESS)
    finally:
        pair.close()
    for mode, rank in (("prefill", pair.prefill), ("decode", pair.decode)):
        log = (tmp_path / f"{mode}0.log").read_text()
        assert rank.process.returncode == 0, log
        assert '"pdlink._' not in log, "nanobind tells what is left of ours"
