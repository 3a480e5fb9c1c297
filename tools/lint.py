"""`make lint`, a part of `make check`: what pages, code and deploy/ say of each other is true. Five seconds.

Each check is a function that yields sentences; `CHECKS` lists them. A sentence begins with the file that is to be
changed. Status 1 if there is one.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
import sys
import tomllib
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dashboards
import reference
from alerts import ALERTS, RUNBOOKS

from pdlink.cli import whole_parser
from pdlink.commands.engine import split
from pdlink.config import ProxyConfig, StoreConfig, UpConfig, WorkerConfig, settings_of
from pdlink.integrations.vllm_parts.settings import ConnectorSettings
from pdlink.observe.metrics import StoreProcessMetrics, WorkerMetrics
from pdlink.observe.series import Histogram, Metric
from pdlink_proxy.metrics import Metrics as ProxyMetrics

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
PAGES = [
    *(
        ROOT / name
        for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md", "deploy/helm/pdlink/README.md")
    ),
    *sorted((ROOT / "docs").glob("*.md")),
]
FOLDERS = ("pdlink", "proxy", "benchmarks", "csrc", "tests", "tools", "configs", "deploy", "examples")
DEVELOPERS = {"ARCHITECTURE.md", "wire.md", "gotchas.md", "incidents.md"}
"""Pages that are not in the users' menu."""


def name(path: Path) -> str:
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


@cache
def text_of(path: Path) -> str:
    return path.read_text(errors="replace")


# ---- pages


