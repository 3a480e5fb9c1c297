"""What pdlink does without the packages of its extras. Each test runs a Python that cannot see them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from pdlink.extras import EXTRA_OF, installing
from pdlink.integrations.sglang_parts import versions as sglang_versions
from pdlink.integrations.vllm_parts import versions as vllm_versions

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

HIDE = f"""
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {sorted(EXTRA_OF)} and name != "libucx":
            raise ModuleNotFoundError("No module named " + repr(name), name=name)
sys.meta_path.insert(0, Hidden())
import pdlink.transport.ucx as ucx
ucx._wheel_library = lambda: ""
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", HIDE + program]
    wide = {**os.environ, "COLUMNS": "300"}  # so that no table folds a sentence
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT, env=wide)


def command(words: str) -> subprocess.CompletedProcess[str]:
    return run(f"from pdlink.cli import main\nsys.exit(main({words.split()!r}))")


def name_of(requirement: str) -> str:
    return re.split(r"[>=<; ]", requirement)[0]


def test_each_package_is_brought_by_the_extra_that_errors_name() -> None:
    extras: dict[str, list[str]] = PROJECT["optional-dependencies"]
    brought = {
        extra: {re.split(r"[>=<; ]", line)[0].removesuffix("-cu13") for line in lines}
        for extra, lines in extras.items()
    }
    with_transformers = {"tokenizers", "safetensors"}
    for package, extra in EXTRA_OF.items():
        parts = {name for name in brought[extra] if name.startswith(f"{package}-")}
        assert (
            {package} & brought[extra] or parts or package in with_transformers and "transformers" in brought[extra]
        )


def test_the_extras_of_engines_bring_the_versions_that_are_tested() -> None:
    extras: dict[str, list[str]] = PROJECT["optional-dependencies"]
    for name, versions in (("vllm", vllm_versions), ("sglang", sglang_versions)):
        (requirement,) = map(Requirement, extras[name])
        assert requirement.name == name
        oldest, newest = versions.OLDEST, versions.NEWEST
        after = (*newest[:-1], newest[-1] + 1)
        inside = [".".join(map(str, (*oldest, 0))), ".".join(map(str, (*newest, 7)))]
        assert list(requirement.specifier.filter(inside)) == inside
        outside = [".".join(map(str, after)), ".".join(map(str, (*oldest[:-1], oldest[-1] - 1)))]
        assert list(requirement.specifier.filter(outside)) == []


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_base_installation_changes_no_version_that_an_engine_was_run_with(engine: str) -> None:
    """numba>=0.68 here would have replaced the 0.65 that vLLM pins."""
    lines = (ROOT / f"constraints-{engine}.txt").read_text().splitlines()
    pins = {name.lower().replace("_", "-"): version for name, _, version in (line.partition("==") for line in lines)}
    for requirement in map(Requirement, PROJECT["dependencies"]):
        pinned = pins.get(requirement.name)
        assert pinned is None or requirement.specifier.contains(pinned), f"{requirement}, and it runs with {pinned}"
    assert "numba" in pins


def test_base_installation_brings_no_package_of_an_extra() -> None:
    base = {name_of(line) for line in PROJECT["dependencies"]}
    assert not base & {*EXTRA_OF, "libucx-cu13"}


def test_a_router_needs_no_numba() -> None:
    """deploy/Dockerfile removes it from the image of a router alone."""
    result = run("""
sys.modules["numba"] = sys.modules["llvmlite"] = None
from pdlink.config import ProxyConfig
from pdlink.serve import roles
from pdlink_proxy.app import build_app
build_app(ProxyConfig(prefill=["http://127.0.0.1:9"], decode=["http://127.0.0.1:10"]))
print("built")
""")
    assert (result.returncode, result.stdout) == (0, "built\n"), result.stderr


def test_node_moves_kv_without_any_extra() -> None:
    result = run("""
import numpy as np, pdlink
sizes = {"num_layers": 2, "num_blocks": 8, "block_tokens": 16, "num_heads": 1, "head_dim": 8}
groups = pdlink.KVGroups((pdlink.paged_layout(dtype="float32", itemsize=4, **sizes),))
with pdlink.Node("p", groups, insecure=True) as one, pdlink.Node("d", groups, insecure=True) as other:
    one.pages(0, 0).view(np.float32)[3] = 7
    outgoing = one.send("r", [[3]], 16)
    incoming = other.receive("r", peer=one.address, blocks=[[5]], tokens=range(16))
    for layer in range(2):
        outgoing.layer_ready(layer)
    outgoing.finish(first_token=1)
    incoming.wait(timeout_s=30)
    print((other.pages(0, 0).view(np.float32)[5] == 7).all())
""")
    assert (result.returncode, result.stdout) == (0, "True\n"), result.stderr


def test_built_in_engine_without_torch_is_one_line_that_names_the_extra() -> None:
    result = command("prefill")
    assert result.returncode == 2, result.stderr
    assert f"torch: not installed, and this needs it; pip install '{ROOT}[engine]'" in result.stderr
    assert "Traceback" not in result.stderr


def test_completion_knows_every_benchmark_without_torch() -> None:
    result = command("completion bash")
    assert result.returncode == 0, result.stderr
    assert "_pdlink_bench_warm" in result.stdout


@pytest.mark.parametrize("words", ["bench transfer --rounds 3", "chaos --seconds 20", "bench"])
def test_a_command_of_the_laboratory_names_its_distribution_where_that_is_not_installed(words: str) -> None:
    program = f"""
import importlib.metadata
importlib.metadata.entry_points = lambda **_: ()
from pdlink.cli import main
sys.exit(main({words.split()!r}))"""
    result = run(program)
    assert result.returncode == 2
    name = words.split()[0]
    said = f"pdlink: {name}: not installed; in a clone of pdlink, pip install ./benchmarks brings it\n"
    assert result.stderr == said


def test_the_wheel_has_no_benchmark_and_no_fault_injection() -> None:
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["scikit-build"]["wheel"]["packages"]
    assert set(packages) == {"pdlink", "pdlink_proxy"}
    users = [path for path in (ROOT / "pdlink").rglob("*.py") if "pdlink_bench" in path.read_text()]
    users += [path for path in (ROOT / "proxy").rglob("*.py") if "pdlink_bench" in path.read_text()]
    assert users == []


def test_check_works_without_torch_and_without_ucx() -> None:
    result = command("check")
    assert result.returncode in {0, 1}, result.stderr
    said = " ".join(result.stdout.split())
    assert f"pip install '{ROOT}[engine]'" in said
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            "file:///srv/a%20b/pdlink-0.1.0-cp311-abi3-linux_x86_64.whl",
            "'/srv/a b/pdlink-0.1.0-cp311-abi3-linux_x86_64.whl[otel]'",
        ),
        ("https://example.com/pdlink.whl", "'pdlink[otel] @ https://example.com/pdlink.whl'"),
        ("", "'pdlink[otel]'"),
    ],
)
def test_an_extra_is_added_from_where_pdlink_came_from(
    monkeypatch: pytest.MonkeyPatch, source: str, expected: str
) -> None:
    class From:
        def read_text(self, name: str) -> str | None:
            assert name == "direct_url.json"
            return json.dumps({"url": source}) if source else None

    monkeypatch.setattr("importlib.metadata.distribution", lambda _: From())
    assert installing("otel") == f"pip install {expected}"
