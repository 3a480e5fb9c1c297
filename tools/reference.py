"""`make reference`: write what says the same as the code: docs/settings.md, cli.md and pdlink.1, the errors in
troubleshooting.md and the metrics in monitoring.md.

They come from the settings' fields, the command line's parser, the tree of errors and the declarations of metrics;
`make lint` fails when they are stale.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
import sys
import types
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pdlink
from pdlink.cli import whole_parser
from pdlink.config import ProxyConfig, StoreConfig, UpConfig, WorkerConfig, settings_of
from pdlink.errors import LocalError, PdlinkError, RemoteError
from pdlink.integrations.stats import declared
from pdlink.integrations.vllm_parts.settings import ConnectorSettings
from pdlink.observe.metrics import CODES, StoreProcessMetrics, WorkerMetrics
from pdlink.reasons import Code
from pdlink_proxy.metrics import Metrics as ProxyMetrics

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pydantic import BaseModel
    from pydantic.fields import FieldInfo

    from pdlink.observe.series import Metric

ROOT = Path(__file__).parents[1]
MADE_BY = "<!-- Made by `make reference` from the code; change that. -->"

# ---- settings

_KINDS: dict[str, tuple[type[BaseModel], str]] = {
    "Workers": (WorkerConfig, "`pdlink prefill`, `decode`, `both`; also `prefill.` and `decode.` of `pdlink up`"),
    "The proxy": (ProxyConfig, "`pdlink proxy`; also `proxy.` of `pdlink up`"),
    "A store process": (StoreConfig, "`pdlink store`; also `store.` of `pdlink up`"),
    "A whole deployment": (UpConfig, "`pdlink up`; beside these it has the sections above"),
    "vLLM's connector": (ConnectorSettings, "in `kv_connector_extra_config`, not from a file or the environment"),
}
_OF_OTHERS = ("prefill.", "decode.", "proxy.", "store.")


def settings() -> str:
    """A row that an earlier part has word for word is not repeated: its section names it, with a link to there."""
    lines = [
        "# Settings",
        MADE_BY,
        "",
        "A value comes from its default, then a YAML file (`--config`), then the environment, then flags; later ones",
        "win. A dot in a key is a level in YAML, and two underscores in the environment: `cache.num_blocks` is",
        "`PDLINK_CACHE__NUM_BLOCKS`. `--set KEY=VALUE` reaches every setting; values are YAML. Unknown keys are",
        "refused with the nearest valid name. `_s` is seconds, `_nbytes` bytes.",
        "",
    ]
    lines += [f"[{title}](#{_anchor(title)})" + (" ·" if title != list(_KINDS)[-1] else "") for title in _KINDS]
    first: dict[str, str] = {}
    """Row to the section that has it."""
    num: dict[str, int] = {}
    """Of a section's settings."""
    for title, (kind, used_by) in _KINDS.items():
        lines += ["", f"## {title}", used_by[0].upper() + used_by[1:] + "."]
        for section, fields in _sections(title, kind).items():
            own: list[str] = []
            again: dict[str, list[str]] = {}
            for key, field in fields.items():
                value = f"{_type(field)}; {_default(field)}"
                row = f"| `{key}` | {value} | {_cell(field.description or '')} |"
                if (there := first.setdefault(row, section)) == section:
                    own.append(row)
                else:
                    again.setdefault(there, []).append(key)
            if section != title:
                lines += ["", f"### {section}"]
            if own:
                lines += ["", "| key | type; default | what |", "|---|---|---|", *own]
            num[section] = len(own)
            for there, keys in again.items():
                some = "" if len(keys) == num[there] else ": " + ", ".join(f"`{key}`" for key in keys)
                lines += ["", f"As in [{there}](#{_anchor(there)}){some}."]
    return "\n".join(lines) + "\n"


def _sections(title: str, kind: type[BaseModel]) -> dict[str, dict[str, FieldInfo]]:
    """By heading: the part's own title for keys without a section, else `TITLE: SECTION`."""
    found: dict[str, dict[str, FieldInfo]] = {}
    for key, field in settings_of(kind).items():
        if kind is UpConfig and key.startswith(_OF_OTHERS):
            continue
        above = key.rpartition(".")[0].partition(".")[0]
        found.setdefault(f"{title}: {above}" if above else title, {})[key] = field
    return found


