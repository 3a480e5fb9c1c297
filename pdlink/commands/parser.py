"""argparse with better manners."""

from __future__ import annotations

import argparse
import difflib
import re
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Sequence


class Parser(argparse.ArgumentParser):
    """argparse that takes no abbreviations, and says what was probably meant."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)
        self.commands: list[str] = []
        """Words that may stand here, for the one that is wrong."""
        self.set_defaults(parser=self)

    def error(self, message: str) -> NoReturn:
        wrong = re.match(r"argument (COMMAND|BENCHMARK|ACTION): invalid choice: '(.*?)' \(", message)
        if wrong is None:
            super().error(message)
        kind, word = wrong.group(1).lower(), wrong.group(2)
        near = difflib.get_close_matches(word, self.commands, n=1, cutoff=0.5)
        hint = f"did you mean `{self.prog} {near[0]}`?" if near else f"there are {', '.join(self.commands)}"
        self.exit(2, f"pdlink: no {kind} {word!r}; {hint}\n")

    def refuse(self, words: Sequence[str]) -> NoReturn:
        """End with what is said about arguments that nobody takes."""
        flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
        hints = []
        for word in words:
            near = difflib.get_close_matches(word.partition("=")[0], flags, n=1, cutoff=0.6)
            hints.append(f"{word} (did you mean {near[0]}?)" if near and word.startswith("-") else word)
        self.error(f"unrecognized arguments: {' '.join(hints)}")
