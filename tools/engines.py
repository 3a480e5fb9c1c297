"""The contract with an engine's own classes, for each version of the window; run by `make engines`.

    .venv-vllm/bin/python tools/engines.py vllm [0.33.0 ...]
    PYTHONPATH=tests/sglang_cpu .venv-sglang/bin/python tools/engines.py sglang [0.5.23 ...]

A version's wheel is for GPUs and has no use here but for its Python files: up to 340 MB are fetched and 60 kept, in
`.cache/engines`. No device, no kernel and no model is needed. Versions outside of the window can be tried, too.
"""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
import zipfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT = Path(__file__).parent.parent
CACHE = ROOT / ".cache/engines"
PASSED, NOT_FETCHED = "passed", "not fetched"


class Engine(NamedTuple):
    title: str
    window: tuple[str, ...]
    """Of each minor release that is taken the last one."""
    servers: dict[str, str]
    """Real servers on CPUs, by `make test-vllm` and `make test-sglang`."""
    gpus: dict[str, str]
    """Real servers on GPUs, one or two on one host."""
    tests: tuple[str, ...]
    files: tuple[str, ...]
    """Endings of the wheel's files that are kept; an empty one is all."""
    local_version: str = ""
    """Said to be installed beside the files: by it vLLM picks the platform."""
    beside: tuple[str, ...] = ()
    """Wheels of Python alone that older releases import and the newest does not."""
    refused: dict[str, str] = {}
    """Older releases of the last year, which pdlink refuses at the start, and why."""


ENGINES = {
    "vllm": Engine(
        "vLLM",
        (
            *("0.33.0", "0.32.0", "0.31.0", "0.30.0", "0.29.0", "0.28.0", "0.27.1", "0.26.0", "0.25.1", "0.24.0"),
            *("0.23.0", "0.22.1", "0.21.0", "0.20.2", "0.19.1", "0.18.1", "0.17.1", "0.16.0"),
            *("0.15.1", "0.14.1", "0.13.0", "0.12.0"),
        ),
        {
            "0.33.0": "no build for CPUs",
            "0.32.0": "all tests",
            **dict.fromkeys(("0.31.0", "0.30.0", "0.29.0", "0.28.0", "0.26.0", "0.24.0"), "a part"),
        },
        {"0.32.0": "H200"},
        ("tests/integrations/contract",),
        (".py",),
        "+cpu",
        ("gguf==0.19.0", "diskcache==5.6.3"),
    ),
    "sglang": Engine(
        "SGLang",
        ("0.5.23", "0.5.22"),
        {"0.5.23": "all tests"},
        {},
        ("tests/integrations",),
        ("",),
        refused={
            **dict.fromkeys(("0.5.21", "0.5.20", "0.5.19"), "refused: acknowledged aborts name no request"),
            **dict.fromkeys(
                ("0.5.18", "0.5.17", "0.5.16", "0.5.15.post1", "0.5.14", "0.5.13.post1"),
                "refused: one backend alone acknowledges aborts",
            ),
            **dict.fromkeys(("0.5.12.post1", "0.5.11"), "refused: aborts do not reach prefill"),
            **dict.fromkeys(("0.5.10.post1", "0.5.9", "0.5.8.post1", "0.5.7", "0.5.6.post2"), "refused: no plugins"),
        },
    ),
}


def unpacked(requirement: str, place: Path, files: tuple[str, ...], said: str = "") -> Path:
    """A wheel's files with these endings. said: the version that a distribution beside them says."""
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            wanted = ["--no-deps", "--only-binary=:all:", "-d", folder, requirement]
            subprocess.run([sys.executable, "-m", "pip", "download", "-q", *wanted], check=True)
            (wheel,) = Path(folder).glob("*.whl")
            found = Path(folder, "unpacked")
            with zipfile.ZipFile(wheel) as names:
                wanted = [one for one in names.namelist() if one.endswith(files) and ".dist-info/" not in one]
                names.extractall(found, wanted)
            name = requirement.partition("==")[0]
            alias = found / f"{name}-{said}.dist-info"
            alias.mkdir()
            (alias / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {said}\n")
            found.rename(place)
    return place


def fetched(name: str, version: str) -> list[Path]:
    """Folders to import the engine from. Raises CalledProcessError."""
    engine = ENGINES[name]
    package = unpacked(f"{name}=={version}", CACHE / name / version, engine.files, f"{version}{engine.local_version}")
    return [package, *(unpacked(one, CACHE / one, ("",), one.partition("==")[2]) for one in engine.beside)]


def tried(name: str, version: str) -> str:
    """What its contract says, in a few words. The failures are on the terminal."""
    report = CACHE / name / f"{version}.xml"
    report.unlink(missing_ok=True)
    try:
        folders = fetched(name, version)
    except subprocess.CalledProcessError:
        return NOT_FETCHED
    path = os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])
    # Warnings of older versions are not ours.
    quiet = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    asked = ["-o", "filterwarnings=default", "-m", f"engines and {name}", f"--junitxml={report}"]
    command = [sys.executable, "-m", "pytest", *asked, *ENGINES[name].tests]
    ended = subprocess.run(command, env=os.environ | quiet | {"PYTHONPATH": path}, cwd=ROOT, check=False)
    if not report.exists():
        return f"not run: pytest ended with {ended.returncode}"
    counts: Counter[str] = Counter()
    for suite in ElementTree.parse(report).getroot().iter("testsuite"):
        counts.update({name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")})
    failed, ran = counts["failures"] + counts["errors"], counts["tests"] - counts["skipped"]
    if failed:
        return f"{failed} of {ran} FAILED"
    return PASSED if ran else "nothing ran: it cannot be imported"


def table(name: str, said: Mapping[str, str]) -> str:
    """said: by version, newest first. Neighbours of which the same is known share a row."""
    engine, rows = ENGINES[name], list[tuple[list[str], str]]()
    for version, contract in said.items():
        servers, gpu = engine.servers.get(version, "not run"), engine.gpus.get(version, "not run")
        known = f"{contract} | {servers} | {gpu}"
        if rows and rows[-1][1] == known:
            rows[-1][0].append(version)
        else:
            rows.append(([version], known))
    spans = [(f"{alike[-1]} to {alike[0]}" if alike[1:] else alike[0], known) for alike, known in rows]
    head = f"| {engine.title} | contract | servers | GPU |\n|---|---|---|---|\n"
    return head + "\n".join(f"| {span} | {known} |" for span, known in spans)


def main(words: list[str]) -> int:
    """0: all have passed; 1: a contract failed; 3: none failed, and a wheel could not be fetched."""
    name = words.pop(0) if words and words[0] in ENGINES else "vllm"
    CACHE.mkdir(parents=True, exist_ok=True)
    said = {version: tried(name, version) for version in words or ENGINES[name].window}
    refused = {} if words else ENGINES[name].refused
    print(f"\n{datetime.datetime.now(datetime.UTC).date()}\n\n{table(name, said | refused)}")
    left = set(said.values()) - {PASSED, *refused.values()}
    return 1 if left - {NOT_FETCHED} else 3 if left else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
