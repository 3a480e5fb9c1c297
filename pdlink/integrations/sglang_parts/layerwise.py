"""Hooks that tell a manager of each layer that a prefill has written, before the forward pass ends.

SGLang itself sends a chunk when its forward pass is over. `Scheduler.run_batch` says which requests a pass computes,
`AttentionBackend.forward` that a layer's KV is in the pool, fused kernels included. Backends that do not go through
it are pushed by chunk.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, ClassVar

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from pdlink.integrations.sglang_parts.gpu import WrittenPages, to_host

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdlink.integrations.sglang_parts.transfer import PDLinkKVManager

    Hooked = Callable[..., Any]

log = logging.getLogger(__name__)

_RUN_BATCH = "sglang.srt.managers.scheduler.Scheduler.run_batch"
_FORWARD = "sglang.srt.layers.attention.base_attn_backend.AttentionBackend.forward"


class Layerwise:
    """Of one prefill rank. All of it runs in the scheduler's thread."""

    def __init__(self, manager: PDLinkKVManager) -> None:
        self._manager = manager
        self._number = {layer: number for number, layer in enumerate(manager.layer_ids)}
        self._pass: tuple[Any, Any] | None = None
        """The scheduler and the batch of the forward pass that runs."""
        self._rooms: list[Callable[[int], None]] | None = None
        """Of each room with pages that this pass completes, what reports one layer; from the first layer on."""
        self._told = False

    _current: ClassVar[Layerwise | None] = None
    """SGLang's hooks cannot be taken out: they call this one, and a server has one prefill rank a process."""
    _hooked: ClassVar[bool] = False

    def install(self) -> None:
        Layerwise._current = self
        if not Layerwise._hooked:
            Layerwise._hooked = True
            HookRegistry.register(_RUN_BATCH, _through(Layerwise.around_batch), HookType.AROUND)
            HookRegistry.register(_FORWARD, _through(Layerwise.around_forward), HookType.AROUND)
            HookRegistry.apply_hooks()

    def remove(self) -> None:
        """From now on layers are not reported."""
        if Layerwise._current is self:
            Layerwise._current = None

    def around_batch(self, original: Hooked, scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if not batch.forward_mode.is_extend():
            return original(scheduler, batch, *args, **kwargs)
        self._pass, self._rooms = (scheduler, batch), None
        try:
            return original(scheduler, batch, *args, **kwargs)
        finally:
            self._pass = None

    def around_forward(
        self, original: Hooked, backend: Any, q: Any, k: Any, v: Any, layer: Any, *args: Any, **kwargs: Any
    ) -> Any:
        result = original(backend, q, k, v, layer, *args, **kwargs)
        number = self._number.get(layer.layer_id)
        if self._pass is not None and number is not None:
            try:
                self._written(number)
            except Exception:
                # The chunk's send() pushes what is missing, so the pass goes on.
                log.exception("pdlink: layer %s is not pushed early", layer.layer_id)
                self._pass = None
        return result

    def _written(self, number: int) -> None:
        assert self._pass is not None
        if self._rooms is None:  # now, because SGLang may have sent a cached prefix since the pass began
            scheduler, batch = self._pass
            found = [self._extended(scheduler, req) for req in batch.reqs]
            self._rooms = [room for room in found if room is not None]
        for report in self._rooms:
            report(number)
        if self._rooms and not self._told and number == len(self._number) - 1:
            self._told = True  # once: without this line a server pushes by chunk only
            log.info("pdlink: a prompt's KV was pushed layer by layer, during its forward pass")

    def _extended(self, scheduler: Any, req: Any) -> Callable[[int], None] | None:
        """What reports a layer of the pages that a request has after this pass; None if none can be pushed yet."""
        sender, page = req.disagg_kv_sender, self._manager.kv_args.page_size
        if getattr(sender, "kv_mgr", None) is not self._manager or getattr(sender, "num_kv_indices", None) is None:
            return None  # of a warm-up, or decode has not asked yet
        prompt = len(req.origin_input_ids)
        end = min(req.extend_end, prompt)
        start, end_page = req.start_send_idx, -(-end // page) if end == prompt else end // page
        first = sender.curr_idx
        num = end_page - start // page
        if num <= 0:
            return None
        slots = scheduler.req_to_token_pool.req_to_token[req.kv.req_pool_idx, start : end_page * page : page]
        slots = scheduler.token_to_kv_pool_allocator.translate_kv_indices_for_transfer(slots)
        sending, room, pages, gpu = (
            self._manager.sending,
            sender.bootstrap_room,
            slots[:num] // page,
            self._manager.gpu,
        )
        if gpu is None:
            sending.extend(room, first, pages.tolist())
            return lambda layer: sending.written(room, layer, first + num)
        part = WrittenPages(sending, room, first, to_host(pages), first + num)
        return lambda layer: part.written(gpu, layer)


def _through(hook: Hooked) -> Hooked:
    """The hook of whatever rank this process has now."""

    def call(original: Hooked, *args: Any, **kwargs: Any) -> Any:
        current = Layerwise._current
        return original(*args, **kwargs) if current is None else hook(current, original, *args, **kwargs)

    return call
