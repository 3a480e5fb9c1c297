"""What the flow knows of one attempt: its legs, and what they have said."""

from __future__ import annotations

from pdlink.api.sse import EventBuffer


class LegState:
    __slots__ = ("_events", "ended_well", "running", "since_s", "spoke", "worker")

    def __init__(self, worker: str, since_s: float) -> None:
        self.worker, self.since_s = worker, since_s
        """The latter is its last sign of life; its deadline counts from there."""
        self.running = True
        self.ended_well = False
        self.spoke = False
        """Its first data event or whole answer is here."""
        self._events: EventBuffer | None = None

    @property
    def events(self) -> EventBuffer:
        """Of its stream; an answer in one piece needs none."""
        if self._events is None:
            self._events = EventBuffer()
        return self._events
