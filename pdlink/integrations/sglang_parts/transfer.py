"""SGLang's manager for `--disaggregation-transfer-backend pdlink`; sender and receiver are in `requests.py`.

SGLang's own classes keep what is SGLang's: bootstrap over HTTP, which rank belongs to which, room states, heartbeats,
ABORT and its acknowledgement. KV travels from node to node (`rooms.py`); the row of metadata goes with the news that
all of it has landed, so decode can see neither before the KV.

| event | prefill | decode |
|---|---|---|
| decode has pages | announces the transfer, says where its node is | sends *ask* |
| node is known | | offers the pages |
| a layer, or a chunk | reports the pages; the node pushes | |
| all landed and acknowledged | room is Success, sends *status* with the row | writes the row, room is Success |
| ABORT, death, refusal | room is Failed; says so; acknowledges when drained | holds pages until nothing can write |
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections import OrderedDict
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import sglang
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import (
    ABORT_TAG,
    AbortNotification,
    CommonKVManager,
)
from sglang.srt.disaggregation.utils import DisaggregationMode

from pdlink import threads
from pdlink.config import SglangConfig, load
from pdlink.config.loading import mention_foreign
from pdlink.errors import PdlinkError
from pdlink.integrations.sglang_parts import opening, pool, versions, wire
from pdlink.integrations.sglang_parts.arrivals import DecodeRooms
from pdlink.integrations.sglang_parts.ends import Cut, RankShare, comes_from_another, shared_heads
from pdlink.integrations.sglang_parts.giving_up import GivingUp
from pdlink.integrations.sglang_parts.gpu import GpuOrder
from pdlink.integrations.sglang_parts.layerwise import Layerwise
from pdlink.integrations.sglang_parts.metrics import SHOWN
from pdlink.integrations.sglang_parts.rooms import KV, PrefillRooms
from pdlink.integrations.sglang_parts.stand_ins import Outstanding, TransferInfo
from pdlink.integrations.sglang_parts.versions import UnsupportedSglang
from pdlink.integrations.trace_file import TraceFile
from pdlink.reasons import ABORTED, Reason
from pdlink.store.line import Line

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdlink.integrations.sglang_parts.ends import NodeEnd

log = logging.getLogger(__name__)

_MAX_REFUSED = 4096
_LOOK_MS = 200
"""Of the listener, for `teardown`."""
_STOP_S = 5.0


class PDLinkKVManager(CommonKVManager):  # type: ignore[misc]  # SGLang is not installed where types are checked
    """One per scheduler rank. Opens its node in the constructor; `teardown` ends it, at the latest when the process
    ends by itself."""

    supports_deferred_decode_kv_release = True
    supports_role_switch = True
    reports_transfer_latency = True

    def __init__(self, args: Any, mode: Any, server_args: Any, is_mla_backend: bool = False) -> None:
        """Raises UnsupportedSglang, ConfigError, OSError: the server does not start."""
        settings = load(SglangConfig)
        versions.check(sglang.__version__, accept_newer=settings.untested_sglang == "accept")
        mention_foreign()
        opening.check(args, server_args)
        self.rows = pool.MetadataRows(args)
        # The node is there before SGLang tells others about this rank.
        self.ends, self.layer_ids = opening.open_ends(settings, args, server_args, mode.value, latent=is_mla_backend)
        self.node = self.ends.own.port.node
        memory: Any = self.ends.memory[0]
        self.gpu: GpuOrder | None = None
        """None where the KV is the host's."""
        if memory.kind == "cuda":
            self.gpu = GpuOrder(self.node.when_written, memory.device.synchronize, memory.device.index)
        self.sending = PrefillRooms(self._sent, self._drained)
        self.receiving = DecodeRooms(self._lost)
        self._teller = Line("pdlink-sglang-tell")
        self._aux: dict[int, tuple[bytes, ...]] = {}
        self._refused: OrderedDict[int, str] = OrderedDict()
        """Rooms that ended before decode asked for them, and why; the newest."""
        self.answer_s = settings.timeouts.other_leg_s
        super().__init__(args, mode, server_args, is_mla_backend)
        self.enable_staging = False
        self._staging_outstanding = Outstanding(self.sending)
        path = settings.timeline
        self._trace = TraceFile(self.node.name, path.replace("{rank}", str(args.engine_rank))) if path else None
        self._shown_no_more = SHOWN.add_nodes(server_args, lambda: self.ends.nodes)
        self._heartbeat: threading.Thread | None = None
        self._layerwise: Layerwise | None = None
        self._giving_up = GivingUp(self)
        if mode == DisaggregationMode.DECODE:
            self._heartbeat = self._start_heartbeat_checker_thread()
        else:
            self._giving_up.install()
            if settings.layerwise:
                self._layerwise = Layerwise(self)
                self._layerwise.install()
        self._stopped = threading.Event()
        self._listener = threads.guarded("pdlink-sglang", self._listen, self._deaf)
        self._listener.start()
        # SGLang calls no manager when a server ends, and native threads must not outlive the interpreter.
        atexit.register(self.teardown)
        log.info("pdlink: %s listens on %s, KV over %s", self.node.name, self.node.address, self.node.transports)

    def teardown(self) -> None:
        """The server takes the other role, or ends; SGLang has ended its requests. End threads, sockets and nodes."""
        atexit.unregister(self.teardown)
        self._giving_up.remove()
        if self._layerwise is not None:
            self._layerwise.remove()
        if self._heartbeat is not None:
            self._heartbeat_shutdown.set()
        self._stopped.set()
        self._listener.join(_STOP_S)
        self._teller.close(_STOP_S)
        self._shown_no_more()
        if self.gpu is not None:
            self.gpu.close()
        self.ends.close()
        if self._trace is not None:
            self._trace.close()
        with self._socket_lock:
            for socket in (*self._socket_cache.values(), *self._monitor_cache.values()):
                socket.close(linger=0)
            self._socket_cache.clear()
            self._monitor_cache.clear()
        self.server_socket.close(linger=0)
        self._zmq_ctx.destroy(linger=0)

    # --- Called by SGLang's sender and receiver

    def build_receiver_registration_message(self) -> list[bytes]:
        return wire.encode(wire.Hello())

    def build_receiver_metadata_message(
        self,
        *,
        bootstrap_room: int,
        required_dst_info_num: int,
        kv_indices: Any,
        aux_index: int | None,
        state_indices: Any,
        decode_prefix_len: int | None,
        is_dummy: bool,
        device_kv_indices: Any = None,
    ) -> list[bytes]:
        prefix_pages = (decode_prefix_len or 0) // self.kv_args.page_size
        pages, states = ((), ()) if is_dummy else (kv_indices, state_indices or ())
        transfer_id = self.receiving.open(bootstrap_room, prefix_pages, pages, aux_index or 0, states, dummy=is_dummy)
        ask = wire.RoomAsked(
            bootstrap_room,
            transfer_id,
            self.local_ip,
            self.rank_port,
            prefix_pages,
            len(pages),
            tuple(len(one) if one is not None else 0 for one in states),
            (self.attn_tp_rank, self.attn_tp_size),
            self.pp_size,
            required_dst_info_num,
            bool(is_dummy),
        )
        return wire.encode(ask)

    def add_transfer_request(
        self,
        room: int,
        kv_indices: Any,
        index_slice: slice,
        is_last_chunk: bool,
        aux_index: int | None = None,
        state_indices: Any = None,
        wait_event: Any = None,
        **_: Any,
    ) -> None:
        """In the scheduler's thread. Does not wait: one native call for each layer.

        wait_event: of torch's, behind what may still write the pages (a cached prefix of the step before).
        """
        if self.request_status.get(room) in (None, KVPoll.Failed):
            return
        if is_last_chunk and aux_index is not None:
            self._aux[room] = self.rows.read(aux_index)
        with nullcontext() if self.gpu is None else self.gpu.behind(wait_event):
            self.sending.chunk(room, index_slice.start, kv_indices, last=is_last_chunk, states=state_indices)

    def stop_room(self, room: int, reason: Reason | None) -> None:
        """Nothing of it is wanted any more, on this side."""
        if self.disaggregation_mode == DisaggregationMode.PREFILL:
            self.sending.end(room, reason)
            self._aux.pop(room, None)
        else:
            self.receiving.stop(room, reason or ABORTED)

    def opened(self, room: int) -> None:
        self._refused.pop(room, None)

    def refuse(self, room: int, reason: str) -> None:
        """Decode will ask for a room whose request has ended here: let it hear so then."""
        if not self.sending.transfer_ids(room):
            self._refused[room] = reason
            if len(self._refused) > _MAX_REFUSED:
                self._refused.popitem(last=False)

    def is_abort_release_safe(self, bootstrap_room: int, required_acks: int) -> bool:
        """The node knows when nothing can write any more, whether or not the prefill rank lives to say so."""
        return bool(self.receiving.is_quiet(bootstrap_room))

    def forget_route(self, room: int) -> None:
        """The prefill server of this room may have started anew, on other ports: ask its bootstrap for the next."""
        with self.connection_lock:
            for address in [one for one, rooms in list(self.addr_to_rooms_tracker.items()) if room in rooms]:
                for key in [key for key in self.connection_pool if key.startswith(f"{address}_")]:
                    del self.connection_pool[key]

    # --- From a node's thread

    def _sent(self, room: int, transfer_id: str, error: str) -> None:
        self._tell(lambda: self._conclude(room, transfer_id, error))

    def _drained(self, room: int) -> None:
        self._tell(lambda: self._maybe_ack_drained_abort(room))

    def _lost(self, room: int, reason: Reason) -> None:
        self._tell(lambda: self._fail_here(room, str(reason)))

    def _tell(self, job: Callable[[], None]) -> None:
        """In a thread that may wait for a socket."""
        self._teller.put(job)

    # --- In the teller's thread

    def _conclude(self, room: int, transfer_id: str, error: str) -> None:
        """Decode hears first: as soon as the status is set here, SGLang may clear the room and use its row again."""
        status = self.request_status.get(room)
        if status is None or transfer_id not in self.sending.transfer_ids(room):
            return  # SGLang has cleared the room, or another request has it
        if status == KVPoll.Failed:
            error = error or "its request has failed"
        if error:
            with self.failure_lock:
                error = self.failure_records.setdefault(room, f"pdlink: {error}")
        status = KVPoll.Failed if error else KVPoll.Success
        self.send_kv_status_message(
            targets=self._room_notify_targets(room), bootstrap_room=room, status=status, failure_reason=error or None
        )
        self.update_status(room, status)

    def _fail_here(self, room: int, reason: str) -> None:
        status = self.request_status.get(room)
        if status is None:
            return
        if status != KVPoll.Failed:  # else it has a reason: what follows from an abort comes here, too
            self.record_failure(room, f"pdlink: {reason}")
            self.update_status(room, KVPoll.Failed)
        self.forget_route(room)

    def _encode_kv_status_message(
        self, *, bootstrap_room: int, status: Any, failure_reason: str | None
    ) -> list[bytes]:
        aux = self._aux.pop(bootstrap_room, ()) if status == KVPoll.Success else ()
        transfer_ids, rank = self.sending.transfer_ids(bootstrap_room), self._prefill_unique_rank()
        news = wire.RoomStatus(bootstrap_room, transfer_ids, int(status), rank, failure_reason or "", aux)
        return wire.encode(news)

    # --- In the listener's thread

    def _listen(self) -> None:
        while not self._stopped.is_set():
            if not self.server_socket.poll(_LOOK_MS):
                continue
            frames = self.server_socket.recv_multipart()
            try:
                self._take(frames)
            except Exception as error:  # noqa: BLE001  a message may cost its request, and never the listener
                log.warning("pdlink: message of %d frames: %s: %s", len(frames), type(error).__name__, error)

    def _deaf(self, why: str) -> None:
        """Nothing of this rank can go on: its transfers fail now, on both sides, instead of after a timeout."""
        for node in self.ends.nodes:
            node.close()
        log.error("pdlink: %s; requests fail until the server is restarted", why)

    def _take(self, frames: list[bytes]) -> None:
        if frames and frames[0] == ABORT_TAG:
            self._aborted(frames)
        elif not self.handle_abort_ack_message(frames):
            message = wire.decode(frames)
            if isinstance(message, wire.RoomAsked):
                self._asked(message)
            elif isinstance(message, wire.PrefillNodes):
                self._answered(message)
            elif isinstance(message, wire.RoomStatus):
                self._ended(message)

    def _asked(self, ask: wire.RoomAsked) -> None:
        peer, refused = TransferInfo(ask), self._refused.get(ask.room, "")
        addresses: dict[int, str] = {}
        try:
            if not refused:
                cut, ends = self._ends_for(ask)
                if not self.sending.asked(ask.room, ask.transfer_id, ask.prefix_pages, ends):
                    return
                addresses = {number: end.port.node.address for number, (end, _) in ends.items()}
        except PdlinkError as error:
            refused = str(error)
            self.update_status(ask.room, KVPoll.Bootstrapping)
            self.record_failure(ask.room, f"pdlink: {error}")
            self.update_status(ask.room, KVPoll.Failed)
        if refused:
            ids = (ask.transfer_id,)
            news = wire.RoomStatus(ask.room, ids, KVPoll.Failed, self._prefill_unique_rank(), refused)
            self._send_to(peer, wire.encode(news))
            return
        self.transfer_infos.setdefault(ask.room, {})[ask.transfer_id] = peer
        self.req_to_decode_prefix_len[ask.room] = ask.prefix_pages * self.kv_args.page_size
        if not ask.dummy:
            tp = (self.attn_tp_rank, self.attn_tp_size)
            here = wire.PrefillNodes(ask.room, ask.transfer_id, addresses, tp, cut.heads, cut.layers)
            self._send_to(peer, wire.encode(here))
        if self.sending.num_receivers(ask.room) >= ask.receivers:
            self.update_status(ask.room, KVPoll.WaitingForInput)

    def _ends_for(self, ask: wire.RoomAsked) -> tuple[Cut, dict[int, tuple[NodeEnd, int]]]:
        """What goes to a decode rank, and from where. Raises UnsupportedSglang, and what Node does."""
        rank = opening.rank_of(self, ask.tp)
        heads = shared_heads(rank, ask.tp)
        if any(ask.states) and (ask.tp[1] != self.attn_tp_size or ask.num_stages != self.pp_size):
            raise UnsupportedSglang(
                f"ranks: got {ask.tp[1]} of decode in {ask.num_stages} stages for {self.attn_tp_size} in "
                f"{self.pp_size}; expected equal numbers for a model with states beside its KV "
                f"({opening.names_of(self.kv_args)}); choose another --tp-size or --pp-size"
            )
        cut = Cut(heads, tuple(self.layer_ids))
        if ask.dummy or comes_from_another(rank, ask.tp):
            return cut, {}
        ends = {KV: (self.ends.kv(cut, rank), ask.num_pages)} if ask.num_pages else {}
        return cut, ends | {number: (self.ends.state(number), num) for number, num in enumerate(ask.states) if num}

    def _answered(self, here: wire.PrefillNodes) -> None:
        try:
            cut = Cut(here.heads, here.layers)
            rank = opening.rank_of(self, here.tp)
            ends = {
                number: (self.ends.kv(cut, rank) if number == KV else self.ends.state(number), address)
                for number, address in here.addresses.items()
            }
        except PdlinkError as error:
            self.receiving.stop(here.room, error.reason)
            self._fail_here(here.room, str(error))
            return
        needless = comes_from_another(RankShare(here.tp, rank.num_heads), rank.tp)
        offer = partial(self.receiving.sender_is_at, here.room, here.transfer_id, ends, needs_kv=not needless)
        if self.gpu is None:
            offer()
        else:
            self.gpu.after_all(offer, partial(self._lost, here.room))

    def _ended(self, news: wire.RoomStatus) -> None:
        """Where it is Success, decode's own node may hear a moment later that all is here."""
        mine = self.receiving.which(news.room, news.transfer_ids)
        if mine and news.status == KVPoll.Success:
            self.receiving.when_done(news.room, mine, lambda: self._tell(lambda: self._landed(news, mine)))
        elif mine:
            self._apply(news)

    def _landed(self, news: wire.RoomStatus, mine: str) -> None:
        try:
            if self.receiving.landed(news.room, mine, lambda row: self.rows.write(row, news.aux)):
                self._apply(news)
        except UnsupportedSglang as error:
            self._fail_here(news.room, str(error))

    def _apply(self, news: wire.RoomStatus) -> None:
        if self.request_status.get(news.room) == KVPoll.Failed:
            return  # the first reason stays
        self.apply_prefill_status(
            bootstrap_room=news.room, status=news.status, prefill_rank=news.rank, failure_reason=news.reason or None
        )

    def _aborted(self, frames: list[bytes]) -> None:
        notice = AbortNotification.from_zmq(frames)
        if notice is None:
            return
        # First Failed, then the target: no new chunk may be taken after the acknowledgement.
        if self.request_status.get(notice.room) not in (None, KVPoll.Success):
            self.record_failure(notice.room, "Aborted by decode.")
            self.update_status(notice.room, KVPoll.Failed)
        target = notice.deferred_ack_target()
        if target is not None:
            self.register_deferred_ack_target(notice.room, target)
        self.sending.end(notice.room, ABORTED)
        self._maybe_ack_drained_abort(notice.room)

    def _send_to(self, peer: TransferInfo, frames: list[bytes]) -> None:
        from sglang.srt.utils.network import NetworkAddress

        place = NetworkAddress(peer.endpoint, peer.dst_port)
        self._send_multipart_locked(place.to_tcp(), frames, is_ipv6=place.is_ipv6)
