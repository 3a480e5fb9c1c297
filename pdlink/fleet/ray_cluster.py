"""`RayCluster`: a Ray cluster as posts need one. The only file that calls Ray's core."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pdlink.errors import ConfigError
from pdlink.fleet.launcher import Launcher
from pdlink.fleet.placing import NodeRoom
from pdlink.fleet.post import ClusterAway, ProcessEnded

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdlink.fleet.post import PostPlan, ProcessReport

_ASK_S = 0.5
"""Between two questions to an actor; one takes it a millisecond."""
_LOOK_S = 0.2
"""Between two looks at a group that is not placed yet."""
_OPTIONS = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
"""Resources that Ray's options have own names for."""


class OnRay(Launcher):
    """The launcher inside an actor: with the address and the name of its node."""

    def __init__(self, label: str, role: str, settings: dict[str, Any], token: str) -> None:
        import ray

        nice = _as_urgent_as_others()
        node = ray.get_runtime_context().get_node_id()
        super().__init__(label, role, settings, token, ray.util.get_node_ip_address(), node)
        if nice > 0:
            self.warnings = (
                f"niceness: got {nice} from Ray, which this user cannot lower: other processes of the node come "
                "first; start its nodes with RAY_worker_niceness=0 in the environment",
            )


def _as_urgent_as_others() -> int:
    """Undo that Ray makes its workers nice (15 by default), which ours would inherit; returns what is left of it."""
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, min(0, os.getpriority(os.PRIO_PROCESS, 0)))
    return os.getpriority(os.PRIO_PROCESS, 0)


@dataclass(slots=True)
class PlacementGroup:
    """A placement group of one bundle."""

    group: Any
    looked_s: float = 0.0
    placed: bool = False


@dataclass(slots=True)
class Actor:
    handle: Any
    question: Any = None
    """Of the answer to come."""
    asked_s: float = 0.0


class RayCluster:
    """Connected from the constructor to `close`. Of one thread."""

    same_place = "in the same place"
    other_place = "on another node if there is one"

    def __init__(self, address: str, token: str) -> None:
        """token: of the deployment. Raises ConfigError if there is no cluster at this address."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._ray, self._within, self._token = ray, PlacementGroupSchedulingStrategy, token
        self._groups = importlib.import_module("ray.util.placement_group")  # ray.util has a function of this name
        try:
            ray.init(address=address, logging_level=logging.WARNING)
        except (ConnectionError, RuntimeError, ValueError) as error:
            reason = str(error).strip().partition("\n")[0][:300]
            raise ConfigError(
                f"ray.address: no Ray cluster runs at {address} ({reason}); start one with `ray start --head`, or "
                "give the HOST:PORT that it printed"
            ) from None
        self._actor_class = ray.remote(OnRay)
        self.host = str(ray.util.get_node_ip_address())
        """Address of this host that all nodes reach."""

    def close(self) -> None:
        """Every group and actor that is left ends with the connection."""
        self._ray.shutdown()

    @contextlib.contextmanager
    def _asked(self) -> Iterator[None]:
        """Of Ray's own processes, which may be gone for a while: the head of a cluster that starts again.

        Raises ClusterAway.
        """
        try:
            yield
        except (self._ray.exceptions.RayError, ConnectionError, TimeoutError) as error:
            raise ClusterAway(_last_line(error)) from None

    def nodes(self) -> list[NodeRoom]:
        """Raises ClusterAway, as all that follow but `kill` and `release`."""
        with self._asked():
            free = self._ray._private.state.available_resources_per_node()
            return [
                NodeRoom(each["NodeID"], dict(each["Resources"]), dict(free.get(each["NodeID"], {})))
                for each in self._ray.nodes()
                if each["Alive"]
            ]

    def reserve(self, plan: PostPlan, avoid: frozenset[str]) -> PlacementGroup:
        where = [{"ray.io/node-id": f"!in({','.join(sorted(avoid))})"}] if avoid else None
        with self._asked():
            made = self._groups.placement_group(
                [dict(plan.need)], strategy="STRICT_PACK", name=f"pdlink-{plan.label}", bundle_label_selector=where
            )
        return PlacementGroup(made)

    def is_placed(self, group: PlacementGroup) -> bool:
        """Also again, once it was: its node may have died."""
        now_s = time.monotonic()
        if now_s - group.looked_s >= _LOOK_S:
            group.looked_s = now_s
            with self._asked():
                group.placed = self._groups.placement_group_table(group.group)["state"] == "CREATED"
        return group.placed

    def launch(self, group: PlacementGroup, plan: PostPlan) -> Actor:
        options: dict[str, Any] = {"num_cpus": 0, "resources": {}}
        for name, amount in plan.need.items():
            if name in _OPTIONS:
                options[_OPTIONS[name]] = amount
            else:
                options["resources"][name] = amount
        within = self._within(group.group, placement_group_bundle_index=0)
        made = self._actor_class.options(
            name=None, max_restarts=0, max_task_retries=0, scheduling_strategy=within, **options
        )
        with self._asked():
            return Actor(made.remote(plan.label, plan.role, plan.settings, self._token))

    def hear(self, actor: Actor) -> ProcessReport | None:
        if actor.question is None:
            if time.monotonic() - actor.asked_s >= _ASK_S:
                self._ask(actor)
            return None
        with self._asked():
            done, _ = self._ray.wait([actor.question], timeout=0)
        if not done:
            return None
        question, actor.question = actor.question, None
        errors = self._ray.exceptions
        try:
            report: ProcessReport = self._ray.get(question)
        except errors.ActorUnavailableError:
            return None  # what Ray says of a node that is gone, until it knows
        except errors.RayError as error:
            raise ProcessEnded(f"lost its actor ({_last_line(error)})") from None
        return report

    def _ask(self, actor: Actor) -> None:
        with self._asked():
            actor.asked_s, actor.question = time.monotonic(), actor.handle.report.remote()

    def stop(self, actors: list[Actor], drain_s: float, timeout_s: float) -> None:
        """Let the workers of these drain; returns when they have ended, or after `timeout_s`."""
        with contextlib.suppress(self._ray.exceptions.RayError):
            asked = [actor.handle.stop.remote(drain_s) for actor in actors]
            if asked:
                self._ray.wait(asked, num_returns=len(asked), timeout=timeout_s)

    def kill(self, actor: Actor) -> None:
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.kill(actor.handle)

    def release(self, group: PlacementGroup) -> None:
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._groups.remove_placement_group(group.group)


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:300] if lines else type(error).__name__
