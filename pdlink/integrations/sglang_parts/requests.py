"""SGLang's sender, receiver and bootstrap server: SGLang's own, with what the manager is to be told."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer

from pdlink.integrations.sglang_parts.speakers import SpeakingReceiver, SpeakingSender, fail
from pdlink.integrations.sglang_parts.transfer import PDLinkKVManager
from pdlink.reasons import ABORTED, Code, Reason

if TYPE_CHECKING:
    from collections.abc import Callable


class PDLinkKVSender(SpeakingSender):  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kv_mgr.opened(self.bootstrap_room)

    def abort(self) -> None:
        super().abort()
        self.kv_mgr.refuse(self.bootstrap_room, "aborted")
        self.kv_mgr.stop_room(self.bootstrap_room, ABORTED)

    def clear(self) -> None:
        super().clear()
        succeeded = self.conclude_state == KVPoll.Success
        reason = None if succeeded else Reason(Code.ABORTED, "the request has ended")
        self.kv_mgr.stop_room(self.bootstrap_room, reason)


class PDLinkKVReceiver(SpeakingReceiver):  # type: ignore[misc]
    def init(self, prefill_dp_rank: int) -> None:
        super().init(prefill_dp_rank)
        info = getattr(self, "prefill_info", None)
        if (
            self.conclude_state is None
            and info is not None
            and (info.attn_cp_size > 1 or getattr(info, "enable_kv_cache_sharding", False))
        ):
            fail(
                self,
                f"context parallel prefill: got {info.attn_cp_size} ranks; expected 1, without "
                "--enable-kv-cache-sharding; start prefill so",
            )

    def _poll(self) -> Any:
        """SGLang's sockets do not say that nobody listens any more: a manager that does not answer is gone."""
        if self.conclude_state is None and self.init_time is not None:
            unanswered = not self.kv_mgr.receiving.is_answered(self.bootstrap_room)
            if unanswered and time.time() - self.init_time > self.kv_mgr.answer_s:
                fail(self, f"no answer of prefill at {self.bootstrap_addr} within {self.kv_mgr.answer_s} s")
                self.kv_mgr.forget_route(self.bootstrap_room)
        return super()._poll()

    def _send_abort_notification(self, *, force_arm: bool = False) -> None:
        super()._send_abort_notification(force_arm=force_arm)
        self.kv_mgr.stop_room(self.bootstrap_room, ABORTED)

    def _clear(self) -> None:
        super()._clear()
        self.kv_mgr.receiving.forget(self.bootstrap_room)


class PDLinkKVBootstrapServer(CommonKVBootstrapServer):  # type: ignore[misc]
    """SGLang's."""


def classes() -> dict[str, Callable[..., Any]]:
    """By the names of SGLang's `KVClassType`."""
    return {
        "MANAGER": PDLinkKVManager,
        "SENDER": PDLinkKVSender,
        "RECEIVER": PDLinkKVReceiver,
        "BOOTSTRAP_SERVER": PDLinkKVBootstrapServer,
    }
