"""Ids that nobody can guess, of 128 bits each: some hundred at once, because a system call for each took 0.8 us."""

from __future__ import annotations

import os
from itertools import chain, repeat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_NBYTES, _AT_ONCE = 16, 256
_spare: list[str] = []
# A child would hand out the ids of its parent.
os.register_at_fork(after_in_child=_spare.clear)


def _drawn(num: int) -> list[str]:
    drawn = os.urandom(_NBYTES * num).hex()
    _spare[:] = [drawn[at : at + 2 * _NBYTES] for at in range(0, len(drawn), 2 * _NBYTES)]
    return _spare


new_id: Callable[[], str] = chain.from_iterable(map(_drawn, repeat(_AT_ONCE))).__next__
"""32 hexadecimal digits, never the same. Of 256 calls one runs Python code."""
