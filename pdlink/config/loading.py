"""Where values come from: defaults, a file, the environment, flags. The one place that reads the environment."""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError

from pdlink.config.proxy import ProxyConfig
from pdlink.config.up import UpConfig
from pdlink.config.worker import WorkerConfig
from pdlink.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

ENVIRONMENT_PREFIX = "PDLINK_"
_Config = TypeVar("_Config", WorkerConfig, ProxyConfig, UpConfig)


def load(
    kind: type[_Config],
    path: str | Path | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> _Config:
    """The settings of one role: defaults < file < environment < flags.

    flags: dotted keys ("cache.num_blocks") to values; None values are left out.
    Raises ConfigError that names the key, the value and what would be valid.
    """
    data: dict[str, Any] = {}
    if path is not None:
        data = _read_file(Path(path))
    for key, value in _from_environment(kind, os.environ if environment is None else environment):
        _put(data, key, value)
    for dotted, value in (flags or {}).items():
        if value is not None:
            _put(data, dotted.split("."), value)
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(kind, item) for item in error.errors())) from None


def environment_with(more: Mapping[str, str]) -> dict[str, str]:
    """This process's environment and more, for a child that is not ours."""
    return {**os.environ, **more}


def _read_file(path: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read config file {path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"config file {path} is not valid YAML: {error}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"config file {path} must hold keys and values, got a {type(data).__name__}")
    return data


def _from_environment(kind: type[BaseModel], environment: Mapping[str, str]) -> list[tuple[list[str], Any]]:
    found = []
    for name, text in sorted(environment.items()):
        if not name.startswith(ENVIRONMENT_PREFIX):
            continue
        key = name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__")
        found.append((key, yaml.safe_load(text) if text else text))
    return found


def _put(data: dict[str, Any], key: list[str], value: Any) -> None:
    for part in key[:-1]:
        below = data.setdefault(part, {})
        if not isinstance(below, dict):
            raise ConfigError(f"{'.'.join(key)}: {part} is a single value, not a section")
        data = below
    data[key[-1]] = value


def _explain(kind: type[BaseModel], item: Any) -> str:
    """One line of help for one pydantic error."""
    where = [str(part) for part in item["loc"]]
    name = ".".join(where) or kind.__name__
    if item["type"] == "extra_forbidden":
        section: type[BaseModel] = kind
        for part in where[:-1]:
            section = _section_at(section, part)
        near = difflib.get_close_matches(where[-1], section.model_fields, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"valid keys: {', '.join(section.model_fields)}"
        return f"unknown setting {name!r}; {hint}"
    if item["type"] == "value_error":  # one of ours, which names the setting itself
        return str(item["ctx"]["error"])
    return f"{name}: {item['msg']}, got {item.get('input')!r}"


def _section_at(section: type[BaseModel], part: str) -> type[BaseModel]:
    annotation = section.model_fields[part].annotation
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return section
