"""argparse with better manners."""

from __future__ import annotations

import argparse
import difflib
import itertools
import re
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from pdlink import logs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from types import ModuleType


class Parser(argparse.ArgumentParser):
    """argparse that takes no abbreviations, and says what was probably meant."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)
        self.commands: list[str] = []
        """Words that may stand here, for the one that is wrong."""
        self.below: Callable[[], Mapping[str, argparse.ArgumentParser]] = dict
        """The parsers of commands with all their options, for one that stands before the command that takes it."""
        self.hint = ""
        """What is said behind the arguments that nobody takes."""
        self.typed: Sequence[str] = ()
        """The whole command line."""
        self.set_defaults(parser=self)

    def error(self, message: str) -> NoReturn:
        wrong = re.match(r"argument (COMMAND|BENCHMARK|ACTION): invalid choice: '(.*?)' \(", message)
        if wrong is None:
            super().error(message)
        kind, word = wrong.group(1).lower(), wrong.group(2)
        self._refuse_early(itertools.takewhile(lambda each: each != word, self.typed))
        near = difflib.get_close_matches(word, self.commands, n=1, cutoff=0.5)
        hint = f"did you mean `{self.prog} {near[0]}`?" if near else f"there are {', '.join(self.commands)}"
        self.exit(2, f"pdlink: no {kind} {word!r}; {hint}\n")

    def refuse(self, words: Sequence[str]) -> NoReturn:
        """End with what is said about arguments that nobody takes."""
        self._refuse_early(words)
        flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
        hints = []
        for word in words:
            near = difflib.get_close_matches(word.partition("=")[0], flags, n=1, cutoff=0.6)
            hints.append(f"{word} (did you mean {near[0]}?)" if near and word.startswith("-") else word)
        self.error(f"unrecognized arguments: {' '.join(hints)}{self.hint}")

    def _refuse_early(self, words: Iterable[str]) -> None:
        """End with the command to put before an option, if one of these words is an option of commands alone."""
        flags = [word.partition("=")[0] for word in words if word.startswith("--")]
        if not (unknown := [flag for flag in flags if flag not in self._option_string_actions]):
            return
        commands = self.below().values()
        options = {option for command in commands for option in command._option_string_actions if option[:2] == "--"}
        for name in unknown:
            near = difflib.get_close_matches(name, options - self._option_string_actions.keys(), n=1, cutoff=0.7)
            if not near:
                continue
            found = [each.prog for each in commands if near[0] in each._option_string_actions]
            *most, last = [f"`{prog} {near[0]}`" for prog in found]
            meant = f"{', '.join(most)} or {last}" if most else last
            self.exit(2, f"pdlink: {name} goes after a command: did you mean {meant}?\n")


def no_command(parser: argparse.ArgumentParser) -> int:
    """What runs where a command of a command is missing."""
    parser.print_help(sys.stderr)
    return 2


def fill(parser: argparse.ArgumentParser, command: ModuleType) -> None:
    """With what the command's own module says of it, and its options."""
    parser.description, parser.epilog = command.DESCRIPTION, command.EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    command.add_arguments(parser)


def add_log_behind(command: argparse.ArgumentParser) -> None:
    """`--log-level` behind the command too; there it is not looked for first, but where people write it."""
    add_log(command, default=argparse.SUPPRESS)


def add_log(parser: argparse.ArgumentParser, default: str | None) -> None:
    """`--log-level` and `--log-format`."""
    level = "lowest level that is logged (warning; `up`: info)"
    parser.add_argument("--log-level", choices=logs.LEVELS, default=default, help=level)
    form = "text, or json: one object a line (text)"
    parser.add_argument("--log-format", choices=logs.FORMATS, default=default, help=form)


def positive(text: str) -> int:
    """An option of argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def positive_float(text: str) -> float:
    """An option of argparse."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be positive, not {text}")
    return value
