"""A store process tells what it keeps, and a proxy's index knows it for every worker of that store."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from typing import TYPE_CHECKING, Any

import pytest

from pdlink.config import KVEventsConfig
from pdlink.kv import hashing
from pdlink.kv.hashing import Origin, Preimage
from pdlink.serve.health import health
from pdlink.serve.kv_events import open_publisher, tell_shared_records
from pdlink.store import late
from pdlink.store.preimages import PreimageFile
from pdlink_proxy.fleet import PlacementRequest
from pdlink_proxy.kv_events import KVEvents
from pdlink_proxy.table import WorkerState
from tests.waiting import WAIT_S, until

from ..observe.subscriber import Subscriber
from ..store.process import client, process, served
from ..store.stubs import SHAPE
from .test_shared_store import worker
from .tiered import CHUNK, answers, computed_here, prompt_of, sourced

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from pdlink.serve.worker import Worker

RECORD_NBYTES = 4096 + CHUNK * 2 * 2 * 512
PUBLISHED = {"endpoint": "tcp://127.0.0.1:0", "replay_endpoint": "tcp://127.0.0.1:0"}


def publishing(directory: Path, records: int = 64, disk: bool = True) -> dict[str, Any]:
    tiers: dict[str, Any] = {"max_local_cpu_size": records * RECORD_NBYTES / (1 << 30)}
    if disk:
        tiers |= {"local_disk": str(directory / "disk"), "max_local_disk_size": 0.01}
    return {"tiers": tiers, "kv_events": PUBLISHED}


class Index:
    """A proxy's, in a loop of its own, that hears the workers' health as a proxy does."""

    def __init__(self, workers: Mapping[str, Worker]) -> None:
        self._workers = workers
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._events = KVEvents()
        self._states = {name: WorkerState(f"http://{name}#1") for name in workers}

    def held(self, prompt: tuple[int, ...]) -> dict[str, int]:
        return asyncio.run_coroutine_threadsafe(self._held(prompt), self._loop).result(WAIT_S)

    async def _held(self, prompt: tuple[int, ...]) -> dict[str, int]:
        model = ""
        for name, each in self._workers.items():
            said = health(each)
            model = said.model
            self._events.heard(f"http://{name}", self._states[name], model, said.kv_events)
        request = PlacementRequest(model, len(prompt), prompt=str(list(prompt)).encode())
        held, names = self._events.held(request, model), {each.number: name for name, each in self._states.items()}
        return {names[number]: tokens for number, tokens, _ in (held.shares if held else ())}

    def until(self, prompt: tuple[int, ...], held: dict[str, int]) -> None:
        until(lambda: self.held(prompt) == held, f"they hold {held}")

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(WAIT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        self._events.close()
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*rest, return_exceptions=True)


@contextlib.contextmanager
def indexed(*workers: Worker) -> Iterator[Index]:
    index = Index({each.name: each for each in workers})
    try:
        yield index
    finally:
        index.close()


def test_what_one_worker_computed_counts_as_known_for_all_workers_of_the_store(tmp_path: Path) -> None:
    """Also a store's end, its restart on the same disk, and the end of each place that a record is in."""
    first, other = prompt_of(5 * CHUNK + 3, 1), prompt_of(5 * CHUNK, 2)
    everywhere, nowhere = {"a": 5 * CHUNK, "b": 5 * CHUNK}, dict[str, int]()
    with (
        process(tmp_path, **publishing(tmp_path)) as store,
        worker(tmp_path, "a") as one,
        worker(tmp_path, "b") as two,
        indexed(one, two) as index,
    ):
        assert index.held(first) == nowhere
        answers(one, [first], at_once=False)
        index.until(first, everywhere)
        assert two.source is not None
        store_of_two = two.source.store
        assert store_of_two.flush(WAIT_S)
        store.kill()
        index.until(first, nowhere)
        store.start()
        index.until(first, everywhere)
        answers(two, [other], at_once=False)
        index.until(other, everywhere)
        assert index.held(first) == index.held(other) == everywhere
        keys = two.source.keys(other).by_group[0]
        store_of_two.clear(keys, ["memory"])
        assert store_of_two.flush(WAIT_S)
        assert index.held(other) == everywhere, "it is on the disk"
        store_of_two.clear(keys[3:])
        index.until(other, {"a": 3 * CHUNK, "b": 3 * CHUNK})
        assert index.held(first) == everywhere


def test_what_is_evicted_from_memory_without_a_tier_below_is_not_known_any_more(tmp_path: Path) -> None:
    prompts = [prompt_of(4 * CHUNK, seed) for seed in range(2)]
    with (
        process(tmp_path, **publishing(tmp_path, records=5, disk=False)),
        worker(tmp_path, "a") as one,
        indexed(one) as index,
    ):
        answers(one, prompts[:1], at_once=False)
        index.until(prompts[0], {"a": 4 * CHUNK})
        answers(one, prompts[1:], at_once=False)
        index.until(prompts[1], {"a": 4 * CHUNK})
        assert index.held(prompts[0]).get("a", 0) <= CHUNK


