"""Who has joined, by beats: lives of one name, silence, comings and goings. No sockets and no clock."""

from __future__ import annotations

from typing import Any

import pytest

from pdlink.api import presence
from pdlink.api.health import Health
from pdlink.errors import ProtocolError
from pdlink_proxy.discovery.roll import (
    COMINGS,
    COMINGS_S,
    FIRST_PAUSE_S,
    FORGET_S,
    MAX_LIVES,
    MAX_LIVES_OF_KEY,
    MAX_UNPROVEN,
    PROVE_S,
    Life,
    Roll,
)


class Hall:
    """A roll in virtual time."""

    def __init__(self) -> None:
        self.roll = Roll()
        self.now_s = 1000.0
        self.well: set[str] = set()
        self.names: dict[str, str] = {}

    def beat(
        self,
        name: str,
        epoch: str = "e1",
        *,
        age_s: float = 5.0,
        port: int = 1,
        role: str = "prefill",
        at: str = "",
        key: str = "",
        **more: Any,
    ) -> Life | None:
        """at: its host, if that is not its name."""
        beat = presence.Beat(presence.VERSION, f"http://{at or name}:{port}", b"", 1.0, age_s, **more)
        health = Health("ok", name, epoch, role, "m", "tcp://127.0.0.1:1")
        return self.roll.beat(beat, health, now_s=self.now_s, awake_s=self.now_s, key=key)

    def after(self, wait_s: float) -> list[str]:
        """Time goes on; the names of workers that have fallen silent."""
        self.now_s += wait_s
        fallen = self.roll.expire(
            now_s=self.now_s,
            awake_s=self.now_s,
            well=lambda url: url in self.well,
            named=lambda url: self.names.get(url, ""),
        )
        return [life.name for life in fallen]

    @property
    def sides(self) -> tuple[int, int]:
        """Numbers of prefill and decode workers."""
        members = self.roll.members()
        return len(members.prefill), len(members.decode)

    @property
    def urls(self) -> list[str]:
        members = self.roll.members()
        return [entry.url for entry in (*members.prefill, *members.decode)]


def test_a_worker_is_silent_after_three_beats_and_stays_listed_for_a_probe() -> None:
    hall = Hall()
    hall.beat("a")
    assert hall.after(3.0) == []
    assert hall.after(0.1) == ["a"]
    assert hall.after(0.1) == []
    assert hall.urls == ["http://a:1"]


def test_a_silent_worker_is_forgotten_when_probes_fail_too() -> None:
    hall = Hall()
    hall.beat("a")
    hall.beat("b")
    hall.well = {"http://b:1"}
    hall.after(3.1)
    hall.after(FORGET_S + 0.1)
    assert hall.urls == ["http://b:1"]
    hall.beat("a")
    assert hall.urls == ["http://b:1", "http://a:1"]


def test_a_worker_that_leaves_is_listed_no_more() -> None:
    hall = Hall()
    hall.beat("a")
    hall.beat("b", role="decode")
    assert hall.beat("a", leaves=True) is None
    assert hall.urls == ["http://b:1"]


def test_a_worker_of_both_roles_is_listed_on_both_sides() -> None:
    hall = Hall()
    hall.beat("a", role="both")
    assert hall.urls == ["http://a:1", "http://a:1"]
    hall.roll.changed = False
    hall.beat("a", role="decode")
    assert hall.roll.changed
    assert (hall.roll.members().prefill, len(hall.roll.members().decode)) == ((), 1)


@pytest.mark.parametrize("first", ["old", "new"])
def test_of_two_lives_of_one_name_the_younger_counts_whichever_is_heard_first(first: str) -> None:
    """A stopped host wakes up beside the worker that has replaced its own; a proxy may have been started since."""
    hall = Hall()
    lives = {"old": ("e-old", 500.0, 1), "new": ("e-new", 5.0, 2)}
    for which in (first, *({"old", "new"} - {first})):
        epoch, age_s, port = lives[which]
        hall.beat("a", epoch, age_s=age_s, port=port)
    assert hall.urls == ["http://a:2"]
    assert list(hall.roll.left_out()) == ["a at http://a:1: a younger one is at http://a:2"]


