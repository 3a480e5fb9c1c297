"""What the sessions of agents keep: over pressure, on the way down, until they end; and no more than their quota."""

from __future__ import annotations

from itertools import islice
from math import inf
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from pdlink.store import books
from pdlink.store.catalog import Catalog
from pdlink.store.eviction import Lru
from pdlink.store.extents import ALIGNMENT_NBYTES as PAGE
from pdlink.store.sessions import MAX_OF_TENANT, SessionHolds, SessionTerms
from pdlink.store.slots import HELD, KEPT
from pdlink.store.store import Store
from tests.waiting import WAIT_S, until

from .stubs import SHAPE, StubTier
from .test_store import Clock, fetch, opened, put, put_below, read

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

NBYTES = SHAPE.nbytes
MINE = [b"mine%028d" % index for index in range(4)]
OTHERS = [b"others%026d" % index for index in range(64)]


def session(name: str = "agent", tenant: str = "", ttl_s: float = 60.0, scope: str = "") -> SessionTerms:
    return SessionTerms(name, tenant, ttl_s, scope)


def hold(store: Store, keys: list[bytes], *, waits: bool = True, of: SessionTerms | None = None) -> int:
    return store.hold(of or session(), keys, [NBYTES], waits=waits)


def keep(
    sessions: SessionHolds,
    of: SessionTerms,
    keys: list[bytes],
    sizes: Sequence[int] = (1,),
    now_s: float = 0.0,
    *,
    waits: bool = True,
) -> list[bytes]:
    """Keys that the session keeps."""
    return [key for key, is_kept in sessions.holding(of, keys, sizes, now_s, waits=waits) if is_kept]


def keep_in(made: Catalog, of: SessionTerms, keys: list[bytes], *, waits: bool = True) -> None:
    """As a store does."""
    looked = list(made.sessions.holding(of, keys, [PAGE], 0.0, waits=waits))
    made.rank([key for key, _ in sorted(looked, key=lambda one: not one[1])])


def in_memory(store: Store, keys: list[bytes]) -> int:
    return sum(store.holds(keys))


@pytest.mark.parametrize("waits", [True, False])
def test_a_session_keeps_its_records_while_others_push(*, waits: bool) -> None:
    with opened(16) as store:
        assert hold(store, MINE, waits=waits) == 4, "before they are there"
        assert put(store, MINE) == 4
        for key in OTHERS:
            assert put(store, [key]) == 1
        assert read(store, MINE) == 4
        assert store.end_session("agent", "")
        for key in reversed(OTHERS):
            put(store, [key])
        assert in_memory(store, MINE) == 0
        assert not store.end_session("agent", "")


def test_a_session_keeps_what_was_there_before() -> None:
    with opened(16) as store:
        assert put(store, MINE) == 4
        assert hold(store, MINE) == 4
        for key in OTHERS:
            assert put(store, [key]) == 1
        assert read(store, MINE) == 4


def test_a_session_ends_with_its_time_after_its_last_turn() -> None:
    clock = Clock()
    with opened(16, clock=clock) as store:
        hold(store, MINE)
        put(store, MINE)
        clock.now_s = 50.0
        hold(store, MINE)
        clock.now_s = 109.0
        assert [(each.records, each.ends_in_s) for each in store.state().sessions] == [(4, 1.0)]
        clock.now_s = 110.0
        until(lambda: not store.state().sessions, "it has ended")
        for key in OTHERS:
            put(store, [key])
        assert in_memory(store, MINE) == 0


def test_the_next_turn_keeps_its_own_records_and_no_others() -> None:
    with opened(16) as store:
        assert hold(store, MINE[:2]) == 2
        assert hold(store, [MINE[0], *MINE[2:]]) == 3
        put(store, MINE)
        for key in OTHERS:
            put(store, [key])
        assert store.holds(MINE) == [True, False, True, True]


@pytest.mark.parametrize("waits", [True, False])
def test_what_a_session_keeps_leaves_memory_after_all_others(*, waits: bool) -> None:
    tier = StubTier()
    with opened(8, [tier]) as store:
        hold(store, MINE[:2], waits=waits)
        put_below(store, MINE[:2], tier)
        assert store.flush(WAIT_S)
        put_below(store, OTHERS[:20], tier)
        assert in_memory(store, MINE) == 2, "although they are the oldest"
        leases = [store.lend(key) for key in OTHERS[14:20]]
        assert put(store, OTHERS[20:22]) == 2, "others need room, and nothing else may go"
        assert in_memory(store, MINE) == 0
        for lease in leases:
            assert lease is not None
            store.take_back(lease)
        assert read(store, MINE[:2]) == 2, "from the tier"


