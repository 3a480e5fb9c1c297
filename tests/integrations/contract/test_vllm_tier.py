"""pdlink's store as a secondary tier of vLLM's OffloadingConnector, under vLLM's own managers and Scheduler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM and torch warn about each other while they are imported
    pytest.importorskip("vllm.v1.kv_offload.tiering.spec", exc_type=ImportError)

import vllm  # noqa: E402

from pdlink.integrations.vllm_parts import versions  # noqa: E402

if versions.check(vllm.__version__, accept_newer=True) < versions.TIER:
    pytest.skip("takes no tier of others, or was not tried", allow_module_level=True)

from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory  # noqa: E402

from pdlink.errors import ConfigError  # noqa: E402
from pdlink.store.record import HEADER_NBYTES  # noqa: E402
from tests.integrations.contract.offloading_server import PROMPT, OffloadingServer  # noqa: E402
from tests.integrations.contract.vllm_server import WAIT_S, tokens_of  # noqa: E402
from tests.store.process import process  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.engines, pytest.mark.filterwarnings("ignore")]

ANSWER = tokens_of(PROMPT, 1)
KEPT = 96
"""Of its 100 tokens, in whole chunks of 16."""


def tier(folder: Path, **more: Any) -> dict[str, Any]:
    tiers = {"local_disk": str(folder / "kv"), "max_local_disk_size": 0.1, "max_local_cpu_size": 0.01}
    ours = {"type": "PDLinkTier", "module_path": "pdlink.integrations.vllm_offloading"}
    return {**ours, "tiers": tiers, **more}


@pytest.fixture
def server(tmp_path: Path) -> Any:
    with closing(OffloadingServer(tmp_path / "model", tier(tmp_path))) as found:
        yield found


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_a_prompt_seen_before_is_loaded_through_rows(tmp_path: Path, runner: str, *, asynchronous: bool) -> None:
    """The model of the test checks each token's KV that it does not compute."""
    more = {"runner": runner, "asynchronous": asynchronous}
    with closing(OffloadingServer(tmp_path / "model", tier(tmp_path), **more)) as server:
        assert server.serve("a", PROMPT) == (ANSWER, 100)
        server.forget()
        assert server.serve("b", PROMPT) == (ANSWER, 100 - KEPT)
        longer = [*PROMPT, *range(500, 560)]
        server.forget()
        assert server.serve("c", longer) == (tokens_of(longer, 1), 160 - KEPT)


@pytest.mark.slow
@pytest.mark.timeout(600)  # two processes import vLLM, which takes minutes on a busy machine
def test_a_later_process_loads_what_one_before_it_wrote(tmp_path: Path) -> None:
    def in_a_process() -> list[Any]:
        command = [sys.executable, "-m", "tests.integrations.contract.offloading_server"]
        given = [str(tmp_path / "model"), json.dumps(tier(tmp_path))]
        found = subprocess.run([*command, *given], check=True, capture_output=True, text=True, env=os.environ)
        last: list[Any] = json.loads(found.stdout.splitlines()[-1])
        return last

    assert in_a_process() == [ANSWER, 100]
    assert in_a_process() == [ANSWER, 100 - KEPT]


def test_requests_cap_what_is_loaded_and_kept(server: OffloadingServer) -> None:
    server.serve("a", PROMPT)
    caps: list[tuple[str, dict[str, Any], int]] = [
        ("none", {"max_load_tokens": 0}, 0),
        ("two chunks", {"max_load_tokens": 40}, 32),
        ("of memory alone", {"kv_load_tiers": [{"medium": "CPU"}]}, 0),
        ("of storage", {"kv_load_tiers": [{"medium": "STORAGE"}]}, KEPT),
    ]
    for name, params, loaded in caps:
        server.forget()
        assert server.serve(name, PROMPT, params) == (ANSWER, 100 - loaded), name
    other = PROMPT[::-1]
    server.serve("kept in part", other, {"max_offload_tokens": 40})
    server.forget()
    assert server.serve("again", other) == (tokens_of(other, 1), 100 - 32)


