"""Python's collector of cycles in a process that serves: it looks at what requests leave, not at modules and models.

What a worker imports are 410,000 objects. To look at all of them takes 200 ms, in which no request goes on; doing so
again and again during the imports was 0.85 of 4.3 CPU seconds until a worker is ready (two cores, torch 2.13).
"""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


def pause() -> None:
    """While modules and models are loaded. They leave 8 MB in cycles, which stay."""
    gc.disable()


@contextmanager
def over_requests_only() -> Iterator[None]:
    """What is there now lives as long as the process."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)  # a request leaves a few cycles; the default looks at them after ten requests
    gc.enable()
    try:
        yield
    finally:
        gc.unfreeze()  # else what is in a cycle outlives the interpreter, of which nanobind tells on stderr