def test_beyond_half_of_memory_the_session_of_the_longest_pause_is_as_others() -> None:
    tier = StubTier()
    names = ["first", "second", "third"]
    prompts = dict(zip(names, (OTHERS[:2], OTHERS[2:4], OTHERS[4:6]), strict=True))
    tier.capacity_nbytes, tier.keep = 400 * NBYTES, lambda _keys: None  # type: ignore[attr-defined]
    with opened(8, [tier]) as store:
        for name in (*names, "first"):  # whose pause is the shortest one now
            if not in_memory(store, prompts[name]):
                put_below(store, prompts[name], tier)
            assert store.flush(WAIT_S)
            assert hold(store, prompts[name], of=session(name)) == 2
        for key in OTHERS[6:30]:
            put_below(store, [key], tier)
        assert [in_memory(store, prompts[name]) for name in names] == [2, 0, 2]
        assert read(store, prompts["second"]) == 2, "from the tier"
        store.check()


def test_of_a_long_prompt_the_head_leaves_memory_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(books, "_PIECE_KEYS", 2)
    tier, prompt = StubTier(), OTHERS[:8]
    tier.capacity_nbytes, tier.keep = 400 * NBYTES, lambda _keys: None  # type: ignore[attr-defined]
    with opened(16, [tier]) as store:
        hold(store, prompt)
        put_below(store, prompt, tier)
        assert store.flush(WAIT_S)
        hold(store, prompt)
        put_below(store, OTHERS[8:16], tier)
        leases = [store.lend(key) for key in OTHERS[8:16]]
        assert put(store, OTHERS[16:20]) == 4, "others need room, and nothing else may go"
        assert store.holds(prompt) == [True] * 4 + [False] * 4
        for lease in leases:
            assert lease is not None
            store.take_back(lease)


def test_what_a_session_keeps_no_more_takes_no_room_from_what_it_keeps_now() -> None:
    made = Catalog(Lru(), sessions=SessionHolds(1 << 40, 1 << 40))
    made.resize(8 * PAGE)
    for turn in (OTHERS[:4], OTHERS[4:8]):
        made.commit(made.reserve(turn, PAGE, "w"))
        keep_in(made, session(), turn)
    made.commit(made.reserve([b"another %d" % index for index in range(4)], PAGE, "w"))
    assert [made.lookup([key]) for key in OTHERS[4:8]] == [1] * 4


def test_each_record_that_finds_no_room_in_the_share_of_sessions_costs_one_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Catalog(Lru(), sessions=SessionHolds(1 << 40, 1 << 40))
    made.resize(64 * PAGE)
    made.commit(made.reserve(OTHERS, PAGE, "w"))
    keep_in(made, session(), OTHERS[:32])
    made.resize(32 * PAGE)  # the system refuses memory
    looks, evict = 0, made._turns.evict

    def counted(*args: Any, **more: Any) -> bytes | None:
        nonlocal looks
        looks += 1
        return evict(*args, **more)

    monkeypatch.setattr(made._turns, "evict", counted)
    keep_in(made, session("another"), OTHERS[32:])
    assert looks == 32


def test_no_record_of_a_session_leaves_memory_before_lru_would_evict_it() -> None:
    """Here a tier has all of them at once: what only memory has may take the room of what a tier has, too."""
    left_later = 0
    for seed in range(60):
        rng = Random(seed)
        pages, lengths = rng.randint(4, 24), [rng.randint(1, 6) for _ in range(4)]
        with_sessions, without = (Catalog(Lru(), sessions=SessionHolds(1 << 40, 1 << 40)) for _ in range(2))
        for made in (with_sessions, without):
            made.resize(pages * PAGE)
        for _ in range(200):
            agent = rng.randrange(8)
            if agent < len(lengths):
                lengths[agent] += rng.random() < 0.2
                keys = [b"%d of %d" % (index, agent) for index in range(lengths[agent])]
            else:
                keys = [b"other %d" % rng.randrange(3 * pages)]
            if agent < len(lengths):
                keep_in(with_sessions, session(str(agent)), keys, waits=False)
            for made in (with_sessions, without):
                use(made, keys)
            for key in with_sessions.sessions.kept:
                assert with_sessions.lookup([key]) >= without.lookup([key])
                left_later += with_sessions.lookup([key]) > without.lookup([key])
            with_sessions.check()
    assert left_later


