"""Who may import whom: the rules of docs/ARCHITECTURE.md, held for every import, also those inside functions."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BASE = {
    "errors",
    "compiled",
    "config",
    "content",
    "events",
    "capabilities",
    "breaker",
    "extras",
    "logs",
    "zmq_context",
}

MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "capabilities": set(),
    "compiled": set(),
    "zmq_context": set(),
    "breaker": set(),
    "extras": {"errors"},
    "logs": set(),
    "content": {"errors"},
    "events": {"errors"},
    "config": {"errors"},
    "kv": BASE,
    "memory": BASE | {"kv", "_copy", "cuda.buffers", "cuda.driver"},
    "cuda": BASE | {"kv", "memory", "_cuda"},
    "transport": BASE | {"kv", "memory", "cuda", "_copy", "_cuda", "_ucx", "_tcp"},
    "protocol": BASE | {"kv"},
    "endpoint": BASE | {"kv", "memory", "transport", "protocol"},
    "node": BASE | {"kv", "memory", "transport", "protocol", "endpoint"},
    "engine": BASE | {"kv", "memory", "cuda"},
    "store": BASE | {"kv", "memory", "cuda", "_copy"},
    "peers": BASE
    | {"kv", "memory", "transport", "protocol", "node", "store"}
    | {"endpoint.channel", "endpoint.inflow", "endpoint.work"},  # sockets and their thread; no endpoint
    "observe": BASE | {"kv.hashing", "protocol"},
    "serve": BASE
    | {"kv", "memory", "cuda", "transport", "protocol", "node", "engine", "store", "peers", "observe"}
    | {"pdlink_proxy"},
    "fleet": BASE | {"protocol", "serve", "engine.places", "pdlink_proxy"},
    "plan": BASE | {"observe", "pdlink_proxy"},
    "doctor": BASE | {"serve", "observe", "protocol"},
    "integrations": BASE
    | {"kv", "memory", "transport", "protocol", "node", "observe", "serve.keys", "fleet.ports", "store", "peers"},
    "pdlink_proxy": BASE
    | {"kv.hashing", "observe", "protocol", "_http", "_index", "_relay"}
    | {"endpoint.channel", "endpoint.clock"},  # where workers register
    "pdlink_bench": BASE
    | {
        "kv",
        "memory",
        "cuda",
        "transport",
        "protocol",
        "node",
        "engine",
        "observe",
        "serve",
        "fleet",
        "store",
        "peers",
        "plan",
        "pdlink_proxy",
        "commands.parser",
        "cli",
        "endpoint.channel",
    }
    | {"_copy", "_cuda", "_ucx", "_tcp", "pdlink_proxy"},
}
"""Part of pdlink to the parts it may import. `cli` may import everything."""

FILES = [
    *(
        (path.relative_to(ROOT / "pdlink").parts[0].removesuffix(".py"), path)
        for path in (ROOT / "pdlink").rglob("*.py")
    ),
    *(("pdlink_proxy", path) for path in (ROOT / "proxy/pdlink_proxy").rglob("*.py")),
    *(("pdlink_bench", path) for path in (ROOT / "benchmarks/pdlink_bench").rglob("*.py")),
]


@functools.cache
def nodes_of(path: Path) -> list[ast.Import | ast.ImportFrom | ast.Attribute]:
    """What the tests here look at; each file is parsed once."""
    walked = ast.walk(ast.parse(path.read_text()))
    return [node for node in walked if isinstance(node, ast.Import | ast.ImportFrom | ast.Attribute)]


def imports(path: Path) -> set[str]:
    """Absolute names of everything a file imports, wherever in it."""
    found = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names if node.module == "pdlink"}
    return found


def test_parts_import_only_what_the_architecture_allows() -> None:
    too_much = []
    for part, path in FILES:
        if part not in MAY_IMPORT:
            continue
        allowed = MAY_IMPORT[part] | {part}
        for name in imports(path):
            head, _, rest = name.partition(".")
            if head == "pdlink" and rest and rest != "__version__":
                wrong = rest not in allowed and rest.split(".")[0] not in allowed
            else:
                wrong = head in ("pdlink_proxy", "pdlink_bench") and head not in allowed
            if wrong:
                too_much.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not too_much


def test_modules_of_the_endpoint_import_each_other_in_one_direction() -> None:
    """Also for types. So each can be read with those below it alone."""
    below = {
        f"pdlink.endpoint.{path.stem}": {name for name in imports(path) if name.startswith("pdlink.endpoint.")}
        for part, path in FILES
        if part == "endpoint" and path.stem != "__init__"
    }
    TopologicalSorter(below).prepare()


def test_every_part_has_its_rule() -> None:
    assert {part for part, _ in FILES} - {"cli", "commands", "__main__", "__init__"} <= set(MAY_IMPORT)


def test_only_config_reads_the_environment() -> None:
    readers = [
        str(path.relative_to(ROOT))
        for part, path in FILES
        if part != "pdlink_bench"
        and any(isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv") for node in nodes_of(path))
    ]
    assert readers == ["pdlink/config/loading.py"]


def test_one_module_imports_a_metrics_library() -> None:
    users = {
        str(path.relative_to(ROOT))
        for _, path in FILES
        if any(name.startswith("prometheus") for name in imports(path))
    }
    assert users == {"pdlink/observe/series.py"}


def test_protocol_reads_no_clock_and_opens_nothing() -> None:
    forbidden = {"time", "datetime", "socket", "threading", "asyncio", "zmq", "os", "random"}
    for part, path in FILES:
        if part == "protocol":
            assert not {name.split(".")[0] for name in imports(path)} & forbidden, path


@pytest.mark.parametrize(
    "module", ["pdlink.kv.plan", "pdlink.kv.hashing", "pdlink.protocol.sending", "pdlink_proxy.app"]
)
def test_parts_that_need_no_torch_load_none(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
