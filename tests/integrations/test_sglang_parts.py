"""What the SGLang integration decides without SGLang: rooms on real nodes, host pools, pages, settings, versions."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pdlink.errors import ConfigError
from pdlink.integrations.sglang_parts import host_pool, sessions, versions, wire
from pdlink.integrations.sglang_parts.arrivals import DecodeRooms
from pdlink.integrations.sglang_parts.ends import Cut, Ends, NodeEnd, RankShare, comes_from_another, shared_heads
from pdlink.integrations.sglang_parts.hicache import HostPages, RankScheme
from pdlink.integrations.sglang_parts.pages import restorable
from pdlink.integrations.sglang_parts.pool import Memory, layout_of, state_of
from pdlink.integrations.sglang_parts.rooms import KV, PrefillRooms
from pdlink.integrations.sglang_parts.settings import read_storage
from pdlink.integrations.sglang_parts.versions import UnsupportedSglang
from pdlink.kv.groups import KVGroups
from pdlink.node.node import Node
from pdlink.protocol.handshake import ModelId
from pdlink.reasons import ABORTED
from tests.waiting import WAIT_S

PAGE, TOKEN, PAGES, LAYERS, PLACES = 4, 32, 64, 3, 16


class Side:
    """Nodes over entries as SGLang has them: all of K, then all of V, then those of states."""

    def __init__(self, name: str, *, v_token: int = TOKEN, heads: int = 1, states: tuple[int, ...] = ()) -> None:
        items = [PAGE * TOKEN * heads] * LAYERS + [PAGE * v_token * heads] * LAYERS
        lens = [PAGES * item for item in items]
        places = [(entry, 0) for entry in range(2 * LAYERS)]
        groups, self.layers = layout_of(places, lens, items, [*range(LAYERS)] * 2, PAGE, "float32")
        self.entries = [np.zeros((PAGES, item), np.uint8) for item in items]
        self.states = [np.zeros((PLACES, item), np.uint8) for item in states]
        described: Any = None
        if states:
            where = [one.ctypes.data for one in self.states], [one.nbytes for one in self.states]
            described = state_of(*where, states, Memory(self))

        def node(layout: KVGroups, suffix: str, meaning: str) -> Node:
            memory: Any = described[1] if suffix.startswith("/s") else self.entries
            return Node(f"{name}{suffix}", layout, memory, model=ModelId(revision=meaning))

        self.ends = Ends(groups, self.layers, [described[0]] if states else [], node)

    def fill(self, pages: list[int], seed: int) -> None:
        for entry, buffer in enumerate(self.entries):
            buffer[pages] = values(pages, entry, seed, buffer.shape[1])


def values(pages: list[int], entry: int, seed: int, width: int) -> Any:
    rng = np.arange(len(pages) * width).reshape(len(pages), width)
    return ((rng * 7 + entry * 31 + seed) % 251).astype(np.uint8)


Make = Callable[..., Side]


@pytest.fixture
def make() -> Iterator[Make]:
    sides: list[Side] = []

    def made(name: str, **form: Any) -> Side:
        sides.append(Side(name, **form))
        return sides[-1]

    yield made
    for side in sides:
        side.ends.close()


@pytest.fixture
def sides(make: Make) -> tuple[Side, Side]:
    return make("prefill"), make("decode")


class News:
    def __init__(self) -> None:
        self.said: list[Any] = []
        self.concluded, self.drained, self.failed = threading.Event(), threading.Event(), threading.Event()

    def conclude(self, *told: Any) -> None:
        self.said.append(("concluded", *told))
        self.concluded.set()

    def drain(self, room: int) -> None:
        self.drained.set()

    def fail(self, *told: Any) -> None:
        self.said.append(("failed", *told))
        self.failed.set()


def joined() -> tuple[PrefillRooms, DecodeRooms, News]:
    news = News()
    return PrefillRooms(news.conclude, news.drain), DecodeRooms(news.fail), news


Parts = dict[int, tuple[NodeEnd, int]]


def asked(
    sides: tuple[Side, Side],
    sending: PrefillRooms,
    receiving: DecodeRooms,
    pages: list[int],
    prefix: int,
    *,
    places: list[int] | None = None,
    cut: tuple[Cut, tuple[RankShare, RankShare]] | None = None,
) -> str:
    """Decode asks for a room, and hears where prefill's nodes are. cut: with the ranks of prefill and decode."""
    states = [places] if places else []
    transfer_id = receiving.open(7, prefix, pages, 2, states)
    here = [side.ends.own if cut is None else side.ends.kv(cut[0], cut[1][at]) for at, side in enumerate(sides)]
    ends: Parts = {KV: (here[0], len(pages))} if pages else {}
    theirs: dict[int, tuple[NodeEnd, str]] = {KV: (here[1], here[0].port.node.address)}
    if places:
        ends[0] = (sides[0].ends.state(0), len(places))
        theirs[0] = (sides[1].ends.state(0), ends[0][0].port.node.address)
    assert sending.asked(7, transfer_id, prefix, ends)
    assert not sending.asked(7, transfer_id, prefix, ends), "the same again"
    receiving.sender_is_at(7, transfer_id, theirs)
    return transfer_id