def _type(field: FieldInfo) -> str:
    found = {
        name: limit
        for each in field.metadata
        for name in ("gt", "ge", "lt", "le")
        if (limit := getattr(each, name, None)) is not None
    }
    if {"ge", "le"} <= found.keys():
        limits = [f"{found['ge']:g} to {found['le']:g}"]
    else:
        signs = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
        limits = [f"{signs[name]} {limit:g}" for name, limit in found.items()]
    return _cell(", ".join([_named(field.annotation), *limits]))


def _named(kind: Any) -> str:
    """A type, in words."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        limits = [f"> {each.gt:g}" for each in args[1:] if getattr(each, "gt", None) is not None]
        inner = getattr(args[1], "metadata", []) if len(args) > 1 else []
        limits += [f"> {each.gt:g}" for each in inner if getattr(each, "gt", None) is not None]
        return " ".join([_named(args[0]), *limits])
    if origin is typing.Literal:
        return " or ".join(f"`{value}`" for value in args)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_named(each) for each in args if each is not type(None))
    if origin in (tuple, list):
        return f"list of {_named(args[0])}"
    if origin is dict:
        return f"mapping of {_named(args[0])} to {_named(args[1])}"
    return {"str": "text", "int": "integer", "float": "number", "bool": "boolean"}.get(
        getattr(kind, "__name__", ""), getattr(kind, "__name__", str(kind))
    )


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "(needed)"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple | list):
        return "`[]`" if not value else _cell(f"`[{', '.join(map(str, value))}]`")
    if isinstance(value, float):
        return f"`{value:g}`"
    return _cell(f"`{value}`") if str(value) else "empty"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _anchor(title: str) -> str:
    return re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")


# ---- the command line


def _commands(parser: argparse.ArgumentParser) -> Iterator[tuple[argparse.ArgumentParser, str]]:
    """Every command with what its list says of it, in order; those with commands below come before them."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            texts = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, command in action.choices.items():
                yield command, texts.get(name, "")
                yield from _commands(command)