def test_the_older_life_takes_its_name_back_when_the_younger_one_is_silent() -> None:
    hall = Hall()
    hall.beat("a", "e-old", age_s=500.0, port=1)
    hall.beat("a", "e-new", age_s=5.0, port=2)
    for _ in range(4):
        hall.after(1.0)
        hall.beat("a", "e-old", age_s=500.0 + hall.now_s - 1000.0, port=1)
    assert hall.urls == ["http://a:1"]


def test_a_beat_that_comes_late_makes_no_life_younger() -> None:
    """The proxy slept, and reads beats of an old life that were sent long ago."""
    hall = Hall()
    hall.beat("a", "e-old", age_s=500.0, port=1)
    hall.beat("a", "e-new", age_s=5.0, port=2)
    hall.now_s += 1000.0
    hall.beat("a", "e-old", age_s=501.0, port=1)
    hall.beat("a", "e-new", age_s=6.0, port=2)
    assert hall.urls == ["http://a:2"]


def test_who_announces_the_url_of_another_does_not_take_it() -> None:
    """Neither the role nor the cell of the worker there, also where the announced one is younger."""
    hall = Hall()
    hall.beat("a", age_s=500.0, key="k1")
    life = hall.beat("b", age_s=5.0, key="k2", at="a", role="decode")
    assert life is not None
    assert hall.sides == (1, 0)
    assert "b at http://a:1: a is there" in hall.roll.left_out()
    assert not hall.roll.counts(life), "its beats are not taken for the worker's"


def test_a_younger_worker_takes_the_url_of_another_of_its_key() -> None:
    hall = Hall()
    hall.beat("a", age_s=500.0, key="k1")
    hall.beat("b", age_s=5.0, key="k1", at="a", role="decode")
    assert hall.sides == (0, 1)


def test_a_url_whose_worker_is_silent_is_another_ones_until_its_beats_come_again() -> None:
    hall = Hall()
    hall.beat("a", age_s=500.0, key="k1")
    hall.beat("b", key="k2", at="a", role="decode")
    for _ in range(4):
        hall.after(1.0)
        hall.beat("b", age_s=5.0 + hall.now_s - 1000.0, key="k2", at="a", role="decode")
    assert (hall.sides, hall.roll.changed) == ((0, 1), True)
    hall.roll.changed = False
    hall.beat("a", age_s=504.0, key="k1")
    assert (hall.sides, hall.roll.changed) == ((1, 0), True)


def test_the_older_one_at_a_url_comes_back_when_the_younger_one_falls_silent() -> None:
    hall = Hall()
    hall.beat("a", age_s=500.0, key="k1")
    hall.beat("b", age_s=5.0, key="k1", at="a", role="decode")
    hall.roll.changed = False
    for _ in range(4):
        hall.after(1.0)
        hall.beat("a", age_s=500.0 + hall.now_s - 1000.0, key="k1")
    assert (hall.sides, hall.roll.changed) == ((1, 0), True)


def test_a_url_is_of_the_worker_that_answers_the_probe_there() -> None:
    """After a restart of the proxy the liar may have come first."""
    hall = Hall()
    hall.beat("b", key="k2", at="a", role="decode")
    hall.beat("a", key="k1")
    assert hall.sides == (0, 1)
    hall.names["http://a:1"] = "a"
    hall.roll.changed = False
    hall.after(0.1)
    assert (hall.sides, hall.roll.changed) == ((1, 0), True)


def test_what_comes_with_one_key_is_bounded_and_leaves_others_their_room() -> None:
    hall = Hall()
    hall.well = {f"http://n{number}:1" for number in range(MAX_LIVES_OF_KEY)}
    for number in range(MAX_LIVES_OF_KEY):
        assert not hall.roll.room(f"n{number}", "e1", "k1", hall.now_s)
        hall.beat(f"n{number}", key="k1")
        if number % MAX_UNPROVEN == MAX_UNPROVEN - 1:
            hall.after(0.0)
    assert "its key has" in hall.roll.room("more", "e1", "k1", hall.now_s)
    assert not hall.roll.room("n0", "e1", "k1", hall.now_s), "it is here"
    assert not hall.roll.room("more", "e1", "k2", hall.now_s)


