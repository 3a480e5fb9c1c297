"""Metrics of workers, stores and vLLM's ranks, from events. docs/monitoring.md is made of these declarations.

Each class declares what one part of pdlink counts and which events it counts; a process has those of its parts.
"""

from __future__ import annotations

from collections import Counter as Counts
from typing import TYPE_CHECKING, Any

from pdlink.events import (
    Event,
    FallbackUsed,
    HandlingFailed,
    KVCopied,
    LayerLanded,
    MessageDropped,
    PeerChanged,
    PrefixFound,
    PromptSourced,
    RecordsChanged,
    RequestEnded,
    TierCalled,
    TransferEnded,
    WriteDropped,
)
from pdlink.observe.gauges import ClientGauges, EngineGauges, LinkGauges, StoreGauges
from pdlink.observe.series import FINE_SECONDS, SECONDS, Busy, Counter, Histogram, ProcessMetrics, Registry
from pdlink.reasons import Code, Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Handlers = Mapping[type[Event], Callable[[Any], None]]

DROPPED = (
    "before_handshake",
    "key",
    "malformed",
    "old_session",
    "repeated",
    "too_long",
    "too_many_handshakes",
    "unexpected_invite",
    "unexpected_ready",
    "unexpected_welcome",
    "unknown_transfer",
    "wrong_direction",
)
"""Reasons of `MessageDropped`."""
CODES = tuple(sorted(code for code in Code if code is not Code.NOT_NEEDED))
"""Reasons of failed transfers."""
HANDLED = ("frame", "message", "push", "occurrence", "transport", "command", "callback")
"""What `HandlingFailed` is about."""
SIDES = ("sender", "receiver")
SOURCES = ("device", "host", "prefill", "computed")
"""Where KV of prompts comes from; and the kinds of tiers that a store has: disk, peer and so on."""


class TransferMetrics:
    """The link: pushes, transfers, sessions. Of every process that has a node."""

    def __init__(self, registry: Registry, transports: tuple[str, ...] = ()) -> None:
        """transports: lanes whose series are to be there before the first byte."""
        add, self._busy = registry.add, dict[str, Busy]()
        self.nbytes = add(
            Counter(
                "pdlink_transfer_bytes_total",
                "KV bytes visible at the receiver, by the lane really used; counted by the sender.",
                transport=transports,
            )
        )
        self.layers = add(
            Counter("pdlink_layers_landed_total", "Layer pushes visible at the receiver.", transport=transports)
        )
        self.busy = add(
            Counter(
                "pdlink_push_busy_seconds_total",
                "Time in which at least one push was in flight. Bytes by this time are the speed of the link, bytes "
                "by all time its load. mapped-cuda: with the kernels that write a layer.",
                transport=transports,
            )
        )
        self.push = add(
            Histogram(
                "pdlink_push_seconds",
                FINE_SECONDS,
                "From handing a layer to the transport (mapped-cuda: before it is written) until it is visible.",
            )
        )
        self.wait = add(
            Histogram(
                "pdlink_push_wait_seconds",
                FINE_SECONDS,
                "From a layer being written and offered for until its first bytes leave. High: the link is behind.",
            )
        )
        self.transfers = add(
            Counter(
                "pdlink_transfers_total",
                "Transfers ended. done and ready: all KV is there, as the sender and the receiver call it; unneeded: "
                "decode had the prompt in its own prefix cache.",
                side=SIDES,
                state=("done", "ready", "unneeded", "failed"),
            )
        )
        self.failures = add(
            Counter(
                "pdlink_transfer_failures_total",
                "Transfers that failed, by [reason](troubleshooting.md#why-a-transfer-failed); every refusal is "
                "`refused`.",
                side=SIDES,
                reason=CODES,
            )
        )
        self.life = add(
            Histogram(
                "pdlink_transfer_seconds",
                FINE_SECONDS,
                "Life of a transfer, from its announcement to its end; most of it is waiting for prefill to compute.",
                side=SIDES,
            )
        )
        self.exposed = add(
            Histogram(
                "pdlink_transfer_exposed_seconds",
                FINE_SECONDS,
                "From the last layer being written until the last one has landed: what prefill did not hide.",
            )
        )
        self.peers = add(
            Counter(
                "pdlink_peer_changes_total",
                "Sessions that became ready or were lost, and peers refused.",
                state=("ready", "lost", "refused"),
            )
        )
        self.dropped = add(
            Counter("pdlink_messages_dropped_total", "Control messages not acted upon.", reason=DROPPED)
        )
        self.handling = add(
            Counter(
                "pdlink_handling_failures_total",
                "Unexpected errors in the endpoint, each charged to who caused it. Any is worth a look at the log.",
                what=HANDLED,
            )
        )
        self.handlers: Handlers = {
            LayerLanded: self._landed,
            TransferEnded: self._ended,
            PeerChanged: lambda event: self.peers.add(1, event.state),
            MessageDropped: lambda event: self.dropped.add(1, event.reason),
            HandlingFailed: lambda event: self.handling.add(1, event.what),
        }

    def _landed(self, event: LayerLanded) -> None:
        lane = event.transport or "unknown"
        self.nbytes.add(event.nbytes, lane)
        self.layers.add(1, lane)
        if (busy := self._busy.get(lane)) is None:
            busy = self._busy[lane] = Busy()
        self.busy.add(busy.add(event.submitted_s, event.at_s), lane)
        self.push.observe(event.at_s - event.submitted_s)
        self.wait.observe(event.submitted_s - event.asked_s)

    def _ended(self, event: TransferEnded) -> None:
        state, exemplar = event.state.lower(), {"transfer_id": event.transfer_id[:_MAX_EXEMPLAR_CHARS]}
        code = Reason.of(event.reason).code if event.reason else Code.OTHER
        if code is Code.NOT_NEEDED:
            state = "unneeded"
        self.transfers.add(1, event.side, state)
        if state == "failed":
            self.failures.add(1, event.side, code)
        self.life.observe(event.at_s - event.started_s, event.side, exemplar=exemplar)
        if event.exposed_s is not None:
            self.exposed.observe(event.exposed_s, exemplar=exemplar)


