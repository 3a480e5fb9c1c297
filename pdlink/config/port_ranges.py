"""Addresses that differ in their port alone, written as one."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_RANGE = re.compile(r"(?P<before>.*:)(?P<first>\d{1,5})-(?P<last>\d{1,5})", re.DOTALL)
_MAX_PORT = 65535


def in_full(addresses: Iterable[str]) -> tuple[str, ...]:
    """An address for each port of `tcp://HOST:8101-8104`; others as they are. Raises ValueError."""
    found: list[str] = []
    for text in addresses:
        match = _RANGE.fullmatch(text)
        if match is None:
            found.append(text)
            continue
        first, last = int(match["first"]), int(match["last"])
        if not 0 < first <= last <= _MAX_PORT:
            raise ValueError(f"got {text!r}; expected ports from 1 to {_MAX_PORT}, the lower one first; correct it")
        found += [f"{match['before']}{port}" for port in range(first, last + 1)]
    return tuple(found)
