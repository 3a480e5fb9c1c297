"""A `Side` in a process of its own."""

from __future__ import annotations

from tests import other_process
from tests.conformance.transports.entries import ENTRIES


class OtherProcess(other_process.OtherProcess):
    def __init__(self, entry_name: str) -> None:
        super().__init__(__name__, entry_name)


def serve(arguments: list[str]) -> None:
    [entry_name] = arguments
    side = ENTRIES[entry_name].side()
    other_process.answer_calls(side)
    side.close()
