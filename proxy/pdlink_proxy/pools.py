"""The prefill and the decode workers of one proxy, and the choice among them.

Their health is polled all the time. Placement (`placement.py`) sees the workers that may get requests.
"""

from __future__ import annotations

import itertools
import logging
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from pdlink.api.fields import MOST

from .engines import id_of, workers_of
from .fleet import Fleet, PlacementRequest
from .kv_events import KVEvents, source
from .lenders import Lenders
from .mismatches import mismatched
from .outliers import leave_out
from .pair_times import PairTimes
from .placement import Pair, Placer, ProxyBarred, Queued
from .refusals import Refusals
from .side import Side
from .steps import Leg
from .table import Workers, WorkerState, compare, mean_speed
from .worker import State, Worker

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pdlink.api.health import Health

    from .lenders import KVSource
    from .members import Members
    from .mismatches import Mismatch
    from .placement import Pairs
    from .records import EndedRequest
    from .refusals import RefusedPair

log = logging.getLogger("pdlink.proxy")

_COMPARE_S = 0.5
"""Between two comparisons of the workers' speeds."""

_NOBODY: frozenset[str] = frozenset()
_NO_PAIRS: frozenset[tuple[str, str]] = frozenset()


class Pools:
    """The prefill and the decode workers of one proxy."""

    def __init__(self, placer: Placer, *, most_left_out: float = 0.0) -> None:
        """Without workers: see `replace`. most_left_out: share of a pool that may be left out as outliers."""
        self._most_left_out = most_left_out
        self._left_out: set[Worker] = set()
        self._fleets: dict[tuple[str, bool], _Known] = {}
        """By model, and whether decode must not compute prompts: as long as it is settled."""
        self._sides = {side: Side(self._fleets.clear) for side in Leg}
        self._paces: dict[str, float | None] = {}
        """`prefill_pace` by model."""
        self._placer = placer
        self.noting = {Leg(leg): note for leg, note in placer.noting.items()}
        """See `Placer.noting`."""
        self._labels = {side: itertools.count() for side in Leg}
        self._both = itertools.count()
        self.kv_events = KVEvents()
        self._lenders = Lenders()
        self._compared_s = 0.0
        self._any_plain = False
        self.several = False
        """There is a choice: on some side there are several workers."""
        self.has_engines = False
        """Some prefill server has several engines, so that legs name theirs."""
        self._at: dict[str, list[Worker]] = {}
        """By URL."""
        self._groups: set[tuple[str, str]] = set()
        """Of the workers: with one of them KV may move between any two."""
        self.refusals = Refusals()
        self._pair_times = PairTimes()
        self.mismatches: list[Mismatch] = []
        """Of the last comparison."""
        self._alone: RefusedPair | None = None
        """Why decode works alone although prefill is healthy; logged once."""

    def replace(self, members: Members) -> None:
        """These are the workers from now on; known ones keep their state.

        Raises ConfigError for an invalid or repeated URL, and changes nothing then.
        """
        listed = {side: members.of(side) for side in Leg}
        listed[Leg.DECODE] += members.both
        checked = {side: workers_of(side.value, listed[side]) for side in Leg}
        sources: dict[str, tuple[str, ...]] = {}
        for url, _, engine in itertools.chain(*checked.values()):
            for text in engine.kv_events:
                source(text, url)
            name = id_of(url, engine.number)
            sources[name] = engine.kv_events or sources.get(name, ())
        self.kv_events.follow(sources)
        both = frozenset(members.both)
        self._any_plain = bool(both)
        self.several = any(len(workers) > 1 for workers in checked.values())
        self.has_engines = any(engine.number is not None for _, _, engine in checked[Leg.PREFILL])
        for side, servers in checked.items():
            known = {worker.id: worker for worker in self.workers[side]}
            found = []
            for url, entry, engine in servers:
                plain = side is Leg.DECODE and entry in both
                worker = known.pop(id_of(url, engine.number), None)
                if worker is None or worker.plain != plain:
                    label = f"both-{next(self._both)}" if plain else f"{side.value}-{next(self._labels[side])}"
                    worker = Worker(url, side, label=label, engine=engine.number, headers=engine.headers, plain=plain)
                worker.cell, worker.store = entry.cell, entry.store
                worker.controlled_at(engine.control)
                worker.listed_as_draining = entry.drain
                found.append(worker)
            self._sides[side].replace(found)
            for gone in known.values():
                self._forget(gone.work)
                self.refusals.forget(gone)
        self._at = {}
        for worker in self.all:
            self._at.setdefault(worker.url, []).append(worker)

    def at(self, url: str) -> Sequence[Worker]:
        """The workers of this URL: one, or one of each side, or several engines."""
        return self._at.get(url.rstrip("/"), ())

    @property
    def workers(self) -> dict[Leg, list[Worker]]:
        return {leg: side.workers for leg, side in self._sides.items()}

    @property
    def all(self) -> list[Worker]:
        return self.workers[Leg.PREFILL] + self.workers[Leg.DECODE]

    @property
    def servers(self) -> list[tuple[Worker, ...]]:
        """All workers, the engines of one server together."""
        found: dict[tuple[Leg, str], list[Worker]] = {}
        for worker in self.all:
            found.setdefault((worker.side, worker.url), []).append(worker)
        return [tuple(workers) for workers in found.values()]

    @property
    def links(self) -> list[Mapping[str, Any]]:
        """`Health.link` of every worker that is known."""
        return [worker.health.link for worker in self.all if worker.health is not None]

    def usable(self, side: Leg, model: str | None = None) -> list[Worker]:
        """Workers that may get requests, for one model or any."""
        return self._sides[side].usable_workers(model, time.monotonic())

    def prefill_pace(self, model: str) -> float | None:
        """Tokens a second of a mean prefill worker of late; None if that was not measured."""
        if model not in self._paces:
            self._paces[model] = mean_speed(worker.work for worker in self.usable(Leg.PREFILL, model)) or None
        return self._paces[model]

    @property
    def lists_plain(self) -> bool:
        """Whether there are plain servers, perhaps none that can be used now."""
        return self._any_plain

    def has_plain(self) -> bool:
        """Whether a plain server may get requests."""
        return self._any_plain and any(worker.plain for worker in self.usable(Leg.DECODE))

    def models(self) -> list[str]:
        """Models of the decode workers; of an absent worker, its last known ones."""
        return self._sides[Leg.DECODE].models

    def serves(self, model: str) -> bool:
        """Whether a decode worker serves it, perhaps one that is absent or has not answered yet."""
        if (model, False) in self._fleets or (model, True) in self._fleets:  # it did for the last request
            return True
        side = self._sides[Leg.DECODE]
        return model in side.models or not side.all_heard

    def heard(self, worker: Worker) -> None:
        """A worker's health has been updated."""
        self.refusals.heard(worker, self._sides[worker.side.other].workers)
        self._update(worker)
        if worker.state is State.OK and worker.health is not None:
            self.kv_events.heard(worker.id, worker.work, worker.health.model, worker.health.kv_events)
        if self._alone is not None and self.refusals.known(self._alone.prefill, self._alone.decode) is None:
            self._tell_alone(None)

    def barred(self, side: Leg) -> bool:
        """Whether some worker refuses this proxy's key."""
        return self._sides[side].barred

    def fault(self, worker: Worker, reason: str) -> None:
        """A leg found the worker gone, and with it the other engines behind its URL."""
        for each in self.at(worker.url) if worker.engine is not None else (worker,):
            if each is worker or each.engine is not None:
                each.fault(reason)

    def mispaired(self, prefill: Worker, decode: Worker) -> None:
        """A request found that decode refuses this prefill worker."""
        if prefill in self.all and decode in self.all:  # a removed one may still have requests
            self.refusals.note(prefill, decode, "peer_not_allowed")

    def leaving(self) -> None:
        """The proxy ends, and usually its workers with it: expect their absence."""
        for worker in self.all:
            worker.quiet_until_s = float("inf")

    def _update(self, worker: Worker) -> None:
        """What a worker has said of its load."""
        work, said, table = worker.work, worker.health, self._sides[worker.side].table
        if work.key != worker.key:
            self._forget(work)
            row = work.row
            worker.work = work = WorkerState(worker.key, worker.label, allowed=worker.side is Leg.DECODE)
            if row >= 0:
                table.put(row, work)
            self._fleets.clear()
        if said is None:
            return
        self._lenders.heard(work, said.store or worker.store, stays=said.store_stays or not said.store)
        if (group := (worker.cell, said.fingerprint)) != work.group:
            work.group = group
            if work.row >= 0:
                table.tell_group(work.row)
        if not worker.plain and work.group not in self._groups:
            self._groups.add(work.group)
            self._fleets.clear()
        work.pool_tokens = _tokens_of(said.num_blocks, said.block_tokens) or None
        self._weigh(work, said)
        self._compare_now_and_then()

    @staticmethod
    def _weigh(work: WorkerState, said: Health) -> None:
        free = _tokens_of(said.free_blocks, said.block_tokens)
        work.heard(
            work.requests if said.running is None else said.running + (said.waiting or 0), free, said.load_tokens
        )

    def _compare_now_and_then(self) -> None:
        if time.monotonic() - self._compared_s > _COMPARE_S:
            self._compared_s = time.monotonic()
            self._fleets.clear()
            self._paces.clear()
            self._groups = {each.work.group for each in self.all if each.health and not each.plain}
            self._look_for_mismatches()
            self.kv_events.look(self._compared_s)
            for side in Leg:
                compare([each.work for each in self.workers[side]])
                self._look_for_outliers(side)
            self._pair_times.compare(mean_speed(each.work for each in self.workers[Leg.PREFILL]), self._compared_s)

    def streamed(self, kept: EndedRequest, chosen: Mapping[Leg, Worker]) -> None:
        """A stream has ended, of a prompt of `MIN_TOKENS` or more: it tells of the way between its last workers."""
        if (took_s := kept.handover_s) is not None:
            one, to = (chosen[leg].work for leg in Leg)
            if one.row >= 0 and to.row >= 0:  # both are listed
                self._pair_times.took(one.key, to.key, kept.prompt_tokens, took_s, time.monotonic())

    def _forget(self, work: WorkerState) -> None:
        self._lenders.forget(work)
        self._placer.forget(work)
        self._pair_times.forget(work.key)

    def _look_for_mismatches(self) -> None:
        found = mismatched(self.workers[Leg.PREFILL], self.workers[Leg.DECODE]) if len(self._groups) > 1 else []
        for each in found:
            if each not in self.mismatches:
                log.log(logging.WARNING if each.stranded else logging.INFO, "%s, so they are not paired", each)
        self.mismatches = found

    def _look_for_outliers(self, side: Leg) -> None:
        workers = [worker for worker in self.workers[side] if worker.state is State.OK]
        leave_out([worker.outlier for worker in workers], time.monotonic(), self._most_left_out)
        for worker in workers:
            if worker.outlier.out and worker not in self._left_out:
                self._left_out.add(worker)
                worker.judged()
                log.warning("%s worker %s is left out: %s", side.value, worker.id, worker.outlier.why)
        for worker in [each for each in self._left_out if not each.outlier.out or each not in self.all]:
            self._left_out.discard(worker)
            log.warning("%s worker %s is no more left out", worker.side.value, worker.id)

    def choose(
        self, request: PlacementRequest, *, needs_prefill: bool, full: bool
    ) -> WorkerPair | Queued | ProxyBarred:
        """A pair for a request. full: see `Placer.place`."""
        refused_pairs = self.refusals.pairs
        known = None if refused_pairs else self._fleets.get((request.model, needs_prefill))
        if known is None:
            known = self._known(request.model, needs_prefill=needs_prefill)
        fleet, sides = known.fleet, self._sides
        if request.known_ids is not None or request.prompt[:1] == b"[":
            request.held = self.kv_events.held(request, known.model)
        if known.pairs is not None and not full and (rows := self._placer.pair(request, known.pairs)) is not None:
            one, to = known.prefills[rows[0]], known.decodes[rows[1]]
            if self._alone is not None:
                self._tell_alone(None)
            source = self._source(request, one.work) if len(self._lenders.at) > 1 else None
            return WorkerPair(one, to, rows[2], source=source)
        placed = self._placer.place(request, fleet, full=full)
        if not isinstance(placed, Pair):
            return placed
        to = sides[Leg.DECODE].workers[placed.decode.row]
        source = self._source(request, placed.prefill or placed.decode) if len(self._lenders.at) > 1 else None
        if placed.prefill is not None:
            one = sides[Leg.PREFILL].workers[placed.prefill.row]
            if not (refused_pairs and self.refusals.try_again(one, to)) and self._alone is not None:
                self._tell_alone(None)
            return WorkerPair(one, to, placed.cached_tokens, source=source)
        if placed.misfit:
            refused = self.refusals.known(sides[Leg.PREFILL].workers[fleet.prefill[0].row], to)
            self._tell_alone(refused)
            factor = refused.factor if refused is not None else next((each.factor for each in self.mismatches), "")
            return WorkerPair(None, to, differs=factor, source=source)
        if placed.alone:
            return WorkerPair(None, to, alone=placed.alone, source=source)
        return WorkerPair(None, to, differs=self._without_prefill(request.model), source=source)

    def _source(self, request: PlacementRequest, computes: WorkerState) -> KVSource | None:
        """From which store the worker that computes the prompt pulls what it lacks: of one that computes prompts, a
        prefill worker, or where there are none a plain server."""
        side, policy = self._sides[Leg.PREFILL], self._placer.prefill
        if not side.workers:
            side, policy = self._sides[Leg.DECODE], self._placer.decode
        workers = Workers(side.table)
        expected = policy.expected(request, workers)
        return self._lenders.source(request, computes, expected, workers.table.states)

    def _known(self, model: str, *, needs_prefill: bool) -> _Known:
        """The workers for requests of this model now; kept if that is settled."""
        now, prefill_side, decode_side = time.monotonic(), self._sides[Leg.PREFILL], self._sides[Leg.DECODE]
        prefill, decode = prefill_side.usable(model, now), decode_side.usable(model, now)
        refused_pairs = self.refusals.pairs
        fleet = Fleet(
            prefill.pair,
            decode.pair,
            refused=self.refusals.now() if refused_pairs else _NO_PAIRS,
            barred=_NOBODY if prefill.pair.num and decode.pair.num else self._barred_legs(),
            needs_prefill=needs_prefill,
            plain=decode.plain or (),
            grouped=len(self._groups) > 1,
            behind=self._pair_times.behind,
        )
        computes = prefill if prefill.pair.num else decode
        settled = prefill_side.settled(model) and decode_side.settled(model)
        kept = settled and not refused_pairs and bool(decode.pair.num or decode.plain)
        pairs = self._placer.pairs(fleet) if kept else None  # which take longer to make than one request to place
        known = _Known(fleet, computes.model or model, pairs, prefill_side.workers, decode_side.workers)
        if kept:
            self._fleets[model, needs_prefill] = known
        return known

    def _without_prefill(self, model: str) -> str:
        """`model` where prefill workers are well and none of them serves this model; else empty."""
        said = [each.health for each in self.workers[Leg.PREFILL] if each.state is State.OK and each.health]
        return "model" if said and all(model not in (each.model, *each.aliases) for each in said) else ""

    def limit_prefill(self, tokens: int) -> None:
        """See `Placer.prefill_queue_tokens`."""
        self._placer.prefill_queue_tokens = tokens

    def _barred_legs(self) -> frozenset[str]:
        return frozenset(leg.value for leg in Leg if self.barred(leg))

    def pick(self, request: PlacementRequest, workers: Sequence[Worker]) -> Worker:
        """One of these workers for a request that it serves whole, by the decode leg's policy."""
        picked = self._placer.one_of(request, [worker.work for worker in workers])
        return next(worker for worker in workers if worker.work is picked)

    def _tell_alone(self, refused: RefusedPair | None) -> None:
        if refused is not None and self._alone is None:
            log.warning("no pair of workers fits together, so decode computes prompts itself: %s", refused)
        elif refused is None and self._alone is not None:
            log.warning("a pair of workers fits together again, so prefill computes prompts")
        self._alone = refused


def _tokens_of(blocks: int | None, block_tokens: int | None) -> int | None:
    """None if the worker does not say."""
    return None if blocks is None or not block_tokens else min(MOST, blocks * block_tokens)


class _Known(NamedTuple):
    """The workers that requests of one model may get."""

    fleet: Fleet
    model: str
    """As the first prefill worker calls it, or the first decode worker."""
    pairs: Pairs | None
    prefills: Sequence[Worker]
    """By row."""
    decodes: Sequence[Worker]


class WorkerPair(msgspec.Struct, frozen=True):
    """Workers for a request."""

    prefill: Worker | None
    decode: Worker
    cached_tokens: int = 0
    """Of the prompt, expected at the prefill worker."""
    differs: str = ""
    """Why there is no prefill although a prefill worker is healthy: the property in which it differs from decode."""
    alone: str = ""
    """See `Pair`."""
    source: KVSource | None = None
    """From which store the worker that computes the prompt pulls what it lacks."""
