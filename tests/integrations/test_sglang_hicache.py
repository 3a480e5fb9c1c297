"""HiCache's third level: SGLang's own tree, controller and host pools in two processes, on one `pdlink store`.

Run with `make test-sglang`.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pdlink.fleet.ports import free_ports
from pdlink.store.scope import sglang_names

from .sglang_process import Engine

if importlib.util.find_spec("sglang") is None:
    pytest.skip("needs SGLang", allow_module_level=True)

pytestmark = [pytest.mark.sglang, pytest.mark.engines, pytest.mark.e2e, pytest.mark.timeout(300)]

PAGE = 16


class Store:
    """A `pdlink store` process, that can die and come back."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.address = f"ipc://{folder}/socket/store"
        self.start()

    def start(self) -> None:
        arguments = ["--socket", self.address, "--memory", "0.1", "--listen", "127.0.0.1:0"]
        disk = ["--disk", f"{self._folder}/disk", "--disk-size", "0.1"]
        with (self._folder / "store.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "pdlink", "store", *arguments, *disk], stdout=log, stderr=log
            )
        socket, deadline = Path(self.address.removeprefix("ipc://")), time.monotonic() + 60
        while not socket.is_socket():
            assert self.process.poll() is None, (self._folder / "store.log").read_text()
            assert time.monotonic() < deadline, "the store does not listen"
            time.sleep(0.05)

    def end(self) -> None:
        """As an update of the host would: what waits for the disk is written."""
        self.process.terminate()
        self.process.wait(30)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)


def settings_of(store: str, **others: object) -> dict[str, Any]:
    return {
        "backend_name": "pdlink",
        "module_path": "pdlink.integrations.sglang",
        "class_name": "PDLinkHiCache",
        "interface_v1": 1,
        "prefetch_threshold": 1,
        "tiers": {"store": store},
        **others,
    }


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    store = Store(tmp_path_factory.mktemp("store"))
    yield store
    store.kill()


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory, store: Store) -> Iterator[list[Engine]]:
    """Two of one model whose host pools have other layouts, and two with states beside the KV: Mamba, windows."""
    folder = tmp_path_factory.mktemp("engines")
    forms = [
        ("plain", "page_first_direct", (0, 1)),
        ("plain", "layer_first", (0, 1)),
        ("mamba", "page_first_direct", (0, 1)),
        ("swa", "page_first_direct", (0, 1)),
    ]
    engines = [Engine("sglang_cache", folder / f"{number}.log") for number in range(len(forms))]
    try:
        for engine, (form, layout, tp) in zip(engines, forms, strict=True):
            engine.send("open", form=form, extra=settings_of(store.address), layout=layout, tp=tp)
        for engine in engines:
            engine.answer()
        yield engines
    finally:
        for engine in engines:
            engine.close()


def test_pages_of_one_engine_are_right_in_another_with_another_host_layout(engines: list[Engine]) -> None:
    writer, reader = engines[:2]
    assert writer("store", start=1, pages=5) == {"known": 5}
    assert reader("fetch", start=1, pages=5) == {"tokens": 5 * PAGE, "wrong": 0}
    assert reader("store", start=5000, pages=3) == {"known": 3}
    assert writer("fetch", start=5000, pages=3) == {"tokens": 3 * PAGE, "wrong": 0}


def test_host_pools_of_a_server_with_a_gpu_are_kept_in_every_layout(store: Store, tmp_path: Path) -> None:
    """SGLang registers their memory with the GPU, from mmap or shared memory; the double of the driver has it."""
    engine = Engine("sglang_cache", tmp_path / "log")
    extra = settings_of(store.address)
    engine("open", form="plain", extra=extra, layout="page_first_direct", tp=(0, 1), registered=True)
    assert engine("store", start=40000, pages=3) == {"known": 3}
    assert engine("forget")["emptied"] > 3
    assert engine("fetch", start=40000, pages=3) == {"tokens": 3 * PAGE, "wrong": 0}
    assert engine("layouts") == {"pools": 8, "wrong": 0, "registered": 8}
    engine.close()


def test_a_prefix_is_as_long_as_what_is_there(engines: list[Engine]) -> None:
    writer, reader = engines[:2]
    assert writer("store", start=10000, pages=2) == {"known": 2}
    assert reader("fetch", start=10000, pages=6) == {"tokens": 2 * PAGE, "wrong": 0}
    assert reader("fetch", start=11000, pages=2) == {"tokens": 0, "wrong": 0}