def anchors(text: str) -> set[str]:
    """Of its headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles}


def wrong_links(text: str, folder: Path) -> list[str]:
    wrong = []
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", prose):
        file, _, anchor = link.partition("#")
        there = text if not file else text_of(folder / file) if (folder / file).is_file() else ""
        if (file and not (folder / file).exists()) or (anchor and anchor not in anchors(there)):
            wrong.append(link)
    return wrong


def links() -> Iterator[str]:
    for path in PAGES:
        for link in wrong_links(text_of(path), path.parent):
            yield f"{name(path)}: the link {link} leads nowhere"


def pages_that_code_names() -> Iterator[str]:
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    kinds = {".py", ".pyi", ".h", ".cpp", ".cu", ".yaml", ".yml", ".json", ".sh", ".sbatch", ".service", ".tpl", ""}
    for path in [*files, ROOT / "Makefile", ROOT / "pyproject.toml"]:
        if (
            path.suffix not in kinds
            or not path.is_file()
            or "node_modules" in path.parts
            or "__pycache__" in path.parts
        ):
            continue
        for page, anchor in re.findall(r"\b(docs/[\w-]+\.md)(?:#([\w-]+))?", text_of(path)):
            if not (ROOT / page).exists():
                yield f"{name(path)}: there is no {page}"
            elif anchor and anchor not in anchors(text_of(ROOT / page)):
                yield f"{name(path)}: {page} has no section #{anchor}"


def menu() -> Iterator[str]:
    def listed(value: object) -> set[str]:
        if isinstance(value, str):
            return {value}
        values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        return {each for part in values for each in listed(part)}

    shown = listed(tomllib.loads(text_of(ROOT / "zensical.toml"))["project"]["nav"])
    written = {path.name for path in (ROOT / "docs").glob("*.md")}
    for page in sorted((written - DEVELOPERS) ^ shown):
        yield f"zensical.toml: {page} is " + ("not a page for users" if page in shown else "not in the menu")


def names_on_pages() -> Iterator[str]:
    """Files, tests, commands, targets of make."""
    folders = "tests|pdlink|proxy|configs|benchmarks|tools|csrc|docs|examples|deploy"
    commands = {each.prog.split()[1] for each, _ in reference._commands(whole_parser())} | {"help", "version"}
    targets = set(re.findall(r"^([a-z-]+):", text_of(ROOT / "Makefile"), re.MULTILINE))
    for path in PAGES:
        text = text_of(path)
        for file in re.findall(rf"`((?:{folders})/[\w./-]+)`", text):
            if not (ROOT / file).exists():
                yield f"{name(path)}: there is no {file}"
        for file, test in named_tests(text):
            if test not in tests_of(file):
                yield f"{name(path)}: {file} has no {test}"
        for command in re.findall(r"(?:`|^    (?:\$ )?)pdlink ([a-z]+)\b", text, re.MULTILINE):
            if command not in commands and command != "records":  # of docs/wire.md; nobody types it
                yield f"{name(path)}: there is no command `pdlink {command}`"
        for target in re.findall(r"(?:`|^    )make ([a-z-]+)", text, re.MULTILINE):
            if target not in targets:
                yield f"{name(path)}: Makefile has no target {target}"


def named_tests(text: str) -> list[tuple[str, str]]:
    return re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", text)


@cache
def tests_of(file: str) -> dict[str, str]:
    """Name to docstring of each test in a file; empty if there is no such file."""
    if not (ROOT / file).exists():
        return {}
    return {
        node.name: ast.get_docstring(node) or ""
        for node in ast.parse(text_of(ROOT / file)).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


PROGRAM = re.compile(r"pdlink\s")


def commands_of(path: Path, program: re.Pattern[str] = PROGRAM) -> list[str]:
    """Lines of code blocks that begin with a program, without comments; a backslash at the end joins two lines."""
    text = text_of(path).replace("\\\n", " ")
    lines = re.findall(r"^    (?:\$ )?(.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    for fenced in re.findall(r"```(?:sh|bash|console)?\n(.*?)```", text, re.DOTALL):
        lines += [line.removeprefix("$ ") for line in fenced.splitlines()]
    found = [line for line in lines if program.match(line + " ")]
    return [re.split(r"\s+#\s|\s{3,}|\s&$", line)[0].strip() for line in found]


def options_on_pages() -> Iterator[str]:
    parser = whole_parser()
    laboratory = {entry.name for entry in entry_points(group="pdlink.commands")}
    for path in PAGES:
        for command in commands_of(path):
            if command.split()[1] in {"bench", "chaos"} - laboratory:
                continue  # not installed here
            words = shlex.split(re.sub(r"\$\w+", "x", re.split(r" (?:\||>>?) ", command)[0]))[1:]
            try:
                _, unknown = parser.parse_known_args(split(words)[0])
            except SystemExit:
                unknown = ["an argument (see above)"]
            if unknown:
                yield f"{name(path)}: `{command}`: pdlink does not take {' '.join(unknown)}"


def settings_on_pages() -> Iterator[str]:
    """Behind --set, and what stands in code type and begins with the name of a section."""
    kinds = (WorkerConfig, ProxyConfig, StoreConfig, UpConfig, ConnectorSettings)
    keys = {key for kind in kinds for key in settings_of(kind)}
    known = keys | {".".join(key.split(".")[:count]) for key in keys for count in range(1, key.count(".") + 1)}
    sections = {key.partition(".")[0] for key in keys if "." in key}
    for path in PAGES:
        if "helm" in path.parts:
            continue  # its values are the chart's
        text = text_of(path)
        said = re.findall(r"--set '?([a-z_.0-9]+)=", text)
        said += [
            key for key in re.findall(r"`([a-z_]+(?:\.[a-z_0-9]+)+)(?:[:=` ])", text) if key.split(".")[0] in sections
        ]
        for key in dict.fromkeys(said):
            if key not in known and not key.endswith((".py", ".md", ".yaml", ".json", ".h", ".cpp", ".sock")):
                yield f"{name(path)}: there is no setting {key}"


# ---- metrics, dashboard, alerts


@cache
def declared() -> dict[str, Metric[Any]]:
    registries = (ProxyMetrics(), WorkerMetrics(store=True), StoreProcessMetrics())
    return {metric.name: metric for registry in registries for metric in registry.metrics}


def metric_of(sample: str) -> Metric[Any] | None:
    if sample in declared():
        return declared()[sample]
    metric = declared().get(re.sub("_(bucket|sum|count)$", "", sample))
    return metric if isinstance(metric, Histogram) else None


def wrong_words(expr: str) -> list[str]:
    """Metrics, labels and values of labels in a query that nothing declares."""
    of_prometheus = {"instance", "job", "le"}
    wrong, labels = [], {*of_prometheus, "cache_source"}  # SGLang's own
    for sample, _, where in re.findall(r"\b((?:pdlink|process)_\w+)(\{([^}]*)\})?", expr):
        metric = metric_of(sample)
        if metric is None:
            wrong.append(sample)
            continue
        labels |= set(metric.labels)
        for label, _, values in re.findall(r'(\w+)(=~|!~|!=|=)"([^"]*)"', where):
            if label not in {*metric.labels, *of_prometheus}:
                wrong.append(f"{sample}{{{label}}}")
            elif known := metric.known.get(label):
                wrong += [f"{label}={value}" for value in values.split("|") if value not in known]
    for by in re.findall(r"\bby \(([^)]*)\)", expr):
        wrong += [label for label in re.split(", *", by) if label not in labels]
    return wrong


def queries() -> Iterator[str]:
    for row in dashboards.ROWS.values():
        for panel in row:
            for query in panel.queries:
                for word in wrong_words(query.expr):
                    yield f"tools/dashboards.py: panel {panel.title!r}: nothing declares {word}"
    for alert in ALERTS:
        for word in wrong_words(alert.expr):
            yield f"tools/alerts.py: {alert.name}: nothing declares {word}"
    for path in PAGES:
        for query in re.findall(r"`([^`\n]*\brate\([^`\n]*)`", text_of(path)):
            for word in wrong_words(query):
                yield f"{name(path)}: `{query}`: nothing declares {word}"


def runbooks() -> Iterator[str]:
    sections = re.findall(r"^#+ (Pdlink\w+)$", text_of(ROOT / RUNBOOKS), re.MULTILINE)
    names = [alert.name for alert in ALERTS]
    for name_ in sorted(set(names) ^ set(sections)):
        yield f"{RUNBOOKS}: {name_} is " + ("an alert without a section" if name_ in names else "no alert")
    for alert in ALERTS:
        if not alert.summary.endswith(".") or alert.severity not in ("critical", "warning", "info"):
            yield (f"tools/alerts.py: {alert.name}: a summary is a sentence; a severity is critical, warning or info")


def panels() -> Iterator[str]:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(text_of(ROOT / dashboards.PATH))["panels"]:
        place = panel["gridPos"]
        cells = {(x + place["x"], y + place["y"]) for x in range(place["w"]) for y in range(place["h"])}
        if cells & taken:
            yield f"tools/dashboards.py: panel {panel['title']!r} lies on another one"
        taken |= cells
        if panel["type"] != "row" and not panel["description"]:
            yield f"tools/dashboards.py: panel {panel['title']!r} does not say what it means"


# ---- what is made from the code


def made_pages() -> Iterator[str]:
    made = {dashboards.PATH: dashboards.page, dashboards.RULES_PATH: dashboards.rules}
    for page, make in {**reference.PAGES, **made}.items():
        if make() != text_of(ROOT / page):
            yield f"{page}: stale: run `make reference` and commit it"


def words_of_commands_and_settings() -> Iterator[str]:
    parser = whole_parser()
    for command, text in [(parser, "-"), *reference._commands(parser)]:
        if not (command.description or text):
            yield f"pdlink/cli.py: `{command.prog}` does not say what it does"
        for option, words in reference._options(command):
            if not words and not command.prog.startswith((*reference._LABORATORY, "pdlink help")):
                yield f"pdlink/cli.py: `{command.prog}`: {option} does not say what it is for"
    for kind, _ in reference._KINDS.values():
        for key, field in settings_of(kind).items():
            if not (field.description or "").strip():
                yield f"pdlink/config: {key} does not say what it is"


# ---- code


def logs() -> Iterator[str]:
    """A line about a request or transfer has its ids apart, so that `--log-format json` has them as fields."""
    for folder in ("pdlink", "proxy/pdlink_proxy"):
        for path in (ROOT / folder).rglob("*.py"):
            if "integrations" in path.parts or not re.search(r"\b(request|transfer) %s", text_of(path)):
                continue  # integrations log as their engine does
            for node in ast.walk(ast.parse(text_of(path))):
                if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                    continue
                if node.func.attr not in ("debug", "info", "warning", "error", "exception", "log"):
                    continue
                words = [each.value for each in node.args if isinstance(each, ast.Constant)]
                about = any(isinstance(word, str) and re.search(r"\b(request|transfer) %s", word) for word in words)
                if about and not any(keyword.arg == "extra" for keyword in node.keywords):
                    yield f"{name(path)}:{node.lineno}: a log line about a request needs extra=logs.about(...)"


SAME_IDEA = {
    "Hello": "the first message of a connection, in each protocol",
    "NameTaken": "an error of every native transport",
    "PeerUnusable": "another one",
    "TransferEngine": "a native transport",
    "Welcome": "the answer to a Hello",
    "Worker": "one worker: the process itself, and what the proxy knows of it",
}
"""Names that several classes may have."""


def class_names() -> Iterator[str]:
    """A class has a name of its own, so that a reader and a search find one. Private ones are read with their
    file."""
    places: dict[str, list[str]] = {}
    for folder in ("pdlink", "proxy/pdlink_proxy", "benchmarks/pdlink_bench"):
        for path in sorted(each for each in (ROOT / folder).rglob("*.py*") if each.suffix in (".py", ".pyi")):
            for node in ast.walk(ast.parse(text_of(path))):
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places.setdefault(node.name, []).append(f"{name(path)}:{node.lineno}")
    for known, found in places.items():
        if len(found) > 1 and known not in SAME_IDEA:
            yield f"{found[0]}: {', '.join(found[1:])}: {known} is a class there, too; give each a name of its own"


def incidents() -> Iterator[str]:
    """Each row of docs/incidents.md names a test whose docstring names one of its threads, or a reason."""
    thread, page = re.compile(r"[\w-]+#\d+"), "docs/incidents.md"
    for line in text_of(ROOT / page).splitlines():
        columns = [column.strip() for column in line.strip("|").split("|")]
        if (
            not line.startswith("|")
            or not thread.match(columns[0])
            or columns[2].startswith(("Cannot happen", "Missing"))
        ):
            continue
        told = " ".join(tests_of(file).get(test, "") for file, test in named_tests(columns[2]))
        if not set(thread.findall(told.replace("vllm-ascend#", "ascend#"))) & set(thread.findall(columns[0])):
            yield f"{page}: {columns[0]}: neither a test whose docstring names it nor a reason"


CHECKS = (
    links,
    pages_that_code_names,
    menu,
    names_on_pages,
    options_on_pages,
    settings_on_pages,
    queries,
    runbooks,
    panels,
    made_pages,
    words_of_commands_and_settings,
    logs,
    class_names,
    incidents,
)


def main() -> int:
    wrong = [sentence for check in CHECKS for sentence in check()]
    for sentence in wrong:
        print(sentence)
    print(f"lint: {len(wrong)} wrong" if wrong else f"lint: {len(CHECKS)} checks of {len(PAGES)} pages, all good")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
