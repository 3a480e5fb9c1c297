"""SGLang on a GPU: prefill and decode share one by shares of its memory, and answer as one server alone.

Needs SGLang's build for CUDA; a stage of `make gpu`. It has not run yet.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import ClassVar, NamedTuple

import pytest

if importlib.util.find_spec("sglang") is None:
    pytest.skip("needs SGLang", allow_module_level=True)

import torch  # noqa: E402

from tests.e2e.engine_servers import MODEL, Answer, place_of, prompt_of, until  # noqa: E402
from tests.e2e.sglang_servers import (  # noqa: E402
    ROOT,
    SglangPair,
    SglangServer,
    cached_of,
    save_checkpoint,
    tokens_of,
)

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.gpu,
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

PAGE = 16
FLAGS = [
    *("--device", "cuda", "--dtype", "bfloat16", "--attention-backend", "triton", "--grammar-backend", "none"),
    *(
        "--sampling-backend",
        "pytorch",
        "--max-total-tokens",
        "16384",
        "--page-size",
        str(PAGE),
        "--host",
        "127.0.0.1",
    ),
    *("--mem-fraction-static", "0.3", "--context-length", "8192", "--chunked-prefill-size", "256"),
    *("--served-model-name", MODEL, "--skip-server-warmup"),
]
NO_CACHE = "--disable-radix-cache"
LENGTHS = [1, 33, 513, 2001]
PLUGINS = "sglang.srt.plugins"


class GpuServer(SglangServer):
    ready_s: ClassVar[float] = 150.0

    def command(self) -> list[str]:
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(self.model)]
        command += ["--port", str(self.port), *FLAGS, *self.flags]
        if "--disaggregation-mode" in self.flags:
            command += ["--disaggregation-bootstrap-port", str(self.bootstrap_port)]
        return command

    def settings(self) -> dict[str, str]:
        place = Path(self.model).parent / "plugin"
        if not any(
            one.name == "pdlink" for one in entry_points(group=PLUGINS)
        ):  # pdlink is a folder on the path here
            told = place / "pdlink_plugin-0.dist-info"
            told.mkdir(parents=True, exist_ok=True)
            (told / "METADATA").write_text("Metadata-Version: 2.1\nName: pdlink-plugin\nVersion: 0\n")
            (told / "entry_points.txt").write_text(f"[{PLUGINS}]\npdlink = pdlink.integrations.sglang:register\n")
        path = ":".join([str(place), str(ROOT), *sys.path[1:]])
        return {"HF_HUB_OFFLINE": "1", "PYTHONPATH": path, **self.environment}


class Lane(NamedTuple):
    name: str
    kind: str
    graphs: tuple[str, ...]
    """Flags of prefills, of the pair and of the server that it is compared with: in bfloat16 a pass that is padded
    for a graph rounds in another way."""
    flags: list[str]


LANES = {
    "mapped-cuda, layer by layer": Lane("mapped-cuda", "mapped", ("--cuda-graph-backend-prefill", "disabled"), []),
    "staged-tcp, without overlap": Lane("staged-tcp", "tcp", (), ["--disable-overlap-schedule"]),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sglang-gpu")
    save_checkpoint(folder / "model")
    return folder


Expected = Callable[[tuple[str, ...]], dict[int, list[int]]]


@pytest.fixture(scope="module")
def expected(folder: Path) -> Expected:
    """What one server with these flags answers."""

    @functools.cache
    def answered(flags: tuple[str, ...]) -> dict[int, list[int]]:
        log = folder / f"alone{''.join(flags)}.log"
        with GpuServer("alone", folder / "model", log, [NO_CACHE, *flags]).serving() as alone:
            return {length: tokens_of(alone.complete(prompt_of(length, length))) for length in LENGTHS}

    return answered


@pytest.mark.parametrize("lane", LANES)
def test_tokens_are_those_of_one_server_on_the_gpu(folder: Path, expected: Expected, lane: str) -> None:
    name, kind, graphs, flags = LANES[lane]
    wanted = expected(graphs)
    place = place_of(folder, kind)
    settings = {"PDLINK_TRANSPORT__KIND": kind, "PDLINK_TRANSPORT__REQUIRE": name}
    pair = SglangPair.of(place, [NO_CACHE, *graphs, *flags], environment=settings, kind=GpuServer)
    try:
        assert {length: pair.tokens(prompt_of(length, length)) for length in LENGTHS} == wanted
        early = "a prompt's KV was pushed layer by layer"
        assert (early in pair.prefill.output()) or "layer by layer" not in lane
    finally:
        pair.stop()


LINKER = {
    "linker": "PDLinkLinker",
    "linker_module_path": "pdlink.integrations.sglang_linker",
    "linker_extra_config": {"tiers": {"max_local_cpu_size": 0.5}},
}
HICACHE = {
    "backend_name": "pdlink",
    "module_path": "pdlink.integrations.sglang",
    "class_name": "PDLinkHiCache",
    "interface_v1": 1,
    "prefetch_threshold": 1,
    "tiers": {"max_local_cpu_size": 0.5},
}
KEEPING = {
    "the linker": [
        *("--enable-unified-cache-external-linker", "--unified-cache-external-linker-backend", "dynamic"),
        *("--unified-cache-external-linker-config", json.dumps(LINKER)),
    ],
    "HiCache": [
        *(
            "--enable-hierarchical-cache",
            "--hicache-mem-layout",
            "page_first_direct",
            "--hicache-io-backend",
            "direct",
        ),
        *("--hicache-storage-backend", "dynamic", "--hicache-storage-prefetch-policy", "wait_complete"),
        *("--hicache-storage-backend-extra-config", json.dumps(HICACHE)),
    ],
}


@pytest.mark.parametrize("by", KEEPING)
def test_a_prompt_seen_before_comes_back_from_the_store_of_a_gpu(folder: Path, by: str) -> None:
    """It goes on as after a prefix in the server's own cache, which was emptied: the passes are the same."""
    with GpuServer("kept", folder / "model", folder / f"{by.split()[-1]}.log", KEEPING[by]).serving() as server:
        for length in LENGTHS:
            check_kept(server, prompt_of(length, length))


def check_kept(server: SglangServer, prompt: list[int]) -> None:
    assert cached_of(server.generate(prompt)) == 0
    kept, found = server.generate(prompt), list[Answer]()
    assert cached_of(kept) == len(prompt) // PAGE * PAGE

    def loaded() -> bool:
        """HiCache may not have stored all of it before its memory was emptied; then it is computed once more."""
        until(lambda: server.call("POST", "/flush_cache") == 200, "it has nothing to do, and its cache is empty")
        found.append(server.generate(prompt))
        return cached_of(found[-1]) == cached_of(kept)

    until(loaded, "all of it comes from the store")
    assert tokens_of(found[-1]) == tokens_of(kept), len(prompt)
