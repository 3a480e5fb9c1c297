"""`python -m pdlink_bench.unobserved ...`: `pdlink ...` that observes nothing, for `pdlink bench observe`.

No product setting does this: what is taken out here is what the benchmark measures.
"""

from __future__ import annotations

import runpy
from typing import TYPE_CHECKING

from pdlink import events

if TYPE_CHECKING:
    from collections.abc import Callable


def _nothing(*_: object, **__: object) -> None:
    """In the place of what notes something."""


def _listen(_: events.Listener) -> Callable[[], None]:
    return _nothing


def take_out() -> None:
    """Before anything that observes is imported."""
    vars(events)["listen"] = _listen
    from pdlink.observe import series
    from pdlink_proxy import admission, answering, decision_log, decisions, records

    for kind, names in (
        (series.Counter, ("inc", "add", "set")),
        (series.Gauge, ("add", "set", "replace")),
        (series.Histogram, ("observe", "observe_each")),
        (decision_log.Tally, ("add", "whole")),
        (records.Records, ("append",)),
        (decisions.Decisions, ("append",)),
        (admission.Admission, ("note",)),
        (answering.Answering, ("count",)),
    ):
        for name in names:
            assert hasattr(kind, name), f"{kind.__name__}.{name}"
            setattr(kind, name, _nothing)
    vars(answering)["exemplar_of"] = _nothing


if __name__ == "__main__":
    take_out()
    runpy.run_module("pdlink", run_name="__main__")