def _options(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    """What is typed, and what it means; of all but --help."""
    for action in parser._actions:
        if action.help is argparse.SUPPRESS or isinstance(action, argparse._HelpAction | argparse._SubParsersAction):
            continue
        value = action.metavar or (
            "{" + ",".join(map(str, action.choices)) + "}" if action.choices else action.dest.upper()
        )
        value = " ".join(value) if isinstance(value, tuple) else value
        text = (action.help or "") % {**vars(action), "prog": parser.prog}
        if not action.option_strings:
            yield (f"[{value}]" if action.nargs in ("?", "*") else value), text
        elif action.nargs == 0:
            yield ", ".join(action.option_strings), text
        else:
            yield f"{', '.join(action.option_strings)} {value}", text


def _paragraphs(text: str | None) -> list[tuple[bool, str]]:
    """Paragraphs, and whether each is to be shown as it is: examples and tables are indented, or aligned."""
    found = []
    for part in re.split(r"\n\s*\n", (text or "").strip("\n")):
        if part.strip():
            verbatim = any(line.startswith("  ") or "   " in line.strip() for line in part.splitlines())
            found.append((verbatim, part if verbatim else " ".join(part.split())))
    return found


_LABORATORY = ("pdlink bench", "pdlink chaos")
"""Commands of another distribution, which need not be installed here: a line each, and benchmarks/README.md."""


_MANY = 3
"""Options that are not told twice."""


def cli() -> str:
    parser = whole_parser()
    commands = [
        (parser, ""),
        *((each, text) for each, text in _commands(parser) if not each.prog.startswith(_LABORATORY)),
    ]
    takers: dict[tuple[str, str], list[str]] = {}
    for each, _ in commands:
        for option in _options(each):
            takers.setdefault(option, []).append(each.prog)
    common = {option for option, names in takers.items() if len(names) > 2 and option[0].startswith("-")}
    lines, epilogs = ["# Command line", MADE_BY, ""], set[str | None]()
    told: dict[str, list[tuple[str, str]]] = {}
    for each, text in commands:
        lines += [f"## {each.prog}", ""]
        if not each.description and text:
            lines += [text[0].upper() + text[1:] + ".", ""]
        lines += _shown(each.description)
        for action in each._actions:
            if isinstance(action, argparse._SubParsersAction):
                lines += ["| command | what |", "|---|---|"]
                for choice in action._choices_actions:
                    name = f"{each.prog} {choice.dest}"
                    link = f"`{name}`" if name in _LABORATORY else f"[`{name}`](#{_anchor(name)})"
                    lines.append(f"| {link} | {_cell(choice.help or '')} |")
                lines.append("")
        options = list(_options(each))
        own = [option for option in options if option not in common]
        if twin := next(
            (
                name
                for name, other in told.items()
                if len(own) > _MANY and {each for each in own if each[0][0] == "-"} < {*other}
            ),
            None,
        ):
            own = [option for option in own if not option[0].startswith("-")]
            lines += [f"Its options are among those of [`{twin}`](#{_anchor(twin)}).", ""]
        else:
            told[each.prog] = own
        lines += _table(own)
        shared = [option.split()[0] for option, words in options if (option, words) in common]
        if shared and each is not parser:
            lines += [
                "Also " + ", ".join(f"`{option}`" for option in shared if not option.startswith("--log-")) + "."
            ]
            lines = lines[:-1] if lines[-1] == "Also ." else [*lines, ""]
        about = (each.epilog or "").partition("\n")[0]  # the others show other settings as examples
        if about not in epilogs:
            lines += _shown(each.epilog)
        epilogs.add(about)
        if each is parser:
            lines += ["## Options of several commands", ""]
            lines += _table([option for option in takers if option in common])
    return "\n".join(lines).rstrip() + "\n"


def _shown(text: str | None) -> list[str]:
    lines = []
    for verbatim, words in _paragraphs(text):
        lines += [*(f"    {line.removeprefix('  ')}" for line in words.splitlines())] if verbatim else [words]
        lines.append("")
    return lines


def _table(options: list[tuple[str, str]]) -> list[str]:
    rows = [f"| `{_cell(option)}` | {_cell(words)} |" for option, words in options]
    return ["| option | what |", "|---|---|", *rows, ""] if rows else []


def manual() -> str:
    """For man(1)."""
    parser = whole_parser()

    def plain(text: str) -> str:
        return re.sub(
            r"^([.'])", r"\\&\1", text.replace("\\", "\\e").replace("-", "\\-").replace("`", ""), flags=re.M
        )

    lines = ['.\\" Made by `make reference` from the code; change that.']
    lines += ['.TH PDLINK 1 "" "pdlink" "User Commands"', ".SH NAME"]
    lines += [
        "pdlink \\- " + plain((parser.description or "").rstrip(".")),
        ".SH SYNOPSIS",
        ".B pdlink",
        ".I COMMAND",
    ]
    lines += ["[options]", ".SH COMMANDS"]
    for each, text in _commands(parser):
        if each.prog.startswith(_LABORATORY):
            continue
        lines += [f".SS {plain(each.prog)}"]
        paragraphs = _paragraphs(each.description) or [(False, text)]
        for verbatim, words in [*paragraphs, *_paragraphs(each.epilog)]:
            lines += [".nf", plain(words), ".fi"] if verbatim else [plain(words), ".PP"]
        for option, words in _options(each):
            lines += [".TP", f".B {plain(option)}", plain(" ".join(words.split())) or "\\&"]
    lines += [".SH ENVIRONMENT", ".TP", f".B {plain('PDLINK_KEY, PDLINK_SECTION__KEY')}"]
    lines += [plain("Settings; see docs/settings.md. A file and flags are the other ways to give them.")]
    lines += [".SH EXIT STATUS", plain("0 done, 1 failed, 2 wrong usage or settings, 130 stopped by Ctrl-C")]
    return "\n".join(lines) + "\n"


# ---- errors


def errors() -> str:
    for package in (ROOT / "pdlink", ROOT / "proxy/pdlink_proxy"):
        for path in package.rglob("*.py"):
            if "integrations" not in path.parts and re.search(r'^    code = "', path.read_text(), re.MULTILINE):
                importlib.import_module(".".join(path.relative_to(package.parent).with_suffix("").parts))
    lines = [
        'An error answer is `{"error": {"message", "type", "param", "code"}}`; its `code` is one of these, and the',
        "same word is in metrics and logs. The message names what is wrong, what was expected and what to do.",
        "",
        "| code | HTTP | try again? | at fault | meaning |",
        "|---|---|---|---|---|",
    ]
    kinds: dict[str, type[PdlinkError]] = {}
    for kind in _below(PdlinkError):
        # Somebody else may have imported what is not walked above.
        known = kind.__module__.startswith(("pdlink.", "pdlink_proxy.")) and ".integrations" not in kind.__module__
        if known and kind not in (LocalError, RemoteError):
            kinds.setdefault(kind.code, kind)
    for code, kind in sorted(kinds.items()):
        side = "peer" if issubclass(kind, RemoteError) else "here"
        meaning = _cell(inspect.getdoc(kind) or "")
        lines.append(f"| `{code}` | {kind.http_status} | {'yes' if kind.retryable else 'no'} | {side} | {meaning} |")
    lines += ["", "### Why a transfer failed", ""]
    lines += ["The `reason` of a failed transfer, and of `X-Pdlink-KV: recomputed;reason=CODE`:", ""]
    lines += ["| code | meaning |", "|---|---|"]
    shown = {Code.REFUSED: "refused:FACTOR"}
    lines += [f"| `{shown.get(code, code)}` | {_cell(code.meaning)} |" for code in sorted(Code)]
    return _within("docs/troubleshooting.md", lines)


def _below(kind: type[PdlinkError]) -> Iterator[type[PdlinkError]]:
    for each in kind.__subclasses__():
        yield each
        yield from _below(each)


# ---- metrics

_PARTS = {
    "The proxy": "pdlink_proxy_",
    "Stores": ("pdlink_store_", "pdlink_tier_"),
    "The link, and workers": "pdlink_",
    "Every process": ("process_", "pdlink_build_info"),
}
"""Title to the beginnings of names, in the order of the page; a metric is in the last part that fits."""


def metrics() -> str:
    processes = {
        "proxy": ProxyMetrics(),
        "worker": WorkerMetrics(store=True),
        "store": StoreProcessMetrics(),
        "engines": declared(prompts=False),
        "vLLM": declared(),
    }
    found: dict[str, tuple[Metric[Any], list[str]]] = {}
    for process, registry in processes.items():
        for metric in registry.metrics:
            named = found.setdefault(metric.name, (metric, []))[1]
            if process != "vLLM" or "engines" not in named:
                named.append(process)
    parts: dict[str, list[tuple[Metric[Any], list[str]]]] = {title: [] for title in _PARTS}
    for name, (metric, named) in sorted(found.items()):
        fits = [title for title, begins in _PARTS.items() if name.startswith(begins)]
        title = fits[-1] if name.startswith(("process_", "pdlink_build")) else fits[0]
        parts[title].append((metric, named))
    lines = []
    for title, rows in parts.items():
        same = all(named == rows[0][1] for _, named in rows)
        lines += ["", f"### {title}", *(["", f"Of {', '.join(rows[0][1])}."] if same and len(rows[0][1]) > 1 else [])]
        lines += ["", "| name | what it is | labels | meaning |", "|---|---|---|---|"]
        for metric, named in rows:
            kind = metric.kind if same else f"{metric.kind} of {', '.join(named)}"
            labels = "; ".join(
                f"`{label}`" + (f": {_labels(values)}" if values else "") for label, values in metric.known.items()
            )
            lines.append(f"| `{metric.name}` | {kind} | {_cell(labels)} | {_cell(metric.text)} |")
    return _within("docs/monitoring.md", lines[1:])


def _labels(values: Sequence[str]) -> str:
    if tuple(values) == CODES:
        return "a [code](troubleshooting.md#why-a-transfer-failed)"
    return ", ".join(values)


_BEGIN, _END = (f"<!-- {word}: made by `make reference` -->" for word in ("begin", "end"))


def _within(page: str, lines: list[str]) -> str:
    """The page, with these lines between its two marks."""
    before, _, rest = (ROOT / page).read_text().partition(_BEGIN)
    return "\n".join([before + _BEGIN, "", *lines, "", _END + rest.partition(_END)[2]])


PAGES = {
    "docs/settings.md": settings,
    "docs/cli.md": cli,
    "docs/troubleshooting.md": errors,
    "docs/monitoring.md": metrics,
    "docs/pdlink.1": manual,
}


def main() -> int:
    for path, page in PAGES.items():
        (ROOT / path).write_text(page())
        print(f"{path}: pdlink {pdlink.__version__}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
