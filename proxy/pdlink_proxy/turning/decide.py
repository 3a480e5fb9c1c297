"""`Decider`: whether a worker should take the other role, and which one. No I/O and no clock.

Of what two pools have to do follows the share of it that is done in time: all, up to the usable load of a pool, then
as much less as the load is more. A turn is worth it if the worse of the two pools does better by a margin, judged at
the loads that the pools would have *after* it, and counting the time in which the worker drains and serves neither.
Two pools of one to three workers would else turn back and forth for ever (dynamo PR #9294).

The same turn must be worth it in several windows in a row, and a turn back soon after by more. Then nothing happens
for as long as a drain may take, and all windows begin anew. While a worker of a group drains, turns, comes or goes,
its group decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from .demand import Group, Window, slope_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pdlink.config import RolesConfig

    from .demand import Seen, Side

OTHER: dict[Side, Side] = {"prefill": "decode", "decode": "prefill"}
_BACK = 4.0
"""Margins that a turn back is to be worth within the time for which the last one was to be of use: what is measured
of two pools without enough workers differs by a margin from minute to minute."""
_LEAST_LOOKS = 3
"""Of a worker in a window, or it counts for nothing."""


class Pool(NamedTuple):
    """One side of a group over the last window."""

    workers: int
    demand: float
    """In workers."""


class Turn(NamedTuple):
    """A worker should take the other role."""

    url: str
    epoch: str
    role: Side
    """To serve from then on."""
    why: str


class Judged(NamedTuple):
    """A group at the end of a window."""

    group: Group
    prefill: Pool
    decode: Pool
    now: float
    """Share of the work that is done in time; `after` with a worker turned to that role."""
    after: dict[Side, float]
    worth: Side | None
    """The role that it is worth turning a worker to."""
    waits_for: str
    """Why nothing follows from that now; empty if it does."""


@dataclass(slots=True)
class _Group:
    windows: dict[tuple[str, str, Side], Window] = field(default_factory=dict)
    """By URL, life and role."""
    unsettled: str = ""
    """Who was not settled in this window."""
    worth: Side | None = None
    times: int = 0
    """Windows in a row in which it was that."""


class Decider:
    """Of one proxy."""

    def __init__(self, config: RolesConfig) -> None:
        self._config = config
        self._groups: dict[Group, _Group] = {}
        self._ends_s: float | None = None
        """Of this window."""
        self._rest_until_s = 0.0
        self._last: dict[Group, tuple[Side, float]] = {}
        """Role and time of the last turn."""
        self.judged: list[Judged] = []
        """At the end of the last window."""

    def look(self, now_s: float, seen: Sequence[Seen], queued: int) -> Turn | None:
        """Take in all workers that serve one role. queued: requests that wait in the proxy for room.

        At the end of a window: the turn that is to be made, if any. The caller says by `turned` that it is over.
        """
        if self._ends_s is None:
            self._ends_s = now_s + self._config.window_s
        slope_s = slope_of(seen)
        for each in seen:
            group = self._groups.setdefault(each.group, _Group())
            if not each.settled:
                group.unsettled = each.health.name
                continue
            key = each.url, each.health.epoch, each.side
            group.windows.setdefault(key, Window()).look(each, self._config.token_s, slope_s)
        if now_s < self._ends_s:
            return None
        self._ends_s = now_s + self._config.window_s
        present = {each.group for each in seen}
        self._groups = {group: known for group, known in self._groups.items() if group in present}
        self._last = {group: last for group, last in self._last.items() if group in present}
        self.judged, found = [], list[tuple[float, Turn, Group]]()
        for name, group in self._groups.items():
            of_group = [each for each in seen if each.group == name]
            judged, turn = self._judge(name, group, of_group, queued, now_s)
            self.judged.append(judged)
            if turn is not None and judged.worth is not None:
                found.append((judged.after[judged.worth] - judged.now, turn, name))
            group.windows, group.unsettled = {}, ""
        if not found:
            return None
        _, best, where = max(found)
        self._last[where] = best.role, now_s
        return best

    def turned(self, now_s: float) -> None:
        """The turn is over, or was refused: begin anew after a rest."""
        self._groups.clear()
        self._ends_s = None
        self._rest_until_s = now_s + self._config.drain_s

    def _judge(
        self, name: Group, group: _Group, seen: Sequence[Seen], queued: int, now_s: float
    ) -> tuple[Judged, Turn | None]:
        config = self._config
        prefill, decode = self._pool(group, "prefill", 0), self._pool(group, "decode", queued)
        if gone := {url for url, _, _ in group.windows} - {each.url for each in seen}:
            group.unsettled = group.unsettled or min(gone)
        now = self._attained(prefill.demand, prefill.workers, decode.demand, decode.workers)
        after = {role: self._after(prefill, decode, role) for role in OTHER}
        least = {"prefill": config.min_prefill, "decode": config.min_decode}
        sizes = {"prefill": prefill.workers, "decode": decode.workers}
        willing = {role: self._willing(group, seen, OTHER[role]) for role in OTHER}
        best: Side = max(OTHER, key=lambda role: after[role])
        worth: Side | None = best
        waits_for = ""
        if after[best] < now * (1 + self._margin(name, best, now_s)):
            worth, waits_for = None, "no turn is worth it"
        elif group.unsettled:
            worth, waits_for = None, f"{group.unsettled} comes, goes, drains or turns"
        elif sizes[OTHER[best]] <= least[OTHER[best]]:
            waits_for = f"{OTHER[best]} has {sizes[OTHER[best]]} workers, and keeps {least[OTHER[best]]}"
        elif willing[best] is None:
            waits_for = f"no {OTHER[best]} worker can turn"
        before, group.worth = group.worth, worth if not waits_for else None
        group.times = group.times + 1 if worth is not None and group.worth == before else int(not waits_for)
        turn = None
        if worth is not None and not waits_for:
            if group.times < config.windows:
                waits_for = f"worth it in {group.times} windows of {config.windows}"
            elif now_s < self._rest_until_s:
                waits_for = f"the last turn was less than {config.drain_s:g} s ago"
            else:
                chosen = willing[best]
                assert chosen is not None
                why = (
                    f"prefill: {prefill.demand:.2f} workers' work for {prefill.workers}; decode: {decode.demand:.2f} "
                    f"for {decode.workers}; in time now {now:.0%}, then {after[best]:.0%}"
                )
                turn = Turn(chosen.url, chosen.health.epoch, worth, why)
        return Judged(name, prefill, decode, now, after, worth, waits_for), turn

    def _margin(self, name: Group, role: Side, now_s: float) -> float:
        last, at_s = self._last.get(name, (role, 0.0))
        back = last != role and now_s - at_s < self._config.horizon_s
        return self._config.margin * (_BACK if back else 1.0)

    def _pool(self, group: _Group, side: Side, queued: int) -> Pool:
        windows = [window for (_, _, of), window in group.windows.items() if of == side]
        counted = [window for window in windows if len(window.kept) >= _LEAST_LOOKS]
        if side == "prefill":
            return Pool(len(counted), sum(window.prefill() for window in counted))
        demand = sum(window.decode() for window in counted)
        running = sum(sum(window.running) / len(window.running) for window in counted)
        return Pool(len(counted), demand * (1 + min(1.0, queued / running)) if running else demand)

    def _after(self, prefill: Pool, decode: Pool, role: Side) -> float:
        """Share of the work done in time until `horizon_s` after a worker began to turn to this role."""
        drains = min(1.0, self._config.drain_s / self._config.horizon_s)
        fewer = [prefill.workers, decode.workers]
        fewer[role == "prefill"] -= 1
        more = [fewer[0] + (role == "prefill"), fewer[1] + (role == "decode")]
        during, then = (self._attained(prefill.demand, p, decode.demand, d) for p, d in (fewer, more))
        return drains * during + (1 - drains) * then

    def _attained(self, prefill: float, num_prefill: int, decode: float, num_decode: int) -> float:
        """Share of the work that the worse of the two pools does in time."""
        return min(self._in_time(prefill, num_prefill), self._in_time(decode, num_decode))

    def _in_time(self, demand: float, workers: int) -> float:
        usable = workers * self._config.usable_load
        return 1.0 if demand <= usable else usable / demand

    def _willing(self, group: _Group, seen: Iterable[Seen], side: Side) -> Seen | None:
        """The worker of this side that has least to do and can turn."""

        def load(each: Seen) -> tuple[tuple[float, float], str]:
            return group.windows.get((each.url, each.health.epoch, each.side), Window()).left(), each.url

        willing = (each for each in seen if each.side == side and each.settled and each.can_turn)
        return min(willing, key=load, default=None)