def test_workers_that_no_probe_finds_are_bounded_and_make_room_for_others() -> None:
    hall = Hall()
    for number in range(MAX_UNPROVEN):
        assert not hall.roll.room(f"n{number}", "e1", "", hall.now_s)
        hall.beat(f"n{number}")
    assert "no probe has found" in hall.roll.room("honest", "e1", "", hall.now_s)
    hall.well = {"http://n0:1"}
    hall.after(0.1)
    assert not hall.roll.room("honest", "e1", "", hall.now_s), "one of them was found"
    hall.beat("honest")
    assert hall.roll.room("other", "e1", "", hall.now_s)
    hall.now_s += PROVE_S
    assert not hall.roll.room("other", "e1", "", hall.now_s)
    assert "http://n1:1" not in hall.urls


def test_lives_of_one_name_are_bounded_and_silent_ones_make_room() -> None:
    hall = Hall()
    for number in range(MAX_LIVES):
        hall.beat("a", f"e{number}")
    assert "lives here" in hall.roll.room("a", "more", "", hall.now_s)
    hall.after(3.1)
    assert not hall.roll.room("a", "more", "", hall.now_s)
    assert len(hall.roll) == MAX_LIVES - 1


def test_a_beat_that_comes_late_makes_its_life_no_younger() -> None:
    """It was sent when this life was 501 s old, and the proxy reads it 1,000 s later."""
    hall = Hall()
    life = hall.beat("a", "e-old", age_s=500.0)
    hall.now_s += 1000.0
    assert hall.beat("a", "e-old", age_s=501.0) is life
    assert life is not None
    assert life.started_s == 500.0


def test_a_worker_that_dies_again_and_again_is_left_out_for_growing_pauses() -> None:
    hall = Hall()
    for number in range(COMINGS):
        hall.beat("a", f"e{number}", age_s=0.1)
        assert hall.urls == ["http://a:1"]
        hall.after(2.0)
    life = hall.beat("a", "e-4", age_s=0.1)
    assert life is not None
    assert (hall.urls, hall.roll.counts(life)) == ([], False)
    assert "it came 4 times" in next(iter([text for text in hall.roll.left_out() if "came" in text]))
    hall.roll.changed = False
    hall.after(FIRST_PAUSE_S)
    assert hall.urls == ["http://a:1"]
    assert hall.roll.changed
    hall.beat("a", "e-5", age_s=0.1)
    hall.after(FIRST_PAUSE_S)
    assert hall.urls == []
    hall.after(FIRST_PAUSE_S)
    assert hall.urls == ["http://a:1"]


def test_an_update_now_and_then_is_no_flapping() -> None:
    hall = Hall()
    for number in range(10):
        hall.beat("a", f"e{number}", age_s=0.1)
        assert hall.urls == ["http://a:1"]
        hall.after(COMINGS_S / 2)


def test_what_is_left_of_names_is_bounded_by_the_lives() -> None:
    hall = Hall()
    for number in range(100):
        hall.beat(f"n{number}")
        hall.beat(f"n{number}", leaves=True)
    hall.after(COMINGS_S + 1)
    assert (len(hall.roll), len(hall.roll._names)) == (0, 0)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        b"\x91" * 100_000,
        presence.encode(presence.Beat(presence.VERSION + 1, "http://a:1", b"", 1.0, 1.0)),
        presence.encode(presence.Beat(presence.VERSION, "http://a:1", b"", 0.0, 1.0)),
        presence.encode(presence.Beat(presence.VERSION, "http://a:1", b"", float("nan"), 1.0)),
        presence.encode(presence.Beat(presence.VERSION, "http://a:1", b"", 1.0, -1.0)),
        presence.encode(presence.Beat(presence.VERSION, "http://a:1", b"x" * presence.MAX_NBYTES, 1.0, 1.0)),
    ],
)
def test_what_is_no_beat_is_refused(frame: bytes) -> None:
    with pytest.raises(ProtocolError):
        presence.decode(frame)
