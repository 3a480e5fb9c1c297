"""`Order` decides alone: who goes next, how much is in flight, and how long somebody can be passed over."""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdlink.endpoint.order import OVERDUE_S, Backlog, Order, PeerQueue
from pdlink.endpoint.sharing import Sharing
from tests.endpoint.slow_order import Asked, SlowOrder

if TYPE_CHECKING:
    from collections.abc import Sequence

TEN = Sharing(window_nbytes=40, peer_window_nbytes=20, push_nbytes=10, ageing=0.1)


class Names:
    """An order whose peers and transfers have names."""

    def __init__(self, sharing: Sharing) -> None:
        self.order: Order[Asked] = Order(sharing)
        self.flows: dict[str, PeerQueue[Asked]] = {}
        self.backlogs: dict[str, Backlog[Asked]] = {}

    def add(self, transfer: str, peer: str, nbytes: int, total_nbytes: int, number: int = 0) -> Asked:
        if peer not in self.flows:
            self.flows[peer] = self.order.flow()
        if transfer not in self.backlogs:
            self.backlogs[transfer] = self.order.backlog(self.flows[peer], total_nbytes)
        entry = Asked(self.backlogs[transfer], nbytes, transfer, peer, number)
        self.order.add(entry)
        return entry

    def drop(self, transfer: str) -> list[Asked]:
        backlog = self.backlogs.pop(transfer, None)
        return self.order.drop(backlog) if backlog is not None else []


class Line(Names):
    """An order, and what a test has to remember about it."""

    def __init__(self, sharing: Sharing = TEN) -> None:
        super().__init__(sharing)
        self.sharing = sharing
        self.now = 0.0
        self.moved = 0
        self.left: dict[str, int] = {}
        self.arrived_at: dict[str, int] = {}
        self.peer: dict[str, str] = {}
        self.waiting: Counter[str] = Counter()
        """Entries, by transfer."""
        self.flying: dict[str, list[Asked]] = {}
        """By peer, oldest first."""
        self.sent: list[str] = []
        self.num_entries = 0

    def come(self, transfer: str, peer: str, nbytes: int) -> None:
        """All of a transfer may go."""
        self.left[transfer], self.arrived_at[transfer], self.peer[transfer] = nbytes, self.moved, peer
        for start in range(0, nbytes, self.sharing.push_nbytes):
            self.add(transfer, peer, min(self.sharing.push_nbytes, nbytes - start), nbytes, self.num_entries)
            self.num_entries += 1
            self.waiting[transfer] += 1

    def step(self) -> Asked | None:
        entry = self.order.next(self.now)
        if entry is not None:
            transfer, peer = entry.transfer, entry.peer
            self.moved += entry.nbytes
            self.left[transfer] -= entry.nbytes
            self.waiting[transfer] -= 1
            self.sent.append(transfer)
            self.flying.setdefault(peer, []).append(entry)
        return entry

    def fill(self) -> None:
        while self.step() is not None:
            pass

    def land(self, peer: str, which: int = 0) -> None:
        self.order.ended(self.flying[peer].pop(which), self.now)

    def run(self, limit: int = 100_000) -> list[str]:
        """Land everything, oldest of each peer in turn, until nothing is left; the transfers in order of sending."""
        for _ in range(limit):
            self.fill()
            flying = [peer for peer, entries in self.flying.items() if entries]
            if not flying:
                break
            self.land(flying[len(self.sent) % len(flying)])
        assert self.order.waiting_nbytes == self.order.in_flight_nbytes == 0
        return self.sent


def ready_order(sent: Sequence[str]) -> list[str]:
    """Transfers in the order of their last entry."""
    last = {transfer: index for index, transfer in enumerate(sent)}
    return sorted(last, key=last.__getitem__)


# -- who goes next ---------------------------------------------------------------------------------------------------


