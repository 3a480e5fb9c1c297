"""`Post`: one worker that must run somewhere. Decides when it is placed, lost, and started again, and where not.

Nothing here waits, and nothing knows Ray: a `Cluster` does what is decided, and says what it sees. Ray would restart
an actor by itself, but only after its own health checks: 15 s for a node that was killed, 60 s for one that hangs. So
actors are never restarted: a lost one is replaced, and for a while not on the node where it was lost.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from pdlink import __version__
from pdlink.launch.placing import in_words, to_avoid
from pdlink.serve.keeper import STEADY_S, ChildFailed, delay_s

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdlink.launch.placing import Node, Resources

log = logging.getLogger("pdlink.ray")

LAUNCH_S = 90.0
"""Until a new actor answers for the first time: a Python process with Ray's modules, 1 s on an idle node, 30 s on one
with eight times as much to do as it has cores."""
_TRIES = 3
"""An actor that dies so often before it ever answers has no chance."""
_ROOM_S = 10.0
"""A post that waits longer for room says so."""
_SUSPECT_S = 60.0
"""A node where a worker was lost is avoided for so long."""


class ActorDied(Exception):
    """The cluster knows that this actor has ended, and why."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a post is about."""

    label: str
    role: str
    settings: dict[str, Any]
    setting: str
    """The setting that `need` comes from."""
    need: Resources


@dataclass(frozen=True, slots=True)
class State:
    """What an actor says of its worker."""

    node: str
    facts: dict[str, Any] = field(default_factory=dict)
    """Of the present life, once it is ready; empty before."""
    doing: str = ""
    failed: str = ""
    """Why the worker cannot run here."""
    warnings: tuple[str, ...] = ()
    version: str = ""
    """Of pdlink on that node."""


class Cluster(Protocol):
    """What posts need of one. No call waits."""

    def nodes(self) -> Sequence[Node]: ...
    def reserve(self, plan: Plan, avoid: frozenset[str]) -> Any:
        """Ask for a group: room for one worker on one node."""
        ...

    def is_placed(self, group: Any) -> bool: ...
    def launch(self, group: Any, plan: Plan) -> Any:
        """An actor in that group that starts the worker."""
        ...

    def hear(self, actor: Any) -> State | None:
        """Its newest state, once; it is asked again by itself. Raises ActorDied."""
        ...

    def kill(self, actor: Any) -> None: ...
    def release(self, group: Any) -> None: ...


class Post:
    """Call `look` a few times a second."""

    def __init__(
        self, cluster: Cluster, plan: Plan, lost_after_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.plan = plan
        self.state: State | None = None
        """What was heard last of the present actor."""
        self.actor: Any = None
        self.num_failures = 0
        """In a row."""
        self._cluster, self._lost_after_s, self._clock = cluster, lost_after_s, clock
        self._group: Any = None
        self._since_s = clock()
        """Of the present step: reserved, or launched, or heard."""
        self._again_s = 0.0
        self._ready_s: float | None = None
        self._lost_s: float | None = None
        self._ever_heard = self._ever_ready = False
        self._suspected: dict[str, float] = {}
        """Node to the end of suspicion."""
        self._told = False

    @property
    def ready(self) -> bool:
        return self._ready_s is not None

    @property
    def url(self) -> str:
        """Of the worker, if it is ready."""
        return str(self.state.facts["url"]) if self.ready and self.state is not None else ""

    @property
    def doing(self) -> str:
        if self.state is not None:
            return self.state.doing
        return "starting an actor" if self.actor is not None else f"waiting for {in_words(self.plan.need)}"

    def look(self) -> None:
        """Take in what is seen, and do what is due. Raises ChildFailed if the worker fails before it ever ran."""
        now_s = self._clock()
        if self.actor is not None:
            self._hear(now_s)
        elif now_s < self._again_s:
            pass
        elif self._group is None:
            self._reserve(now_s)
        elif self._cluster.is_placed(self._group):
            self.actor, self.state, self._since_s = self._cluster.launch(self._group, self.plan), None, now_s
        elif now_s - self._since_s > _ROOM_S and not self._told:
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

    def _hear(self, now_s: float) -> None:
        try:
            state = self._cluster.hear(self.actor)
        except ActorDied as error:
            if not self._ever_heard and self.num_failures + 1 >= _TRIES:
                raise ChildFailed(f"{self.plan.label}: {error}") from None
            self._lose(now_s, f"its actor has died ({error})", elsewhere=False)
            return
        if state is None:
            limit_s = self._lost_after_s if self.state is not None else LAUNCH_S
            if now_s - self._since_s > limit_s:
                self._lose(now_s, f"its actor has not answered for {limit_s:g} s", elsewhere=True)
            return
        self.state, self._since_s, self._ever_heard = state, now_s, True
        if state.version != __version__:
            raise ChildFailed(
                f"{self.plan.label}: got pdlink {state.version} on node {state.node}; limit {__version__}, as here; "
                "install the same on all nodes"
            )
        if state.failed:
            if not self._ever_ready:
                raise ChildFailed(f"{self.plan.label}: {state.failed}")
            self._lose(now_s, state.failed, elsewhere=True)
        elif state.facts and self._ready_s is None:
            self._ready_s, self._ever_ready = now_s, True
            if self._lost_s is not None:
                log.warning("%s is back after %.1f s: %s", self.plan.label, now_s - self._lost_s, self.url)
        elif self._ready_s is not None and now_s - self._ready_s >= STEADY_S:
            self.num_failures = 0

    def _lose(self, now_s: float, why: str, *, elsewhere: bool) -> None:
        self._cluster.kill(self.actor)  # if it runs on behind a broken network, it ends when it hears that
        node = self.state.node if self.state is not None else ""
        self.actor = self.state = None
        self.num_failures += 1
        self._lost_s = now_s if self._ready_s is not None or self._lost_s is None else self._lost_s
        self._ready_s = None
        self._again_s = now_s + delay_s(self.num_failures - 1)
        if elsewhere:
            self._cluster.release(self._group)
            self._group = None
            if node:
                self._suspected[node] = now_s + _SUSPECT_S
        self._since_s, self._told = now_s, False
        where = "on another node if there is one" if elsewhere else "in the same place"
        log.warning("%s: %s; starting it again %s", self.plan.label, why, where)
