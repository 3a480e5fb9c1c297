"""When a worker on a cluster counts as lost, and where it goes then: in virtual time, on a cluster of our own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from pdlink import __version__
from pdlink.fleet.child import ChildFailed
from pdlink.fleet.placing import NodeRoom
from pdlink.fleet.post import LAUNCH_S, STEADY_S, ClusterAway, Post, PostPlan, ProcessEnded, ProcessReport

PLAN = PostPlan("decode-0", "decode", {}, "ray.decode_resources", {"CPU": 1.0})
READY = {"url": "http://10.0.0.1:1"}
LOST_AFTER_S = 3.0


@dataclass
class Actor:
    node: str
    says: ProcessReport | Exception | None = None
    killed: bool = False


@dataclass
class FakeCluster:
    """Places a group on the first node that it may use."""

    same_place: str = "in the same place"
    other_place: str = "on another node"
    names: list[str] = field(default_factory=lambda: ["a", "b"])
    full: bool = False
    groups: list[tuple[str, frozenset[str]]] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    actors: list[Actor] = field(default_factory=list)

    def nodes(self) -> Sequence[NodeRoom]:
        return [NodeRoom(name, {"CPU": 1.0}, {}) for name in self.names]

    def reserve(self, plan: PostPlan, avoid: frozenset[str]) -> int:
        self.groups.append((next(name for name in self.names if name not in avoid), avoid))
        return len(self.groups) - 1

    def is_placed(self, group: int) -> bool:
        return not self.full

    def launch(self, group: int, plan: PostPlan) -> Actor:
        self.actors.append(Actor(self.groups[group][0]))
        return self.actors[-1]

    def hear(self, actor: Actor) -> ProcessReport | None:
        if isinstance(actor.says, Exception):
            raise actor.says
        return actor.says

    def kill(self, actor: Actor) -> None:
        actor.killed = True

    def release(self, group: int) -> None:
        self.released.append(group)


class Stage:
    """A post on that cluster, and its clock."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.cluster = FakeCluster()
        self.post = Post(self.cluster, PLAN, lost_after_s=LOST_AFTER_S, clock=lambda: self.now_s)

    def pass_time(self, seconds: float, step_s: float = 0.5) -> None:
        for _ in range(round(seconds / step_s)):
            self.now_s += step_s
            self.post.look()

    def say(self, **fields: Any) -> None:
        actor = self.cluster.actors[-1]
        actor.says = dataclasses.replace(ProcessReport(actor.node, version=__version__), **fields)

    def become_ready(self) -> Actor:
        self.pass_time(1.0)
        self.say(facts=READY)
        self.pass_time(0.5)
        assert self.post.ready
        return self.cluster.actors[-1]


@pytest.fixture
def stage() -> Stage:
    return Stage()


def test_it_is_reserved_launched_and_ready_in_this_order(stage: Stage) -> None:
    assert stage.post.doing == "waiting for 1 CPU"
    stage.pass_time(1.0)
    assert (len(stage.cluster.groups), len(stage.cluster.actors), stage.post.url) == (1, 1, "")
    assert stage.post.doing == "starting an actor"
    stage.say(doing="loading torch")
    stage.pass_time(0.5)
    assert (stage.post.doing, stage.post.ready) == ("loading torch", False)
    stage.say(facts=READY)
    stage.pass_time(0.5)
    assert (stage.post.url, len(stage.cluster.actors)) == (READY["url"], 1)


