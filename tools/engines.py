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

ROOT = Path(__file__).parent.parent
CACHE = ROOT / ".cache/engines"


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


ENGINES = {
    "vllm": Engine(
        "vLLM",
        ("0.33.0", "0.32.0", "0.31.0", "0.30.0", "0.29.0", "0.28.0", "0.27.1", "0.26.0", "0.25.1", "0.24.0"),
        {
            "0.32.0": "all tests",
            **dict.fromkeys(("0.31.0", "0.30.0", "0.29.0", "0.28.0", "0.26.0", "0.24.0"), "a part"),
        },
        {"0.32.0": "H200"},
        ("tests/integrations/contract",),
        (".py",),
        "+cpu",
    ),
    "sglang": Engine(
        "SGLang",
        ("0.5.23",),
        {"0.5.23": "all tests"},
        {},
        ("tests/integrations",),
        ("",),
    ),
}


def fetched(name: str, version: str) -> Path:
    """Folder with the package, and beside it a distribution that says its version."""
    engine, place = ENGINES[name], CACHE / name / version
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            wanted = ["--no-deps", "--only-binary=:all:", "-d", folder, f"{name}=={version}"]
            subprocess.run([sys.executable, "-m", "pip", "download", "-q", *wanted], check=True)
            (wheel,) = Path(folder).glob("*.whl")
            unpacked = Path(folder, "unpacked")
            with zipfile.ZipFile(wheel) as files:
                wanted = [one for one in files.namelist() if one.endswith(engine.files) and ".dist-info/" not in one]
                files.extractall(unpacked, wanted)
            said = f"{version}{engine.local_version}"
            alias = unpacked / f"{name}-{said}.dist-info"
            alias.mkdir()
            (alias / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {said}\n")
            unpacked.rename(place)
    return place


def tried(name: str, version: str) -> str:
    """What its contract says, in a few words. The failures are on the terminal."""
    report = CACHE / name / f"{version}.xml"
    report.unlink(missing_ok=True)
    path = os.pathsep.join([str(fetched(name, version)), *filter(None, [os.environ.get("PYTHONPATH")])])
    # Warnings of older versions are not ours.
    quiet = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    asked = ["-o", "filterwarnings=default", "-m", f"engines and {name}", f"--junitxml={report}"]
    command = [
        sys.executable,
        "-m",
        "pytest",
        *asked,
        *ENGINES[name].tests,
    ]
    ended = subprocess.run(command, env=os.environ | quiet | {"PYTHONPATH": path}, cwd=ROOT, check=False)
    if not report.exists():
        return f"not run: pytest ended with {ended.returncode}"
    counts: Counter[str] = Counter()
    for suite in ElementTree.parse(report).getroot().iter("testsuite"):
        counts.update({name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")})
    failed = counts["failures"] + counts["errors"]
    passed = counts["tests"] - failed - counts["skipped"]
    if not passed:
        return "nothing ran: it cannot be imported"
    return f"{passed} passed" + (f", {failed} FAILED" if failed else "")


def main(words: list[str]) -> int:
    name = words.pop(0) if words and words[0] in ENGINES else "vllm"
    engine = ENGINES[name]
    CACHE.mkdir(parents=True, exist_ok=True)
    rows = [(version, tried(name, version)) for version in words or engine.window]
    print(f"\n{datetime.datetime.now(datetime.UTC).date()}\n")
    print(f"| {engine.title} | contract | servers | GPU |\n|---|---|---|---|")
    for version, said in rows:
        print(f"| {version} | {said} | {engine.servers.get(version, '')} | {engine.gpus.get(version, 'not run')} |")
    return 0 if all("passed" in said and "FAILED" not in said for _, said in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
