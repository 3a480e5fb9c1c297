"""Placement of a request: (request, fleet) -> placed, queued or refused. No I/O, no clock.

The fleet holds workers that may get requests; `pools.py` checks health and roles. Decode is chosen first, among the
workers with room for the request; then prefill, among the workers that can exchange KV with it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import msgspec
import numpy as np

from pdlink._index import Pairing, PairLeg

from .decisions import Considered
from .fleet import fitting
from .policies.base import MAX_SCORES, Pick
from .policies.candidates import Candidates
from .policies.cost import Cost
from .policies.least_loaded import LeastLoaded
from .policies.registry import make_policy
from .table import Workers

if TYPE_CHECKING:
    from collections.abc import Sequence, Set

    from .fleet import Fleet, PlacementRequest
    from .policies.base import Policy
    from .table import Column, WorkerState


class Pair(msgspec.Struct, frozen=True):
    """Workers for a request."""

    prefill: WorkerState | None
    """None: decode computes the prompt."""
    decode: WorkerState
    cached_tokens: int = 0
    """Of the prompt, expected at the prefill worker."""
    misfit: bool = False
    """There is no prefill because no prefill worker exchanges KV with a decode worker."""
    alone: str = ""
    """There is no prefill because a transfer would cost more than it saves: the reason, as a code."""


class Queued(NamedTuple):
    """Nobody can take it now."""

    reason: str
    empty: bool
    """There is no such worker; otherwise all are full."""


class ProxyBarred(NamedTuple):
    """The workers that could serve it do not let this proxy in, and will not before somebody mends that."""

    reason: str


Decision: TypeAlias = Pair | Queued | ProxyBarred


class Alone(NamedTuple):
    """When decode computes a prompt itself: if it lacks at most so many tokens of it."""

    tokens: int = 0
    idle_tokens: int = 0
    """The same for a worker that has nothing else to do."""

    def reason(self, request: PlacementRequest, decode: WorkerState) -> str:
        """As a code; empty if a prefill worker computes the prompt."""
        missing = request.num_tokens - (request.held.tokens_of(decode.number) if request.held else 0)
        if missing <= self.tokens:
            return "short_prompt" if request.num_tokens <= self.tokens else "cached_prompt"
        return "decode_idle" if missing <= self.idle_tokens and not decode.load else ""


_NEVER = Alone()
_NATIVE = (LeastLoaded, Cost)
"""Policies that `Pairing` has, too; not classes derived from them."""


class Pairs(NamedTuple):
    """Chooses both workers of a request in one call, where nothing is unusual, and decides as `Placer.place` does."""

    pairing: Pairing
    hashes: bool
    """The keys of the prompt count."""


class Placer:
    """Places the requests of one proxy. The same calls give the same decisions."""

    def __init__(self, prefill: str, decode: str, alone: Alone = _NEVER, *, routers: int = 1, salt: int = 0) -> None:
        """prefill, decode: the policy of each leg, by name. routers: before the same workers; each of them needs
        another salt then. Raises ConfigError."""
        self.prefill, self.decode = make_policy(prefill), make_policy(decode)
        legs = {"prefill": self.prefill, "decode": self.decode}
        self.noting = {leg: policy.placed for leg, policy in legs.items() if policy.notes}
        """By leg, `Policy.placed` of those that are to be told where requests go."""
        self._names = {self.prefill: ("prefill", prefill), self.decode: ("decode", decode)}
        self._candidates = {
            policy: Candidates(salt + number, affine=policy.affine)
            for number, policy in enumerate((self.prefill, self.decode))
            if routers > 1 and policy.herds
        }
        self._alone, self._may_compute = alone, alone != _NEVER
        self.prefill_queue_tokens = 0
        """A prefill worker that has so many to do gets no more; 0 for no limit."""
        self._turn = salt
        """Routers of equal turns would draw the same workers by chance."""

    def pairs(self, fleet: Fleet) -> Pairs | None:
        """For requests of this fleet; None if they need more than that."""
        legs = (self.decode, Workers.of(fleet.decode)), (self.prefill, Workers.of(fleet.prefill))
        if fleet.plain or fleet.refused or fleet.grouped or self._candidates:
            return None
        if any(type(policy) not in _NATIVE or not workers for policy, workers in legs):
            return None
        decode, prefill = (
            PairLeg(
                workers.table.columns,
                workers.fit,
                policy.sent_to if isinstance(policy, Cost) else None,
                self._names[policy][1],
                workers.table.labels,
            )
            for policy, workers in legs
        )
        alone = Alone(-1, -1) if fleet.needs_prefill else self._alone
        hashes = any(isinstance(policy, Cost) and workers.num > 1 for policy, workers in legs)
        return Pairs(Pairing(prefill, decode, *alone, fleet.behind), hashes)

    def pair(self, request: PlacementRequest, pairs: Pairs) -> tuple[int, int, int] | None:
        """The rows of prefill's worker and decode's, and what the former is expected to have of the prompt; None if
        `place` has to look, or to say why there is none."""
        if request.avoid or request.pinned or request.plain:
            return None
        keys = request.chain if pairs.hashes else ()
        found = pairs.pairing.choose(
            request.keys if keys is None else keys,
            request.key_tokens,
            request.num_tokens,
            request.answer_tokens,
            request.held,
            self.prefill_queue_tokens,
            self._turn,
            0 if request.considered is None else MAX_SCORES,
        )
        if found is None:
            return None
        self._turn += 1
        prefill, decode, cached, weighed = found
        if weighed is not None:
            request.considered = msgspec.Raw(weighed)
        return prefill, decode, cached

    def place(self, request: PlacementRequest, fleet: Fleet, *, full: bool = False) -> Decision:
        """full: workers without room for it may get it, too."""
        prefills, decodes = fleet.prefill, fleet.decode
        if not isinstance(prefills, Workers):
            prefills = Workers.of(prefills)
        if not isinstance(decodes, Workers):
            decodes = Workers.of(decodes)
        if fleet.plain:
            plains = Workers.of(fleet.plain)
            if (by_itself := self._by_itself(request, plains, prefills, decodes, full=full)) is not None:
                return by_itself
        if request.plain:
            return Queued(f"no plain server has room for {request.total_tokens} tokens", empty=not fleet.plain)
        turn, there = self._turn, prefills.num > 0
        if not decodes.num or (fleet.needs_prefill and not there):
            missing = "prefill" if decodes.num else "decode"
            reason = f"no healthy {missing} worker for model {request.model!r}; see /health"
            return ProxyBarred(reason) if missing in fleet.barred else Queued(reason, empty=True)
        if request.avoid:
            prefills, decodes = _others(prefills, request.avoid), _others(decodes, request.avoid)
        if not full and decodes.table.columns.tells_room:
            decodes = _with_room(decodes, request.num_tokens + request.answer_tokens)
            if not decodes.num:
                return Queued(f"no decode worker has room for {request.total_tokens} tokens", empty=False)
        busy = False
        if self.prefill_queue_tokens and not full and prefills.num:
            free = prefills.only(prefills.table.columns.load < self.prefill_queue_tokens)
            busy, prefills = not free.num, free if free.num else prefills
        self._turn += 1
        if fleet.refused:
            decodes = _not_refused(decodes, prefills, fleet.refused) or decodes
        if fleet.grouped:
            decodes = fitting(decodes, prefills) or decodes
        if decodes.num == 1:  # without a choice a prompt need not be hashed
            decode = decodes[0]
        else:
            # With the same turn on both sides, two pools of equal size would always pair the same workers, and one
            # bad worker on each side would spoil every pair. So decode slips by one whenever all pairs of the same
            # turn have been.
            num, num_decode = prefills.num, decodes.num
            slip = turn // math.lcm(num, num_decode) % math.gcd(num, num_decode) if num else 0
            decode = self._pick(self.decode, request, decodes, turn + slip).worker
        computes = (request.held or self._may_compute) and not fleet.needs_prefill  # else decode lacks too much
        if computes and (reason := self._alone.reason(request, decode)):
            return Pair(None, decode, alone=reason)
        if busy:
            limit = f"{self.prefill_queue_tokens} tokens to do (prefill_queue_tokens)"
            return Queued(f"every prefill worker has at least {limit}", empty=False)
        if fleet.refused:
            prefills = prefills.without({one for one, to in fleet.refused if to == decode.key})
        if fleet.grouped:
            prefills = prefills.only(prefills.table.exchanging({decode.group}))
        if not prefills.num and fleet.needs_prefill and fleet.grouped:
            return Queued("no prefill worker of decode's cell with the same KV", empty=True)
        if not prefills.num:
            return Pair(None, decode, misfit=there)
        if prefills.num == 1:
            return Pair(prefills[0], decode)
        request.behind = fleet.behind.get(decode.key) if fleet.behind else None
        prefill = self._pick(self.prefill, request, prefills, turn)
        return Pair(prefill.worker, decode, int(prefill.cached_tokens))

    def _by_itself(
        self, request: PlacementRequest, plains: Workers, prefills: Workers, decodes: Workers, *, full: bool
    ) -> Pair | None:
        """A plain worker, where there is no pair, where the request needs one, or where it begins sooner there."""
        plains = _others(plains, request.avoid)
        if not full:
            plains = _with_room(plains, request.total_tokens)
        if not plains:
            return None
        worker = self.one_of(request, plains)
        if request.whole:
            return Pair(None, worker, alone="prompt_only_decode")
        if not decodes or not prefills:
            return Pair(None, worker, alone="no_pair")
        if not full and not _with_room(decodes, request.total_tokens):
            return Pair(None, worker, alone="plain_sooner")
        here = _ahead(request, plains)[plains.table.rows[worker.key]]
        sooner = here < prefills.among(_ahead(request, prefills)).min()
        return Pair(None, worker, alone="plain_sooner") if sooner else None

    def one_of(self, request: PlacementRequest, workers: Sequence[WorkerState]) -> WorkerState:
        """A worker for a request that it serves whole, of the workers that can."""
        self._turn += 1
        return self._pick(self.decode, request, workers, self._turn).worker

    def _pick(self, policy: Policy, request: PlacementRequest, workers: Sequence[WorkerState], turn: int) -> Pick:
        if request.pinned and (there := _pinned(request, self._names[policy][0], Workers.of(workers))) is not None:
            return policy.pick(request, there, turn)
        found = workers if isinstance(workers, Workers) else Workers.of(workers)
        if self._candidates and (candidates := self._candidates.get(policy)) is not None:
            found = candidates.of(request, found, turn)
        if found.num == 1:
            return Pick(found[0])
        pick = policy.pick(request, found, turn)
        if isinstance(request.considered, dict):
            (leg, name), table = self._names[policy], found.table
            scores = pick.scores or table.columns.lowest(found.fit, MAX_SCORES)
            labels = [(table.labels[row], float(score)) for row, score in scores]  # of a policy's own type else
            request.considered[leg] = Considered(name, labels, found.num)
        return pick

    def forget(self, worker: WorkerState) -> None:
        """The process of this worker is gone."""
        self.prefill.forget(worker)
        self.decode.forget(worker)


def _others(workers: Workers, avoid: Set[str]) -> Workers:
    return workers.without(avoid) or workers


def _with_room(workers: Workers, need: int) -> Workers:
    return workers.only(workers.table.columns.room >= need)


def _not_refused(decodes: Workers, prefills: Workers, refused: Set[tuple[str, str]]) -> Workers:
    """Workers that exchange KV with some prefill worker."""
    by_decode: dict[str, set[str]] = {}
    for one, to in refused:
        by_decode.setdefault(to, set()).add(one)
    return decodes.without(to for to, ones in by_decode.items() if not prefills.without(ones))


def _pinned(request: PlacementRequest, leg: str, workers: Workers) -> Workers | None:
    """The one worker that has the KV of the request's session; None if it is not among them, or if it has more to do
    than another one with all of the prompt."""
    table, label = workers.table, request.pinned.get(leg)
    row = next((row for row in workers.rows if table.labels[row] == label), None)
    if row is None:
        return None
    columns, there = table.columns, table.states[row]
    elsewhere = workers.among((columns.load + request.num_tokens) * columns.slowness).min()
    if there.load * there.slowness > elsewhere:
        return None
    mask = np.zeros(len(table.states), np.bool_)
    mask[row] = True
    return workers.only(mask)


def _ahead(request: PlacementRequest, workers: Workers) -> Column:
    """What each computes until it has this prompt, in tokens of a mean worker."""
    columns = workers.table.columns
    ahead = columns.load + request.num_tokens
    if request.held:
        ahead -= np.array(columns.held(request.held))
    ahead *= columns.slowness
    return ahead
