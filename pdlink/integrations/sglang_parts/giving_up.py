"""A hook that ends a prompt between two of its chunks when its room has failed.

SGLang looks at the rooms of prompts that wait and of prompts that are computed. One in the middle of its chunks is
computed to its end, whether or not decode still wants it. `Scheduler._poll_timeout_aborts` collects the aborts that a
server decides itself; SGLang gives them to all its ranks, so these come with them.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, ClassVar

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdlink.integrations.sglang_parts.transfer import PDLinkKVManager

log = logging.getLogger(__name__)

_ABORTS = "sglang.srt.managers.scheduler.Scheduler._poll_timeout_aborts"


class GivingUp:
    """Of one prefill rank. All of it runs in the scheduler's thread."""

    _current: ClassVar[GivingUp | None] = None
    """SGLang's hooks cannot be taken out: they call this one, and a server has one prefill rank a process."""
    _hooked: ClassVar[bool] = False

    def __init__(self, manager: PDLinkKVManager) -> None:
        self._manager = manager

    def install(self) -> None:
        GivingUp._current = self
        if not GivingUp._hooked:
            GivingUp._hooked = True
            HookRegistry.register(_ABORTS, _around, HookType.AROUND)
            HookRegistry.apply_hooks()

    def remove(self) -> None:
        if GivingUp._current is self:
            GivingUp._current = None

    def aborts(self, scheduler: Any) -> list[Any]:
        """Of the prompt that is computed in chunks, if its room has failed."""
        req = scheduler.chunked_req
        sender = getattr(req, "disagg_kv_sender", None)
        if sender is None or getattr(sender, "kv_mgr", None) is not self._manager:
            return []
        if self._manager.request_status.get(sender.bootstrap_room) != KVPoll.Failed:
            return []
        reason = self._manager.failure_records.get(sender.bootstrap_room, "its room has failed")
        log.info("pdlink: %s is not computed further: %s", req.rid, reason)
        return [AbortReq(rid=req.rid)]


def _around(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    aborts = original(scheduler, *args, **kwargs)
    current = GivingUp._current
    return aborts if current is None else [*aborts, *current.aborts(scheduler)]
