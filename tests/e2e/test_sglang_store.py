"""A real SGLang server whose HiCache has a `pdlink store` as its third level: what it has loaded, by its own account.

Its memory on the host is emptied between prompts (`/flush_cache`), or it is killed. Run with `make test-sglang`.
"""

from __future__ import annotations

import importlib.util
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("sglang") is None:
    pytest.skip("needs SGLang", allow_module_level=True)

from pdlink.api.session import encode_session  # noqa: E402
from tests.e2e.deployment import Deployment, worker_settings  # noqa: E402
from tests.e2e.engine_servers import NUM_LAYERS, body_of, post, prompt_of, until  # noqa: E402
from tests.e2e.sglang_servers import ADMIN_KEY, SglangPair, SglangServer, cached_of, save_checkpoint, tokens_of  # noqa: E402
from tests.store.process import Process, process  # noqa: E402

pytestmark = [pytest.mark.sglang, pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

PAGE = 64
PAGE_NBYTES = PAGE * NUM_LAYERS * 2 * 4 * 32 * 4
"""K and V of four heads of 32 in float32."""
HICACHE = [
    *("--page-size", str(PAGE), "--enable-hierarchical-cache"),
    *("--hicache-mem-layout", "page_first_direct", "--hicache-io-backend", "direct"),
]
FLAGS = [*HICACHE, "--admin-api-key", ADMIN_KEY]
WAITS = "wait_complete"
"""The policy of prefetches with which a hit depends on no timing."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sglang-store")
    save_checkpoint(path / "model")
    return path


@pytest.fixture(scope="module")
def store(place: Path) -> Iterator[Process]:
    tiers = {"local_disk": str(place / "disk"), "max_local_disk_size": 0.5, "max_local_cpu_size": 0.2}
    with process(place, tiers=tiers) as found:
        yield found


@pytest.fixture(scope="module")
def backend(store: Process) -> dict[str, Any]:
    named = {"backend_name": "pdlink", "module_path": "pdlink.integrations.sglang", "class_name": "PDLinkHiCache"}
    return {**named, "interface_v1": 1, "tiers": {"store": str(store.path), "store_timeout_s": 20.0}}


@pytest.fixture(scope="module")
def server(place: Path, backend: dict[str, Any]) -> Iterator[SglangServer]:
    flags = [*FLAGS, "--hicache-storage-backend", "dynamic", "--hicache-storage-prefetch-policy", WAITS]
    flags += ["--hicache-storage-backend-extra-config", json.dumps(backend)]
    with SglangServer("hicache", place / "model", place / "hicache.log", flags).serving() as server:
        yield server


def counted(store: Process, name: str) -> float:
    return Deployment({"store": store.child}).metric("store", name)


def stored(store: Process) -> float:
    return counted(store, 'pdlink_store_records_total{change="stored"}')


def sessions_of(store: Process) -> list[tuple[str, int, bool]]:
    """Name, pages, and whether no turn runs."""
    with urllib.request.urlopen(f"{store.child.facts['url']}/pdlink/cache", timeout=60) as answer:
        return [(each["name"], each["records"], each["waits"]) for each in json.load(answer)["sessions"]]


def end_session(store: Process, name: str) -> None:
    url = f"{store.child.facts['url']}/pdlink/cache/end_session"
    said = json.dumps({"session_id": name}).encode()
    asked = urllib.request.Request(url, said, {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=60) as answer:
        assert json.load(answer) == {"ended": True}


def ended_at(pair: SglangPair) -> Any:
    """What the proxy says when it is asked to end the session."""
    asked = urllib.request.Request(f"{pair.url}/pdlink/sessions/agent", method="DELETE")
    with urllib.request.urlopen(asked, timeout=60) as answer:
        return json.load(answer)


def flush(server: SglangServer) -> None:
    """Empty its memory, on the device and on the host; it refuses while it works."""
    until(lambda: server.call("POST", "/flush_cache") == 200, "its memory is empty")


def test_a_prompt_is_loaded_after_the_server_was_killed_and_after_the_store_was(
    server: SglangServer, store: Process
) -> None:
    prompt = prompt_of(1000, 1)
    pages = len(prompt) // PAGE
    first = server.generate(prompt)
    assert cached_of(first) == 0
    until(lambda: stored(store) == pages, "it is stored")
    server.kill()
    server.start().wait_ready()
    again = server.generate(prompt)
    assert (cached_of(again), tokens_of(again)) == (pages * PAGE, tokens_of(first))
    assert counted(store, 'pdlink_store_chunks_total{place="memory"}') >= pages

    written = 'pdlink_tier_records_total{call="put",tier="disk"}'
    until(lambda: counted(store, written) == pages, "it is on the disk")
    store.kill()
    flush(server)
    alone = server.generate(prompt)
    assert (cached_of(alone), tokens_of(alone)) == (0, tokens_of(first)), "a store that is away is a miss"
    store.start()
    until(lambda: counted(store, 'pdlink_store_clients{state="connected"}') == 1, "the server is connected again")
    flush(server)
    back = server.generate(prompt)
    assert (cached_of(back), tokens_of(back)) == (pages * PAGE, tokens_of(first))
    assert counted(store, 'pdlink_store_chunks_total{place="disk"}') >= pages


def test_the_turn_of_a_session_is_kept_until_the_session_ends(server: SglangServer, store: Process) -> None:
    prompt = prompt_of(600, 31)
    server.generate(prompt, session_id=encode_session("agent", 600.0, ""))
    until(lambda: sessions_of(store) == [("agent", len(prompt) // PAGE, True)], "its session keeps it")
    end_session(store, "agent")
    assert sessions_of(store) == []


def test_the_store_is_detached_attached_and_cleared_while_the_server_runs(
    server: SglangServer, store: Process, backend: dict[str, Any]
) -> None:
    prompt = prompt_of(500, 2)
    pages = len(prompt) // PAGE
    before = stored(store)
    first = server.generate(prompt)
    until(lambda: stored(store) == before + pages, "it is stored")

    until(lambda: server.call("DELETE", "/hicache/storage-backend") == 200, "it is detached")
    assert counted(store, 'pdlink_store_clients{state="connected"}') == 0
    flush(server)
    alone = server.generate(prompt)
    assert (cached_of(alone), tokens_of(alone)) == (0, tokens_of(first))

    attached = {
        "hicache_storage_backend": "dynamic",
        "hicache_storage_backend_extra_config_json": json.dumps(backend),
        "hicache_storage_prefetch_policy": WAITS,
    }
    until(lambda: server.call("PUT", "/hicache/storage-backend", attached) == 200, "it is attached")
    flush(server)
    again = server.generate(prompt)
    assert (cached_of(again), tokens_of(again)) == (pages * PAGE, tokens_of(first))

    until(lambda: server.call("POST", "/hicache/storage-backend/clear") == 200, "it is cleared")
    flush(server)
    assert cached_of(server.generate(prompt)) == 0


@pytest.mark.parametrize(
    ("policy", "device_tokens"), [("write_through_selective", 16384), ("write_back", 2048)], ids=["selective", "back"]
)
def test_other_policies_store_a_prompt_when_they_write_it_to_the_host(
    place: Path, store: Process, backend: dict[str, Any], policy: str, device_tokens: int
) -> None:
    """selective: with its second use. back: when other prompts need its place on the device."""
    flags = [*FLAGS, "--hicache-storage-backend", "dynamic", "--hicache-storage-prefetch-policy", WAITS]
    flags += ["--hicache-storage-backend-extra-config", json.dumps(backend | {"name": policy})]
    flags += ["--hicache-write-policy", policy, "--max-total-tokens", str(device_tokens)]
    with SglangServer(policy, place / "model", place / f"{policy}.log", flags).serving() as writer:
        prompt, pages = prompt_of(1000, len(policy)), 1000 // PAGE
        before = stored(store)
        first = writer.generate(prompt)
        again = writer.generate(prompt)
        assert (cached_of(first), cached_of(again), tokens_of(again)) == (0, pages * PAGE, tokens_of(first))
        if policy == "write_back":
            assert stored(store) == before, "nothing is stored while it has a place on the device"
            for seed in (71, 72):
                writer.generate(prompt_of(1000, seed))
        until(lambda: stored(store) >= before + pages, "it is stored")
        flush(writer)
        loaded = writer.generate(prompt)
        assert (cached_of(loaded), tokens_of(loaded)) == (pages * PAGE, tokens_of(first))


def test_a_pair_over_tcp_keeps_prompts_in_the_store_that_its_next_life_loads(
    place: Path, server: SglangServer, store: Process, backend: dict[str, Any]
) -> None:
    """Prefill and decode each have HiCache in front of the store."""
    flags = [*FLAGS, "--hicache-storage-backend", "dynamic", "--hicache-storage-prefetch-policy", WAITS]
    flags += ["--hicache-storage-backend-extra-config", json.dumps(backend | {"name": "pair"})]
    prompt, pages = prompt_of(1000, 21), 1000 // PAGE
    expected = tokens_of(server.generate(prompt_of(1000, 22))), tokens_of(server.generate(prompt))
    until(lambda: server.call("POST", "/hicache/storage-backend/clear") == 200, "its prompts are forgotten")
    before = stored(store)
    pair = SglangPair.of(
        place,
        flags,
        environment={"PDLINK_TRANSPORT__KIND": "tcp"},
        decode=["--disaggregation-decode-enable-radix-cache"],
    )
    try:
        assert pair.tokens(prompt) == expected[1]
        assert "ready over tcp" in pair.prefill.output() + pair.decode.output()
        until(lambda: stored(store) >= before + pages, "it is stored")
        for one in pair.servers:
            one.kill()
            one.start()
        for one in pair.servers:
            one.wait_ready()
        pair.wait_routed()
        prefill, decode = pair.legs(prompt)
        assert (cached_of(prefill), tokens_of(decode)) == (pages * PAGE, expected[1])
        assert cached_of(decode) == pages * PAGE, "decode has loaded it, too"
        assert pair.tokens(prompt_of(1000, 22)) == expected[0]
    finally:
        pair.stop()


def test_a_pair_keeps_a_session_while_its_tools_run_and_others_push(place: Path, backend: dict[str, Any]) -> None:
    """In a store of 80 pages without a tier below, on which both servers are; sessions keep a quarter of them."""
    prompt, pages = prompt_of(600, 41), 600 // PAGE
    others = [prompt_of(4000, seed) for seed in (51, 52)]
    (small := place / "small").mkdir()
    with process(small, tiers={"max_local_cpu_size": 80 * PAGE_NBYTES / 2**30}) as store:
        extra = backend | {"name": "session", "tiers": {"store": str(store.path), "store_timeout_s": 20.0}}
        flags = [*HICACHE, "--hicache-storage-backend", "dynamic", "--hicache-storage-prefetch-policy", WAITS]
        flags += ["--hicache-storage-backend-extra-config", json.dumps(extra)]
        pair = SglangPair.of(place, flags, decode=["--disaggregation-decode-enable-radix-cache"])
        try:
            asked = body_of(prompt, session_id="agent", session_ttl_s=600.0)
            first = post(f"{pair.url}/v1/completions", asked)
            until(lambda: sessions_of(store) == [("agent", pages, True)], "its session keeps it")
            for other in others:
                pair.tokens(other)
            evicted = 'pdlink_store_records_total{change="evicted"}'
            until(lambda: counted(store, evicted) >= (sum(map(len, others)) // PAGE + pages) - 80, "others push")
            for one in pair.servers:
                flush(one)
            prefill, decode = pair.legs(prompt)
            assert (cached_of(prefill), cached_of(decode)) == (pages * PAGE, pages * PAGE)
            assert tokens_of(decode) == tokens_of(first)
            assert ended_at(pair) == {"session_id": "agent", "ended": 1, "of": 2}, "they share the store"
            assert sessions_of(store) == []
            assert ended_at(pair) == {"session_id": "agent", "ended": 0, "of": 2}
        finally:
            pair.stop()


def test_a_linker_keeps_prompts_without_a_pool_on_the_host_and_shares_them_with_hicache(
    place: Path, server: SglangServer, store: Process
) -> None:
    """`--enable-unified-cache-external-linker`: between the pool on the device and the store there is nothing."""
    theirs, ours = prompt_of(600, 5), prompt_of(1000, 6)
    before = stored(store)
    first = server.generate(theirs)
    until(lambda: stored(store) == before + len(theirs) // PAGE, "HiCache has stored its prompt")
    config = {
        "linker": "PDLinkLinker",
        "linker_module_path": "pdlink.integrations.sglang_linker",
        "linker_extra_config": {"name": "linker", "tiers": {"store": str(store.path), "store_timeout_s": 20.0}},
    }
    flags = ["--page-size", str(PAGE), "--enable-unified-cache-external-linker"]
    flags += ["--unified-cache-external-linker-backend", "dynamic"]
    flags += ["--unified-cache-external-linker-config", json.dumps(config)]
    linked = SglangServer("linked", place / "model", place / "linked.log", flags).start()
    try:
        linked.wait_ready()
        found = linked.generate(theirs)
        assert (cached_of(found), tokens_of(found)) == (len(theirs) // PAGE * PAGE, tokens_of(first))

        before = stored(store)
        computed = linked.generate(ours)
        assert cached_of(computed) == 0
        until(lambda: stored(store) == before + len(ours) // PAGE, "the linker has stored its prompt")
        flush(linked)
        again = linked.generate(ours)
        assert (cached_of(again), tokens_of(again)) == (len(ours) // PAGE * PAGE, tokens_of(computed))
        loaded = server.generate(ours)
        assert (cached_of(loaded), tokens_of(loaded)) == (len(ours) // PAGE * PAGE, tokens_of(computed))

        store.kill()
        flush(linked)
        alone = linked.generate(ours)
        assert (cached_of(alone), tokens_of(alone)) == (0, tokens_of(computed)), "a store that is away is a miss"
    finally:
        linked.kill()
        store.start()
    until(
        lambda: counted(store, 'pdlink_store_clients{state="connected"}') == 1, "the other server is connected again"
    )


def test_entries_of_the_built_in_engine_and_of_sglang_are_not_mixed(
    place: Path, server: SglangServer, store: Process
) -> None:
    """Of one checkpoint in one precision, in one store."""
    tiers = {"store": str(store.path), "chunk_size": PAGE, "load_if_faster": False, "store_timeout_s": 20.0}
    model = {"path": str(place / "model"), "dtype": "float32", "name": "pdlink-tiny"}
    sections = {"model": model, "tiers": tiers, "cache": {"share_prefixes": False}}
    ours, theirs = prompt_of(400, 3), prompt_of(400, 4)
    pages = len(ours) // PAGE
    with Deployment.launch({"built-in": worker_settings("both", **sections)}, routed=False) as deployment:

        def computed(prompt: list[int]) -> None:
            answer = deployment.complete(prompt, at="built-in")
            assert answer.status == 200, answer.body

        before = stored(store)
        assert cached_of(server.generate(theirs)) == 0
        computed(ours)
        until(lambda: stored(store) == before + 2 * pages, "both are stored")
        computed(theirs)
        assert cached_of(server.generate(ours)) == 0
        until(lambda: stored(store) == before + 4 * pages, "each has stored both")
        computed(ours)
        assert counted(store, 'pdlink_store_chunks_total{place="memory"}') > 0, "its own entries are found"
