"""What vLLM calls on a rank, in the order of a step, handed on to its transfers and its store."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Collection

    from pdlink.integrations.vllm_parts.host_copy import HostCopy
    from pdlink.integrations.vllm_parts.requests import StepPlan
    from pdlink.integrations.vllm_parts.store_half import StoreHalf
    from pdlink.integrations.vllm_parts.worker import Results, WorkerHalf


class Steps:
    """Of one rank. For one thread."""

    def __init__(
        self,
        news: threading.Event,
        transfers: WorkerHalf,
        store: StoreHalf | None = None,
        host: HostCopy | None = None,
        settle: Callable[[], None] | None = None,
    ) -> None:
        """news: the event that both set when they have a result. host: of a cache that goes through memory of the
        host. settle: waits for the steps under way, where they may still write to blocks that others have now."""
        self.transfers, self.store, self.host, self._settle = transfers, store, host, settle
        self._news = news
        self._begun = False

    def withdraw(self, plan: StepPlan) -> None:
        """Before the blocks of preempted requests are written to by others."""
        self.transfers.withdraw(plan)
        if self.store is not None:
            self.store.withdraw(plan.store)

    def begin(self, plan: StepPlan) -> None:
        """Before the forward pass."""
        if self._begun:  # model runner V2 says nothing of one that has failed
            self.abandon()
        self._begun = True
        if self._settle is not None and plan.offers:
            self._settle()
        if self.host is not None:
            self.host.prepare(plan)
        self.transfers.begin(plan)
        if self.host is not None:
            self.host.compute(plan, self.transfers.computed)
        if self.store is not None:
            self.store.begin(plan.store)
            for offer in plan.offers:
                if not offer.after_load:
                    self.store.pace.offered(offer.request_id, offer.end - offer.start)
            self.store.pace.begin(plan.store.num_computed)

    def layer_saved(self, name: str) -> None:
        """In the forward pass: this layer's KV of the step's tokens is in its blocks."""
        if self.host is not None and not self.host.layer_saved(name):
            return
        self.transfers.layer_saved(name)
        if self.store is not None:
            self.store.layer_saved(name)

    def end(self) -> None:
        """After the forward pass: layers whose hook did not run (a full graph) are ready now, too."""
        self._begun = False
        if self.host is not None:
            self.host.end()
        self.transfers.end()
        if self.store is not None:
            self.store.end()
            self.store.pace.end()

    def abandon(self) -> None:
        """The forward pass has failed: of what it was to compute nothing is sent or kept any more."""
        self._begun = False
        if self.host is not None:
            self.host.abandon()
        self.transfers.abandon()
        if self.store is not None:
            self.store.abandon()
            self.store.pace.abandon()

    def results(self, over: Collection[str]) -> Results:
        """What has ended. over: requests that vLLM has finished since the last call.

        A request is reported once, when nothing reads its blocks any more: its transfer hears of its end after the
        store has copied them.
        """
        self._news.clear()
        results = self._both(over, self.store) if self.store is not None else self.transfers.results(over)
        if self.host is not None:
            self.host.received(results.received, results.failed)
            self.host.over(over)
        return results

    def _both(self, over: Collection[str], store: StoreHalf) -> Results:
        results = store.results(over)
        free = set(over) - store.copying | results.sent
        results.sent = {request_id for request_id in results.sent if not self.transfers.sends(request_id)}
        loads, results.loaded = results.loaded, []
        for request_id, end in loads:
            rest = self.transfers.loaded(request_id, end)
            if rest:
                store.pace.offered(request_id, rest)
            else:
                results.received.add(request_id)
        transfers = self.transfers.results(free)
        store.pace.received(transfers.received, transfers.failed)
        results.sent |= transfers.sent
        results.received |= transfers.received
        results.failed |= transfers.failed
        results.failed_blocks |= transfers.failed_blocks
        results.reasons |= transfers.reasons
        return results

    def pause(self, timeout_s: float) -> None:
        """Wait for the next result, if vLLM waits for one; for steps that compute nothing."""
        if self.transfers.is_awaited or (self.store is not None and self.store.is_awaited):
            self._news.wait(timeout_s)
