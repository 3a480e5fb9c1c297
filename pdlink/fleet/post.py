"""`Post`: one process that must run somewhere. Decides when it is started, lost, and started again, and where not.

A post is away (until its next start is due, and there is room), starting, or ready. Each failure in a row makes the
next start later. Nothing here waits, and nothing knows how processes are started: a `Cluster` does what is decided,
and says what it sees. `Here` is the one of this host; `ray_cluster.py` has Ray's. Ray would restart an actor by
itself, but only after its own health checks: 15 s for a node that was killed, 60 s for one that hangs. So actors are
never restarted: a lost one is replaced, and for a while not on the node where it was lost.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from pdlink import __version__
from pdlink.fleet.child import ChildFailed, how_it_ended
from pdlink.fleet.placing import in_words, no_room, to_avoid

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdlink.fleet.child import Restartable
    from pdlink.fleet.placing import NodeRoom, Resources

log = logging.getLogger("pdlink.up")

MAX_DELAY_S = 30.0
STEADY_S = 10.0
"""Ending within this time after it was ready counts as a failed start."""
_FIRST_DELAY_S = 0.5
LAUNCH_S = 90.0
"""Until a new process is heard of for the first time: an actor is a Python process with Ray's modules, 1 s on an idle
node, 30 s on one with eight times as much to do as it has cores."""
_AWAY_S = 1.0
"""Between two questions to a cluster that does not answer."""
_TRIES = 3
"""A process that dies so often before it is ready for the first time has no chance."""
_ROOM_S = 10.0
"""A post that waits longer for room says so."""
_SUSPECT_S = 60.0
"""A node where a worker was lost is avoided for so long."""


def delay_s(num_failures: int) -> float:
    return min(MAX_DELAY_S, _FIRST_DELAY_S * 2 ** min(num_failures - 1, 10)) if num_failures else 0.0


class ProcessEnded(Exception):
    """This life of a process is over; the message says how, with the process as its subject."""


class ClusterAway(Exception):
    """The cluster could not be asked now; the message says why. Nothing is known to have changed."""


@dataclass(frozen=True, slots=True)
class PostPlan:
    """What a post is about."""

    label: str
    role: str
    settings: dict[str, Any] = field(default_factory=dict)
    setting: str = ""
    """The setting that `need` comes from."""
    need: Resources = field(default_factory=dict)
    """What a node must have free."""


@dataclass(frozen=True, slots=True)
class ProcessReport:
    """What is known of a process."""

    node: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    """Of the present life, once it is ready; empty before."""
    doing: str = ""
    failed: str = ""
    """Why it cannot run here, with its label."""
    warnings: tuple[str, ...] = ()
    version: str = __version__
    """Of pdlink on that node."""


class Cluster(Protocol):
    """What posts need of one. No call waits."""

    same_place: str
    other_place: str
    """Where a process is started again: one that has ended by itself, and one that cannot run where it was."""

    def nodes(self) -> Sequence[NodeRoom]: ...
    def reserve(self, plan: PostPlan, avoid: frozenset[str]) -> Any:
        """Ask for a group: room for one process on one node."""
        ...

    def is_placed(self, group: Any) -> bool: ...
    def launch(self, group: Any, plan: PostPlan) -> Any:
        """An actor in that group that starts the process. Raises OSError if there is no process to be had."""
        ...

    def hear(self, actor: Any) -> ProcessReport | None:
        """Its newest report, once; it is asked again by itself. Raises Ended."""
        ...

    def kill(self, actor: Any) -> None: ...
    def release(self, group: Any) -> None: ...


class Here:
    """This host, for the one process that `start` starts: there is always room, and it keeps its ports."""

    same_place = other_place = "on the same ports"

    def __init__(self, start: Callable[[], Restartable]) -> None:
        self._start = start
        self.child: Restartable | None = None
        """Over all its lives."""
        self._ready = False

    def nodes(self) -> Sequence[NodeRoom]:
        return ()

    def reserve(self, plan: PostPlan, avoid: frozenset[str]) -> object:
        return plan

    def is_placed(self, group: object) -> bool:
        return True

    def launch(self, group: object, plan: PostPlan) -> Restartable:
        self._ready = False
        if self.child is None:
            self.child = self._start()
        else:
            self.child.again()
        return self.child

    def hear(self, actor: Restartable) -> ProcessReport:
        if self._ready and actor.process.poll() is not None:
            raise ProcessEnded(how_it_ended(actor.process.returncode))
        try:
            self._ready = self._ready or actor.look()
        except ChildFailed as error:
            if (actor.process.poll() or 0) < 0:  # by others: it may well be able to run
                raise ProcessEnded(str(error).removeprefix(f"{actor.label} ")) from None
            return ProcessReport(doing=actor.doing, failed=str(error), warnings=tuple(actor.warnings))
        return ProcessReport("", actor.facts if self._ready else {}, actor.doing, warnings=tuple(actor.warnings))

    def kill(self, actor: Restartable) -> None:
        actor.kill()

    def release(self, group: object) -> None:
        if self.child is not None:
            self.child.close()


class Post:
    """Call `look` a few times a second."""

    def __init__(
        self,
        cluster: Cluster,
        plan: PostPlan,
        *,
        start_timeout_s: float = math.inf,
        lost_after_s: float = math.inf,
        place_timeout_s: float = math.inf,
        max_failures: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """start_timeout_s: longest start of a process that was ready before. lost_after_s: longest silence of one
        that was heard. place_timeout_s: longest wait for its first room. max_failures: give up after this many failed
        starts in a row; None never does."""
        self.plan = plan
        self.report: ProcessReport | None = None
        """What was heard last of the present life."""
        self.actor: Any = None
        """None while it is away."""
        self.num_failures = 0
        """Failed starts in a row."""
        self._cluster, self._clock, self._max_failures = cluster, clock, max_failures
        self._start_timeout_s, self._lost_after_s = start_timeout_s, lost_after_s
        self._place_timeout_s = place_timeout_s
        self._group: Any = None
        self._began_s = self._since_s = clock()
        """`_since_s`: of the present step: reserved, or launched, or heard."""
        self._launched_s = 0.0
        self._again_s = self._away_s = 0.0
        self._is_away = False
        self._ready_s: float | None = None
        self._lost_s: float | None = None
        self._num_lives = 0
        self._ever_ready = False
        self._suspected: dict[str, float] = {}
        """Node to the end of suspicion."""
        self._told = False

    @property
    def ready(self) -> bool:
        return self._ready_s is not None

    @property
    def url(self) -> str:
        """Of the process, if it is ready."""
        return str(self.report.facts["url"]) if self.ready and self.report is not None else ""

    @property
    def doing(self) -> str:
        if self.report is not None:
            return self.report.doing
        return "starting an actor" if self.actor is not None else f"waiting for {in_words(self.plan.need)}"

    def look(self) -> None:
        """Take in what is seen, and do what is due.

        Raises ChildFailed for a process that cannot run where it never ran, and for too many failures in a row,
        PlacementFailed where there is no room for it.
        """
        now_s = self._clock()
        if now_s < self._away_s:
            return
        try:
            self._look(now_s)
        except ClusterAway as error:
            if not self._is_away:
                log.warning("%s: the cluster does not answer (%s); asking again", self.plan.label, error)
            self._is_away, self._away_s = True, now_s + _AWAY_S
            return
        if self._is_away:
            log.warning("%s: the cluster answers again", self.plan.label)
            self._is_away = False

    def _look(self, now_s: float) -> None:
        if self.actor is not None:
            self._hear(now_s)
            return
        if now_s < self._again_s:
            return
        if self._group is None:
            self._reserve(now_s)
        if self._cluster.is_placed(self._group):
            self._launch(now_s)
            return
        waited_s = now_s - self._began_s
        if not self._num_lives and waited_s > self._place_timeout_s:
            plan = self.plan
            raise no_room(plan.label, plan.setting, plan.need, self._cluster.nodes(), waited_s)
        if now_s - self._since_s > _ROOM_S and not self._told:
            self._told = True
            log.warning("%s waits for a node with %s free", self.plan.label, in_words(self.plan.need))

    def end(self) -> None:
        """Give up its actor and its room."""
        if self.actor is not None:
            self._cluster.kill(self.actor)
        if self._group is not None:
            self._cluster.release(self._group)
        self.actor = self._group = None

    def _reserve(self, now_s: float) -> None:
        self._suspected = {node: end_s for node, end_s in self._suspected.items() if end_s > now_s}
        avoid = frozenset(self._suspected)
        if avoid:
            avoid = to_avoid(self.plan.need, self._cluster.nodes(), avoid)
        self._group, self._since_s, self._told = self._cluster.reserve(self.plan, avoid), now_s, False

    def _launch(self, now_s: float) -> None:
        self._num_lives += 1
        self.report, self._launched_s, self._since_s = None, now_s, now_s
        try:
            self.actor = self._cluster.launch(self._group, self.plan)
        except OSError as error:  # no process or descriptor left
            self._lose(now_s, f"could not be started ({error})", elsewhere=False)

    def _hear(self, now_s: float) -> None:
        try:
            report = self._cluster.hear(self.actor)
        except (ProcessEnded, OSError) as error:
            self._lose(now_s, str(error), elsewhere=False)
            return
        if report is None:
            limit_s = self._lost_after_s if self.report is not None else LAUNCH_S
            if now_s - self._since_s > limit_s:
                self._lose(now_s, f"has not answered for {limit_s:g} s", elsewhere=True)
            return
        self.report, self._since_s = report, now_s
        if report.version != __version__:
            why = f"pdlink {report.version} on node {report.node}, expected {__version__} as here"
            if not self._ever_ready:
                raise ChildFailed(f"{self.plan.label}: {why}; install the same on all nodes")
            # A node that came later, or was updated: the others go on.
            self._lose(now_s, f"cannot run there ({why}; install the same on all nodes)", elsewhere=True)
            return
        if report.failed:
            if not self._ever_ready:
                raise ChildFailed(report.failed)
            self._lose(now_s, f"could not be started again ({report.failed})", elsewhere=True)
        elif report.facts and self._ready_s is None:
            self._ready_s, self._ever_ready = now_s, True
            if self._lost_s is not None:  # a warning, like its loss: a log that shows the one must show the other
                log.warning("%s is back after %.1f s: %s", self.plan.label, now_s - self._lost_s, self.url)
                self._lost_s = None
        elif self._ready_s is not None:
            if now_s - self._ready_s >= STEADY_S:
                self.num_failures = 0
        elif self._ever_ready and now_s - self._launched_s > self._start_timeout_s:
            self._lose(now_s, f"was not ready within {self._start_timeout_s:.0f} s", elsewhere=True)

    def _lose(self, now_s: float, why: str, *, elsewhere: bool) -> None:
        """elsewhere: not in the same place if there is another one."""
        if self.actor is not None:
            self._cluster.kill(self.actor)  # if it runs on behind a broken network, it ends when it hears that
        node = self.report.node if self.report is not None else ""
        steady = self._ready_s is not None and now_s - self._ready_s >= STEADY_S
        self.num_failures = 0 if steady else self.num_failures + 1
        self._lost_s = now_s if self._lost_s is None else self._lost_s
        self.actor = self.report = self._ready_s = None
        if not self._ever_ready and self._num_lives >= _TRIES:
            raise ChildFailed(f"{self.plan.label} {why}")
        if self._max_failures is not None and self.num_failures >= self._max_failures:
            raise ChildFailed(f"{self.plan.label} {why}: failure {self.num_failures} in a row (max_failed_starts)")
        wait_s = delay_s(self.num_failures)
        self._again_s = now_s + wait_s
        if elsewhere:
            self._cluster.release(self._group)
            self._group = None
            if node:
                self._suspected[node] = now_s + _SUSPECT_S
        where = self._cluster.other_place if elsewhere else self._cluster.same_place
        self._since_s, self._told = now_s, False
        when = f"in {wait_s:g} s" if wait_s else "now"
        log.warning("%s %s; starting it again %s %s", self.plan.label, why, where, when)