def test_a_short_transfer_passes_a_long_one_that_came_first() -> None:
    line = Line()
    line.come("long", "a", 200)
    line.fill()
    line.come("short", "a", 20)
    sent = line.run()
    assert sent[:4] == ["long", "long", "short", "short"]
    assert ready_order(sent) == ["short", "long"]


def test_what_is_left_of_a_transfer_counts_and_not_what_it_was() -> None:
    line = Line()
    line.come("long", "a", 200)
    for _ in range(18):
        line.fill()
        line.land("a")
    line.come("new", "a", 50)
    assert ready_order(line.run()) == ["long", "new"]


def test_layers_still_to_be_written_count_as_left() -> None:
    """The first layer of a long prompt waits behind a whole short one."""
    line = Line()
    line.add("long", "a", 10, 1000)
    line.add("short", "a", 10, 20)
    line.add("short", "a", 10, 20)
    released = [line.order.next(0.0), line.order.next(0.0)]
    assert [entry.transfer for entry in released if entry] == ["short", "short"]


def test_entries_of_a_transfer_go_in_the_order_they_came() -> None:
    line = Line()
    line.come("t", "a", 95)
    jobs = []
    while (entry := line.step()) is not None:
        jobs.append(entry.number)
        line.land("a")
    assert jobs == list(range(10))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("num_peers", [1, 4])
def test_mean_time_to_ready_beats_first_come_first_served(seed: int, num_peers: int) -> None:
    """One link of one byte a second, 80 % busy, transfers of 1 to 400 entries: simulated time, so always the same."""
    chance = random.Random(seed)
    sizes = [10 * min(400, max(1, int(chance.lognormvariate(2.5, 1.4)))) for _ in range(300)]
    gap_s = sum(sizes) / len(sizes) / 0.8
    arrivals, at_s = [], 0.0
    for index, nbytes in enumerate(sizes):
        at_s += chance.expovariate(1 / gap_s)
        arrivals.append((at_s, f"t{index}", f"p{chance.randrange(num_peers)}", nbytes))
    took_s = simulate(Sharing(window_nbytes=80, peer_window_nbytes=40, push_nbytes=10), arrivals)
    assert sum(took_s.values()) < 0.7 * first_come_first_served_s(arrivals)


def first_come_first_served_s(arrivals: list[tuple[float, str, str, int]]) -> float:
    """Sum of the seconds from coming to the last byte, on a link of one byte a second without any order."""
    free_s = took_s = 0.0
    for at_s, _, _, nbytes in arrivals:
        free_s = max(free_s, at_s) + nbytes
        took_s += free_s - at_s
    return took_s


