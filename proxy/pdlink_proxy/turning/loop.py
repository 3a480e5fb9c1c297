"""`RoleLoop`: looks at the workers, asks `Decider`, and makes the turn: POST /role, one at a time."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from pdlink.config import read_secrets

from ..http_connection import HttpError
from ..steps import Leg
from ..upstream import MAX_REPLY_NBYTES, answer_of, describe, printable
from ..worker import State
from .decide import Decider, Turn
from .demand import Seen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pdlink.config import RolesConfig

    from ..decisions import Decision
    from ..http_client import HttpClient
    from ..metrics import Metrics
    from ..pools import Pools
    from ..worker import Worker

log = logging.getLogger("pdlink.proxy")

_LOOKS = 10
"""In a window."""
_KEPT_TURNS = 32
_ANSWER_S = 5.0
"""For the answer to come, after the worker's own deadline."""
OUTCOMES = ("taken", "refused", "dry_run")


class Made(msgspec.Struct, frozen=True):
    """A turn that was asked for, or would have been."""

    at_s: float
    """Unix time of its end."""
    worker: str
    """Its URL."""
    role: str
    """To serve from then on."""
    outcome: str
    """Of `OUTCOMES`."""
    why: str
    said: str = ""
    """By the worker that refused."""
    took_s: float = 0.0


class RoleLoop:
    """Of one proxy; of its processes the first one has it. Belongs to its asyncio loop."""

    def __init__(self, config: RolesConfig, pools: Pools, metrics: Metrics, num_queued: Callable[[], int]) -> None:
        """num_queued: requests that wait in this proxy. Raises ConfigError for a key file without keys."""
        self._config, self._pools, self._metrics = config, pools, metrics
        self._client: HttpClient | None = None
        self._num_queued = num_queued
        self._key = read_secrets(config.admin_key_file, "roles.admin_key_file")[0] if config.admin_key_file else ""
        self.decider = Decider(config)
        self.turns: deque[Made] = deque(maxlen=_KEPT_TURNS)
        """Oldest first."""
        self._turning: Turn | None = None
        self._chance = random.SystemRandom()  # processes of equal seeds would wait equally long

    def begin(self, client: HttpClient) -> None:
        """client: to workers, as long as `follow` runs."""
        self._client = client

    async def follow(self) -> None:
        """Look, decide and turn until cancelled."""
        while True:
            workers = list(seen(self._pools))
            turn = self.decider.look(time.monotonic(), workers, self._num_queued())
            self._show()
            if turn is not None and await self._is_alone(turn, standing(workers, turn.url)):
                await self._make(turn)
            await asyncio.sleep(self._config.window_s / _LOOKS)

    async def _is_alone(self, turn: Turn, before: frozenset[Standing]) -> bool:
        """Whether nobody else turns workers now: proxies share nothing, and several may have decided the same.

        Each waits for a time by chance, up to a window, and looks again: who is later sees the worker of the first
        one drain, or in its new role, and makes no turn. Two within the same second or two may not see each other.
        """
        if self._config.mode != "on":
            return True
        await asyncio.sleep(self._chance.uniform(0.0, self._config.window_s))
        moved = before ^ standing(list(seen(self._pools)), turn.url)
        if not moved:
            return True
        url = min(each.url for each in moved)
        log.warning("roles: %s to %s: left, for %s has changed meanwhile", turn.url, turn.role, url)
        self.decider.turned(time.monotonic())
        return False

    async def _make(self, turn: Turn) -> None:
        began_s, outcome, said = time.monotonic(), "dry_run", ""
        if self._config.mode == "on":
            self._turning = turn
            try:
                outcome, said = await self._ask(turn)
            finally:
                self._turning = None
        took_s = round(time.monotonic() - began_s, 3)
        self.turns.append(Made(time.time(), turn.url, turn.role, outcome, turn.why, said, took_s))
        self._metrics.role_turns.inc(turn.role, outcome)
        self.decider.turned(time.monotonic())
        level = logging.WARNING if outcome != "dry_run" else logging.INFO
        log.log(level, "roles: %s to %s: %s%s (%s)", turn.url, turn.role, outcome, said and f": {said}", turn.why)

    async def _ask(self, turn: Turn) -> tuple[str, str]:
        """The outcome, and what the worker said where it refused."""
        body = {"role": turn.role, "epoch": turn.epoch, "deadline_s": self._config.drain_s}
        headers = {"Authorization": f"Bearer {self._key}"}
        assert self._client is not None
        try:
            async with asyncio.timeout(self._config.drain_s + _ANSWER_S):
                reply = await answer_of(
                    self._client,
                    "POST",
                    f"{turn.url}/role",
                    msgspec.json.encode(body),
                    headers=headers,
                    max_nbytes=MAX_REPLY_NBYTES,
                )
        except (HttpError, OSError) as error:  # TimeoutError is an OSError
            return "refused", describe(error)
        if reply.status != 200:
            return "refused", printable(f"{reply.status}: {reply.body[:300].decode(errors='replace')}")
        return "taken", ""

    def _show(self) -> None:
        judged = self.decider.judged
        self._metrics.pool_demand.replace(
            {side: sum(getattr(each, side).demand for each in judged) for side in ("prefill", "decode")}
        )

    def turns_beside(self, decisions: Sequence[Decision]) -> list[Made]:
        """The turns that a request with these decisions lived through, as workers drain before a turn ends."""
        if not decisions:
            return []
        first_s, last_s = decisions[0].at_s, decisions[-1].at_s
        return [made for made in self.turns if made.at_s - made.took_s <= last_s and made.at_s >= first_s]

    def describe(self) -> dict[str, Any]:
        """For GET /health and /pdlink/state."""
        return {
            "mode": self._config.mode,
            "turning": self._turning._asdict() if self._turning is not None else None,
            "groups": [
                {
                    "model": each.group[0],
                    "cell": each.group[1],
                    "prefill": each.prefill._asdict(),
                    "decode": each.decode._asdict(),
                    "in_time": each.now,
                    "in_time_after": each.after,
                    "worth": each.worth,
                    "waits_for": each.waits_for,
                }
                for each in self.decider.judged
            ],
            "turns": list(self.turns),
        }


class Standing(NamedTuple):
    """One worker, as far as turns change it."""

    url: str
    side: str
    settled: bool


def standing(workers: Sequence[Seen], url: str) -> frozenset[Standing]:
    """Those of the group of the worker at this URL; nobody if it is not seen."""
    group = next((each.group for each in workers if each.url == url), None)
    return frozenset(Standing(each.url, each.side, each.settled) for each in workers if each.group == group)


def seen(pools: Pools) -> Iterator[Seen]:
    """The workers that serve one role, on the side that they serve."""
    for side in Leg:
        for worker in pools.workers[side]:
            said = worker.health
            if worker.plain or said is None or said.role != side.value or worker.state in _AWAY:
                continue
            group = said.model, worker.cell, said.fingerprint
            settled = worker.state is State.OK and not worker.listed_as_draining
            yield Seen(worker.url, side.value, group, settled, _can_turn(worker, side), said, worker.heard_s or 0.0)


_AWAY = (State.UNREACHABLE, State.INVALID, State.BARRED, State.FAILED, State.WRONG_ROLE)


def _can_turn(worker: Worker, side: Leg) -> bool:
    return worker.health is not None and side.other.value in worker.health.roles
