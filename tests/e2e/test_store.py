"""Two prefill workers and one store process: right answers when one of them is killed, and nothing is left behind."""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from pdlink.observe.explain import fetch_explanation, table_of
from tests.waiting import until

from ..store.process import Process, process
from .deployment import Deployment, prompt_of, request, worker_settings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.e2e

CHUNK = 32


@contextmanager
def launched(tmp_path: Path, holdable: tuple[str, ...] = ()) -> Iterator[tuple[Deployment, Process]]:
    """Two prefill workers, a decode worker, a proxy, and a store with a disk."""
    disk = {"local_disk": str(tmp_path / "disk"), "max_local_disk_size": 0.1, "max_local_cpu_size": 0.1}
    with process(tmp_path, tiers=disk) as store:
        # A machine with more to do than it has cores keeps the store from answering for seconds.
        tiers = {"store": str(store.path), "chunk_size": CHUNK, "load_if_faster": False, "store_timeout_s": 20.0}
        cache = {"share_prefixes": False}
        workers = {name: worker_settings("prefill", tiers=tiers, cache=cache) for name in ("prefill-0", "prefill-1")}
        workers["decode"] = worker_settings("decode", cache=cache, tiers={"max_local_cpu_size": 0})
        with Deployment.launch(workers, {"policy": "round_robin", "retries": 1}, holdable=holdable) as deployment:
            deployment.children["store"] = store.child
            both_are_connected(deployment)
            yield deployment, store
            del deployment.children["store"]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Deployment, Process]]:
    with launched(tmp_path_factory.mktemp("shared")) as found:
        yield found


def both_are_connected(deployment: Deployment) -> None:
    clients = 'pdlink_store_clients{state="connected"}'
    until(lambda: deployment.metric("store", clients) == 2, "both prefill workers are connected to the store")
    deployment.wait_store_answers("prefill-0", "prefill-1")


def hits(deployment: Deployment) -> float:
    return deployment.metric("store", 'pdlink_store_chunks_total{place="memory"}')


def held(deployment: Deployment) -> float:
    return deployment.metric("store", "pdlink_store_leases") + deployment.metric("store", "pdlink_store_reservations")


def again(deployment: Deployment, store: Process) -> None:
    """Start the store that was killed."""
    store.start()
    deployment.children["store"] = store.child


def test_a_prompt_that_one_prefill_computed_is_loaded_by_the_other(shared: tuple[Deployment, Process]) -> None:
    deployment, store = shared
    prompt = prompt_of(6 * CHUNK + 5)
    first = deployment.complete(prompt).text
    until(lambda: deployment.metric("store", 'pdlink_store_records_total{change="stored"}') == 6, "it is stored")
    assert hits(deployment) == 0
    assert deployment.complete(prompt).text == first
    assert hits(deployment) == 6
    landed = [deployment.metric(f"prefill-{number}", "pdlink_layers_landed_total") for number in range(2)]
    assert all(landed), "each prefill has pushed one of the two"
    until(lambda: held(deployment) == 0, "nobody holds anything in the store")
    health = request(deployment.url("store") + "/health").body
    assert {client["name"] for client in health["clients"]} == {"prefill-0", "prefill-1"}

    written = 'pdlink_tier_records_total{call="put",tier="disk"}'
    until(lambda: deployment.metric("store", written) == 6, "it is on the disk")
    store.kill()
    assert deployment.complete(prompt).text == first, "without a store it is computed"
    again(deployment, store)
    both_are_connected(deployment)
    assert deployment.complete(prompt).text == first
    assert deployment.metric("store", 'pdlink_store_chunks_total{place="disk"}') == 6, "from the disk"


def test_explain_shows_where_each_leg_had_its_kv_from_and_why(shared: tuple[Deployment, Process]) -> None:
    deployment, _ = shared
    prompt = prompt_of(4 * CHUNK + 5, 77)
    stored = deployment.metric("store", 'pdlink_store_records_total{change="stored"}')
    first = deployment.complete(prompt).headers["X-Request-Id"]
    until(
        lambda: deployment.metric("store", 'pdlink_store_records_total{change="stored"}') == stored + 4,
        "it is stored",
    )
    second = deployment.complete(prompt).headers["X-Request-Id"]
    computed, loaded = (
        {each["worker"]: each for each in fetch_explanation(deployment.url("proxy"), each).sources}
        for each in (first, second)
    )
    (one,), (other,) = ([name for name in found if name.startswith("prefill")] for found in (computed, loaded))
    assert one != other
    assert (computed[one]["computed"], computed[one]["reason"]) == (4 * CHUNK + 5, "not_found")
    assert (loaded[other]["places"], loaded[other]["computed"]) == ({"memory": 4 * CHUNK}, 5)
    assert (loaded[other]["leg"], loaded[other]["reason"]) == ("prefill", "always"), "load_if_faster is off"
    assert (loaded["decode-0"]["received"], loaded["decode-0"]["reason"]) == (4 * CHUNK + 5, "no_tiers")
    shown = io.StringIO()
    Console(file=shown, width=300).print(table_of(fetch_explanation(deployment.url("proxy"), second)))
    rows = [line for line in shown.getvalue().splitlines() if other in line or "decode-0" in line]
    assert [name for row in rows for name in ("placed", "loaded from memory", "received") if name in row] == [
        "placed",
        *[name for row in rows[1:] for name in ("loaded from memory", "received") if name in row],
    ]
    assert f"{4 * CHUNK} loaded from memory, 5 computed" in shown.getvalue()


def test_sixteen_answers_are_right_while_the_store_is_killed_and_comes_again(
    shared: tuple[Deployment, Process],
) -> None:
    deployment, store = shared
    prompts = [prompt_of(4 * CHUNK + number, number % 5) for number in range(16)]
    expected = [answer.text for answer in deployment.complete_all(prompts)]

    def landed() -> float:
        return sum(deployment.metric(name, "pdlink_layers_landed_total") for name in ("prefill-0", "prefill-1"))

    with ThreadPoolExecutor(1) as threads:
        for _ in range(2):
            before, future = landed(), threads.submit(deployment.complete_all, prompts)
            until(lambda before=before: landed() > before, "some are under way")  # type: ignore[misc]
            store.kill()
            again(deployment, store)
            assert [answer.text for answer in future.result(60)] == expected
    until(lambda: held(deployment) == 0, "nobody holds anything in the store")
    until(lambda: deployment.idle("decode"), "decode has all its blocks back")


def test_a_prefill_that_is_killed_while_it_stores_leaves_nothing_in_the_store(tmp_path: Path) -> None:
    prefills = ("prefill-0", "prefill-1")
    with launched(tmp_path, holdable=prefills) as (deployment, _), ThreadPoolExecutor(1) as threads:
        prompt = prompt_of(6 * CHUNK)
        for name in prefills:
            deployment.hold(name, "layer 2")
        future = threads.submit(deployment.complete, prompt)
        until(lambda: deployment.metric("store", "pdlink_store_reservations") == 6, "it is being stored")
        (busy,) = (name for name in prefills if not deployment.idle(name))
        deployment.kill(busy)
        deployment.let_go()
        answer = future.result(60)
        assert answer.status == 200
        until(lambda: held(deployment) == 0, "its reservations have ended with it")
        assert deployment.complete(prompt).text == answer.text
        until(lambda: deployment.metric("store", 'pdlink_store_records_total{change="stored"}') >= 6, "it is stored")
        assert deployment.complete(prompt).text == answer.text