def simulate(sharing: Sharing, arrivals: list[tuple[float, str, str, int]]) -> dict[str, float]:
    """Seconds from coming to the last byte, on a link of one byte a second that serves what it holds in order."""
    names = Names(sharing)
    link: deque[tuple[float, Asked]] = deque()
    left: Counter[str] = Counter()
    took_s: dict[str, float] = {}
    coming, free_s, now = deque(arrivals), 0.0, 0.0
    came = {name: at_s for at_s, name, _, _ in arrivals}
    while coming or link:
        if coming and (not link or coming[0][0] <= link[0][0]):
            now, name, peer, nbytes = coming.popleft()
            for _ in range(nbytes // 10):
                left[name] += 1
                names.add(name, peer, 10, nbytes)
        else:
            now, entry = link.popleft()
            names.order.ended(entry, now)
            left[entry.transfer] -= 1
            if not left[entry.transfer]:
                took_s[entry.transfer] = now - came[entry.transfer]
        while (released := names.order.next(0.0)) is not None:  # its own clock stands still: nobody is slow here
            free_s = max(free_s, now) + released.nbytes
            link.append((free_s, released))
    assert len(took_s) == len(arrivals)
    return took_s


# -- bounds ----------------------------------------------------------------------------------------------------------


def test_a_stream_of_short_transfers_passes_a_long_one_only_for_so_long() -> None:
    """The bound of the docstring: what comes when the link has moved another S / ageing bytes goes behind."""
    line = Line()
    line.come("long", "a", 100)
    line.fill()
    for index in range(400):
        line.come(f"s{index}", "a", 10)
        line.land("a")
        line.fill()
        if line.left["long"] == 0:
            break
    passed = line.sent[2:].index("long") * 10
    assert (80 - 10) / TEN.ageing - 40 <= passed <= (80 - 10) / TEN.ageing + 10
    assert line.left["long"] == 0


def test_a_peer_with_a_hundred_transfers_does_not_crowd_out_one_with_one() -> None:
    line = Line()
    for index in range(100):
        line.come(f"a{index}", "a", 30)
    line.come("b", "b", 30)
    assert line.run().index("b") <= 3


def test_a_burst_of_short_transfers_to_one_peer_passes_a_long_one_to_another_only_for_so_long() -> None:
    line = Line()
    line.come("long", "b", 100)
    for index in range(1000):
        line.come(f"a{index}", "a", 10)
    assert line.run().index("long") * 10 <= 100 / TEN.ageing + 10


def test_peers_with_equal_claims_take_turns() -> None:
    line = Line(replace(TEN, ageing=1.0))
    for peer in "abcd":
        for index in range(4):
            line.come(f"{peer}{index}", peer, 10)
    sent = line.run()
    for first in range(0, 16, 4):
        assert {name[0] for name in sent[first : first + 4]} == set("abcd")


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("come"), st.integers(0, 3), st.integers(1, 120)),
        st.tuples(st.just("land"), st.integers(0, 3), st.integers(0, 5)),
        st.tuples(st.just("step"), st.just(0), st.just(0)),
        st.tuples(st.just("drop"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("wait"), st.integers(1, 20), st.just(0)),
    ),
    max_size=120,
)


@settings(max_examples=300, deadline=None)
@given(
    operations=OPERATIONS,
    ageing=st.sampled_from([0.01, 0.1, 1.0]),
    windows=st.sampled_from([(40, 20), (10, 10), (25, 15), (7, 5)]),
)
def test_every_entry_goes_or_is_dropped_once_and_no_window_is_exceeded(
    operations: list[tuple[str, int, int]], ageing: float, windows: tuple[int, int]
) -> None:
    sharing = replace(TEN, window_nbytes=windows[0], peer_window_nbytes=windows[1], ageing=ageing)
    line = Line(sharing)
    gone: Counter[int] = Counter()

    def step() -> bool:
        before = {peer: sum(entry.nbytes for entry in entries) for peer, entries in line.flying.items()}
        counted = sum(nbytes for peer, nbytes in before.items() if not line.flows[peer].slow)
        waiting = {name: (line.left[name], line.arrived_at[name]) for name, count in line.waiting.items() if count}
        entry = line.step()
        if entry is None:
            return False
        transfer, its_peer, number = entry.transfer, entry.peer, entry.number
        gone[number] += 1
        mine = before.get(its_peer, 0)
        assert mine == 0 or mine + entry.nbytes <= sharing.peer_window_nbytes
        if not line.flows[its_peer].slow:
            excused = sum(before.get(peer, 0) for peer, flow in line.flows.items() if not flow.slow)
            assert min(counted, excused) == 0 or min(counted, excused) + entry.nbytes <= sharing.window_nbytes
        left, arrived_at = waiting[transfer]
        for name, (left_of, since) in waiting.items():
            if line.peer[name] == its_peer and since < arrived_at:
                assert arrived_at - since <= (left_of - left) / sharing.ageing + 1e-6
        return True

    for what, first, second in operations:
        match what:
            case "come":
                line.come(f"t{len(line.left)}", f"p{first}", second)
            case "land":
                entries = line.flying.get(f"p{first}", [])
                if entries:
                    line.land(f"p{first}", second % len(entries))
            case "step":
                step()
            case "drop" if first < len(line.left):
                dropped = line.drop(f"t{first}")
                assert len(dropped) == line.waiting.pop(f"t{first}", 0)
                gone.update(entry.number for entry in dropped)
            case "wait":
                line.now += first / 20 * OVERDUE_S
        line.order.check()
    while True:
        while step():
            pass
        line.order.check()
        flying = [peer for peer, entries in line.flying.items() if entries]
        if not flying:
            break
        line.land(flying[0])
    assert line.order.waiting_nbytes == line.order.in_flight_nbytes == 0
    assert set(gone) == set(range(line.num_entries))
    assert set(gone.values()) <= {1}


