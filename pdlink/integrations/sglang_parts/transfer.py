"""SGLang's manager, sender, receiver and bootstrap server for `--disaggregation-transfer-backend pdlink`.

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

import logging
import os
import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import sglang
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import (
    ABORT_TAG,
    AbortNotification,
    CommonKVBootstrapServer,
    CommonKVManager,
    CommonKVReceiver,
    CommonKVSender,
)
from sglang.srt.disaggregation.utils import DisaggregationMode

from pdlink.config import SglangConfig, load
from pdlink.errors import PdlinkError
from pdlink.integrations.sglang_parts import pool, versions, wire
from pdlink.integrations.sglang_parts.allocation import ALLOCATION
from pdlink.integrations.sglang_parts.layerwise import Layerwise
from pdlink.integrations.sglang_parts.rooms import DecodeRooms, PrefillRooms
from pdlink.integrations.sglang_parts.versions import UnsupportedSglang
from pdlink.node.node import Node
from pdlink.node.port import EnginePort
from pdlink.serve.keys import load_credentials
from pdlink.store.line import Line

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)

_MAX_REFUSED = 4096


class _Peer:
    """What SGLang's code asks of an entry of `transfer_infos`: where decode's manager listens."""

    def __init__(self, ask: wire.Ask) -> None:
        self.endpoint, self.dst_port = ask.host, ask.port
        self.is_dummy, self.required_dst_info_num = False, 1


class _Outstanding:
    """SGLang's count of what is in flight for a room, from the transfers themselves."""

    def __init__(self, rooms: PrefillRooms) -> None:
        self._rooms = rooms

    def get(self, room: int, default: int = 0) -> int:
        return default if self._rooms.is_drained(room) else 1

    def pop(self, room: int, default: int = 0) -> int:
        return self.get(room, default)

    def __contains__(self, room: int) -> bool:
        return not self._rooms.is_drained(room)


