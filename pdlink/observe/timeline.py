"""The last transfers of a worker as a timeline: when each layer was written, and when its push flew and landed.

The format is the Trace Event JSON that Perfetto (ui.perfetto.dev) and chrome://tracing open: one row per transfer
for what the engine wrote, and one for what was in flight.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

from pdlink.events import Event, LayerLanded, LayerWritten, TransferEnded

_TransferEvent = LayerWritten | LayerLanded | TransferEnded


class Timeline:
    """Keeps the events of the last `capacity` transfers. Pass the instance to `pdlink.events.listen`."""

    def __init__(self, name: str, capacity: int = 64) -> None:
        self._name, self._capacity = name, capacity
        self._lock = threading.Lock()
        self._transfers: OrderedDict[str, list[_TransferEvent]] = OrderedDict()

    def __call__(self, event: Event) -> None:
        if not isinstance(event, _TransferEvent):
            return
        with self._lock:
            if event.transfer_id not in self._transfers:
                self._transfers[event.transfer_id] = []
                if len(self._transfers) > self._capacity:
                    self._transfers.popitem(last=False)
            self._transfers[event.transfer_id].append(event)

    def trace(self) -> dict[str, Any]:
        """All kept transfers as a trace; times in microseconds of this host's monotonic clock."""
        with self._lock:
            transfers = [(name, list(events)) for name, events in self._transfers.items()]
        rows: list[dict[str, Any]] = [_label("process_name", 0, self._name)]
        for index, (transfer_id, events) in enumerate(transfers):
            compute, link = 2 * index + 1, 2 * index + 2
            rows += [_label("thread_name", compute, f"{transfer_id} written")]
            rows += [_label("thread_name", link, f"{transfer_id} in flight")]
            for event in events:
                match event:
                    case LayerWritten():
                        rows.append(
                            {"ph": "i", "s": "t", "pid": 1, "tid": compute, "ts": event.at_s * 1e6,
                             "name": f"layer {event.layer} written", "args": _args(event)}
                        )  # fmt: skip
                    case LayerLanded():
                        # Pushes of one transfer overlap: async slices may, complete ones may not.
                        slice_id = f"{transfer_id}/{event.layer}/{event.start}"
                        slice_ = {"cat": "push", "pid": 1, "tid": link, "id": slice_id,
                                  "name": f"layer {event.layer} landed"}  # fmt: skip
                        rows.append({"ph": "b", "ts": event.submitted_s * 1e6, "args": _args(event), **slice_})
                        rows.append({"ph": "e", "ts": event.at_s * 1e6, **slice_})
                    case TransferEnded():
                        rows.append(
                            {"ph": "i", "s": "t", "pid": 1, "tid": link, "ts": event.at_s * 1e6,
                             "name": f"{event.side} {event.state} {event.reason}".strip(),
                             "args": {"transfer_id": transfer_id, "nbytes": event.nbytes}}
                        )  # fmt: skip
        return {"traceEvents": rows, "displayTimeUnit": "ms"}


def _args(event: LayerWritten | LayerLanded) -> dict[str, Any]:
    args: dict[str, Any] = {
        "transfer_id": event.transfer_id,
        "layer": event.layer,
        "start": event.start,
        "end": event.end,
    }
    if isinstance(event, LayerLanded):
        args |= {"nbytes": event.nbytes, "transport": event.transport}
    return args


def _label(kind: str, row: int, text: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": 1, "tid": row, "args": {"name": text}}