def use(made: Catalog, keys: list[bytes]) -> None:
    """As a turn does, also with a tier: what is not there is brought, and all of it is the newest."""
    for key in reversed(keys):
        if made.lookup([key]):
            made.release(made.lease([key], "r", "", inf), used=True)
        else:
            made.commit(made.reserve([key], PAGE, "w"))
        made.is_below(key)


def test_what_sessions_keep_stays_in_memory_when_the_tier_that_has_it_is_removed() -> None:
    tier, other = StubTier(), StubTier()
    with opened(16, [tier]) as store:
        hold(store, MINE)
        put_below(store, MINE, tier)
        assert store.flush(WAIT_S)
        assert store.remove_tier("stub")
        for key in OTHERS[:32]:
            assert put(store, [key]) == 1
        assert in_memory(store, MINE) == 4
        store.add_tier(other)
        hold(store, MINE, waits=False)
        hold(store, MINE)
        assert store.flush(WAIT_S)
        assert set(MINE) <= other.records.keys()
        leave_no_other(store)
        assert put(store, OTHERS[32:36]) == 4
        assert in_memory(store, MINE) == 0, "the new tier has it"


@pytest.mark.parametrize("keys", [MINE, None], ids=["by key", "whole"])
def test_what_sessions_keep_stays_in_memory_when_their_tier_alone_is_cleared(keys: list[bytes] | None) -> None:
    tier = StubTier()
    with opened(16, [tier]) as store:
        hold(store, MINE)
        put_below(store, MINE, tier)
        assert store.flush(WAIT_S)
        store.clear(keys, places=["stub"])
        until(lambda: not tier.records, "the tier has forgotten them")
        put_below(store, OTHERS[:32], tier)
        assert in_memory(store, MINE) == 4
        assert not tier.records.keys() & set(MINE), "they were cleared there"
        hold(store, MINE, waits=False)
        hold(store, MINE)
        assert store.flush(WAIT_S)
        assert set(MINE) <= tier.records.keys(), "the next turn"


def test_what_a_removed_tier_brings_late_goes_below_again_where_its_successor_has_its_name() -> None:
    removed, successor = StubTier(), StubTier()
    with opened(8, [removed], Clock(), tier_deadline_s=0.2) as store:
        hold(store, MINE[:1])
        put_below(store, MINE[:1], removed)
        assert store.flush(WAIT_S)
        store.clear(places=["memory"])
        removed.going.clear()
        begun = fetch(store, MINE[:1])
        assert removed.stalled.wait(WAIT_S)
        store.remove_tier("stub")
        assert store.add_tier(successor) == "stub"
        removed.going.set()
        begun.done.result(WAIT_S)
        begun.close()
        assert store.flush(WAIT_S)
        assert set(successor.records) == {MINE[0]}


def leave_no_other(store: Store) -> None:
    """Of what is in memory, only what sessions keep may go."""
    for key in OTHERS:
        store.lend(key)


def test_no_record_of_a_session_leaves_memory_before_a_tier_has_it() -> None:
    tier = StubTier()
    with opened(8, [tier]) as store:
        tier.going.clear()
        hold(store, MINE[:2])
        assert put(store, MINE[:2]) == 2
        for key in OTHERS[:32]:
            put(store, [key])
        assert in_memory(store, MINE) == 2
        tier.going.set()
        until(lambda: set(MINE[:2]) <= tier.records.keys(), "the tier has them")
        store.flush(WAIT_S)
        leave_no_other(store)
        assert put(store, OTHERS[32:34]) == 2
        assert in_memory(store, MINE) == 0


def test_a_tier_that_takes_nothing_leaves_half_of_memory_to_others() -> None:
    tier = StubTier()
    tier.capacity_nbytes = 400 * NBYTES
    tier.keep = lambda _keys: None  # type: ignore[attr-defined]
    tier.error = OSError(28, "No space left on device")
    with opened(8, [tier]) as store:
        assert hold(store, OTHERS[:32]) == 32
        for key in OTHERS[:40]:
            assert put(store, [key]) == 1
        assert in_memory(store, OTHERS[:40]) == 8
        assert in_memory(store, OTHERS[:4]) == 4


def test_what_a_session_keeps_goes_below_at_first_sight() -> None:
    tier = StubTier()
    with opened(8, [tier], ingestion="second_sight") as store:
        put(store, OTHERS[:1])
        hold(store, MINE[:1])
        put(store, MINE[:2])
        hold(store, MINE[:2])
        assert store.flush(WAIT_S)
        assert sorted(tier.records) == MINE[:2]