@settings(max_examples=200, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=60),
    long=st.integers(1, 300),
    ageing=st.sampled_from([0.05, 0.2, 1.0]),
    busy=st.integers(0, 20),
)
def test_a_burst_of_another_peer_keeps_to_its_bound(sizes: list[int], long: int, ageing: float, busy: int) -> None:
    """Newer transfers to another peer get at most S / ageing + the lead + one entry before a waiting one."""
    line = Line(replace(TEN, ageing=ageing))
    for index in range(busy):  # both peers have had something before
        line.come(f"x{index}", "ab"[index % 3 == 0], 10 * (index % 5) + 1)
    line.run()
    line.sent.clear()
    line.come("long", "b", long)
    lead = max(0, line.flows["b"].served_nbytes - line.flows["a"].served_nbytes) if "a" in line.flows else 0
    for index, nbytes in enumerate(sizes):
        line.come(f"a{index}", "a", nbytes)
    passed = 0
    while True:
        entry = line.step()
        assert entry is not None
        if entry.transfer == "long":
            break
        passed += entry.nbytes
        line.land("a")
    assert passed <= long / ageing + lead + 10


# -- the same as looking at everybody ------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_it_decides_as_one_does_who_looks_at_everybody(seed: int) -> None:
    """Backlogs are ranked and windows counted as things happen; `SlowOrder` does neither."""
    chance = random.Random(seed)
    windows = chance.choice([(40, 20), (10, 10), (25, 15), (7, 5), (200, 30), (1000, 50)])
    sharing = Sharing(
        window_nbytes=windows[0],
        peer_window_nbytes=windows[1],
        push_nbytes=min(windows[1], 10),
        ageing=chance.choice([0.01, 0.1, 1.0]),
    )
    quick = Names(sharing)
    slow = SlowOrder(sharing)
    num_peers = chance.choice([1, 2, 3, 8, 40])
    transfers: list[tuple[str, str, int]] = []  # name, peer, bytes; one that was dropped may come again
    flying: list[Asked] = []
    now = 0.0

    def add(name: str, peer: str, nbytes: int, total_nbytes: int) -> None:
        slow.add(quick.add(name, peer, nbytes, total_nbytes), total_nbytes)

    def step() -> bool:
        entry = quick.order.next(now)
        assert entry is slow.next(now)
        assert quick.order._virtual_time == slow.virtual_time
        assert {name for name, flow in quick.flows.items() if flow.slow} == slow.slow
        if entry is not None:
            flying.append(entry)
        return entry is not None

    def land(which: int) -> None:
        entry = flying.pop(which)
        quick.order.ended(entry, now)
        slow.ended(entry, now)

    def drop(name: str) -> None:
        assert quick.drop(name) == slow.drop(name)

    kinds = ["come", "more", "land", "step", "drop", "wait", "forget"]
    for kind in chance.choices(kinds, [chance.random() for _ in kinds], k=chance.choice([30, 100, 400])):
        name, peer, nbytes = chance.choice(transfers) if transfers else ("", "", 0)
        match kind:
            case "come":
                name, peer, nbytes = f"t{len(transfers)}", f"p{chance.randrange(num_peers)}", chance.randint(1, 120)
                transfers.append((name, peer, nbytes))
                for start in range(0, nbytes, 10):
                    add(name, peer, min(10, nbytes - start), nbytes)
            case "more" if name:  # another layer was written
                add(name, peer, chance.randint(1, 30), nbytes)
            case "land":
                for _ in range(min(len(flying), chance.randint(1, 4))):
                    land(chance.randrange(len(flying)))
            case "step":
                for _ in range(chance.randint(1, 8)):
                    step()
            case "drop" if chance.random() < 0.3:
                drop(name)
            case "wait":
                now += 1.5 * chance.random() * OVERDUE_S
            case "forget" if chance.random() < 0.1 and not any(entry.peer == peer for entry in flying):
                for other, its_peer, _ in transfers:
                    if its_peer == peer:
                        drop(other)
                quick.flows.pop(peer, None)
                slow.forget(peer)
        quick.order.check()
    while True:
        while step():
            pass
        quick.order.check()
        if not flying:
            break
        land(0)
    assert quick.order.waiting_nbytes == quick.order.in_flight_nbytes == 0


