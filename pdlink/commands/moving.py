"""`pdlink config from`: the configuration of another system, as settings of pdlink.

What is read and printed is here; what becomes of each key is `pdlink.config.foreign`'s.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from pdlink.commands.runs import say
from pdlink.config import ProxyConfig, StoreConfig, WorkerConfig, environment_with, load, parse_value, settings_of
from pdlink.config.foreign import flags, hicache, lmcache, sglang_router, vllm
from pdlink.config.foreign.applying import KINDS, Conversion, move
from pdlink.config.foreign.verdicts import OurSettings
from pdlink.config.loading import nest
from pdlink.errors import ConfigError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from pdlink.config.foreign.applying import Vocabulary
    from pdlink.config.foreign.verdicts import Verdict

DESCRIPTION = """\
Print settings of pdlink for another system's configuration, and what becomes of each key.

  pdlink config from lmcache lmcache.yaml > worker.yaml      or `env`, for LMCACHE_ variables
  pdlink config from vllm '{"kv_connector": "OffloadingConnector", ...}'
  pdlink config from hicache --hicache-size 100 ...          flags of an SGLang server
  pdlink config from sglang-router --prefill URL ...
"""


class System(NamedTuple):
    vocabulary: Vocabulary
    kind: Any
    """Of ours, whose settings are made."""
    read: Callable[[Sequence[str]], dict[str, Any]]
    write: Callable[[Conversion, Sequence[str]], str]


def _read_lmcache(words: Sequence[str]) -> dict[str, Any]:
    where = _only(words, "FILE or env")
    if where == "env":
        variables = {key: text for key, text in environment_with({}).items() if key.startswith(lmcache.VARIABLES)}
        if not variables:
            raise ConfigError("the environment has no variable that begins with LMCACHE_")
        return lmcache.flat(variables)
    try:
        text = Path(where).read_text()
    except UnicodeDecodeError:
        raise ConfigError(f"{where} is not text") from None
    except OSError as error:
        raise ConfigError(f"cannot read {where}: {error.strerror}") from None
    return lmcache.flat(_mapping(text, where))


def _read_vllm(words: Sequence[str]) -> dict[str, Any]:
    return vllm.flat(_mapping(_only(words, "the JSON of --kv-transfer-config"), "kv-transfer-config"))


def _only(words: Sequence[str], what: str) -> str:
    if len(words) != 1:
        raise ConfigError(f"got {len(words)} arguments; expected {what}")
    return words[0]


def _mapping(text: str, where: str) -> dict[str, Any]:
    data = parse_value(text, where)
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: must hold keys and values")
    return {str(key): value for key, value in data.items()}


def _words(words: Sequence[str]) -> Sequence[str]:
    """The words of a command line, which may be in quotes as one."""
    try:
        return shlex.split(words[0]) if len(words) == 1 else words
    except ValueError as error:
        raise ConfigError(f"not a command line: {error}") from None


def _yaml(settings: dict[str, Any]) -> str:
    return yaml.safe_dump(settings, sort_keys=False, allow_unicode=True).strip()


def _nested(moved: Conversion) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    nest(settings, moved.settings)
    return settings


def _write_vllm(moved: Conversion, _: Sequence[str]) -> str:
    ours = {"kv_connector": "PDLinkConnector", "kv_connector_module_path": "pdlink.integrations.vllm"}
    given = {"kv_role": "kv_both", **moved.kept}
    return _flag("--kv-transfer-config", ours | given | {"kv_connector_extra_config": _nested(moved)})


def _write_hicache(moved: Conversion, words: Sequence[str]) -> str:
    program = flags.taken_apart(_words(words)).program
    line = [shlex.join(program)] if program else []
    extra: dict[str, Any] = dict(hicache.OURS)
    for name, value in moved.kept.items():
        if not name.startswith("-"):
            extra[name] = value
        elif name != hicache.BACKEND:
            held = [] if value is True else value if isinstance(value, list) else [value]
            line.append(shlex.join([name, *held]))
    line += [f"{hicache.BACKEND} dynamic", _flag(hicache.EXTRA, extra | _nested(moved))]
    return " \\\n  ".join(line)


def _flag(name: str, value: Any) -> str:
    return f"{name} {shlex.quote(json.dumps(value))}"


SYSTEMS = {
    "lmcache": System(lmcache.LMCACHE, WorkerConfig, _read_lmcache, lambda moved, _: _yaml(_nested(moved))),
    "vllm": System(vllm.VLLM, WorkerConfig, _read_vllm, _write_vllm),
    "hicache": System(hicache.HICACHE, StoreConfig, lambda words: hicache.flat(_words(words)), _write_hicache),
    "sglang-router": System(
        sglang_router.ROUTER,
        ProxyConfig,
        lambda words: sglang_router.flat(_words(words)),
        lambda moved, _: _yaml({"dialect": "sglang", **_nested(moved)}),
    ),
}


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("system", choices=tuple(SYSTEMS), metavar="SYSTEM", help=", ".join(SYSTEMS))
    command.add_argument(
        "given", nargs="...", metavar="CONFIGURATION", help="its file, JSON or flags, as in the examples"
    )
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    say(converted(args.system, args.given))


def converted(name: str, words: Sequence[str]) -> str:
    """The report and our settings. Raises ConfigError for what cannot be read, or would not be accepted."""
    system = SYSTEMS[name]
    moved = move(system.vocabulary, system.read(words), settings_of(system.kind))
    load(system.kind, environment={}, flags=moved.settings)
    return "\n".join([*_report(moved.lines), system.write(moved, words)])


def _report(lines: dict[str, Verdict]) -> list[str]:
    found = []
    for title, kind in KINDS.items():
        held = {key: verdict for key, verdict in lines.items() if isinstance(verdict, kind)}
        if held:
            found += [f"# {title}", *(f"#   {_name(key)}{_outcome(verdict)}" for key, verdict in held.items())]
    return found


def _name(key: str) -> str:
    return key if re.fullmatch(r"[\w.\-\[\]]+", key, re.ASCII) else ascii(key)


def _outcome(verdict: Verdict) -> str:
    if not isinstance(verdict, OurSettings):
        return f": {verdict.why}"
    return f" -> {', '.join(verdict.settings)}" + (f": {verdict.why}" if verdict.why else "")
