"""Where values come from: defaults, a file, the environment, flags. The one place that reads the environment.

What is given is used or refused, never dropped. One exception: variables of the environment that are of another role,
or that Kubernetes makes for a Service called pdlink, are not meant for this process.
"""

from __future__ import annotations

import difflib
import hashlib
import logging
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from pdlink.config.foreign import applying, lmcache
from pdlink.config.mistakes import must_be
from pdlink.config.proxy import ProxyConfig
from pdlink.config.section import Section
from pdlink.config.sglang import SglangConfig
from pdlink.config.store import StoreConfig
from pdlink.config.up import UpConfig
from pdlink.config.worker import WorkerConfig
from pdlink.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from pydantic.fields import FieldInfo

    from pdlink.config.foreign.applying import Vocabulary

ENVIRONMENT_PREFIX = "PDLINK_"
_Config = TypeVar("_Config", WorkerConfig, ProxyConfig, StoreConfig, UpConfig, SglangConfig)

_KINDS: dict[type[BaseModel], str] = {
    WorkerConfig: "a worker's settings",
    ProxyConfig: "the proxy's settings",
    StoreConfig: "a store's settings",
    UpConfig: "the settings of `pdlink up`",
    SglangConfig: "the settings of an SGLang server",
}

_LINK = re.compile(
    r"PDLINK(_[A-Z0-9_]+)?_(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
"""Variables that Kubernetes gives to every container beside a Service called `pdlink` or `pdlink-ANYTHING`; see
"Accessing the Service" in its documentation of Services."""
_LINK_PORT = re.compile(r"(tcp|udp|sctp)://")
"""Value of the one variable of a Service, NAME_PORT, whose name alone proves nothing."""

_IN_BRACKETS = re.compile(r"\[[0-9A-Fa-f.]*:[0-9A-Fa-f.]*:[0-9A-Fa-f:.]*\](:\d+)?")
"""YAML would read a list."""

_MAX_SHOWN_CHARS = 80


def load(
    kind: type[_Config],
    path: str | Path | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> _Config:
    """The settings of one role: defaults < file < environment < flags.

    flags, defaults: dotted keys ("cache.num_blocks") to values. None is a value.
    Raises ConfigError that names the key, the value and what would be valid.
    """
    data: dict[str, Any] = {}
    nest(data, defaults or {}, kind)
    if path is not None:
        for key, value in _read_file(kind, Path(path)).items():
            _put(kind, data, [key], value)
    for parts, value in _from_environment(kind, os.environ if environment is None else environment):
        _put(kind, data, parts, value)
    nest(data, flags or {}, kind)
    if kind not in (ProxyConfig, SglangConfig):  # SGLang loads its settings in every process
        mention_foreign(environment)
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise ConfigError("\n".join(explain(kind, error))) from None


def explain(kind: type[BaseModel], error: ValidationError, foreign: Vocabulary | None = None) -> Iterator[str]:
    """A line of help for each mistake. foreign: whose keys people may have written in place of ours."""
    for item in error.errors():
        theirs = item["type"] == "extra_forbidden" and len(item["loc"]) == 1 and foreign is not None
        hint = applying.hint(foreign, str(item["loc"][0]), item["input"]) if theirs and foreign is not None else None
        yield hint or _explain(kind, item)


def mention_foreign(environment: Mapping[str, str] | None = None) -> None:
    """One line of the log about variables that are for another system in our place, if there are some."""
    names = sorted(
        name for name in (os.environ if environment is None else environment) if name.startswith(lmcache.VARIABLES)
    )
    if names:
        logging.getLogger(__name__).warning(
            "%s in the environment: pdlink does not read what is for LMCache; "
            "`pdlink config from lmcache env` prints settings of pdlink",
            ", ".join(names),
        )


def parse_value(text: str, where: str) -> Any:
    """A value as people type it: YAML, or an IPv6 address in brackets. Raises ConfigError that names `where` it was
    typed."""
    if _IN_BRACKETS.fullmatch(text):
        return text
    try:
        return yaml.load(text, _Strict)
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: not valid YAML: {_one_line(error)}") from None


def parse_assignments(items: Sequence[str]) -> dict[str, Any]:
    """The dotted keys and values of `--set KEY=VALUE`. Raises ConfigError for any other form."""
    found = {}
    for item in items:
        key, equals, text = item.partition("=")
        if not equals:
            raise ConfigError(f"--set takes KEY=VALUE, got {item!r}")
        found[key] = parse_value(text, f"--set {key}")
    return found


def settings_of(kind: type[BaseModel], above: str = "") -> dict[str, FieldInfo]:
    """Every setting below `kind`, by dotted key; sections themselves are not among them."""
    found: dict[str, FieldInfo] = {}
    for name, field in kind.model_fields.items():
        section = _section_of(field)
        if section is None:
            found[above + name] = field
            continue
        below = settings_of(section, f"{above}{name}.")
        if (short := _short_of(section)) is not None:
            found[above + name] = below.pop(f"{above}{name}.{short}")
        found |= below
    return found


def environment_with(more: Mapping[str, str]) -> dict[str, str]:
    """This process's environment and more, for a child that is not ours."""
    return {**os.environ, **more}


def state_directory(given: str | Path | None) -> Path | None:
    """Where a process keeps what it must know after a restart: as given, else the user's. None without a home.

    The user's is $XDG_STATE_HOME/pdlink, or ~/.local/state/pdlink (XDG Base Directory Specification).
    """
    if given is not None:
        return Path(given)
    home = os.environ.get("XDG_STATE_HOME", "") or os.path.expanduser("~/.local/state")
    return Path(home, "pdlink") if os.path.isabs(home) else None


def _known_name(text: str) -> str:
    """A key of a file for an error's text: of a setting; others may be secrets."""
    parts = {part for kind in _KINDS for dotted in settings_of(kind) for part in dotted.split(".")}
    return repr(text) if text in parts else "a key"


class _Strict(yaml.SafeLoader):
    """YAML that refuses a key given twice; others take the last one, and the first is a setting that lies."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag == "tag:yaml.org,2002:merge":
                continue
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{_known_name(key_node.value)} is there twice", key_node.start_mark
                )
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


def _number(loader: _Strict, node: yaml.ScalarNode) -> Any:
    """What YAML 1.1 reads as a number to the base 60 is an IPv6 address here, as 2001:1:2:3:4:5:6:7."""
    if ":" in node.value:
        return node.value
    return loader.construct_yaml_int(node) if node.tag.endswith(":int") else loader.construct_yaml_float(node)


for _tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float"):
    _Strict.add_constructor(_tag, _number)


def _one_line(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and (mark := error.problem_mark) is not None:
        # Its own text quotes the line, which may hold a secret.
        return f"{error.problem or error.context}, line {mark.line + 1}, column {mark.column + 1}"
    return " ".join(str(error).split())


def _read_file(kind: type[BaseModel], path: Path) -> dict[str, Any]:
    try:
        data = yaml.load(path.read_text(), _Strict)
    except OSError as error:
        raise ConfigError(f"cannot read config file {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"config file {path} is not text") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"config file {path} is not valid YAML: {_one_line(error)}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"config file {path} must hold keys and values, got a {type(data).__name__}")
    data = {str(key): value for key, value in data.items()}
    if not _fits(kind, data):
        if data.keys() <= lmcache.RULES.keys():
            raise ConfigError(f"config file {path} holds LMCache's settings; use `pdlink config from lmcache {path}`")
        for other, what in _KINDS.items():
            if _fits(other, data):
                names: dict[type[BaseModel], str] = {ProxyConfig: "proxy", StoreConfig: "store", UpConfig: "up"}
                command = names.get(other) or data.get("role", "prefill")
                raise ConfigError(f"config file {path} holds {what}; use `pdlink {command} --config {path}`")
    return data


def _fits(kind: type[BaseModel], data: Mapping[str, Any]) -> bool:
    """Whether the first level of a file is of this kind."""
    for name, value in data.items():
        field = kind.model_fields.get(name)
        if field is None:
            return False
        section = _section_of(field)
        holds = section is not None or _holds_keys(field)
        if value is None or (holds and str in get_args(field.annotation)) or _short_of(section) is not None:
            continue
        if isinstance(value, dict) != holds:
            return False
    return True


def _from_environment(kind: type[BaseModel], environment: Mapping[str, str]) -> Iterator[tuple[list[str], Any]]:
    log = logging.getLogger(__name__)
    for name, text in sorted(environment.items()):
        if not name.startswith(ENVIRONMENT_PREFIX) or _LINK.fullmatch(name):
            continue
        if name.endswith("_PORT") and _LINK_PORT.match(text):
            continue
        key = name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__")
        value = parse_value(text, name) if text else text
        if _takes(kind, key, value):
            yield key, value
            continue
        other = next((other for other in _KINDS if other is not kind and _takes(other, key, value)), None)
        if other is not None:
            # `up` starts workers, so somebody may well expect that it takes a worker's settings.
            level = logging.WARNING if kind is UpConfig else logging.INFO
            near = [dotted for dotted in settings_of(kind) if dotted.endswith("." + ".".join(key))]
            use = f"; `pdlink up` takes {' and '.join(map(_variable, near))}" if near else ""
            log.log(level, "%s is of %s, and not used here%s", name, _KINDS[other], use)
        elif _takes(kind, key, {}):
            yield key, value  # for the error that says what a section is
        else:
            raise ConfigError(f"{name} in the environment: {_unknown(kind, key, _variable)}")


def _variable(dotted: str) -> str:
    return ENVIRONMENT_PREFIX + dotted.upper().replace(".", "__")


def _takes(kind: type[BaseModel], key: Sequence[str], value: Any) -> bool:
    """Whether such a setting is there, or a section for which `value` holds settings."""
    for index, part in enumerate(key):
        field = kind.model_fields.get(part)
        if field is None:
            return False
        section = _section_of(field)
        if section is None:
            return index == len(key) - 1 or _holds_keys(field)
        kind = section
    return isinstance(value, dict) or _short_of(kind) is not None


def nest(data: dict[str, Any], values: Mapping[str, Any], kind: type[BaseModel] | None = None) -> None:
    """Set values of dotted keys in a section and those below it. Raises ConfigError where a section would have to be
    what is one value already."""
    for dotted, value in values.items():
        _put(kind, data, dotted.split("."), value)


def _put(kind: type[BaseModel] | None, data: dict[str, Any], key: Sequence[str], value: Any) -> None:
    """Set one value. What a section holds already stays, but for what `value` says anew."""
    name, *below = key
    field = kind.model_fields.get(name) if kind is not None else None
    section = _section_of(field) if field is not None else None
    if section is not None and value is None and not below:
        value = {}  # "cache:" in a file, with nothing or only comments under it
    if not below and not isinstance(value, dict) and (short := _short_of(section)) is not None:
        value = {short: value}
    if below or (section is not None and isinstance(value, dict)):
        inner = data.get(name)
        if inner is None:
            inner = data[name] = {}
        if not isinstance(inner, dict):
            raise ConfigError(f"{'.'.join(key)}: {name} is a single value, not a section")
        if below:
            _put(section, inner, below, value)
        else:
            for part, held in value.items():
                _put(section, inner, [str(part)], held)
        return
    data[name] = value


def _explain(kind: type[BaseModel], item: Any) -> str:
    """One line of help for one pydantic error."""
    where = _named(kind, item["loc"])
    hidden = where != [str(part) for part in item["loc"]] or _is_secret(kind, where)
    if len(where) > 1 and _short_of(_at(kind, where[:-1])) == where[-1]:
        where.pop()
    name = ".".join(where) or kind.__name__
    what, got = item["type"], item.get("input")
    if what == "extra_forbidden":
        return _unknown(kind, where)
    if what == "value_error":  # one of ours, which names the setting as its role knows it
        return (f"{where[0]}." if kind is UpConfig and where else "") + str(item["ctx"]["error"])
    if what in ("model_type", "model_attributes_type", "dataclass_type"):
        section = _at(kind, where)
        keys = ", ".join(f"{name}.{key}" for key in section.model_fields) if section is not None else ""
        return f"{name}: is a section, got {_shown(kind, where, got)}; its settings are {keys}"
    must = must_be(item)
    if isinstance(got, dict) and what not in ("dict_type",):
        inside = [f"{name}.{key}" for key in got]
        near = [dotted for dotted in settings_of(kind) if any(dotted.endswith(f".{key}") for key in inside)]
        hint = f"; did you mean {' or '.join(map(repr, near[:2]))}?" if near else ""
        names = [str(key) for key in got if re.fullmatch(r"\w+", str(key))]  # others are no settings
        held = f" with {', '.join(names)}" if names and not hidden else ""
        return f"{name}: takes one value and {must}, got a section{held}{hint}"
    if what == "string_type" and isinstance(got, bool | int | float):
        must += " (write it in quotes)"
    return f"{name}: {must}, got {'a value that is not shown here' if hidden else _shown(kind, where, got)}"


def _fields(kind: type[BaseModel], where: Sequence[object]) -> Iterator[FieldInfo]:
    """The fields along a path, as far as it goes through sections."""
    at: type[BaseModel] | None = kind
    for part in where:
        field = at.model_fields.get(str(part)) if at is not None else None
        if field is None:
            return
        yield field
        at = _section_of(field)


def _is_secret(kind: type[BaseModel], where: Sequence[object]) -> bool:
    return any(field.repr is False for field in _fields(kind, where))


def _named(kind: type[BaseModel], where: Sequence[object]) -> list[str]:
    """A path for an error's text. API keys are keys of some settings: a digest stands for one."""
    fields = list(_fields(kind, where))
    keys = (at for at, field in enumerate(fields) if field.repr is False and _holds_keys(field))
    secret = next(keys, len(where))
    return [
        f"<key {hashlib.blake2b(part.encode(), digest_size=4).hexdigest()}>"
        if at == secret + 1 and isinstance(part, str)
        else str(part)
        for at, part in enumerate(where)
    ]


def _shown(kind: type[BaseModel], where: Sequence[str], got: Any) -> str:
    """A value for an error's text; secrets are not shown."""
    field = kind.model_fields.get(where[0]) if where else None
    if field is not None and field.repr is False:
        return "a value that is not shown here"
    text = repr(got)
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}…"


def _unknown(kind: type[BaseModel], key: Sequence[str], spell: Callable[[str], str] = repr) -> str:
    """What to say about a setting that is not there: the one that was probably meant, or all there are."""
    above, last = key[:-1], key[-1]
    section = _at(kind, above)
    here = {name: ".".join([*above, name]) for name in section.model_fields} if section is not None else {}
    everywhere = list(settings_of(kind))

    def beside(cutoff: float) -> list[str]:
        return [here[name] for name in difflib.get_close_matches(last, here, n=1, cutoff=cutoff)]

    near = beside(0.75)
    near = near or [dotted for dotted in everywhere if dotted.rsplit(".", 1)[-1] == last][:2]
    near = near or difflib.get_close_matches(".".join(key), [*everywhere, *here.values()], n=1, cutoff=0.75)
    near = near or beside(0.5)
    if near:
        hint = f"did you mean {' or '.join(spell(dotted) for dotted in near)}?"
    else:
        hint = f"valid keys: {', '.join(here.values() or kind.model_fields)}"
    return f"unknown setting {'.'.join(key)!r}; {hint}"


def _at(kind: type[BaseModel], key: Sequence[str]) -> type[BaseModel] | None:
    """The section with this dotted key; None if it is none."""
    found: type[BaseModel] | None = kind
    for part in key:
        field = found.model_fields.get(part) if found is not None else None
        kinds = (field.annotation, *get_args(field.annotation)) if field is not None else ()  # a section may be None
        found = next((each for each in kinds if isinstance(each, type) and issubclass(each, BaseModel)), None)
    return found


def _section_of(field: FieldInfo) -> type[BaseModel] | None:
    annotation: Any = field.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _short_of(section: type[BaseModel] | None) -> str | None:
    return section.short if section is not None and issubclass(section, Section) else None


def _holds_keys(field: FieldInfo) -> bool:
    """Whether the setting's value is a mapping, whose keys are not settings."""
    return any(get_origin(part) is dict for part in (field.annotation, *get_args(field.annotation)))
