"""One configuration of another system, key by key, as settings of ours. Pure: what is read and printed is
`pdlink.commands.moving`'s."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from pdlink.config.mistakes import must_be

from .verdicts import EnginesOwn, NoCounterpart, NotNeeded, OurSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pydantic.fields import FieldInfo

    from .verdicts import Rule, Verdict


class Vocabulary(NamedTuple):
    """The keys of one system."""

    name: str
    rules: Mapping[str, Rule]
    plain: Callable[[str], str]
    """The key of `rules` for a key as it was given, in its place."""
    otherwise: Callable[[str, Any], Verdict | None] = lambda key, value: None
    """Of keys that `rules` does not have, and their values."""
    pairs: tuple[tuple[str, str], ...] = ()
    """Settings of ours of which each needs the other."""


class Conversion(NamedTuple):
    settings: dict[str, Any]
    """Ours, by dotted key."""
    kept: dict[str, Any]
    """The engine's own."""
    lines: dict[str, Verdict]
    """Every given key."""


def move(vocabulary: Vocabulary, given: Mapping[str, Any], fields: Mapping[str, FieldInfo]) -> Conversion:
    """What becomes of each key. given: by dotted key. fields: our settings, by dotted key."""
    moved, said = Conversion({}, {}, {}), dict[str, str]()
    for key, value in given.items():
        verdict = _fitting(fields, judge(vocabulary, key, value))
        settings = _settings_of(vocabulary.plain(key), verdict, value)
        fresh = {each: held for each, held in settings.items() if each not in said}
        if settings and not fresh:
            first = next(iter(settings))
            same = {**moved.settings, **moved.kept}[first] == settings[first]
            verdict = (NotNeeded if same else NoCounterpart)(f"{said[first]} says {'the same' if same else 'other'}")
        elif isinstance(verdict, OurSettings):
            verdict = verdict._replace(settings=fresh)
        said |= dict.fromkeys(fresh, key)
        (moved.kept if isinstance(verdict, EnginesOwn) else moved.settings).update(fresh)
        moved.lines[key] = verdict
    for one, other in vocabulary.pairs:
        for there, missing in ((one, other), (other, one)):
            if there in moved.settings and missing not in moved.settings:
                del moved.settings[there]
                moved.lines[said[there]] = NoCounterpart(f"{there} needs {missing}, and nothing here gives that")
    return moved


def judge(vocabulary: Vocabulary, key: str, value: Any) -> Verdict:
    """By the table alone: whether our settings take the value is not looked at."""
    plain = vocabulary.plain(key)
    rule = vocabulary.rules.get(plain) or vocabulary.otherwise(plain, value)
    if isinstance(rule, str):
        return OurSettings({rule: value})
    if callable(rule):
        return rule(value)
    if rule is not None:
        return rule
    near = difflib.get_close_matches(plain, vocabulary.rules, n=1, cutoff=0.75)
    return NoCounterpart(f"no key of {vocabulary.name} known here" + (f"; did you mean {near[0]}?" if near else ""))


def hint(vocabulary: Vocabulary, key: str, value: Any) -> str | None:
    """For one who writes this key where ours are expected: what to do. None if the vocabulary does not have it."""
    plain = vocabulary.plain(key)
    if plain not in vocabulary.rules and vocabulary.otherwise(plain, value) is None:
        return None
    verdict = judge(vocabulary, key, value)
    if isinstance(verdict, EnginesOwn):
        return None
    if not isinstance(verdict, OurSettings):
        return f"{key} is of {vocabulary.name}: {verdict.why}; leave it out"
    ours = (
        f"{setting}: {held}" if isinstance(held, int | float) else setting  # a URL may hold a password
        for setting, held in verdict.settings.items()
    )
    return f"{key} is of {vocabulary.name}; write {', '.join(ours)}"


def _settings_of(plain: str, verdict: Verdict, value: Any) -> Mapping[str, Any]:
    if isinstance(verdict, OurSettings):
        return verdict.settings
    if isinstance(verdict, EnginesOwn):
        return {plain: value if verdict.value is None else verdict.value}
    return {}


def _fitting(fields: Mapping[str, FieldInfo], verdict: Verdict) -> Verdict:
    """The verdict with values of our types, or why they do not fit."""
    if not isinstance(verdict, OurSettings):
        return verdict
    fitting = {}
    for setting, value in verdict.settings.items():
        if (field := fields.get(setting)) is None:  # a part of one, of which the rule knows the values
            fitting[setting] = value
            continue
        kind: Any = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
        adapter = TypeAdapter(kind)
        try:
            fitting[setting] = adapter.dump_python(adapter.validate_python(value), mode="json")
        except ValidationError as error:
            return NoCounterpart(f"{setting} {must_be(error.errors()[0])}")
    return OurSettings(fitting, verdict.why)


KINDS = {"taken": OurSettings, "kept": EnginesOwn, "not needed": NotNeeded, "no counterpart": NoCounterpart}
"""In the order of the report."""
