"""Choices of a schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

_T = TypeVar("_T")


class Dice:
    """Choices out of one number of a schedule, so that every number means something everywhere."""

    def __init__(self, number: int) -> None:
        self._number = number

    def below(self, count: int) -> int:
        self._number, rest = divmod(self._number, count)
        return rest

    def one(self, items: Sequence[_T]) -> _T:
        return items[self.below(len(items))]