def test_a_tier_that_is_far_away_is_left_out_for_requests_that_say_so(tmp_path: Path) -> None:
    with closing(OffloadingServer(tmp_path / "model", tier(tmp_path, locality="REMOTE"))) as server:
        server.serve("a", PROMPT)
        for locality, loaded in [("LOCAL", 0), ("REMOTE", KEPT)]:
            server.forget()
            assert server.serve(locality, PROMPT, {"kv_load_tiers": [{"locality": locality}]}) == (
                ANSWER,
                100 - loaded,
            )


def test_a_chunk_that_has_changed_on_the_disk_is_computed(tmp_path: Path) -> None:
    with closing(OffloadingServer(tmp_path / "model", tier(tmp_path))) as server:
        server.serve("a", PROMPT)
        row_nbytes = server.tier.block_size_bytes
    for path in filter(Path.is_file, (tmp_path / "kv").rglob("*")):
        stored = np.memmap(path, np.uint8, "r+")
        for record in range(0, len(stored) - HEADER_NBYTES - row_nbytes, 4096):
            if stored[record : record + 8].tobytes() == b"pdlinkKV":
                stored[record + HEADER_NBYTES + 100] ^= 1
    with closing(OffloadingServer(tmp_path / "model", tier(tmp_path))) as server:
        assert server.serve("b", PROMPT) == (ANSWER, 100)


def test_servers_share_a_store_process_and_its_death_is_a_miss(tmp_path: Path) -> None:
    with process(tmp_path, tiers={"max_local_cpu_size": 0.02}) as kept:
        shared = tier(tmp_path, tiers={"store": f"ipc://{kept.path}", "store_timeout_s": WAIT_S})
        with closing(OffloadingServer(tmp_path / "model", shared)) as one:
            one.serve("a", PROMPT)
        with closing(OffloadingServer(tmp_path / "model", shared)) as other:
            assert other.serve("b", PROMPT) == (ANSWER, 100 - KEPT)
            kept.kill()
            other.forget()
            assert other.serve("c", PROMPT) == (ANSWER, 100)


def test_kv_of_other_weights_is_not_found(server: OffloadingServer) -> None:
    server.serve("a", PROMPT)
    server.tier._weights_changed("of a later checkpoint")
    server.forget()
    assert server.serve("b", PROMPT) == (ANSWER, 100)
    server.forget()
    assert server.serve("c", PROMPT) == (ANSWER, 100 - KEPT)


@pytest.mark.parametrize("verb", ["known_at", "lookup", "fetch", "reserve", "commit"])
def test_a_store_that_fails_costs_what_it_was_to_bring(
    server: OffloadingServer, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise OSError("gone")

    reads = verb in ("known_at", "lookup", "fetch")
    if reads:
        server.serve("a", PROMPT)
    with monkeypatch.context() as patch:
        patch.setattr(server.tier._store, verb, fails)
        server.forget()
        assert server.serve("b", PROMPT) == (ANSWER, 100)
    for name, expected in [("c", 100 - KEPT if reads else 100), ("d", 100 - KEPT)]:
        server.forget()
        assert server.serve(name, PROMPT) == (ANSWER, expected)


def test_it_is_loaded_by_its_module_path_and_keeps_to_the_interface(tmp_path: Path) -> None:
    found = SecondaryTierFactory.get_tier_class(tier(tmp_path))
    assert not found.__abstractmethods__
    assert found.cache_hit_source.name == "DISK"


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"tiers": {}}, "memory alone"),
        ({"tires": {}}, "tires"),
        ({"locality": "NEAR"}, "locality"),
        ({"tiers": {"store": "ipc:///x", "chunk_size": 16}}, "tiers.chunk_size"),
        ({"tiers": {"local_disk": "/kv", "max_local_disk_size": 1, "peers": ["tcp://127.0.0.1:1"]}}, "tiers.peers"),
        ({"tiers": {"local_disk": "/kv", "max_local_disk_size": 1, "quota_per_salt": 1}}, "tiers.quota_per_salt"),
        ({"tiers": {"local_disk": "/kv", "max_local_disk_size": 1, "max_local_cpu_size": 1e-6}}, "a chunk of vLLM's"),
    ],
)
def test_a_wrong_setting_is_named(tmp_path: Path, more: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        OffloadingServer(tmp_path / "model", {**tier(tmp_path), **more})