class EngineMetrics:
    """Requests of the built-in engine."""

    def __init__(self, registry: Registry, roles: tuple[str, ...] = ()) -> None:
        """roles: of this worker."""
        add = registry.add
        self.requests = add(
            Counter(
                "pdlink_requests_total",
                "Requests ended, by a finish reason (stop, length) or an error's code.",
                role=roles,
                outcome=("stop", "length"),
            )
        )
        self.tokens = add(Counter("pdlink_tokens_total", "Tokens of ended requests.", kind=("prompt", "completion")))
        self.ttft = add(
            Histogram(
                "pdlink_time_to_first_token_seconds",
                SECONDS,
                "From a request's arrival at this worker to its first token here.",
                role=roles,
            )
        )
        self.fallbacks = add(
            Counter(
                "pdlink_fallbacks_total",
                "Requests that took their configured second way, by why: recompute, decode computed the prompt.",
                kind=("recompute",),
                reason=CODES,
            )
        )
        self.handlers: Handlers = {
            RequestEnded: self._ended,
            FallbackUsed: lambda event: self.fallbacks.add(1, event.kind, event.reason),
        }

    def _ended(self, event: RequestEnded) -> None:
        self.requests.add(1, event.role, event.outcome)
        self.tokens.add(event.prompt_tokens, "prompt")
        self.tokens.add(event.completion_tokens, "completion")
        if event.first_token_s is not None:
            self.ttft.observe(event.first_token_s - event.started_s, event.role)


class PromptMetrics:
    """Where the KV of prompts comes from, of an engine."""

    def __init__(self, registry: Registry) -> None:
        add = registry.add
        self.prompt_tokens = add(
            Counter(
                "pdlink_prompt_tokens_total",
                "Tokens of prompts, by where their KV comes from: the engine's own blocks (device), the store's "
                "memory (host) or a tier below it by its kind (disk, peer, ...), the prefill worker, computed here.",
                source=SOURCES,
            )
        )
        self.handlers: Handlers = {PromptSourced: self._sourced}

    def _sourced(self, event: PromptSourced) -> None:
        """The engine's own blocks are device, the store's memory is host, tiers below it have their kind; what nobody
        says the place of was in memory."""
        found = Counts(device=event.cached, prefill=event.received, computed=event.computed, host=event.loaded)
        for place, tokens in event.places.items():
            if place != "memory":
                found["host"] -= tokens
                found[place.partition(" ")[0]] += tokens
        for source, tokens in found.items():
            self.prompt_tokens.add(tokens, source)


