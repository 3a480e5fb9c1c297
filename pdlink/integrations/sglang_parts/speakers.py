"""SGLang's sender and receiver of a request, which speak to the manager.

Up to 0.5.22 SGLang left that to each backend's classes. What SGLang does itself since then is here for earlier ones.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import zmq
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVReceiver, CommonKVSender, KVTransferError

if TYPE_CHECKING:
    from collections.abc import Callable

_BOTH_SPEAK = hasattr(CommonKVReceiver, "_send_bootstrap_message")


def fail(receiver: Any, reason: str) -> None:
    """The request has failed on this side."""
    receiver.kv_mgr.record_failure(receiver.bootstrap_room, f"pdlink: {reason}")
    receiver.kv_mgr.update_status(receiver.bootstrap_room, KVPoll.Failed)
    receiver.conclude_state = KVPoll.Failed


def _raise_failure(of: Any) -> None:
    of.conclude_state = KVPoll.Failed
    of.clear()
    with of.kv_mgr.failure_lock:
        reason = of.kv_mgr.failure_records.pop(of.bootstrap_room, None)
    why = reason or "the request failed on another rank"
    raise KVTransferError(of.bootstrap_room, why, is_from_another_rank=reason is None)


class _Sender(CommonKVSender):  # type: ignore[misc]  # SGLang is not installed where types are checked
    conclude_state: Any
    _early_send_wait_event: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.init_time = time.time()

    def send(self, kv_indices: Any, state_indices: Any = None, num_kv_tokens: int | None = None) -> None:
        if self.conclude_state is not None:
            return
        pages, which, is_last, skips = self._prepare_send_indices(kv_indices, state_indices)
        if skips:
            return
        event, self._early_send_wait_event = self._early_send_wait_event, None
        self.kv_mgr.add_transfer_request(
            self.bootstrap_room,
            pages,
            which,
            is_last,
            aux_index=self.aux_index,
            state_indices=state_indices,
            wait_event=event,
        )
        self._record_transfer_indices(pages, state_indices)

    def poll(self) -> Any:
        return self._look(self.kv_mgr.check_status)

    def poll_pp_consensus(self) -> Any:
        return self._look(self.kv_mgr.check_status_pp_consensus)

    def _look(self, ask: Callable[[int], Any]) -> Any:
        if self.conclude_state is not None:
            return self.conclude_state
        room = self.bootstrap_room
        status = ask(room) if room in self.kv_mgr.request_status else KVPoll.Failed
        late = self._check_bootstrap_timeout() if status == KVPoll.Bootstrapping else None
        if late is not None:
            status = late
        if status == KVPoll.Success and self.kv_mgr._staging_outstanding.get(room, 0):
            return KVPoll.Transferring
        if status in (KVPoll.Success, KVPoll.Failed):
            self.conclude_state = status
        return status

    def failure_exception(self) -> None:
        _raise_failure(self)


class _Receiver(CommonKVReceiver):  # type: ignore[misc]  # SGLang is not installed where types are checked
    def send_metadata(
        self,
        kv_indices: Any,
        aux_index: int | None = None,
        state_indices: Any = None,
        decode_prefix_len: int | None = None,
        **_: Any,
    ) -> None:
        for info in self.bootstrap_infos or ():
            message = self.kv_mgr.build_receiver_metadata_message(
                bootstrap_room=self.bootstrap_room,
                required_dst_info_num=self.required_dst_info_num,
                kv_indices=kv_indices,
                aux_index=aux_index,
                state_indices=state_indices,
                decode_prefix_len=decode_prefix_len,
                is_dummy=info["is_dummy"],
            )
            try:
                socket, lock = self._connect_to_bootstrap_server(info)
                with lock:
                    socket.send_multipart(message)
            except zmq.ZMQError as error:
                fail(self, f"{info.get('rank_ip')}:{info.get('rank_port')} cannot be told: {error}")
                self.invalidate_cached_bootstrap_infos()
                return
        if self.bootstrap_infos is None:
            fail(self, f"the bootstrap server at {self.bootstrap_addr} does not say where prefill is")
        else:
            self.init_time = time.time()

    def failure_exception(self) -> None:
        _raise_failure(self)


SpeakingSender: Any = CommonKVSender if _BOTH_SPEAK else _Sender
SpeakingReceiver: Any = CommonKVReceiver if _BOTH_SPEAK else _Receiver