def landed(receiving: DecodeRooms, transfer_id: str) -> list[int]:
    rows: list[int] = []
    called = threading.Event()

    def look() -> None:
        receiving.landed(7, transfer_id, rows.append)
        called.set()

    receiving.when_done(7, transfer_id, look)
    assert called.wait(WAIT_S)
    return rows


def test_layers_may_go_before_their_chunk_and_what_is_missing_with_it(sides: tuple[Side, Side]) -> None:
    sending, receiving, news = joined()
    transfer_id = asked(sides, sending, receiving, [10, 11, 12], prefix=2)
    for number, entry in enumerate(sides[0].entries):
        entry[[3, 5, 4]] = np.array([[1], [2], [3]]) * 10 + number
    sending.extend(7, 0, [3, 5])
    sending.written(7, 0, 2)
    sending.written(7, 2, 2)
    sending.chunk(7, 0, [3, 5], last=False)
    sending.extend(7, 2, [4])
    sending.written(7, 1, 3)
    assert not news.concluded.is_set()
    sending.chunk(7, 2, [4], last=True)
    assert landed(receiving, transfer_id) == [2]
    for number, entry in enumerate(sides[1].entries):
        assert entry[[10, 11, 12]].tolist() == (
            np.broadcast_to(np.array([[1], [2], [3]]) * 10 + number, (3, PAGE * TOKEN)).tolist()
        )
        assert not entry[:10].any(), "nothing else is written to, the prefix neither"
    assert news.drained.wait(WAIT_S)
    assert news.concluded.wait(WAIT_S)
    assert news.said == [("concluded", 7, transfer_id, "")]
    assert sending.is_drained(7)
    sending.end(7)
    receiving.forget(7)
    assert not sides[0].ends.own.port.node.transfers()