class StoreMetrics:
    """A store and its tiers: look-ups, records, copies, calls."""

    def __init__(self, registry: Registry) -> None:
        add = registry.add
        self.chunks = add(
            Counter(
                "pdlink_store_chunks_total",
                "Chunks of prompts looked up in the store, by where they were: memory, a tier, or missed.",
                place=("memory", "missed"),
            )
        )
        self.choices = add(
            Counter("pdlink_store_choices_total", "Prompts by why so much of them was to be loaded.", reason=())
        )
        self.records = add(
            Counter(
                "pdlink_store_records_total",
                "Records that came into the store's memory or went.",
                change=("stored", "evicted", "removed"),
            )
        )
        self.record_bytes = add(
            Counter(
                "pdlink_store_record_bytes_total",
                "Bytes of records that came into the store's memory or went.",
                change=("stored", "evicted", "removed"),
            )
        )
        self.lookup = add(
            Histogram("pdlink_store_lookup_seconds", FINE_SECONDS, "Look-ups of prompts, in memory and in tiers.")
        )
        self.copied = add(
            Counter(
                "pdlink_store_copied_bytes_total",
                "KV copied between an engine's blocks and the store's memory.",
                direction=("load", "store"),
            )
        )
        self.copy = add(
            Histogram(
                "pdlink_store_copy_seconds",
                FINE_SECONDS,
                "Such copies, of a prompt that is loaded or a pass that is stored.",
                direction=("load", "store"),
            )
        )
        self.writes_dropped = add(
            Counter(
                "pdlink_tier_writes_dropped_total",
                "Records that left memory before a tier had them. Rises: the tier is too slow for what is written, "
                "or takes nothing.",
                tier=(),
            )
        )
        self.tier_records = add(
            Counter("pdlink_tier_records_total", "Records read from and written to tiers.", tier=(), call=())
        )
        self.tier_bytes = add(
            Counter("pdlink_tier_bytes_total", "Bytes of records read from and written to tiers.", tier=(), call=())
        )
        self.tier = add(
            Histogram(
                "pdlink_tier_seconds", FINE_SECONDS, "Calls of tiers, by outcome.", tier=(), call=(), outcome=()
            )
        )
        self.handlers: Handlers = {
            PrefixFound: self._found,
            KVCopied: self._copied,
            WriteDropped: lambda event: self.writes_dropped.add(1, event.tier),
            PromptSourced: lambda event: self.choices.add(1, event.reason),
            RecordsChanged: self._changed,
            TierCalled: self._called,
        }

    def tiers(self, names: tuple[str, ...]) -> None:
        """The tiers of this store are these: their series are there from now on."""
        for name in names:
            self.writes_dropped.series(name)
            self.chunks.series(name)
            for call in ("get", "put"):
                self.tier_records.series(name, call)
                self.tier_bytes.series(name, call)
                for outcome in ("done", "missed", "failed"):
                    self.tier.series(name, call, outcome)

    def _found(self, event: PrefixFound) -> None:
        for place, found in event.places.items():
            self.chunks.add(found, place)
        self.chunks.add(event.asked - sum(event.places.values()), "missed")
        self.lookup.observe(event.took_s)

    def _copied(self, event: KVCopied) -> None:
        self.copied.add(event.nbytes, event.direction)
        self.copy.observe(event.took_s, event.direction)

    def _changed(self, event: RecordsChanged) -> None:
        self.records.add(event.records, event.kind)
        self.record_bytes.add(event.nbytes, event.kind)

    def _called(self, event: TierCalled) -> None:
        if event.outcome == "done":
            self.tier_bytes.add(event.nbytes, event.tier, event.call)
            self.tier_records.add(event.num_records, event.tier, event.call)
        self.tier.observe(event.took_s, event.tier, event.call, event.outcome)


class Counting:
    """The listener: hands each event to the series that count it. Pass the instance to `pdlink.events.listen`."""

    def __init__(
        self, registry: Registry, *parts: TransferMetrics | EngineMetrics | PromptMetrics | StoreMetrics
    ) -> None:
        handlers: dict[type[Event], tuple[Callable[[Any], None], ...]] = {}
        for part in parts:
            for kind, handler in part.handlers.items():
                handlers[kind] = (*handlers.get(kind, ()), handler)
        self._handlers, self._lock = handlers, registry.lock

    def __call__(self, event: Event) -> None:
        handlers = self._handlers.get(type(event))
        if handlers is not None:
            with self._lock:  # events come from the threads of engine, endpoint and store
                for handler in handlers:
                    handler(event)


class WorkerMetrics(Registry):
    """All of a worker. Pass `counting` to `pdlink.events.listen`, and set the gauges before a reading."""

    def __init__(self, *, roles: tuple[str, ...] = (), transports: tuple[str, ...] = (), store: bool = False) -> None:
        """store: it has one."""
        super().__init__()
        self.store = StoreMetrics(self) if store else None
        stores = () if self.store is None else (self.store,)
        self.counting = Counting(
            self, TransferMetrics(self, transports), EngineMetrics(self, roles), PromptMetrics(self), *stores
        )
        self.link, self.engine = LinkGauges(self), EngineGauges(self)
        self.sizes = StoreGauges(self) if store else None
        ProcessMetrics(self)


class StoreProcessMetrics(Registry):
    """All of a store process, which has a node where it serves peers. As `WorkerMetrics`."""

    def __init__(self, transports: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.store = StoreMetrics(self)
        self.counting = Counting(self, self.store, TransferMetrics(self, transports))
        self.sizes, self.clients = StoreGauges(self), ClientGauges(self)
        ProcessMetrics(self)


_MAX_EXEMPLAR_CHARS = 100
"""OpenMetrics allows 128 for the label's name and value together."""
