"""What a process has at the moment of a scrape, as gauges. Their owners give the values."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pdlink.observe.series import Gauge, Registry

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


class LinkState(NamedTuple):
    """Of a node."""

    sending: Mapping[str, int]
    receiving: Mapping[str, int]
    quarantined_blocks: int
    push_nbytes: Mapping[str, int]
    control_nbytes: Mapping[str, int]
    live: int
    closing: int
    peers: Iterable[Mapping[str, str]]
    """With `peer`, `transport` and `lane`."""
    refused: Iterable[Mapping[str, object]]
    """With `peer` and `factor`."""
    longest_absence_s: float


class LinkGauges:
    """Of a node: transfers, sessions, what is held for peers."""

    def __init__(self, registry: Registry) -> None:
        add = registry.add
        self._live = add(
            Gauge(
                "pdlink_live_transfers",
                "Transfers that go on. early: offers whose request has not come; draining: ended, but their blocks "
                "wait for the fence.",
                side=(),
                state=(),
            )
        )
        self._quarantined = add(
            Gauge("pdlink_quarantined_blocks", "Offered blocks that wait for *quiet* or the fence.")
        )
        self._push = add(
            Gauge(
                "pdlink_push_bytes",
                "KV bytes of pushes: waiting for room on their transport, and in flight.",
                state=("waiting", "in_flight"),
            )
        )
        self._control = add(
            Gauge(
                "pdlink_control_bytes",
                "Bytes held for peers: offers whose request has not come (early), frames that they do not read "
                "(queued).",
                kind=("early", "queued"),
            )
        )
        self._sessions = add(
            Gauge(
                "pdlink_sessions",
                "Sessions with other workers. closing: lost, and the fence does not hold yet.",
                state=("live", "closing"),
            )
        )
        self._info = add(
            Gauge(
                "pdlink_session_info",
                "1 for each live session; the lane is known on the sending side once KV has landed.",
                peer=(),
                transport=(),
                lane=(),
            )
        )
        self._refused = add(
            Gauge(
                "pdlink_refused_peers",
                "1 for each peer whose handshake was refused, by what differs. Both values: /health.",
                peer=(),
                factor=(),
            )
        )
        self._absence = add(
            Gauge(
                "pdlink_endpoint_longest_absence_seconds",
                "Longest time of the last one to two minutes for which the endpoint's loop could not run.",
            )
        )

    def set(self, now: LinkState) -> None:
        self._live.replace(
            {
                **{("sender", state): count for state, count in now.sending.items()},
                **{("receiver", state): count for state, count in now.receiving.items()},
            }
        )
        self._quarantined.set(now.quarantined_blocks)
        self._push.replace(now.push_nbytes)
        self._control.replace(now.control_nbytes)
        self._sessions.replace({"live": now.live, "closing": now.closing})
        self._info.replace({(peer["peer"], peer["transport"], peer["lane"]): 1 for peer in now.peers})
        self._refused.replace({(str(peer["peer"]), str(peer["factor"])): 1 for peer in now.refused})
        self._absence.set(now.longest_absence_s)


class EngineGauges:
    """Of the built-in engine."""

    def __init__(self, registry: Registry) -> None:
        add = registry.add
        self._blocks = add(Gauge("pdlink_blocks", "Blocks of the KV pool.", state=("free", "held")))
        self._capacity = add(Gauge("pdlink_blocks_capacity", "All blocks of the KV pool."))
        self._requests = add(
            Gauge("pdlink_engine_requests", "Requests in the engine.", state=("running", "awaiting_kv", "waiting"))
        )
        self._role = add(Gauge("pdlink_role", "1 for the role that the worker serves now.", role=()))
        self._queue_tokens = add(
            Gauge(
                "pdlink_prefill_queue_tokens",
                "Tokens of prompts that are still to be computed here: scale prefill workers by their mean.",
            )
        )
        self._queue_seconds = add(
            Gauge(
                "pdlink_prefill_queue_seconds",
                "The same in seconds, by what this worker has measured of its passes; 0 until it has.",
            )
        )
        self._kv_used = add(
            Gauge(
                "pdlink_decode_kv_used_ratio",
                "Share of the KV pool that requests hold, 0 to 1; 0 of a prefill worker: scale decode workers by "
                "their mean.",
            )
        )

    def set(
        self,
        *,
        free: int,
        held: int,
        capacity: int,
        requests: Mapping[str, int],
        role: str,
        queue_tokens: int,
        queue_s: float,
    ) -> None:
        """requests: by state. role: that is served now. queue_tokens: of prompts, not computed yet; queue_s: they
        will take."""
        self._role.replace({role: 1})
        self._queue_tokens.set(queue_tokens)
        self._queue_seconds.set(queue_s)
        self._kv_used.set(held / capacity if capacity and role != "prefill" else 0.0)
        self._blocks.replace({"free": free, "held": held})
        self._capacity.set(capacity)
        self._requests.replace(requests)


class StoreGauges:
    """Of a store in this process, or of the connection to one."""

    def __init__(self, registry: Registry) -> None:
        add = registry.add
        self._used = add(Gauge("pdlink_store_used_bytes", "Bytes of records in the store's memory."))
        self._pinned = add(
            Gauge("pdlink_store_pinned_bytes", "Part of them that readers and writers hold: it cannot be evicted.")
        )
        self._capacity = add(Gauge("pdlink_store_capacity_bytes", "Memory that the store has from the system now."))
        self._room = add(
            Gauge(
                "pdlink_store_room_bytes",
                "Memory that the store may use: less than its settings say where the system refused more.",
            )
        )
        self._tier_used = add(Gauge("pdlink_tier_used_bytes", "Bytes of records in each tier.", tier=()))
        self._answering = add(
            Gauge(
                "pdlink_tier_answering",
                "0 for a tier (or the store process: `store`) that is left alone since it failed or stalled.",
                tier=(),
            )
        )

        self._problem = add(
            Gauge(
                "pdlink_tier_problem",
                "1 for a tier (or `memory`) that keeps less than its settings say; `pdlink doctor` says why.",
                tier=(),
            )
        )

    def set(self, sizes: Mapping[str, float], health: Mapping[str, bool], problems: Mapping[str, str]) -> None:
        """As a store's `gauges`, `health` and `problems`."""
        rest = dict(sizes)
        self._used.set(rest.pop("used", 0))
        self._capacity.set(rest.pop("committed", 0))
        self._room.set(rest.pop("room", 0))
        self._pinned.set(rest.pop("pinned", 0))
        self._tier_used.replace(rest)
        self._answering.replace({place: float(is_well) for place, is_well in health.items() if place != "memory"})
        self._problem.replace({place: float(bool(why)) for place, why in problems.items()})


class ClientGauges:
    """Of a store process."""

    def __init__(self, registry: Registry) -> None:
        add = registry.add
        self._leases = add(Gauge("pdlink_store_leases", "Leases of readers."))
        self._reservations = add(Gauge("pdlink_store_reservations", "Reservations of writers."))
        self._clients = add(
            Gauge(
                "pdlink_store_clients",
                "Clients; away: without a connection, while their process may still write.",
                state=("connected", "away"),
            )
        )

    def set(self, held: Mapping[str, float], connected: int, away: int) -> None:
        """held: as a store's `held`."""
        self._leases.set(held["leases"])
        self._reservations.set(held["reservations"])
        self._clients.replace({"connected": connected, "away": away})
