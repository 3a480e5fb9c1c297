"""Who gets the slots of an owner: writers ask, and take turns. Pure.

A slot is granted to be filled once. Nobody holds more than half of them, so that a writer that stands still does not
keep the lane from the others.
"""

from __future__ import annotations

from collections import deque


class Credit:
    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.most = max(1, num_slots // 2)
        """Slots of one writer."""
        self._free = deque(range(num_slots))
        self._asked: dict[str, int] = {}
        """Writers that wait, in the order of their turns."""
        self._held: dict[str, set[int]] = {}

    def ask(self, writer: str, count: int) -> None:
        self._asked[writer] = min(self._asked.get(writer, 0) + count, self.num_slots)

    def grants(self) -> list[tuple[str, int]]:
        """Slots that can be given now, in turns: (writer, slot)."""
        given = []
        turns = deque(self._asked)
        while turns and self._free:
            writer = turns.popleft()
            held = self._held.setdefault(writer, set())
            if len(held) >= self.most:
                continue
            slot = self._free.popleft()
            held.add(slot)
            given.append((writer, slot))
            left = self._asked.pop(writer) - 1
            if left > 0:
                self._asked[writer] = left  # behind the others
                turns.append(writer)
        return given

    def holds(self, writer: str, slot: int) -> bool:
        return slot in self._held.get(writer, ())

    def give_back(self, writer: str, slot: int) -> None:
        self._held[writer].discard(slot)
        self._free.append(slot)

    def ask_no_more(self, writer: str) -> None:
        self._asked.pop(writer, None)

    def forget(self, writer: str) -> None:
        """All that it holds is free: nothing of it can be written any more."""
        self.ask_no_more(writer)
        self._free.extend(self._held.pop(writer, ()))