class PDLinkKVManager(CommonKVManager):  # type: ignore[misc]  # SGLang is not installed where types are checked
    """One per scheduler rank. Opens its node in the constructor; both end with the process."""

    supports_deferred_decode_kv_release = True
    reports_transfer_latency = True

    def __init__(self, args: Any, mode: Any, server_args: Any, is_mla_backend: bool = False) -> None:
        """Raises UnsupportedSglang, ConfigError, OSError: the server does not start."""
        settings = load(SglangConfig)
        versions.check(sglang.__version__, accept_newer=settings.untested_sglang == "accept")
        _check(args, server_args)
        self.rows = pool.Rows(args)
        buffers, places = pool.buffers_of(args.kv_data_ptrs, args.kv_data_lens, args, ALLOCATION.buffers)
        sizes = args.kv_data_lens, args.kv_item_lens, pool.numbers_of(args, latent=bool(is_mla_backend))
        layout, self.layer_ids = pool.layout_of(places, *sizes, args.page_size, args.kv_cache_dtype_str)
        # The node is there before SGLang tells others about this rank.
        self.node = _open_node(settings, args, layout, buffers, server_args, mode.value)
        port = EnginePort(self.node)
        self.sending = PrefillRooms(port, args.page_size, self._sent, self._drained)
        self.receiving = DecodeRooms(port, args.page_size, self._lost)
        self._teller = Line("pdlink-sglang-tell")
        self._aux: dict[int, tuple[bytes, ...]] = {}
        self._refused: OrderedDict[int, str] = OrderedDict()
        """Rooms that ended before decode asked for them, and why; the newest."""
        self.answer_s = settings.timeouts.other_leg_s
        super().__init__(args, mode, server_args, is_mla_backend)
        self.enable_staging = False
        self._staging_outstanding = _Outstanding(self.sending)
        if mode == DisaggregationMode.DECODE:
            self._start_heartbeat_checker_thread()
        elif settings.layerwise:
            Layerwise(self).install()
        threading.Thread(target=self._listen, name="pdlink-sglang", daemon=True).start()
        log.info("pdlink: %s listens on %s, KV over %s", self.node.name, self.node.address, self.node.transports)

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
        transfer_id = self.receiving.open(bootstrap_room, prefix_pages, kv_indices, aux_index or 0)
        ask = wire.Ask(bootstrap_room, transfer_id, self.local_ip, self.rank_port, prefix_pages, len(kv_indices))
        return wire.encode(ask)

    def add_transfer_request(
        self,
        room: int,
        kv_indices: Any,
        index_slice: slice,
        is_last_chunk: bool,
        aux_index: int | None = None,
        **_: Any,
    ) -> None:
        """In the scheduler's thread. Does not wait: one native call for each layer."""
        if self.request_status.get(room) in (None, KVPoll.Failed):
            return
        if is_last_chunk and aux_index is not None:
            self._aux[room] = self.rows.read(aux_index)
        if self.sending.chunk(room, index_slice.start, kv_indices, last=is_last_chunk):
            self._tell(lambda: self._conclude(room, self.sending.transfer_id(room), ""))

    def stop_room(self, room: int, reason: str) -> None:
        """Nothing of it is wanted any more, on this side."""
        if self.disaggregation_mode == DisaggregationMode.PREFILL:
            self.sending.end(room, reason)
            self._aux.pop(room, None)
        else:
            self.receiving.stop(room, reason)

    def opened(self, room: int) -> None:
        self._refused.pop(room, None)

    def refuse(self, room: int, reason: str) -> None:
        """Decode will ask for a room whose request has ended here: let it hear so then."""
        if not self.sending.transfer_id(room):
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

    # --- From the node's thread

    def _sent(self, room: int, transfer_id: str, error: str) -> None:
        self._tell(lambda: self._conclude(room, transfer_id, error))

    def _drained(self, room: int) -> None:
        self._tell(lambda: self._maybe_ack_drained_abort(room))

    def _lost(self, room: int, reason: str) -> None:
        self._tell(lambda: self._fail_here(room, reason))

    def _tell(self, job: Callable[[], None]) -> None:
        """In a thread that may wait for a socket."""
        self._teller.put(job)

    # --- In the teller's thread

    def _conclude(self, room: int, transfer_id: str, error: str) -> None:
        """Decode hears first: as soon as the status is set here, SGLang may clear the room and use its row again."""
        status = self.request_status.get(room)
        if status is None or self.sending.transfer_id(room) != transfer_id:
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
        if room in self.request_status:
            self.record_failure(room, f"pdlink: {reason}")
            self.update_status(room, KVPoll.Failed)
            self.forget_route(room)

    def _encode_kv_status_message(
        self, *, bootstrap_room: int, status: Any, failure_reason: str | None
    ) -> list[bytes]:
        aux = self._aux.pop(bootstrap_room, ()) if status == KVPoll.Success else ()
        transfer_id, rank = self.sending.transfer_id(bootstrap_room), self._prefill_unique_rank()
        news = wire.Status(bootstrap_room, transfer_id, int(status), rank, failure_reason or "", aux)
        return wire.encode(news)

    # --- In the listener's thread

    def _listen(self) -> None:
        while True:
            frames = self.server_socket.recv_multipart()
            try:
                self._take(frames)
            except Exception as error:  # noqa: BLE001  a message may cost its request, and never the listener
                log.warning("pdlink: message of %d frames: %s: %s", len(frames), type(error).__name__, error)

    def _take(self, frames: list[bytes]) -> None:
        if frames and frames[0] == ABORT_TAG:
            self._aborted(frames)
        elif not self.handle_abort_ack_message(frames):
            message = wire.decode(frames)
            if isinstance(message, wire.Ask):
                self._asked(message)
            elif isinstance(message, wire.Here):
                self.receiving.sender_is_at(message.room, message.transfer_id, message.address)
            elif isinstance(message, wire.Status):
                self._ended(message)

    def _asked(self, ask: wire.Ask) -> None:
        peer, refused = _Peer(ask), self._refused.pop(ask.room, "")
        try:
            if not refused and not self.sending.asked(ask.room, ask.transfer_id, ask.prefix_pages, ask.num_pages):
                return
        except PdlinkError as error:
            refused = str(error)
            self.update_status(ask.room, KVPoll.Bootstrapping)
            self.record_failure(ask.room, f"pdlink: {error}")
            self.update_status(ask.room, KVPoll.Failed)
        if refused:
            news = wire.Status(ask.room, ask.transfer_id, KVPoll.Failed, self._prefill_unique_rank(), refused)
            self._send_to(peer, wire.encode(news))
            return
        self.transfer_infos[ask.room] = {ask.transfer_id: peer}
        self.req_to_decode_prefix_len[ask.room] = ask.prefix_pages * self.kv_args.page_size
        self._send_to(peer, wire.encode(wire.Here(ask.room, ask.transfer_id, self.node.address)))
        self.update_status(ask.room, KVPoll.WaitingForInput)

    def _ended(self, news: wire.Status) -> None:
        """Where it is Success, decode's own node may hear a moment later that all is here."""
        if news.status == KVPoll.Success:
            self.receiving.when_done(news.room, news.transfer_id, lambda: self._tell(lambda: self._landed(news)))
        elif self.receiving.is_of(news.room, news.transfer_id):
            self._apply(news)

    def _landed(self, news: wire.Status) -> None:
        try:
            if self.receiving.landed(news.room, news.transfer_id, lambda row: self.rows.write(row, news.aux)):
                self._apply(news)
        except UnsupportedSglang as error:
            self._fail_here(news.room, str(error))

    def _apply(self, news: wire.Status) -> None:
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
        self.sending.end(notice.room, "aborted")
        self._maybe_ack_drained_abort(notice.room)

    def _send_to(self, peer: _Peer, frames: list[bytes]) -> None:
        from sglang.srt.utils.network import NetworkAddress

        place = NetworkAddress(peer.endpoint, peer.dst_port)
        self._send_multipart_locked(place.to_tcp(), frames, is_ipv6=place.is_ipv6)


