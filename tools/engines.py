"""The contract with vLLM's own classes, for each version of the window; run by `make engines` in `.venv-vllm`.

A version's wheel is for GPUs and has no use here but for its Python files: 340 MB are fetched and 60 kept, in
`.cache/engines`. No device, no kernel and no model is needed. `engines.py 0.33.0 0.32.0` tries these versions alone.
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

ROOT = Path(__file__).parent.parent
CACHE = ROOT / ".cache/engines"
WINDOW = ("0.33.0", "0.32.0", "0.31.0", "0.30.0", "0.29.0", "0.28.0", "0.27.1", "0.26.0", "0.25.1", "0.24.0")
"""Of each minor release that the connector takes the last one."""
SERVERS = {
    "0.32.0": "all tests",
    **dict.fromkeys(("0.31.0", "0.30.0", "0.29.0", "0.28.0", "0.26.0", "0.24.0"), "a part"),
}
"""Real servers on CPUs, by `make test-vllm`."""
GPUS = {"0.32.0": "H200"}
"""Real servers on GPUs, one or two on one host."""


def fetched(version: str) -> Path:
    """Folder with the package, and beside it a distribution that says `cpu`, by which vLLM picks the platform."""
    place = CACHE / version
    if not place.exists():
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            wanted = ["--no-deps", "--only-binary=:all:", "-d", folder, f"vllm=={version}"]
            subprocess.run([sys.executable, "-m", "pip", "download", "-q", *wanted], check=True)
            (wheel,) = Path(folder).glob("*.whl")
            unpacked = Path(folder, "unpacked")
            with zipfile.ZipFile(wheel) as files:
                files.extractall(unpacked, [name for name in files.namelist() if name.endswith(".py")])
            alias = unpacked / f"vllm-{version}+cpu.dist-info"
            alias.mkdir()
            (alias / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
            unpacked.rename(place)
    return place


def tried(version: str) -> str:
    """What its contract says, in a few words. The failures are on the terminal."""
    report = CACHE / f"{version}.xml"
    report.unlink(missing_ok=True)
    path = os.pathsep.join([str(fetched(version)), *filter(None, [os.environ.get("PYTHONPATH")])])
    quiet = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    asked = ["-o", "filterwarnings=default", "-m", "engines", "tests/integrations/contract", f"--junitxml={report}"]
    command = [sys.executable, "-m", "pytest", *asked]  # older versions' warnings about torch are not ours
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


def main(versions: list[str]) -> int:
    CACHE.mkdir(parents=True, exist_ok=True)
    rows = [(version, tried(version)) for version in versions]
    print(f"\n{datetime.datetime.now(datetime.UTC).date()}\n\n| vLLM | contract | servers | GPU |\n|---|---|---|---|")
    for version, said in rows:
        print(f"| {version} | {said} | {SERVERS.get(version, '')} | {GPUS.get(version, '')} |")
    return 0 if all("passed" in said and "FAILED" not in said for _, said in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or list(WINDOW)))