def test_keys_and_values_of_other_widths_are_pushed_layer_by_layer(make: Make) -> None:
    sides = make("prefill", v_token=TOKEN // 2), make("decode", v_token=TOKEN // 2)
    sending, receiving, _ = joined()
    transfer_id = asked(sides, sending, receiving, [10, 11], prefix=0)
    sides[0].fill([3, 5], 1)
    sending.extend(7, 0, [3, 5])
    sending.written(7, 1, 2)
    sending.chunk(7, 0, [3, 5], last=True)
    assert landed(receiving, transfer_id) == [2]
    for mine, theirs in zip(sides[0].entries, sides[1].entries, strict=True):
        assert (theirs[[10, 11]] == mine[[3, 5]]).all()


@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1), (4, 2)])
def test_ranks_of_other_numbers_exchange_the_heads_that_they_share(make: Make, prefill: int, decode: int) -> None:
    """Two heads: four ranks share them in pairs."""
    sending_sides = [make(f"p{rank}", heads=max(1, 2 // prefill)) for rank in range(prefill)]
    receiving_sides = [make(f"d{rank}", heads=max(1, 2 // decode)) for rank in range(decode)]
    flat = [(np.arange(2 * PAGE * 2 * TOKEN) * 7 + entry).astype(np.uint8) for entry in range(2 * LAYERS)]
    whole = [one.reshape(2, PAGE, 2, TOKEN) for one in flat]

    def of_rank(rank: RankShare, entry: int) -> Any:
        return whole[entry][:, :, rank.heads].reshape(2, -1)

    ranks = [RankShare((rank, prefill), 2) for rank in range(prefill)]
    for rank, side in zip(ranks, sending_sides, strict=True):
        for entry, buffer in enumerate(side.entries):
            buffer[[3, 5]] = of_rank(rank, entry)
    for number, receiver in enumerate(receiving_sides):
        theirs = RankShare((number, decode), 2)
        for rank, sender in zip(ranks, sending_sides, strict=True):
            if not {*rank.heads} & {*theirs.heads}:
                with pytest.raises(UnsupportedSglang, match="share heads"):
                    shared_heads(rank, theirs.tp)
                continue
            cut = Cut(shared_heads(rank, theirs.tp), tuple(range(LAYERS)))
            sending, receiving, _ = joined()
            transfer_id = asked((sender, receiver), sending, receiving, [10, 11], prefix=1, cut=(cut, (rank, theirs)))
            sending.chunk(7, 0, [3, 5], last=True)
            assert landed(receiving, transfer_id) == [2]
        for entry, buffer in enumerate(receiver.entries):
            assert (buffer[[10, 11]] == of_rank(theirs, entry)).all()
            assert not buffer[:10].any()


@pytest.mark.parametrize("num_heads", [1, 2, 4, 8])
@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (4, 1), (4, 2), (8, 2), (8, 4), (2, 2), (2, 4)])
def test_each_head_of_a_decode_rank_comes_from_one_prefill_rank(prefill: int, decode: int, num_heads: int) -> None:
    """Of the prefill ranks that it asks; a block of decode's is open to one writer at a time."""
    for number in range(decode):
        theirs = RankShare((number, decode), num_heads)
        if prefill <= decode:
            asked_ranks = [number * prefill // decode]
        else:
            asked_ranks = list(range(number * (prefill // decode), (number + 1) * (prefill // decode)))
        sent = [
            head
            for rank in asked_ranks
            if not comes_from_another(RankShare((rank, prefill), num_heads), theirs.tp)
            for head in RankShare((rank, prefill), num_heads).heads
            if head in theirs.heads
        ]
        assert sorted(sent) == list(theirs.heads)


def test_a_decode_rank_of_all_layers_is_served_by_the_ranks_of_each_stage(make: Make) -> None:
    prefill, decode = make("prefill"), make("decode")
    prefill.fill([3], 5)
    rank = RankShare((0, 1), 0)
    for layers in ((0, 1), (2,)):
        sending, receiving, _ = joined()
        transfer_id = asked(
            (prefill, decode), sending, receiving, [10], prefix=0, cut=(Cut(None, layers), (rank, rank))
        )
        sending.chunk(7, 0, [3], last=True)
        assert landed(receiving, transfer_id) == [2]
    for mine, theirs in zip(prefill.entries, decode.entries, strict=True):
        assert (theirs[10] == mine[3]).all()
    with pytest.raises(UnsupportedSglang, match=r"layers: got \[9\]"):
        decode.ends.kv(Cut(None, (0, 9)), rank)


def test_states_beside_the_kv_arrive_with_the_last_chunk(make: Make) -> None:
    """Tensors of two widths, as those of a convolution and of a recurrence."""
    sides = make("prefill", states=(48, 48, 20)), make("decode", states=(48, 48, 20))
    for number, buffer in enumerate(sides[0].states):
        buffer[[6, 2]] = values([6, 2], number, 3, buffer.shape[1])
    sending, receiving, news = joined()
    transfer_id = asked(sides, sending, receiving, [10, 11], prefix=1, places=[4, 9])
    sending.chunk(7, 0, [3], last=False)
    sending.chunk(7, 1, [5], last=True, states=[[6, 2]])
    assert landed(receiving, transfer_id) == [2]
    assert news.concluded.wait(WAIT_S)
    for mine, theirs in zip(sides[0].states, sides[1].states, strict=True):
        assert (theirs[[4, 9]] == mine[[6, 2]]).all()
        assert not theirs[[0, 1, 2, 3]].any()


def test_other_places_of_a_state_than_decode_has_are_an_error_on_both_sides(make: Make) -> None:
    sides = make("prefill", states=(48,)), make("decode", states=(48,))
    sending, receiving, news = joined()
    transfer_id = asked(sides, sending, receiving, [10], prefix=0, places=[4, 9])
    sending.chunk(7, 0, [3], last=True, states=[[6]])
    assert landed(receiving, transfer_id) == []
    assert news.concluded.wait(WAIT_S)
    assert news.failed.wait(WAIT_S)
    (said,) = (one for one in news.said if one[0] == "concluded")
    assert said[3]


def test_a_room_of_two_decode_ranks_is_concluded_when_both_have_everything(make: Make) -> None:
    """A latent cache: each of them needs all of it."""
    prefill, decodes = make("prefill"), (make("d0"), make("d1"))
    prefill.fill([3], 5)
    sending, _, news = joined()
    receivings = [DecodeRooms(news.fail) for _ in decodes]
    ids = [asked((prefill, side), sending, rooms, [10], 0) for side, rooms in zip(decodes, receivings, strict=True)]
    assert sending.num_receivers(7) == 2
    assert sending.transfer_ids(7) == tuple(ids)
    sending.chunk(7, 0, [3], last=True)
    for side, rooms, transfer_id in zip(decodes, receivings, ids, strict=True):
        assert landed(rooms, transfer_id) == [2]
        assert (side.entries[0][10] == prefill.entries[0][3]).all()
    assert news.concluded.wait(WAIT_S)
    assert news.said == [("concluded", 7, ids[0], "")]


def test_a_rank_that_sends_nothing_is_neither_waited_for_nor_in_the_way() -> None:
    sending, receiving, news = joined()
    transfer_id = receiving.open(7, 0, (), 0, dummy=True)
    assert receiving.is_answered(7)
    assert receiving.is_quiet(7)
    assert sending.asked(7, transfer_id, 0, {})
    sending.chunk(7, 0, [1, 2], last=True)
    assert news.said == [("concluded", 7, transfer_id, "")]


def test_news_of_an_earlier_request_in_a_room_counts_for_nothing(sides: tuple[Side, Side]) -> None:
    _, receiving, _ = joined()
    old = receiving.open(7, 0, [1], 0)
    receiving.forget(7)
    new = receiving.open(7, 0, [2], 0)
    receiving.sender_is_at(7, old, {KV: (sides[1].ends.own, sides[0].ends.own.port.node.address)})
    assert not receiving.is_answered(7)
    assert not receiving.landed(7, old, lambda row: pytest.fail("a row of another request"))
    assert receiving.which(7, (old, new)) == new
    assert receiving.which(7, (old,)) == ""


def test_pages_of_a_stopped_room_are_quiet_after_the_fence_only(sides: tuple[Side, Side]) -> None:
    sending, receiving, _ = joined()
    transfer_id = asked(sides, sending, receiving, [20, 21], prefix=0)
    incoming = receiving._rooms[7][transfer_id].incoming[KV]
    assert not receiving.is_quiet(7)
    receiving.stop(7, ABORTED)
    assert incoming.released.wait(WAIT_S)
    assert receiving.is_quiet(7)


def test_a_room_that_prefill_never_heard_of_is_quiet_once_it_is_stopped() -> None:
    _, receiving, _ = joined()
    receiving.open(7, 0, [1, 2], 0)
    assert not receiving.is_quiet(7)
    receiving.stop(7, ABORTED)
    assert receiving.is_quiet(7)


def test_a_whole_prompt_that_decode_has_needs_no_transfer(sides: tuple[Side, Side]) -> None:
    sending, receiving, news = joined()
    transfer_id = asked(sides, sending, receiving, [], prefix=4)
    sending.chunk(7, 0, [], last=True)
    assert news.said == [("concluded", 7, transfer_id, "")], "only the row is to be told"
    rows: list[int] = []
    assert receiving.landed(7, transfer_id, rows.append)
    assert rows == [2]
    assert not sides[0].ends.own.port.node.transfers()


def pool(layout: str, tensor: Any) -> Any:
    return SimpleNamespace(kv_buffer=tensor, layout=layout, page_size=PAGE, head_dim=tensor.shape[-1])


FORMS = {
    "layer_first": lambda kv: kv,
    "page_first": lambda kv: kv.permute(0, 2, 1, 3, 4),
    "page_first_direct": lambda kv: kv.reshape(2, LAYERS, PAGES, PAGE, 2, 8).permute(0, 2, 1, 3, 4, 5),
    "page_head": lambda kv: kv.reshape(2, LAYERS, PAGES, PAGE, 2, 8).permute(0, 2, 4, 3, 1, 5),
}
RANKS = RankScheme((0, 1), (0, 1), (0, 1), False)


def pages_of(
    host: Any,
    ranks: RankScheme = RANKS,
    store: str | None = None,
    heads: int = 2,
    model: str = "m",
    admin: str | None = None,
) -> HostPages:
    tiers = {"max_local_cpu_size": 0.01} if store is None else {"store": store}
    settings = read_storage({"interface_v1": 1, "tiers": tiers, "admin": admin})
    return HostPages(settings, ranks, host, model=model, revision="r", num_kv_heads=heads)


@pytest.mark.parametrize("form", FORMS)
def test_every_host_layout_gives_the_same_record(form: str) -> None:
    """[part, layer, slot, head, element] of SGLang's pool in its own order."""
    plain = torch.randint(0, 2**15, (2, LAYERS, PAGES * PAGE, 2, 8), dtype=torch.int16)
    held, other = pool(form, FORMS[form](plain).contiguous()), pool("layer_first", torch.zeros_like(plain))
    pages, reader = pages_of(held), pages_of(other)
    try:
        assert pages.kv.records.set(["a", "b"], [3, 9]) == [True, True]
        reader.kv.records._store = pages.kv.records._store
        assert reader.kv.records.num_known(["a", "b", "c"]) == 2
        source = pages._source
        assert source is not None
        slots = source.store.fetch(
            source.store.lookup(pages.kv.records._keys(["a", "b"]), 1.0), source.groups[0].shape, "test"
        ).done.result()
        for slot, page in zip(slots, (3, 9), strict=True):
            record = source.store.array[slot.offset + 4096 :][: source.groups[0].shape.payload_nbytes].view(np.int16)
            wanted = plain[:, :, page * PAGE : (page + 1) * PAGE].permute(1, 0, 2, 3, 4).numpy()
            assert (record.reshape(wanted.shape) == wanted).all()
    finally:
        pages.close()
        reader.close()


def test_what_one_server_clears_is_its_own_model_in_a_store_of_several() -> None:
    """Also what another server of its model has stored."""
    plain = torch.zeros((2, LAYERS, PAGES * PAGE, 2, 8), dtype=torch.int16)
    servers = [pages_of(pool("layer_first", plain), model=model) for model in ("m", "m", "n")]
    try:
        mine, twin, other = (server.kv.records for server in servers)
        twin._store = other._store = mine._store
        assert mine.set(["a"], [0]) == twin.set(["b"], [1]) == [True]
        assert other.set(["a", "c"], [2, 3]) == [True, True]
        servers[0].clear()
        assert mine.known(["a", "b", "c"]) == twin.known(["a", "b", "c"]) == [False, False, False]
        assert other.known(["a", "b", "c"]) == [True, False, True]
        assert mine.set(["a"], [0]) == [True], "it can be stored again"
        assert twin.num_known(["a"]) == 1
    finally:
        for server in servers:
            server.close()


def test_a_pool_without_a_layout_is_refused_with_those_that_have_one() -> None:
    with pytest.raises(UnsupportedSglang, match="page_first_direct"):
        pages_of(pool("page_unified", torch.zeros(2, 3, 4, 5, 6)))


def test_pages_that_are_not_whole_are_refused() -> None:
    assert host_pool.pages_at(torch.arange(8), 4) == [0, 1]
    for indices in (torch.arange(7), torch.arange(2, 10)):
        with pytest.raises(ValueError, match="whole pages"):
            host_pool.pages_at(indices, 4)


def test_a_pool_of_last_pages_limits_where_a_prefix_may_end() -> None:
    known = [True, True, False, True, True]
    assert restorable(5, known, trailing=1) == {1, 2, 4, 5}
    assert restorable(5, known, trailing=2) == {1, 2, 5}
    assert restorable(4, known, trailing=1) == {1, 2, 4}
    assert restorable(5, known, trailing=0) == {1, 2}


@pytest.mark.parametrize(
    ("extra", "match"),
    [
        ({"interface_v1": 0}, "interface_v1"),
        ({"interface_v1": 1, "colour": "red"}, "colour"),
        ({"interface_v1": 1, "tiers": {"chunk_size": 64}}, "chunk_size"),
        ({"interface_v1": 1, "tiers": {"peer_port": 8110}}, "peer_port"),
    ],
)
def test_settings_that_nobody_would_look_at_are_refused(extra: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        read_storage({"backend_name": "pdlink", **extra})


def test_other_versions_are_refused_with_the_range(caplog: pytest.LogCaptureFixture) -> None:
    assert versions.check("0.5.23.post1", accept_newer=False) == (0, 5, 23)
    assert not caplog.records
    assert versions.check("0.6.0", accept_newer=True) == (0, 6, 0)
    assert "neither managers and caches nor servers nor GPUs were tried" in caplog.text
    for other in ("0.5.21", "0.5.24", "main"):
        with pytest.raises(UnsupportedSglang, match=r"0\.5\.22 to 0\.5\.23|three numbers"):
            versions.check(other, accept_newer=False)


def test_layers_of_different_pages_are_refused() -> None:
    for items, match in (([128, 256], "in all of"), ([128, 128], "equally many pages")):
        with pytest.raises(UnsupportedSglang, match=match):
            layout_of([(0, 0), (1, 0)], [1024, 2048], items, [0, 1], 4, "bfloat16")


@pytest.mark.parametrize("frames", [[b"PDLINK/1", b""], [wire.TAG], [wire.TAG, b"\xc1"], [wire.TAG, b"\x80"]])
def test_messages_that_no_pdlink_sends_cost_themselves(frames: list[bytes]) -> None:
    with pytest.raises(wire.BadMessage):
        wire.decode(frames)


def test_messages_of_sglang_are_left_to_it() -> None:
    assert wire.decode([b"ABORT", b"7"]) is None
    ask = wire.RoomAsked(2**63 - 1, "t", "127.0.0.1", 1, 0, 3, (1,), (1, 2), 2, 2, True)
    assert wire.decode(wire.encode(ask)) == ask
    here = wire.PrefillNodes(1, "t", {-1: "tcp://a:1", 0: "tcp://a:2"}, (1, 2), (0, 1), (0, 1))
    assert wire.decode(wire.encode(here)) == here


@pytest.mark.parametrize("missing", ["session_id", "kv", "finished", "up_to"])
def test_a_request_whose_session_cannot_be_read_goes_on(missing: str, caplog: pytest.LogCaptureFixture) -> None:
    """As in a later SGLang, which is tried with `untested_sglang: accept`."""
    hooks: list[Callable[..., Any]] = []
    sessions.install(lambda _, around: hooks.append(around))
    told: list[dict[str, int]] = []

    def insert(_tree: object, _request: object, **named: int) -> str:
        told.append(named)
        return "inserted"

    known: dict[str, Any] = {
        "session_id": "agent",
        "kv": SimpleNamespace(cache_inserted_len=0),
        "finished": lambda: True,
        "full_untruncated_fill_ids": [1],
    }
    request = SimpleNamespace(**{name: value for name, value in known.items() if name != missing})
    named = {"upto" if missing == "up_to" else "up_to": 1}
    assert hooks[0](insert, None, request, **named) == "inserted"
    assert told == [named]
    assert "what a request's session_id says has no effect" in caplog.text


def test_settings_that_are_sglangs_own_are_left_to_it(caplog: pytest.LogCaptureFixture) -> None:
    hooks: dict[str, Callable[..., Any]] = {}
    sessions.install(lambda name, around: hooks.__setitem__(name, around))
    for settings in ({"pp_max_micro_batch_size": 8}, {}):
        asked = SimpleNamespace(server_args=settings)
        assert hooks[sessions.SET](lambda _, request: request, None, asked) is asked
    for wrong in ("", "{}", '{"session_id": 5}', '{"session_id": "a", "more": 1}'):
        assert not sessions._ended(wrong)
    assert caplog.text.count("a session was not ended: ValidationError") == 3
    assert not sessions._ended('{"session_id": "a"}'), "no store is open"