class PDLinkKVSender(CommonKVSender):  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kv_mgr.opened(self.bootstrap_room)

    def abort(self) -> None:
        super().abort()
        self.kv_mgr.refuse(self.bootstrap_room, "aborted")
        self.kv_mgr.stop_room(self.bootstrap_room, "aborted")

    def clear(self) -> None:
        super().clear()
        self.kv_mgr.stop_room(self.bootstrap_room, "" if self.conclude_state == KVPoll.Success else "request_ended")


class PDLinkKVReceiver(CommonKVReceiver):  # type: ignore[misc]
    def init(self, prefill_dp_rank: int) -> None:
        super().init(prefill_dp_rank)
        infos = getattr(self, "bootstrap_infos", None)
        if self.conclude_state is None and (infos is None or len(infos) != 1 or self.required_dst_info_num != 1):
            self._refuse(
                f"ranks: got {len(infos or ())} of prefill for one of decode, {self.required_dst_info_num} of decode "
                "for one of prefill; limit one each; start both servers with equal --tp-size, --pp-size and CP"
            )

    def _poll(self) -> Any:
        """SGLang's sockets do not say that nobody listens any more: a manager that does not answer is gone."""
        if self.conclude_state is None and self.init_time is not None:
            unanswered = not self.kv_mgr.receiving.is_answered(self.bootstrap_room)
            if unanswered and time.time() - self.init_time > self.kv_mgr.answer_s:
                self._refuse(f"no answer of prefill at {self.bootstrap_addr} within {self.kv_mgr.answer_s} s")
                self.kv_mgr.forget_route(self.bootstrap_room)
        return super()._poll()

    def _refuse(self, reason: str) -> None:
        self.kv_mgr.record_failure(self.bootstrap_room, f"pdlink: {reason}")
        self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Failed)
        self.conclude_state = KVPoll.Failed

    def _send_abort_notification(self, *, force_arm: bool = False) -> None:
        super()._send_abort_notification(force_arm=force_arm)
        self.kv_mgr.stop_room(self.bootstrap_room, "aborted")

    def _clear(self) -> None:
        super()._clear()
        self.kv_mgr.receiving.forget(self.bootstrap_room)


class PDLinkKVBootstrapServer(CommonKVBootstrapServer):  # type: ignore[misc]
    """SGLang's."""


def _check(args: Any, server_args: Any) -> None:
    if server_args.device != "cpu":
        raise UnsupportedSglang(
            f"device: got {server_args.device}; limit cpu; KV of that device is not moved for SGLang yet"
        )
    if getattr(args, "num_draft_entries", 0):
        raise UnsupportedSglang("draft model: got one; limit none; its KV is not transferred yet; leave it out")
    if any(args.state_types):
        raise UnsupportedSglang(
            f"KV pool: got states of {[str(kind) for kind in args.state_types]} beside the KV; limit models of full "
            "attention; serve this one without --disaggregation-mode"
        )


def _open_node(settings: SglangConfig, args: Any, layout: Any, buffers: Any, server_args: Any, mode: str) -> Node:
    rank = args.engine_rank
    key_file = settings.security.key_file
    if key_file is not None:
        key_file = key_file.replace("{rank}", str(rank))
    security = settings.security.model_copy(update={"key_file": key_file})
    credentials = load_credentials(security)
    name = f"sglang-{mode}-{os.getpid()}" if credentials is None else credentials.keys.name
    return Node(
        f"{name}/{rank}",
        layout,
        buffers,
        host=settings.control_host,
        port=settings.control_port + rank if settings.control_port else 0,
        advertise_host=settings.advertise_host,
        model=str(server_args.served_model_name or server_args.model_path),
        revision=f"sglang {versions.precision(server_args)} {args.kv_layout} {len(layout.layers)}",
        content=versions.content(server_args),
        transport=settings.transport,
        timeouts=settings.timeouts,
        credentials=credentials,
        insecure=settings.security.insecure,
        on_death=lambda: log.error("pdlink: the node has died; requests fail until the server is restarted"),
    )


def classes() -> dict[str, Callable[..., Any]]:
    """By the names of SGLang's `KVClassType`."""
    return {
        "MANAGER": PDLinkKVManager,
        "SENDER": PDLinkKVSender,
        "RECEIVER": PDLinkKVReceiver,
        "BOOTSTRAP_SERVER": PDLinkKVBootstrapServer,
    }
