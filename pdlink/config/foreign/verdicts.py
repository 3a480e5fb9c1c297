"""What becomes of one key of another system's configuration."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class OurSettings(NamedTuple):
    """It becomes settings of ours."""

    settings: Mapping[str, Any]
    """By dotted key."""
    why: str = ""


class EnginesOwn(NamedTuple):
    """It is the engine's own, and stays."""

    value: Any = None
    """In place of the one that was given; None keeps that."""
    why: str = "the engine's own; stays"


class NotNeeded(NamedTuple):
    why: str


class NoCounterpart(NamedTuple):
    why: str


Verdict = OurSettings | EnginesOwn | NotNeeded | NoCounterpart
if TYPE_CHECKING:
    Rule = str | Verdict | Callable[[Any], Verdict]
    """A dotted key of ours takes the value as it is; a function looks at it."""


def is_off(value: object) -> bool:
    """Whether a value says that the thing is not wanted."""
    return not value or str(value).strip().lower() in ("false", "0", "0.0", "no", "off", "none", "null", "-1")


def lacking(why: str) -> Callable[[Any], Verdict]:
    """Of something that we do not have."""
    return lambda value: NotNeeded("off here, too") if is_off(value) else NoCounterpart(why)


def gib(setting: str) -> Callable[[Any], Verdict]:
    """A size in GiB, as a number or as "400.0 GB"."""

    def rule(value: Any) -> Verdict:
        found = re.fullmatch(r"\s*([\d.]+)\s*(?:gi?b)?\s*", str(value), re.IGNORECASE)
        return OurSettings({setting: found.group(1) if found else value})

    return rule


def nbytes_as_gib(setting: str, why: str = "") -> Callable[[Any], Verdict]:
    """A size in bytes."""

    def rule(value: Any) -> Verdict:
        found = re.fullmatch(r"\d{1,18}(?:\.0)?", str(value))
        return OurSettings({setting: float(found.group()) / 2**30 if found else "no number"}, why)

    return rule


def directories(value: Any) -> Verdict:
    """A directory of a disk: a path, file:///PATH, or several with commas between."""
    if is_off(value):
        return NotNeeded("off here, too")
    if not isinstance(value, str):
        return NoCounterpart("tiers.local_disk must be a directory")
    paths = [re.sub(r"^file://", "", path.strip()) for path in value.split(",")]
    if any("://" in path or not path for path in paths):
        return NoCounterpart("tiers.local_disk must be a directory")
    return OurSettings({"tiers.local_disk": paths[0] if len(paths) == 1 else paths})


def no_room(value: Any) -> bool:
    return is_off(re.sub(r"(?i)\s*gi?b\s*$", "", str(value)))


def same(rule: Rule, keys: str) -> dict[str, Rule]:
    """One rule for several keys, with blanks between."""
    return dict.fromkeys(keys.split(), rule)
