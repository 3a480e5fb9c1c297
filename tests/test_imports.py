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
    "few_lines",
    "logs",
    "reasons",
    "threads",
    "zmq_context",
}

MAY_IMPORT: dict[str, set[str]] = {
    "errors": {"reasons"},
    "reasons": set(),
    "capabilities": set(),
    "compiled": set(),
    "threads": set(),
    "zmq_context": {"threads"},
    "breaker": set(),
    "extras": {"errors"},
    "logs": {"errors"},
    "few_lines": {"logs"},
    "content": {"errors"},
    "events": {"errors"},
    "config": {"errors"},
    "kv": BASE,
    "memory": BASE | {"kv", "_copy", "cuda.buffers", "cuda.driver"},
    "cuda": BASE | {"kv", "memory", "_cuda"},
    "transport": BASE | {"kv", "memory", "cuda", "_copy", "_cuda", "_ucx", "_tcp"},
    "protocol": BASE | {"kv"},
    "api": BASE | {"_http"},  # reads streams
    "endpoint": BASE | {"kv", "memory", "transport", "protocol"},
    "node": BASE | {"kv", "memory", "transport", "protocol", "endpoint"},
    "engine": BASE | {"kv", "memory", "cuda"},
    "store": BASE | {"kv", "memory", "cuda", "_copy"},
    "peers": BASE
    | {"kv", "memory", "transport", "protocol", "node", "store"}
    | {"endpoint.channel", "endpoint.inflow", "endpoint.work"},  # sockets and their thread; no endpoint
    "observe": BASE | {"api", "kv.hashing", "protocol", "_http"},  # counts natively
    "serve": BASE
    | {"_http"}  # its large pages
    | {"api", "kv", "memory", "cuda", "transport", "protocol", "node", "engine", "store", "peers", "observe"}
    | {"endpoint.token", "pdlink_proxy"},
    "fleet": BASE
    | {"api", "protocol", "endpoint.token", "serve", "engine.places", "integrations.vllm_parts.settings"}
    | {"pdlink_proxy"},
    "plan": BASE | {"api", "observe", "pdlink_proxy", "_index"},  # plays the router
    "doctor": BASE
    | {"api", "serve", "observe", "protocol"}
    | {"store.tiers.opening", "store.line", "memory.available"},  # asks remote tiers, and disks that may hang
    "integrations": BASE
    | {
        "api",
        "kv",
        "memory",
        "transport",
        "protocol",
        "node",
        "observe",
        "serve.keys",
        "serve.admin",
        "serve.kv_events",
        "fleet.ports",
        "store",
        "peers",
    },
    "pdlink_proxy": BASE | {"api", "kv.hashing", "observe", "protocol", "_http", "_index"} | {"endpoint.token"},
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
    of_sglang = "pdlink/integrations/sglang_parts/metrics.py"  # its processes share numbers by this library's files
    assert users == {"pdlink/observe/series.py", of_sglang}


def test_protocol_and_api_read_no_clock_and_open_nothing() -> None:
    forbidden = {"time", "datetime", "socket", "threading", "asyncio", "zmq", "os", "random"}
    for part, path in FILES:
        if part in ("protocol", "api"):
            assert not {name.split(".")[0] for name in imports(path)} & forbidden, path


@pytest.mark.parametrize(
    "module", ["pdlink.kv.plan", "pdlink.kv.hashing", "pdlink.protocol.sending", "pdlink_proxy.app"]
)
def test_parts_that_need_no_torch_load_none(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0


PROXY = ROOT / "proxy/pdlink_proxy"
MOST_FLOORS = 12


def proxy_modules(path: Path, *, types: bool) -> set[str]:
    """Modules of the proxy that one of them imports; types: also those whose names it needs for types alone."""
    found: set[str] = set()
    folder = path.parent.relative_to(PROXY).parts

    def look(node: ast.AST) -> None:
        for each in ast.iter_child_nodes(node):
            for_types = (
                isinstance(each, ast.If) and isinstance(each.test, ast.Name) and each.test.id == "TYPE_CHECKING"
            )
            if for_types and not types:
                continue
            if isinstance(each, ast.ImportFrom) and each.level:
                base = (*folder[: len(folder) - each.level + 1], *(each.module.split(".") if each.module else ()))
                for alias in each.names:
                    deeper = PROXY.joinpath(*base, alias.name)
                    found.add(".".join((*base, alias.name) if deeper.with_suffix(".py").exists() else base))
            look(each)

    look(ast.parse(path.read_text()))
    return found


def proxy_name(path: Path) -> str:
    return ".".join(path.relative_to(PROXY).with_suffix("").parts).removesuffix(".__init__")


def test_modules_of_the_proxy_import_no_circle_not_even_for_types_and_stand_on_few_floors() -> None:
    needs = {proxy_name(path): proxy_modules(path, types=True) for path in PROXY.rglob("*.py")}
    TopologicalSorter(needs).prepare()  # raises CycleError
    needs = {proxy_name(path): proxy_modules(path, types=False) for path in PROXY.rglob("*.py")}
    floors: dict[str, int] = {}
    for name in TopologicalSorter(needs).static_order():
        floors[name] = 1 + max((floors[each] for each in needs.get(name, ())), default=0)
    assert max(floors.values()) <= MOST_FLOORS


def test_what_serves_a_route_knows_services_and_not_the_router() -> None:
    """Not even for types: a route that reaches back into the whole proxy can be understood with all of it alone."""
    users = {proxy_name(path) for path in PROXY.rglob("*.py") if "app" in proxy_modules(path, types=True)}
    assert users == {"__init__", "front"}


def test_a_leg_an_attempt_and_a_request_are_given_values() -> None:
    """They know neither the services of the proxy nor, but for an attempt and a request, what requests share."""
    for name in ("leg", "flow", "recovery", "client_answer"):
        assert not {"services", "shared", "app"} & proxy_modules(PROXY / f"{name}.py", types=True), name
    for name in ("attempt", "request", "admission"):
        assert not {"services", "app"} & proxy_modules(PROXY / f"{name}.py", types=True), name