def test_a_record_that_a_tier_has_lost_is_kept_in_memory_again() -> None:
    tier = StubTier()
    with opened(8, [tier]) as store:
        hold(store, MINE[:1])
        put_below(store, MINE[:1], tier)
        assert store.flush(WAIT_S)
        store.clear(MINE[:1])
        until(lambda: not tier.records, "the tier has forgotten it")
        tier.going.clear()
        assert put(store, MINE[:1]) == 1
        for key in OTHERS[:16]:
            put(store, [key])
        assert in_memory(store, MINE[:1]) == 1
        tier.going.set()


def test_a_session_beyond_the_quota_keeps_the_head_of_its_prompt() -> None:
    with opened(16) as store:
        assert hold(store, MINE) == 4
        assert hold(store, OTHERS[:2], of=session("more")) == 0
        assert [(each.name, each.records, each.asked) for each in store.state().sessions] == [
            ("agent", 4, 4),
            ("more", 0, 2),
        ]
        store.end_session("agent", "")
        assert hold(store, OTHERS[:5], of=session("more")) == 4


def test_each_tenant_has_a_quota_and_names_of_its_own() -> None:
    store = Store(64 * NBYTES, Lru(), session_quota_nbytes=3 * NBYTES)
    store.open()
    try:
        assert hold(store, MINE, of=session(tenant="a")) == 3
        assert hold(store, OTHERS[:4], of=session(tenant="b")) == 3
        assert hold(store, MINE[:3], of=session("second", tenant="a")) == 3, "what two keep counts once"
        assert store.end_session("agent", "b")
        assert not store.end_session("second", "b")
        assert store.state().sessions_nbytes == 3 * NBYTES
        store.check()
    finally:
        store.close()


def test_a_session_keeps_the_last_turn_of_each_model_and_one_call_ends_all() -> None:
    with opened(32) as store:
        assert hold(store, MINE, of=session(scope="model")) == 4
        assert hold(store, OTHERS[:4], of=session(scope="other")) == 4
        put(store, MINE + OTHERS[:4])
        assert hold(store, OTHERS[1:3], of=session(scope="other")) == 2
        assert {key for key in MINE + OTHERS if key in store._catalog.sessions.kept} == {*MINE, *OTHERS[1:3]}
        store.check()
        assert store.end_session("agent", "")
        assert not store.state().sessions
        assert not store.end_session("agent", "")


def test_one_tenant_cannot_take_all_sessions() -> None:
    sessions = SessionHolds(1 << 40, 1 << 40)
    for number in range(MAX_OF_TENANT + 1):
        assert len(keep(sessions, session(str(number)), MINE[:1])) == (number < MAX_OF_TENANT)
    assert keep(sessions, session(tenant="other"), MINE[:1])


def test_a_hold_that_is_under_way_ends_with_the_next_one_of_its_session_and_with_the_session() -> None:
    sessions = SessionHolds(1 << 40, 1 << 40)
    first = sessions.holding(session(), MINE, [1], 0.0, waits=False)
    assert list(islice(first, 2)) == [(key, True) for key in MINE[:2]]
    assert keep(sessions, session(), [MINE[0], *OTHERS[:2]]) == [MINE[0], *OTHERS[:2]]
    assert not list(first)
    assert sessions.kept.keys() == {MINE[0], *OTHERS[:2]}
    second = sessions.holding(session(), MINE, [1], 0.0, waits=False)
    assert list(islice(second, 2)) == [(MINE[0], True), (OTHERS[1], False)]
    (ended,) = sessions.end("agent", "")
    assert not list(second)
    assert sessions.take_of(ended, 9) == [MINE[0], OTHERS[0]]
    assert keep(sessions, session(), MINE) == MINE
    assert not list(second)
    sessions.check()


def test_the_end_of_a_session_waits_for_what_it_kept_and_for_no_other() -> None:
    sessions = SessionHolds(1 << 40, 1 << 40)
    made = Catalog(Lru(), sessions=sessions)
    for name, keys in (("agent", MINE), ("other", OTHERS[:4])):
        keep(sessions, session(name), keys)
    (ended,) = sessions.end("agent", "")
    sessions.end("other", "")
    while made.forget_ended(ended):
        pass
    assert sessions.kept.keys() == set(OTHERS[:4])
    while made.forget_ended():
        pass
    assert not sessions.kept
    assert not sessions.is_due(0.0)


