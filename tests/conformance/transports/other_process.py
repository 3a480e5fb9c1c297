"""A `Side` in a process of its own."""

from __future__ import annotations

from tests import other_process
from tests.conformance.transports.entries import ENTRIES
from tests.conformance.transports.side import Side


class OtherProcess(other_process.OtherProcess):
    def __init__(self, entry_name: str) -> None:
        super().__init__(__name__, entry_name)


def serve(arguments: list[str]) -> None:
    [entry_name] = arguments
    side = Side(ENTRIES[entry_name].group()(), ENTRIES[entry_name].shorter)
    other_process.answer_calls(side)
    side.close()
