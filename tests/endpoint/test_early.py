"""What one peer says about transfers that nobody here knows takes its own share of the tables, not that of others."""

from __future__ import annotations

import tracemalloc

import pytest

from pdlink.endpoint import early
from pdlink.endpoint.early import EarlyInterest
from pdlink.endpoint.half import EndedTransfers
from pdlink.endpoint.peer import Peer
from pdlink.protocol.messages import Offer
from pdlink.reasons import ABORTED, Code


def peer(name: str) -> Peer:
    return Peer(1, "", 1, dialed=False, since_s=0.0, heard_s=0.0, name=name)


def offer(transfer_id: str, num_blocks: int) -> Offer:
    return Offer(transfer_id, 0, 16 * num_blocks, (tuple(range(1000, 1000 + num_blocks)),), 4)


def test_peer_that_promises_too_much_is_refused_alone() -> None:
    table, greedy, honest = EarlyInterest(), peer("greedy"), peer("honest")
    refused = [table.put(f"g-{number}", greedy, None, 0.0) for number in range(40_000)]
    assert set(refused) == {None, Code.TOO_MANY_EARLY_OFFERS}
    assert table.put("h", honest, None, 0.0) is None
    assert table.put("h", honest, offer("h", 100_000), 0.0) is None
    assert len(greedy.early) * early.ENTRY_NBYTES <= early.MAX_PEER_NBYTES


def test_all_peers_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early, "MAX_NBYTES", 10 * early.ENTRY_NBYTES)
    table = EarlyInterest()
    refused = [table.put(f"t-{number}", peer("many"), None, 0.0) for number in range(11)]
    assert refused == [None] * 10 + [Code.TOO_MANY_EARLY_OFFERS]
    table.pop("t-3")
    assert table.put("t-10", peer("many"), None, 0.0) is None


def test_what_is_forgotten_counts_no_more() -> None:
    table, one = EarlyInterest(), peer("one")
    for number in range(100):
        assert table.put(f"t-{number}", one, None, 0.0) is None
        assert table.put(f"t-{number}", one, offer(f"t-{number}", number), 0.0) is None
    assert table.nbytes == 100 * early.ENTRY_NBYTES + 8 * sum(range(100))
    for transfer_id in list(one.early):
        table.pop(transfer_id)
    assert (len(table), table.nbytes, one.early, one.early_nbytes) == (0, 0, {}, 0)


def test_offer_comes_out_as_it_went_in() -> None:
    table, one = EarlyInterest(), peer("one")
    said = offer("t", 300)
    table.put("t", one, said, 0.0)
    kept = table.pop("t")
    assert kept is not None
    assert kept.offer == said


def test_interest_ages_from_its_first_word() -> None:
    table, one = EarlyInterest(), peer("one")
    for at_s, name in enumerate(("a", "b", "c")):
        assert table.put(name, one, None, float(at_s)) is None
    assert table.put("a", one, offer("a", 3), 5.0) is None
    assert table.older_than(1.0) == ["a", "b"]


def test_bytes_are_counted_as_they_are_taken() -> None:
    """With ids as long as they may be."""
    table, one = EarlyInterest(), peer("one")
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(2000):
            transfer_id = f"{number:0128d}"
            assert table.put(transfer_id, one, offer(transfer_id, 50), 0.0) is None
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before <= table.nbytes


def test_one_peer_flushes_its_own_ended_ids_only() -> None:
    ended = EndedTransfers()
    for number in range(1000):
        ended.add(f"h-{number}", None, "honest")
    for number in range(100_000):
        ended.add(f"g-{number}", ABORTED, "greedy")
    assert all(f"h-{number}" in ended for number in range(1000))
    assert "g-0" not in ended
    assert ended.get("g-99999") == (ABORTED, "greedy")


def test_ended_ids_of_all_peers_are_bounded_and_the_oldest_go_first() -> None:
    ended = EndedTransfers(capacity=10, share=4)
    for number in range(30):
        ended.add(f"t-{number}", None, f"peer-{number}")
    assert [number for number in range(30) if f"t-{number}" in ended] == list(range(20, 30))
    assert len(ended._of) == 10
    ended.add("t-25", ABORTED, "another")
    assert ended.get("t-25") == (ABORTED, "another")
    assert len(ended) == 10