def test_what_was_pulled_from_another_store_is_known_to_be_in_both(tmp_path: Path) -> None:
    """Also what is computed behind it, which names it as the one before."""
    first, longer = prompt_of(5 * CHUNK, 1), prompt_of(5 * CHUNK, 1) + prompt_of(2 * CHUNK, 2)
    expected, paths = computed_here([longer]), [tmp_path / name for name in ("left", "right")]
    for path in paths:
        path.mkdir()
    settings = publishing(tmp_path, disk=False)
    settings["tiers"]["peer_port"] = 0
    with (
        process(paths[0], **settings),
        process(paths[1], **settings),
        worker(paths[0], "a") as one,
        worker(paths[1], "b") as two,
        indexed(one, two) as index,
    ):
        answers(one, [first], at_once=False)
        index.until(first, {"a": 5 * CHUNK})
        with sourced() as events:
            assert answers(two, [longer], at_once=False, source=health(one).store) == expected
        assert [event.places for event in events] == [{"peer": 5 * CHUNK}]
        index.until(longer, {"a": 5 * CHUNK, "b": 7 * CHUNK})


TOKENS = tuple(range(4))
ORIGIN = Origin("m", "r", SHAPE.dtype, SHAPE.text, 4)
FIRST = Preimage(None, TOKENS, (), ORIGIN)
KEYS = hashing.chain(hashing.namespace(ORIGIN), TOKENS * 2, 4)
SECOND = Preimage(KEYS[0], TOKENS)


@pytest.mark.parametrize(
    "lie",
    [
        FIRST._replace(tokens=(9, 9, 9, 9)),
        FIRST._replace(tokens=TOKENS * 2),
        FIRST._replace(origin=ORIGIN._replace(model="other")),
        FIRST._replace(origin=ORIGIN._replace(salt="other")),
        FIRST._replace(origin=ORIGIN._replace(chunk_tokens=2)),
        Preimage(KEYS[0], TOKENS),
        Preimage(hashing.namespace(ORIGIN), TOKENS[:3]),
    ],
)
def test_a_worker_that_lies_about_tokens_loses_its_connection_and_nothing_is_told(
    lie: Preimage, tmp_path: Path
) -> None:
    with process(tmp_path, **publishing(tmp_path)) as store, client(store.path) as mine, client(store.path) as honest:
        subscriber = Subscriber(mine.events)
        link = mine._link
        assert link is not None
        mine.commit(mine.reserve(KEYS[:1], SHAPE), SHAPE, [lie])
        until(lambda: link.lost, "it is sent away")
        assert "tokens of another key" in link.lost
        until(lambda: mine.connected, "it is let in again")
        again = mine._link
        assert again is not None
        mine.announce(KEYS[:1], SHAPE, [lie])
        until(lambda: "tokens of another key" in again.lost, "nor is it believed of a record that others brought")
        honest.commit(honest.reserve(KEYS[1:], SHAPE), SHAPE, [SECOND])
        assert subscriber.hears({(medium, KEYS[1]) for medium in ("CPU", "STORAGE")})
        subscriber.close()


def test_events_of_a_store_say_whose_model_first_blocks_are_of_and_no_more_than_was_checked(tmp_path: Path) -> None:
    salted = ORIGIN._replace(salt="s")
    keys = [*KEYS, *hashing.chain(hashing.namespace(salted), TOKENS, 4), b"i" * 32]
    known = [FIRST, SECOND, FIRST._replace(origin=salted), Preimage(None, (), (), ORIGIN)]
    with process(tmp_path, **publishing(tmp_path, disk=False)) as store, client(store.path) as mine:
        subscriber = Subscriber(mine.events)
        mine.commit(mine.reserve(keys, SHAPE), SHAPE, known)
        assert subscriber.hears({("CPU", key) for key in keys[:3]}), "images are not told: their tokens say nothing"
        told: dict[bytes, dict[str, Any]] = {}
        for batch in subscriber.batches:
            told |= {event["block_hashes"][0]: event for event in batch if event["type"] == "BlockStored"}
        assert told[keys[0]]["block_hashes"] == keys[:2]
        assert (told[keys[0]]["model"], told[keys[0]]["scope"]) == ("m", ORIGIN.scope)
        assert (told[keys[2]]["extra_keys"], told[keys[2]]["scope"]) == ([["s"]], ORIGIN.scope)
        assert told[keys[0]]["token_ids"] == list(TOKENS * 2)
        assert told[keys[0]]["block_size"] == 4
        subscriber.close()


def test_a_file_of_tokens_that_does_not_answer_holds_up_neither_the_start_nor_a_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(late, "WAIT_S", 0.01)
    place = tmp_path / "preimages"
    os.mkfifo(place)  # who opens it waits for the other end
    publisher = open_publisher(KVEventsConfig(endpoint="tcp://127.0.0.1:0"), "store", "0")
    assert publisher is not None
    with served(tmp_path) as (store, _), contextlib.closing(publisher):
        tell_shared_records(publisher, store, PreimageFile(place))
        store.commit(store.reserve(KEYS, SHAPE), SHAPE, [FIRST, SECOND])
        assert store.lookup(KEYS, WAIT_S).keys == tuple(KEYS)
        assert publisher.num_blocks == 0
        with place.open("wb"):
            pass
        until(place.is_file, "the file is written")
        assert publisher.num_blocks == len(KEYS)
