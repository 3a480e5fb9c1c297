"""`sglang:pdlink_...` on the /metrics of an SGLang server (`--enable-metrics`): what pdlink counts in its schedulers.

SGLang's processes write their numbers to files, which its server reads and adds up. A thread of each scheduler's
process brings ours up to date. prometheus_client looks for the place of the files when it is imported, which SGLang
sets first: so nothing here may import it before a rank is there.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Any

from pdlink import threads
from pdlink.events import listen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pdlink.integrations.stats import Counts
    from pdlink.node.node import Node
    from pdlink.observe.gauges import LinkGauges, StoreGauges
    from pdlink.store.interface import AnyStore

    Look = Callable[[LinkGauges, StoreGauges], None]

_INTERVAL_S = 1.0


class SchedulerStats:
    """Of one process, for all of pdlink in it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._looks: list[Look] = []
        """What sets the gauges."""
        self._counts: Counts | None = None
        self._update: Callable[[], None] = lambda: None
        self._ended = threading.Event()

    def add_nodes(self, server_args: Any, nodes: Callable[[], Iterable[Node]]) -> Callable[[], None]:
        """Show the link of these, until the function is called that is returned: before they are closed."""

        def look(link: LinkGauges, _: StoreGauges) -> None:
            from pdlink.integrations.stats import link_state

            link.set(link_state(node.report() for node in nodes()))

        return self._add(server_args, look)

    def add_store(self, server_args: Any, store: AnyStore) -> Callable[[], None]:
        """As `add_nodes`."""

        def look(_: LinkGauges, kept: StoreGauges) -> None:
            kept.set(store.gauges(), store.health(), store.problems())

        return self._add(server_args, look)

    def _add(self, server_args: Any, look: Look) -> Callable[[], None]:
        if not server_args.enable_metrics:
            return lambda: None
        with self._lock:
            if self._counts is None:
                self._counts = self._declare(str(server_args.served_model_name or server_args.model_path))
            self._looks.append(look)
            if len(self._looks) == 1:
                self._ended = threading.Event()
                run = partial(self._run, self._ended)
                threads.guarded("pdlink-sglang-metrics", run, lambda _: None).start()
        return partial(self._drop, look)

    def _drop(self, look: Look) -> None:
        with self._lock:
            self._looks.remove(look)
            assert self._counts is not None
            self._counts.forget_gauges()
            self._update()
            if not self._looks:
                self._ended.set()

    def _declare(self, model: str) -> Counts:
        import prometheus_client

        from pdlink.integrations.stats import Counts, ShownStats

        gauge = partial(prometheus_client.Gauge, multiprocess_mode="sum")
        made = prometheus_client.Counter, gauge, prometheus_client.Histogram
        shown, counts = ShownStats("sglang", *made, ["model_name"], [[model]], prompts=False), Counts()
        counts.look, self._update = self._look, lambda: shown.add(counts.take(), [model])
        listen(counts)
        return counts

    def _run(self, ended: threading.Event) -> None:
        while not ended.wait(_INTERVAL_S):
            with self._lock:
                self._update()

    def _look(self, link: LinkGauges, kept: StoreGauges) -> None:
        for look in self._looks:
            look(link, kept)


SHOWN = SchedulerStats()
"""Of this process."""
