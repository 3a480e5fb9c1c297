"""What the SGLang integration decides without SGLang: rooms on real nodes, host pools, pages, settings, versions."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pdlink.errors import ConfigError
from pdlink.integrations.sglang_parts import host_pool, versions, wire
from pdlink.integrations.sglang_parts.hicache import HostPages, RankScheme
from pdlink.integrations.sglang_parts.pages import restorable
from pdlink.integrations.sglang_parts.pool import layout_of
from pdlink.integrations.sglang_parts.rooms import DecodeRooms, PrefillRooms
from pdlink.integrations.sglang_parts.settings import read_storage
from pdlink.integrations.sglang_parts.versions import UnsupportedSglang
from pdlink.node.node import Node
from pdlink.node.port import EnginePort

PAGE, TOKEN, PAGES, LAYERS = 4, 32, 64, 3
WAIT_S = 20.0


class Side:
    """A node over two entries a layer, as SGLang has them."""

    def __init__(self, name: str) -> None:
        item = PAGE * TOKEN
        sizes = [PAGES * item] * 2 * LAYERS, [item] * 2 * LAYERS, [*range(LAYERS)] * 2
        layout, self.layers = layout_of([(entry, 0) for entry in range(2 * LAYERS)], *sizes, PAGE, "float32")
        self.entries = [np.zeros((PAGES, item), np.uint8) for _ in range(2 * LAYERS)]
        self.node = Node(name, layout, self.entries)
        self.port = EnginePort(self.node)


@pytest.fixture
def sides() -> Iterator[tuple[Side, Side]]:
    prefill, decode = Side("prefill"), Side("decode")
    yield prefill, decode
    prefill.node.close()
    decode.node.close()


def joined(sides: tuple[Side, Side]) -> tuple[PrefillRooms, DecodeRooms, list[Any]]:
    news: list[Any] = []
    sending = PrefillRooms(
        sides[0].port,
        PAGE,
        lambda *told: news.append(("concluded", *told)),
        lambda room: news.append(("drained", room)),
    )
    receiving = DecodeRooms(sides[1].port, PAGE, lambda *told: news.append(("failed", *told)))
    return sending, receiving, news


def asked(
    sides: tuple[Side, Side], sending: PrefillRooms, receiving: DecodeRooms, pages: list[int], prefix: int
) -> str:
    transfer_id = receiving.open(7, prefix, pages, 2)
    assert sending.asked(7, transfer_id, prefix, len(pages))
    receiving.sender_is_at(7, transfer_id, sides[0].node.address)
    return transfer_id


def landed(receiving: DecodeRooms, transfer_id: str) -> list[int]:
    rows: list[int] = []
    signal: list[bool] = []
    receiving.when_done(7, transfer_id, lambda: signal.append(receiving.landed(7, transfer_id, rows.append)))
    incoming = receiving._rooms[7].incoming
    assert incoming is not None
    assert incoming.done.wait(WAIT_S)
    return rows


def test_layers_may_go_before_their_chunk_and_what_is_missing_with_it(sides: tuple[Side, Side]) -> None:
    sending, receiving, news = joined(sides)
    transfer_id = asked(sides, sending, receiving, [10, 11, 12], prefix=2)
    for number, entry in enumerate(sides[0].entries):
        entry[[3, 5, 4]] = np.array([[1], [2], [3]]) * 10 + number
    sending.extend(7, 0, [3, 5])
    sending.written(7, 0, 2)
    sending.written(7, 2, 2)
    assert not sending.chunk(7, 0, [3, 5], last=False)
    sending.extend(7, 2, [4])
    sending.written(7, 1, 3)
    assert not sending.chunk(7, 2, [4], last=True)
    assert landed(receiving, transfer_id) == [2]
    for number, entry in enumerate(sides[1].entries):
        assert entry[[10, 11, 12]].tolist() == (
            np.broadcast_to(np.array([[1], [2], [3]]) * 10 + number, (3, PAGE * TOKEN)).tolist()
        )
        assert not entry[:10].any(), "nothing else is written to, the prefix neither"
    outgoing = sending._rooms[7].outgoing
    assert outgoing is not None
    assert outgoing.released.wait(WAIT_S)
    assert ("concluded", 7, transfer_id, "") in news
    assert sending.is_drained(7)
    sending.end(7)
    receiving.forget(7)
    assert not sides[0].node.transfers()


def test_news_of_an_earlier_request_in_a_room_counts_for_nothing(sides: tuple[Side, Side]) -> None:
    sending, receiving, _ = joined(sides)
    old = receiving.open(7, 0, [1], 0)
    receiving.forget(7)
    new = receiving.open(7, 0, [2], 0)
    receiving.sender_is_at(7, old, sides[0].node.address)
    assert not receiving.is_answered(7)
    assert not receiving.landed(7, old, lambda row: pytest.fail("a row of another request"))
    assert receiving.is_of(7, new)
    assert not receiving.is_of(7, old)


def test_pages_of_a_stopped_room_are_quiet_after_the_fence_only(sides: tuple[Side, Side]) -> None:
    sending, receiving, _ = joined(sides)
    asked(sides, sending, receiving, [20, 21], prefix=0)
    incoming = receiving._rooms[7].incoming
    assert incoming is not None
    assert not receiving.is_quiet(7)
    receiving.stop(7, "aborted")
    assert incoming.released.wait(WAIT_S)
    assert receiving.is_quiet(7)


def test_a_room_that_prefill_never_heard_of_is_quiet_once_it_is_stopped(sides: tuple[Side, Side]) -> None:
    _, receiving, _ = joined(sides)
    receiving.open(7, 0, [1, 2], 0)
    assert not receiving.is_quiet(7)
    receiving.stop(7, "aborted")
    assert receiving.is_quiet(7)


def test_a_whole_prompt_that_decode_has_needs_no_transfer(sides: tuple[Side, Side]) -> None:
    sending, receiving, _ = joined(sides)
    transfer_id = asked(sides, sending, receiving, [], prefix=4)
    assert sending.chunk(7, 0, [], last=True), "only the row is to be told"
    rows: list[int] = []
    assert receiving.landed(7, transfer_id, rows.append)
    assert rows == [2]
    assert not sides[0].node.transfers()


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
    host: Any, ranks: RankScheme = RANKS, store: str | None = None, heads: int = 2, model: str = "m"
) -> HostPages:
    tiers = {"max_local_cpu_size": 0.01} if store is None else {"store": store}
    settings = read_storage({"interface_v1": 1, "tiers": tiers})
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
            source.store.lookup(pages.kv.records._keys(["a", "b"]), 1.0), source.shape, "test"
        ).done.result()
        for slot, page in zip(slots, (3, 9), strict=True):
            record = source.store.array[slot.offset + 4096 :][: source.shape.payload_nbytes].view(np.int16)
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
    ],
)
def test_settings_that_nobody_would_look_at_are_refused(extra: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        read_storage({"backend_name": "pdlink", **extra})


def test_other_versions_are_refused_with_the_range() -> None:
    assert versions.check("0.5.23.post1", accept_newer=False) == (0, 5, 23)
    assert versions.check("0.6.0", accept_newer=True) == (0, 6, 0)
    for other in ("0.5.22", "0.5.24", "main"):
        with pytest.raises(UnsupportedSglang, match=r"0\.5\.23|three numbers"):
            versions.check(other, accept_newer=False)


def test_entries_of_different_pages_are_refused() -> None:
    with pytest.raises(UnsupportedSglang, match="one size"):
        layout_of([(0, 0), (1, 0)], [1024, 2048], [128, 256], [0, 0], 4, "bfloat16")


@pytest.mark.parametrize("frames", [[b"PDLINK/2", b""], [wire.TAG], [wire.TAG, b"\xc1"], [wire.TAG, b"\x80"]])
def test_messages_that_no_pdlink_sends_cost_themselves(frames: list[bytes]) -> None:
    with pytest.raises(wire.BadMessage):
        wire.decode(frames)


def test_messages_of_sglang_are_left_to_it() -> None:
    assert wire.decode([b"ABORT", b"7"]) is None
    ask = wire.Ask(2**63 - 1, "t", "127.0.0.1", 1, 0, 3)
    assert wire.decode(wire.encode(ask)) == ask