class NotPassed(dict[Any, Any]):
    """A look at all of it fails."""

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError

    items = keys = values = __iter__  # type: ignore[assignment]


def test_the_end_of_one_session_costs_no_look_at_the_others() -> None:
    sessions = SessionHolds(1 << 40, 1 << 40)
    for number in range(MAX_OF_TENANT):
        for now_s in (0.0, 1.0):
            keep(sessions, session(str(number), ttl_s=60.0 + number), [b"%d" % number], now_s=now_s)
    sessions._holders = NotPassed(sessions._holders)
    assert sessions.end("7", "")
    assert not sessions.end("7", "")
    calls = 0
    while sessions.is_due(60.0 + MAX_OF_TENANT // 2):
        sessions.expire(60.0 + MAX_OF_TENANT // 2)
        sessions.take_ended(512)
        calls += 1
    assert len(sessions) == MAX_OF_TENANT // 2
    assert calls < MAX_OF_TENANT // 8


def test_what_a_large_session_kept_is_let_go_in_pieces_when_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [b"%d" % number for number in range(20_000)]
    made = Catalog(Lru(), sessions=SessionHolds(1 << 40, 1 << 40))
    made.resize(1 << 30)
    ranked, rank = list[int](), made.rank

    def counted(of: list[bytes]) -> list[bytes]:
        ranked.append(len(of))
        return rank(of)

    monkeypatch.setattr(made, "rank", counted)
    for number in range(3):
        keep(made.sessions, session(str(number)), keys)
        keep(made.sessions, session(f"small {number}"), keys[:1])
    while made.is_due(60.0):
        made.expire(60.0)
    assert max(ranked) <= 512
    assert sum(ranked) == 3 * len(keys) + 3
    assert not made.sessions.kept


def test_turns_with_shorter_times_leave_no_deadlines_behind() -> None:
    sessions = SessionHolds(1 << 40, 1 << 40)
    for turn in range(10_000):
        keep(sessions, session(ttl_s=20_000.0 - turn), MINE)
    assert len(sessions._entries) < 100
    sessions.check()
    sessions.expire(10_000.0)
    assert len(sessions) == 1
    sessions.expire(10_001.0)
    assert len(sessions) == 0


def test_sessions_count_right_in_any_order() -> None:
    for seed in range(100):
        rng, now_s = Random(seed), 0.0
        sessions = SessionHolds(12, 20)
        keys = [bytes([index]) for index in range(12)]
        for _ in range(80):
            now_s += rng.random()
            one = session(f"s{rng.randrange(4)}", rng.choice("ab"), ttl_s=rng.uniform(0.5, 8), scope=rng.choice("mn"))
            match rng.randrange(5):
                case 0:
                    sessions.end(one.name, one.tenant)
                case 1:
                    while sessions.is_due(now_s):
                        sessions.expire(now_s)
                        sessions.take_ended(rng.randint(1, 5))
                        sessions.check()
                    assert all(each.ends_in_s > 0 for each in sessions.states(now_s))
                case 2:
                    sessions.place(rng.choice(keys), is_below=rng.random() < 0.5)
                case _:
                    own = [key + one.tenant.encode() for key in keys[: rng.randrange(12)]]
                    if rng.random() < 0.3:
                        own = own[::-1]
                    sizes = [1, 2] if len(own) % 2 else [1]
                    held = keep(sessions, one, own, sizes, now_s, waits=rng.random() < 0.5)
                    assert held == own[: len(held)]
            sessions.check()
        for each in sessions.states(now_s):
            sessions.end(each.name, each.tenant)
        while sessions.take_ended(3):
            sessions.check()
        assert not sessions.kept


def test_the_rank_of_a_record_follows_all_who_keep_it() -> None:
    sessions = SessionHolds(10, 10)
    key = MINE[0]
    assert sessions.rank(key) is None
    assert keep(sessions, session("a"), [key]) == [key]
    assert sessions.rank(key) == KEPT
    sessions.place(key, is_below=True)
    assert sessions.rank(key) == HELD
    assert keep(sessions, session("b"), [key]) == [key]
    assert sessions.end("a", "")
    assert sessions.take_ended(9) == [key]
    assert sessions.rank(key) == HELD, "the other one keeps it"
    assert sessions.end("b", "")
    assert sessions.take_ended(9) == [key]
    assert sessions.rank(key) is None
