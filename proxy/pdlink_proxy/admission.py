"""The way of one request to its workers: asks the pools, pays from the retry budget, waits in the queue, and notes in
the decision log what was decided. What is placed, and when, the flow says (`Place`)."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Protocol

from pdlink.api import kv_path
from pdlink.api.keys import key_of
from pdlink.events import FallbackUsed, emit
from pdlink.reasons import Reason

from .placement import ProxyBarred, Queued
from .queue import Waiting
from .steps import DECODE, PREFILL, Leg, Place, Placed, Unplaced, Waits, Why

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .decisions import Considered, Decided
    from .fleet import PlacementRequest
    from .lenders import KVSource
    from .pools import WorkerPair
    from .shared import Shared
    from .worker import Worker


_NOBODY: dict[str, Considered] = {}


class PlacesLater(Protocol):
    """A request that waits for workers: `Waiting.item`."""

    def place_now(self) -> bool:
        """There may be workers for it now. Whether it waits no more."""


class Admission:
    """Of one request: finds the workers of each of its attempts."""

    cached_tokens = 0
    """Of the prompt, expected at the chosen prefill worker."""
    source: KVSource | None = None
    """From which store the worker that computes the prompt of the newest attempt pulls what it lacks."""
    recomputed: str | None = None
    """Why the newest attempt has no prefill leg, as a KV path; None if it has one."""
    why = ""
    """Of the newest attempt; empty if workers were never looked for."""
    placement_s = 0.0
    """Spent on the choice."""
    waiting: Waiting | None = None
    """Its place in the queue, once it has had one."""
    _num_behind = 0
    _action: Place | None = None
    """Why workers are wanted now."""

    def __init__(
        self,
        shared: Shared,
        wanted: PlacementRequest,
        *,
        said: Mapping[str, str],
        whole: bool,
        now_s: float,
    ) -> None:
        """said: the client's headers. whole: decode must serve it alone. now_s: on the loop's clock."""
        self.wanted = wanted
        wanted.whole = whole
        wanted.plain = whole and not shared.dialect.decode_computes
        self.chosen: dict[Leg, Worker] = {}
        """Workers of the newest attempt."""
        self.decided: list[Decided] = []
        """About it so far, the newest last."""
        share = shared.decision_share
        self.sampled = share == 1 or random.random() < share
        """Its candidates are noted, and it has a line in the decision log."""
        self._loop, self.started_s = shared.loop, now_s
        self._shared, self._said, self._whole = shared, said, whole
        self.num_prompt_tokens = wanted.num_tokens
        """Without what `place` counts with it later."""

    def place(self, action: Place, waits: PlacesLater, num_behind: int = 0) -> Placed | Unplaced | Waits:
        """Workers for a new attempt, or the request waits for them. waits: is called when there may be some.
        num_behind: tokens of its answer that the client has, which count with the prompt now."""
        shared, wanted = self._shared, self.wanted
        if more := num_behind - self._num_behind:
            self._num_behind = num_behind
            wanted.num_tokens += more
            wanted.answer_tokens = max(1, wanted.answer_tokens - more)
        self._action, self.why = action, action.why.value
        first = action.why is Why.FIRST
        if first:
            self.num_prompt_tokens = wanted.num_tokens
            shared.retries.num_new += 1
        elif action.why in (Why.RETRY, Why.RECOVER) and not shared.retries.spend(self._loop.time()):
            self.note("refused", "too many requests are tried again")
            return Unplaced("too many requests are tried again")
        queue = shared.queue
        if first and queue.num and not queue.passes(wanted.model):
            found: Placed | Unplaced | Queued = Queued(
                "other requests wait", not shared.pools.usable(DECODE, wanted.model)
            )
        else:
            found = self._try(action)
        if not isinstance(found, Queued):
            return found
        config, now = shared.config, self._loop.time()
        timeout_s = config.no_worker_timeout_s if found.empty else config.queue_timeout_s
        if timeout_s == 0 or config.queue_size == 0:
            self.note("refused", found.reason)
            return Unplaced(found.reason)
        since_s = self.started_s if first else now
        self.waiting = Waiting(
            key_of(self._said),  # whose fair share it takes
            wanted.model,
            tokens=wanted.total_tokens,
            since_s=since_s,
            item=waits,
            priority=wanted.priority,
            kind=(wanted.whole, wanted.plain, first),
        )
        if not shared.queue.put(self.waiting):
            self.note("refused", "the queue is full")
            return Unplaced(f"queue_size: {config.queue_size} requests wait already; try again later", full=True)
        self.note("waits", found.reason)
        shared.serve_queue()
        return Waits(f"{found.reason}; waited {timeout_s:g} s", now + timeout_s)

    def place_now(self) -> Placed | Unplaced | None:
        """It waits, and may have workers if there are some; None if there are none."""
        if self._action is None:
            raise RuntimeError("waits for no workers")
        found = self._try(self._action)
        return None if isinstance(found, Queued) else found

    def note(self, verdict: str, reason: str) -> None:
        """Keep a decision about it for `pdlink explain`."""
        waited_s = self._loop.time() - self.started_s
        self.decided.append((time.time(), self.why, verdict, reason, self.wanted.num_tokens, waited_s))

    def _try(self, action: Place) -> Placed | Unplaced | Queued:
        shared, wanted = self._shared, self.wanted
        wanted.avoid = action.avoid
        wanted.considered = {} if self.sampled else None
        if wanted.plain and not shared.pools.lists_plain:
            reason = f"n, echo with logprobs: not possible over two legs of {shared.dialect.name} workers"
            self.note("refused", reason)
            return Unplaced(
                f"{reason}, whose decode computes no prompts; send single requests, or list one under `both`",
                unfit=True,
            )
        needs_prefill = not shared.may_decode_alone and not self._whole
        first = action.why is Why.FIRST
        began_s = time.monotonic()
        if wanted.turn is not None:
            wanted.pinned = shared.sessions.where(wanted.turn, began_s)
        choice = shared.pools.choose(wanted, needs_prefill=needs_prefill, full=not first)
        now_s = time.monotonic()
        self.placement_s = now_s - began_s
        if isinstance(choice, Queued):
            return choice
        if isinstance(choice, ProxyBarred):
            self.note("refused", choice.reason)
            return Unplaced(choice.reason, barred=True)
        if first and wanted.known_ids is not None and shared.tokenizing is not None:
            shared.tokenizing.placed(wanted)
        prefill, decode = choice.prefill, choice.decode
        recomputed = None
        if prefill is None or self._whole or not first:
            prefill, recomputed = self._unusual(action, choice)
        self.cached_tokens, self.recomputed, self.source = choice.cached_tokens, recomputed, choice.source
        shared.metrics.attempts_for[action.why][0] += 1
        self.chosen = {DECODE: decode} if prefill is None else {PREFILL: prefill, DECODE: decode}
        told = ""
        if wanted.turn is not None:
            labels = {leg.value: worker.label for leg, worker in self.chosen.items()}
            told = shared.sessions.placed(wanted.turn, labels, wanted.num_tokens, now_s, again=not first)
        said = (  # as `Decision` has it
            time.time(),
            action.why.value,
            "placed",
            recomputed or "",
            wanted.num_tokens,
            now_s - self.started_s,
            prefill.label if prefill is not None else None,
            decode.label,
            prefill.work.load if prefill is not None else None,
            decode.work.load,
            choice.cached_tokens if prefill is not None else 0,
            wanted.considered or _NOBODY,
            "" if choice.source is None else f"{choice.source.tokens} tokens from {choice.source.label}",
            told,
        )
        self.decided.append(said)
        return Placed(None if prefill is None else prefill.work.key, decode.work.key)

    def _unusual(self, action: Place, choice: WorkerPair) -> tuple[Worker | None, str | None]:
        """Prefill's worker of an attempt after another one, or where decode may compute the prompt; and why it does,
        as a KV path."""
        prefill, decode, differs, alone = choice.prefill, choice.decode, choice.differs, choice.alone
        recomputed = None
        if decode.plain:
            recomputed = kv_path.recomputed(alone)
        elif self._whole:
            prefill = None
            recomputed = kv_path.recomputed("prompt_only_decode")
        elif differs:
            recomputed = kv_path.recomputed(Reason.refused(differs).label)
            self._count_fallback("decode_only", "no pair of workers fits together")
        elif alone:
            recomputed = kv_path.recomputed(alone)
        elif prefill is None:
            recomputed = kv_path.recomputed("no_prefill")
            self._count_fallback("decode_only", "no healthy prefill worker")
        elif action.alone or (action.avoid and prefill.key in action.avoid and self._shared.may_decode_alone):
            prefill = None
            recomputed = kv_path.recomputed("prefill_lost")
            self._count_fallback("decode_only", "this request's prefill was lost")
        if action.why is Why.RETRY:
            self._count_fallback("retry", "a leg was lost")
        if action.why is Why.RECOVER:
            self._count_fallback("recovered", "decode was lost in the middle of a stream")
        return prefill, recomputed

    def _count_fallback(self, kind: str, reason: str) -> None:
        self._shared.metrics.fallbacks.add(1, kind)
        emit(FallbackUsed(kind=kind, reason=reason))