# -- what is in flight -----------------------------------------------------------------------------------------------


def test_a_peer_has_its_window_and_all_share_one() -> None:
    line = Line()
    for peer in "abc":
        line.come(peer, peer, 100)
    line.fill()
    assert sorted(len(entries) for entries in line.flying.values()) == [2, 2]
    assert line.order.in_flight_nbytes == 40


def test_an_entry_that_is_larger_than_the_window_goes_alone() -> None:
    line = Line()
    for name in "ab":
        line.add(name, name, 1000, 1000)
    entry = line.order.next(0.0)
    assert entry is not None
    assert line.order.next(0.0) is None
    line.order.ended(entry, 0.0)
    assert line.order.next(0.0) is not None


def test_stalled_peers_take_nothing_from_the_others_once_they_are_overdue() -> None:
    line = Line()
    for peer in "ab":
        line.come(peer, peer, 100)
    line.fill()
    line.come("c", "c", 100)
    assert line.step() is None  # two peers hold the whole window
    line.now = 1.01 * OVERDUE_S
    line.fill()
    assert len(line.flying["c"]) == 2
    line.land("c")
    line.fill()
    assert len(line.flying["c"]) == 2
    assert [len(line.flying[peer]) for peer in "ab"] == [2, 2]


def test_a_slow_peer_is_served_beside_a_fast_one_that_always_has_something_to_send() -> None:
    line = Line()
    line.come("slow", "s", 60)
    line.fill()
    line.now = 1.01 * OVERDUE_S
    for index in range(60):
        for peer in "ab":
            line.come(f"{peer}{index}", peer, 20)
    line.fill()
    for _ in range(40):
        line.now += 0.01 * OVERDUE_S
        for peer in "ab":
            line.land(peer)
        line.fill()
        assert [len(line.flying[peer]) for peer in "ab"] == [2, 2]
    line.land("s")
    line.fill()
    assert len(line.flying["s"]) == 2


def test_a_slow_peer_that_has_caught_up_shares_the_window_again() -> None:
    line = Line()
    line.come("a", "a", 100)
    line.come("b", "b", 100)
    line.fill()
    line.come("c", "c", 100)
    line.now = 1.01 * OVERDUE_S
    line.fill()
    line.land("a")
    line.land("a")
    line.fill()
    line.order.check()
    assert not line.flows["a"].slow
    assert line.flows["b"].slow


def test_a_peer_that_could_take_nothing_has_nothing_to_make_up_for() -> None:
    """Otherwise it would have the link for itself when it is back."""
    line = Line(replace(TEN, ageing=1.0))
    line.come("a", "a", 60)
    line.fill()
    line.now = 2 * OVERDUE_S
    for index in range(50):
        line.come(f"b{index}", "b", 60)
    for _ in range(100):
        line.fill()
        line.land("b")
    line.sent.clear()
    for index in range(50):
        line.come(f"c{index}", "a", 60)
    for _ in range(40):
        line.fill()
        for peer in "ab":
            line.land(peer)
    assert sum(name.startswith("b") for name in line.sent) >= 30
