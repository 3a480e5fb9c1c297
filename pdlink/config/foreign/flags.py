"""Command lines of other systems, taken apart."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence


class CommandLine(NamedTuple):
    program: list[str]
    """The words before the first flag."""
    flags: dict[str, list[list[str]]]
    """By flag with its dashes: the words behind it, each time that it is there."""


def taken_apart(words: Sequence[str]) -> CommandLine:
    found = CommandLine([], {})
    for word in words:
        if word.startswith("--") or (found.flags and re.match(r"-[A-Za-z]", word)):
            name, equals, value = word.partition("=")
            found.flags.setdefault(name, []).append([value] if equals else [])
        elif found.flags:
            next(reversed(found.flags.values()))[-1].append(word)
        else:
            found.program.append(word)
    return found


def value_of(times: Sequence[Sequence[str]]) -> Any:
    """Of a flag that counts once, the last time: True without a word, else the word, or all of several."""
    last = list(times[-1])
    return (last[0] if len(last) == 1 else last) if last else True