def test_it_waits_for_room_as_long_as_it_takes(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    stage.cluster.full = True
    stage.pass_time(60.0)
    assert (len(stage.cluster.groups), stage.cluster.actors) == (1, [])
    assert [record.message for record in caplog.records] == ["decode-0 waits for a node with 1 CPU free"]


def test_an_actor_that_served_for_long_and_died_is_replaced_at_once_in_the_same_place(stage: Stage) -> None:
    first = stage.become_ready()
    stage.pass_time(STEADY_S)
    first.says = ProcessEnded("SIGKILL")
    stage.pass_time(0.5)
    assert (first.killed, stage.post.ready) == (True, False)
    stage.pass_time(0.5)
    assert (len(stage.cluster.actors), len(stage.cluster.groups), stage.cluster.released) == (2, 1, [])


def test_a_silent_actor_is_replaced_on_another_node_after_its_time_and_not_before(stage: Stage) -> None:
    first = stage.become_ready()
    first.says = None
    stage.pass_time(LOST_AFTER_S)
    assert (stage.post.ready, first.killed) == (True, False)
    stage.pass_time(1.5)
    assert (first.killed, stage.cluster.released) == (True, [0])
    assert stage.cluster.groups[1] == ("b", frozenset("a"))
    assert stage.cluster.actors[-1].node == "b"


def test_a_silent_actor_on_the_only_node_is_replaced_there(stage: Stage) -> None:
    stage.cluster.names = ["a"]
    stage.become_ready().says = None
    stage.pass_time(LOST_AFTER_S + 1.5)
    assert stage.cluster.groups[1:] == [("a", frozenset())]


def test_a_node_is_suspected_for_a_minute(stage: Stage) -> None:
    stage.become_ready().says = None
    stage.pass_time(LOST_AFTER_S + 1.5)
    stage.become_ready()
    stage.pass_time(70.0)
    stage.cluster.actors[-1].says = None
    stage.pass_time(LOST_AFTER_S + 1.5)
    assert stage.cluster.groups[2] == ("a", frozenset("b"))


def test_a_new_actor_has_more_time_for_its_first_word(stage: Stage) -> None:
    stage.pass_time(LAUNCH_S)
    assert len(stage.cluster.actors) == 1
    stage.pass_time(3.0)
    assert (len(stage.cluster.actors), stage.cluster.released) == (2, [0])


def test_failures_in_a_row_make_pauses_that_grow_and_a_steady_worker_ends_them(stage: Stage) -> None:
    times_s = []
    for _ in range(4):
        stage.become_ready().says = ProcessEnded("again")
        stage.pass_time(0.5)
        lost_s, count = stage.now_s, len(stage.cluster.actors)
        while len(stage.cluster.actors) == count:
            stage.pass_time(0.5)
        times_s.append(stage.now_s - lost_s)
    assert times_s == [0.5, 1.0, 2.0, 4.0]
    assert stage.post.num_failures == 4
    stage.become_ready()
    stage.pass_time(11.0)
    assert stage.post.num_failures == 0


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"failed": "decode-0: model.path: no such directory"}, "decode-0: model.path: no such directory"),
        (
            {"version": "0.0.1"},
            f"decode-0: pdlink 0.0.1 on node a, expected {__version__} as here; install the same",
        ),
    ],
)
def test_a_worker_that_cannot_run_where_it_never_ran_ends_the_start(
    stage: Stage, fields: dict[str, str], said: str
) -> None:
    stage.pass_time(1.0)
    stage.say(**fields)
    with pytest.raises(ChildFailed, match=said.replace(".", r"\.")):
        stage.pass_time(0.5)


def test_actors_that_die_before_they_are_ready_end_the_start_after_three(stage: Stage) -> None:
    for _ in range(2):
        while stage.post.actor is None:
            stage.pass_time(0.5)
        stage.cluster.actors[-1].says = ProcessEnded("No module named 'pdlink'")
        stage.pass_time(0.5)
    while stage.post.actor is None:
        stage.pass_time(0.5)
    stage.cluster.actors[-1].says = ProcessEnded("No module named 'pdlink'")
    with pytest.raises(ChildFailed, match="No module named 'pdlink'"):
        stage.pass_time(0.5)


def test_a_worker_that_cannot_run_any_more_goes_to_another_node(stage: Stage) -> None:
    stage.become_ready()
    stage.say(failed="out of memory")
    stage.pass_time(1.5)
    assert stage.cluster.groups[1] == ("b", frozenset("a"))


def test_its_end_gives_back_the_actor_and_the_room(stage: Stage) -> None:
    actor = stage.become_ready()
    stage.post.end()
    assert (actor.killed, stage.cluster.released, stage.post.actor) == (True, [0], None)


def test_a_worker_of_another_version_on_a_node_that_came_later_ends_nobody_else(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    stage.become_ready().says = ProcessEnded("SIGKILL")
    stage.pass_time(2.0)
    stage.say(version="0.0.1", facts=READY)
    stage.pass_time(0.5)
    assert not stage.post.ready
    assert f"cannot run there (pdlink 0.0.1 on node a, expected {__version__} as here" in caplog.text
    stage.pass_time(5.0)
    assert stage.cluster.groups[-1] == ("b", frozenset("a"))
    stage.become_ready()


@pytest.mark.parametrize("question", ["reserve", "is_placed", "launch", "hear"])
def test_a_cluster_that_does_not_answer_for_a_while_ends_nothing(
    question: str, stage: Stage, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if question == "hear":
        stage.become_ready()

    def away(*_: object) -> None:
        raise ClusterAway("the head is gone")

    with monkeypatch.context() as patch:
        patch.setattr(stage.cluster, question, away)
        stage.pass_time(60.0)
    stage.pass_time(1.5)
    if question != "hear":
        stage.become_ready()
    assert stage.post.ready
    assert (stage.post.num_failures, len(stage.cluster.actors)) == (0, 1)
    told = [record.message for record in caplog.records]
    assert told == [
        "decode-0: the cluster does not answer (the head is gone); asking again",
        "decode-0: the cluster answers again",
    ]