def test_another_model_finds_nothing_of_it(engines: list[Engine]) -> None:
    writer, _, other, _ = engines
    assert writer("store", start=15000, pages=2) == {"known": 2}
    assert other("fetch", start=15000, pages=2) == {"tokens": 0, "wrong": 0}


@pytest.mark.parametrize(("form", "states"), [(2, 2), (3, 64)], ids=["mamba", "windows"])
def test_states_beside_the_kv_come_back_with_it(engines: list[Engine], form: int, states: int) -> None:
    """From the store: the memory of the process was emptied. Of another prompt there is nothing."""
    engine = engines[form]
    assert engine("store", start=30000, pages=5) == {"known": 5}
    assert engine("forget")["emptied"] > 10
    assert engine("fetch", start=30000, pages=5) == {"tokens": 5 * PAGE, "wrong": 0, "states": states}
    assert engine("fetch", start=31000, pages=5) == {"tokens": 0, "wrong": 0}


def test_it_can_be_detached_and_attached_while_the_server_runs(engines: list[Engine], store: Store) -> None:
    writer, reader = engines[:2]
    assert reader("detach")["ok"]
    assert writer("store", start=20000, pages=2) == {"known": 2}
    assert reader("attach", extra=settings_of(store.address))["ok"]
    assert reader("fetch", start=20000, pages=2) == {"tokens": 2 * PAGE, "wrong": 0}


def test_a_wrong_setting_is_refused_and_the_server_goes_on(engines: list[Engine], store: Store) -> None:
    reader = engines[1]
    assert reader("detach")["ok"]
    refused = reader("attach", extra=settings_of(store.address, colour="red"))
    assert not refused["ok"]
    assert "colour" in refused["why"]
    assert reader("attach", extra=settings_of(store.address))["ok"]


def test_a_store_that_ends_is_a_miss_and_what_it_had_on_disk_is_found_again(
    engines: list[Engine], store: Store
) -> None:
    writer, reader = engines[:2]
    assert writer("store", start=25000, pages=2) == {"known": 2}
    store.end()
    assert reader("fetch", start=25000, pages=2) == {"tokens": 0, "wrong": 0}
    assert writer("store", start=26000, pages=2) == {"known": 0}
    store.start()
    found = reader("await_known", start=25000, pages=2)
    assert found == {"known": 2}
    assert reader("fetch", start=25000, pages=2) == {"tokens": 2 * PAGE, "wrong": 0}


def test_operators_name_pages_by_token_ids_as_sglang_does(engines: list[Engine], tmp_path: Path) -> None:
    """Also of what the scheduler keeps itself. Salts and adapters change both names alike."""
    engine, port = Engine("sglang_cache", tmp_path / "log"), free_ports(1)
    extra = settings_of("", tiers={"max_local_cpu_size": 0.1}, admin=f"127.0.0.1:{port}")
    try:
        engine("open", form="plain", extra=extra, layout="layer_first", tp=(0, 1))
        assert engine("store", start=50000, pages=3) == {"known": 3}
        tokens = engine("tokens", start=50000, pages=3)["tokens"]
        for salt, lora in (("", ""), ("s", ""), ("", "x"), ("s", "x")):
            named = engine("names", start=50000, pages=3, salt=salt, extra_key=lora)["names"]
            assert named == sglang_names(tokens, PAGE, salt, lora)

        def ask(verb: str) -> Any:
            body = json.dumps({"prompt": tokens}).encode()
            url, kind = f"http://127.0.0.1:{port}/pdlink/cache/{verb}", {"Content-Type": "application/json"}
            with urllib.request.urlopen(urllib.request.Request(url, body, kind), timeout=30) as answer:
                return json.load(answer)

        assert ask("lookup")["tokens"] == ask("warm")["tokens"] == 3 * PAGE
        assert engine("forget")["emptied"] > 3
        assert engine("fetch", start=50000, pages=3) == {"tokens": 3 * PAGE, "wrong": 0}
        assert ask("clear")["records"] == 3
        assert engine("forget")["emptied"] > 3
        assert engine("fetch", start=50000, pages=3) == {"tokens": 0, "wrong": 0}
    finally:
        engine.close()


def test_clearing_it_forgets_everything(engines: list[Engine]) -> None:
    writer, reader = engines[:2]
    assert writer("store", start=28000, pages=2) == {"known": 2}
    assert reader("clear") == {"cleared": True}
    assert reader("fetch", start=28000, pages=2) == {"tokens": 0, "wrong": 0}
