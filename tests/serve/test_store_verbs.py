"""Operators name prompts by token ids to a store process, which knows no model: the engines that use it tell it how
their keys are made."""

from __future__ import annotations

import json
import random
import threading
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from pdlink.cli import main
from pdlink.errors import InvalidRequest
from pdlink.kv.layout import KVLayout, LayerLayout, Part, paged_layout
from pdlink.memory.buffers import Buffer
from pdlink.serve.cache_routes import (
    AddTierRequest,
    CacheDesk,
    ClearRequest,
    CompressRequest,
    FreezeRequest,
    MoveRequest,
    NamedPrompt,
    PinRequest,
    QuotaRequest,
    RemoveTierRequest,
    VerifyRequest,
)
from pdlink.store.eviction import Lru
from pdlink.store.groups import RecordGroup
from pdlink.store.scope import Scope, Scopes
from pdlink.store.slots import Retention, tenant_of
from pdlink.store.source import CallersBlocks, Source
from pdlink.store.store import Store
from tests.waiting import WAIT_S, until

from ..store.process import Process, process
from ..store.stubs import StubTier
from .test_shared_store import worker
from .tiered import CHUNK, Computed, answers, prompt_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from pdlink.serve.worker import Worker

KEPT, SALTED = prompt_of(3 * CHUNK + 1, 1), prompt_of(2 * CHUNK + 1, 2)


class Operator:
    """`pdlink cache` against one URL."""

    def __init__(self, url: str, capsys: pytest.CaptureFixture[str]) -> None:
        self._url, self._capsys = url, capsys

    def said(self, action: str, *words: str, status: int = 0) -> str:
        assert main(["cache", action, self._url, *words]) == status
        printed = self._capsys.readouterr()
        assert "Traceback" not in printed.err
        return printed.out if status == 0 else printed.err

    def __call__(self, action: str, tokens: Sequence[int] = (), *words: str) -> Any:
        named = ["--tokens", ",".join(map(str, tokens))] if tokens else []
        return json.loads(self.said(action, *named, *words, "--json"))


def compute(engine: Worker, prompt: tuple[int, ...]) -> None:
    """And keep it: the store has heard of all of it."""
    answers(engine, [prompt], at_once=False)
    assert engine.source is not None
    assert engine.source.store.flush(WAIT_S)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Process]:
    tiers = {"max_local_cpu_size": 0.01, "local_disk": str(tmp_path / "disk"), "max_local_disk_size": 0.01}
    with process(tmp_path, tiers=tiers) as found:
        yield found


def operator_of(store: Process, capsys: pytest.CaptureFixture[str]) -> Operator:
    return Operator(store.child.facts["url"], capsys)


def test_verbs_find_bring_keep_and_forget_what_an_engine_computed(
    store: Process, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    operator = operator_of(store, capsys)
    with worker(tmp_path, "a") as engine:
        compute(engine, KEPT)
        counted = Computed(engine, monkeypatch)
        in_memory = {"prompt_tokens": 97, "tokens": 96, "runs": [{"place": "memory", "tokens": 96}]}
        assert operator("lookup", KEPT) == in_memory
        assert operator("clear", KEPT, "--place", "memory")["records"] == 3
        assert operator("lookup", KEPT)["runs"] == [{"place": "disk", "tokens": 96}]
        assert operator("warm", KEPT) == {"tokens": 96}
        assert operator("lookup", KEPT) == in_memory
        assert operator("pin", KEPT, "--name", "p") == {"tokens": 96, "durable": True}
        assert operator("unpin", (), "--name", "p") == {"records": 3}
        assert operator("move", KEPT, "--from", "disk", "--to", "memory") == {"tokens": 96}
        answers(engine, [KEPT], at_once=False)
        assert counted.take() == 1, "what was moved is loaded"
        assert operator("clear", KEPT) == {"records": 3, "durable": True}
        assert operator("lookup", KEPT)["tokens"] == 0
        answers(engine, [KEPT], at_once=False)
        assert counted.take() == len(KEPT), "what was cleared is computed again"


def test_an_engine_that_has_gone_leaves_its_scope_and_a_store_that_starts_again_is_told_it(
    store: Process, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with worker(tmp_path, "a") as engine:
        compute(engine, KEPT)
    (scope,) = operator_of(store, capsys)("stats")["scopes"]
    assert (scope["model"], scope["chunk_tokens"]) == ("pdlink-tiny", CHUNK)
    assert operator_of(store, capsys)("lookup", KEPT, "--scope", scope["scope"])["tokens"] == 96
    store.close()
    store.start()
    operator = operator_of(store, capsys)
    assert "start it, or clear everything" in operator.said("lookup", "--tokens", "1", status=2)
    with worker(tmp_path, "a") as engine:
        until(lambda: operator("stats")["scopes"], "the engine tells its scope")
        assert operator("lookup", KEPT)["runs"] == [{"place": "disk", "tokens": 96}]
        store.kill()
        store.start()
        operator = operator_of(store, capsys)
        until(lambda: operator("stats")["scopes"], "the engine tells its scope again")
        assert operator("warm", KEPT) == {"tokens": 96}


@pytest.mark.parametrize("ends", [Process.kill, Process.close], ids=["SIGKILL", "SIGTERM"])
def test_what_an_operator_has_set_stands_in_the_store_that_follows(
    store: Process,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    ends: Callable[[Process], None],
) -> None:
    with worker(tmp_path, "a") as engine:
        compute(engine, KEPT)
        operator = operator_of(store, capsys)
        assert operator("pin", KEPT, "--name", "p") == {"tokens": 96, "durable": True}
        quota = operator("quota", (), "--salt", "s", "--gib", "0.5")
        assert (quota["quota_nbytes"], quota["durable"]) == (2**29, True)
        ends(store)
        store.start()
        operator = operator_of(store, capsys)
        until(lambda: [pin["records"] for pin in operator("stats")["pins"]] == [3], "it is pinned again")
        until(lambda: operator("stats")["scopes"], "the engine tells its scope")
        assert operator("lookup", KEPT)["runs"] == [{"place": "memory", "tokens": 96}]
        counted = Computed(engine, monkeypatch)
        answers(engine, [KEPT], at_once=False)
        assert counted.take() == 1
        assert operator("unpin", (), "--name", "p") == {"records": 3}
        ends(store)
        store.start()
        assert operator_of(store, capsys)("stats")["pins"] == []


def test_wrong_words_to_a_store_end_with_2_and_the_reason(
    store: Process, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    operator = operator_of(store, capsys)
    with worker(tmp_path, "a") as engine:
        compute(engine, SALTED)
        for words, said in (
            (("lookup", "--prompt", "a text"), "got a text; expected token ids"),
            (("lookup", "--tokens", "1,-1"), "prompt[1]"),
            (("lookup", "--tokens", "1", "--model", "another"), "'another'"),
            (("warm", "--tokens", "1", "--scope", "f" * 16), "0 of the kept kinds of KV fit"),
            (("move", "--tokens", "1", "--from", "moon", "--to", "disk"), "got 'moon'; expected memory, disk"),
            (("clear",), "everything: got"),
            (("clear", "--tokens", "1", "--place", "moon"), "place: got 'moon'"),
        ):
            assert said in operator.said(*words, status=2)
        assert operator("lookup", SALTED)["tokens"] == 64
        assert operator("lookup", SALTED, "--salt", "s")["tokens"] == 0
        assert operator("lookup", SALTED, "--lora", "l")["tokens"] == 0


def test_one_model_in_two_kinds_of_kv_is_told_apart_by_scope(
    store: Process, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    operator = operator_of(store, capsys)
    with worker(tmp_path, "a") as engine, worker(tmp_path, "b") as other:
        compute(engine, KEPT)
        assert other.source is not None
        other.source.rename("era")
        assert other.source.store.flush(WAIT_S)
        first, second = [scope["scope"] for scope in operator("stats")["scopes"]]
        assert first in operator.said("lookup", "--tokens", "1", status=2)
        assert operator("lookup", KEPT, "--scope", first)["tokens"] == 96
        assert operator("lookup", KEPT, "--scope", second)["tokens"] == 0
        assert len(other.source.store.scopes.all()) == 1, "an engine uses one"


# --- Groups of layers

HEAD, WINDOW = 64, 40
FULL = paged_layout(
    dtype="uint8", itemsize=1, num_layers=1, num_blocks=8, block_tokens=8, num_heads=1, head_dim=HEAD, num_parts=1
)


def layouts() -> list[KVLayout]:
    part = LayerLayout((Part(2, 0),), HEAD, 0, HEAD)
    layers = tuple(replace(layer, parts=(replace(layer.parts[0], region=1),)) for layer in FULL.layers)
    state = KVLayout("state", CHUNK, 8, 1, HEAD, (part,), state=True)
    return [FULL, replace(FULL, layers=layers, window=WINDOW, window_step=16), state]


class Kept:
    """A store with a tier, used by an engine of full attention, a window and states."""

    def __init__(self, *, verify: bool = False, tier_deadline_s: float = 10.0) -> None:
        self.tier = StubTier()
        self.store = Store(
            1 << 20, Lru(), [self.tier], pin_quota_nbytes=1 << 20, verify=verify, tier_deadline_s=tier_deadline_s
        )
        groups = [
            RecordGroup(one, model="m", revision=f"group {index}", chunk_tokens=CHUNK)
            for index, one in enumerate(layouts())
        ]
        buffers = [Buffer(one.extent(region)) for region, one in enumerate(layouts())]
        self.source = Source(self.store, groups, buffers, CallersBlocks())
        self.store.open()
        self.desk = CacheDesk(self.store, keyed=True)

    def put(self, group: int, keys: Sequence[bytes]) -> None:
        shape = self.source.groups[group].shape
        self.store.commit(self.store.reserve(keys, shape), shape)
        assert self.store.flush(WAIT_S)

    def close(self) -> None:
        self.source.close()
        self.store.close()


@pytest.fixture
def kept() -> Iterator[Kept]:
    found = Kept()
    yield found
    found.close()


def named(tokens: Sequence[int], **more: Any) -> dict[str, Any]:
    return {"prompt": msgspec.Raw(json.dumps(list(tokens)).encode()), **more}


def test_a_verb_finds_what_a_request_finds_in_all_groups(kept: Kept) -> None:
    choose, ends = random.Random(7), set[int]()
    for seed in range(60):
        prompt, salt = prompt_of(6 * CHUNK + 1, 100 + seed), choose.choice(["", "s"])
        keys = kept.source.keys(prompt, salt)
        share = choose.choice([0.6, 0.9, 1.0])
        for group, mine in enumerate(keys.by_group):
            kept.put(group, [key for key in mine if choose.random() < share])
        found = kept.source.prompt("r", keys).lookup()
        assert kept.desk.lookup(NamedPrompt(**named(prompt, cache_salt=salt)))["tokens"] == found
        assert kept.desk.warm(NamedPrompt(**named(prompt, cache_salt=salt)))["tokens"] == found
        ends.add(found)
    assert len(ends) > 4


def test_verbs_reach_what_is_needed_of_every_group(kept: Kept) -> None:
    prompt = prompt_of(4 * CHUNK + 1, 1)
    keys = kept.source.keys(prompt).by_group
    for group, mine in enumerate(keys):
        kept.put(group, mine)
    kept.store.clear(places=["memory"])
    assert kept.desk.warm(NamedPrompt(**named(prompt))) == {"tokens": 4 * CHUNK}
    assert [sum(kept.store.holds(mine)) for mine in keys] == [4, 2, 1], "all, those of the window, the last state"
    assert kept.desk.pin(PinRequest(**named(prompt, name="p"))) == {"tokens": 4 * CHUNK, "durable": False}
    assert kept.store.unpin("p") == 7
    moved = MoveRequest(**named(prompt, source="memory", destination="stub", keep=False))
    assert kept.desk.move(moved) == {"tokens": 4 * CHUNK}
    assert kept.desk.clear(ClearRequest(**named(prompt)))["records"] == 0
    assert kept.store.flush(WAIT_S)
    assert not kept.tier.records


def test_what_has_changed_in_memory_or_in_a_tier_is_counted_and_dropped() -> None:
    kept, prompt = Kept(verify=True), prompt_of(4 * CHUNK + 1, 1)
    keys = kept.source.keys(prompt).by_group
    try:
        for group, mine in enumerate(keys):
            kept.put(group, mine)
        right = {"right": 12, "wrong": 0, "unknown": 0}
        assert kept.desk.verify(VerifyRequest(**named(prompt))) == {"memory": right, "stub": right}
        assert kept.desk.verify(VerifyRequest(everything=True)) == {"memory": right}
        lease = kept.store.lend(keys[0][1])
        assert lease is not None
        kept.store.array[lease.slots[0].offset + 5000] ^= 1
        kept.store.take_back(lease)
        kept.tier.flip(keys[2][3], 4100)
        kept.tier.records[keys[1][0]] = kept.tier.records[keys[1][0]][:100]
        found = kept.desk.verify(VerifyRequest(**named(prompt)))
        assert found["memory"] == {"right": 11, "wrong": 1, "unknown": 0}
        assert found["stub"] == {"right": 10, "wrong": 2, "unknown": 0}
        assert kept.store.flush(WAIT_S)
        assert not kept.store.holds([keys[0][1]])[0]
        assert len(kept.tier.records) == 10
        kept.store.check()
    finally:
        kept.close()


def test_a_tier_that_stalls_keeps_a_check_waiting_for_one_deadline_alone() -> None:
    kept = Kept(tier_deadline_s=0.05)
    keys = kept.source.keys(prompt_of(64 * CHUNK, 1)).by_group[0]
    kept.put(0, keys)
    waited = list[float | None]()

    def result(self: Future[Any], timeout: float | None = None) -> Any:
        waited.append(timeout)
        return right(self, timeout)

    right = Future.result
    kept.tier.going.clear()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Future, "result", result)
            found = kept.store.verify(keys, kept.source.groups[0].shape)
    finally:
        kept.tier.going.set()
        kept.close()
    assert found["stub"].unknown == 64
    assert waited == [0.05] + [0.0] * 63


def test_a_record_without_a_checksum_is_neither_right_nor_wrong(kept: Kept) -> None:
    prompt = prompt_of(CHUNK + 1, 1)
    kept.put(0, kept.source.keys(prompt).by_group[0])
    assert kept.desk.verify(VerifyRequest(**named(prompt)))["memory"] == {"right": 0, "wrong": 0, "unknown": 1}
    kept.tier.error = OSError("it is away")
    assert kept.desk.verify(VerifyRequest(**named(prompt)))["stub"]["wrong"] == 0


def test_a_quota_of_a_salt_holds_from_then_on_and_goes_again(kept: Kept) -> None:
    salts, shape = ("s", "t"), kept.source.groups[0].shape
    prompts = {salt: kept.source.keys(prompt_of(8 * CHUNK, 1), salt).by_group[0] for salt in salts}
    for salt, keys in prompts.items():
        retention = Retention(tenant=tenant_of(salt))
        kept.store.commit(kept.store.reserve(keys, shape, retention=retention), shape)
    assert kept.store.flush(WAIT_S), "what is on its way into a tier is not evicted"
    each = kept.store.quota(tenant_of("s"))[0] // 8
    assert each >= shape.nbytes
    answer = kept.desk.quota(QuotaRequest(cache_salt="s", gib=3.5 * each / 2**30))
    assert answer == {"used_nbytes": 3 * each, "quota_nbytes": int(3.5 * each), "durable": False}
    assert [sum(kept.store.holds(keys)) for keys in prompts.values()] == [3, 8]
    more = kept.source.keys(prompt_of(4 * CHUNK, 2), "s").by_group[0]
    retention = Retention(tenant=tenant_of("s"))
    kept.store.commit(kept.store.reserve(more, shape, retention=retention), shape)
    assert kept.store.flush(WAIT_S)
    assert sum(kept.store.holds([*prompts["s"], *more])) == 3
    assert kept.desk.quota(QuotaRequest(gib=5 * each / 2**30))["quota_nbytes"] == 5 * each
    assert [sum(kept.store.holds(keys)) for keys in prompts.values()][1] == 5
    assert kept.desk.quota(QuotaRequest(cache_salt="s"))["quota_nbytes"] == 5 * each, "that of all again"
    assert kept.desk.quota(QuotaRequest())["quota_nbytes"] == 0
    kept.store.commit(kept.store.reserve(prompts["s"], shape, retention=retention), shape)
    assert sum(kept.store.holds(prompts["s"])) == 8
    kept.store.check()


def test_a_store_that_is_frozen_keeps_and_evicts_nothing_until_it_is_not(kept: Kept) -> None:
    keys, shape = kept.source.keys(prompt_of(4 * CHUNK, 1)).by_group[0], kept.source.groups[0].shape
    assert kept.desk.freeze(FreezeRequest(on=True)) == {"frozen": True}
    assert kept.store.reserve(keys, shape) == ()
    assert kept.desk.freeze(FreezeRequest(on=False)) == {"frozen": False}
    kept.put(0, keys)
    assert sum(kept.store.holds(keys)) == 4


def test_what_a_tier_has_of_a_prompt_is_packed_in_place(kept: Kept) -> None:
    prompt = prompt_of(4 * CHUNK + 1, 1)
    for group, mine in enumerate(kept.source.keys(prompt).by_group):
        kept.put(group, mine)
    before = kept.tier.nbytes
    assert kept.desk.compress(CompressRequest(**named(prompt, place="stub"))) == {"tokens": 4 * CHUNK}
    assert kept.tier.nbytes < before
    assert kept.desk.compress(CompressRequest(**named(prompt, place="memory"))) == {"tokens": 0}
    assert kept.desk.compress(CompressRequest(**named(prompt, place="stub", codec="raw"))) == {"tokens": 4 * CHUNK}
    assert kept.tier.nbytes == before


def test_verbs_of_operators_are_commands(store: Process, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    operator = operator_of(store, capsys)
    with worker(tmp_path, "a") as engine:
        compute(engine, KEPT)
        assert operator.said("freeze") == "frozen\n"
        assert operator("stats")["frozen"]
        assert operator.said("freeze", "--off") == "not frozen any more\n"
        assert "quota: 1.0 MiB, of which 0.0 are used" in operator.said("quota", "--salt", "s", "--gib", str(2**-10))
        assert operator.said("quota") == "quota: none\n"
        assert operator("verify", KEPT)["disk"] == {"right": 3, "wrong": 0, "unknown": 0}
        assert "96 tokens are zstd in disk" in operator.said(
            "compress", "--tokens", ",".join(map(str, KEPT)), "--place", "disk"
        )
        for words, said in (
            (("quota", "--gib", "0"), "gib"),
            (("quota", "--gib", "1e-12"), "gib"),
            (("compress", "--tokens", "1", "--place", "moon"), "place: got 'moon'"),
            (("verify",), "everything: got"),
        ):
            assert said in operator.said(*words, status=2)
        assert engine.source is not None
        desk = CacheDesk(engine.source.store, keyed=True)
        with pytest.raises(InvalidRequest, match="ask that one"):
            desk.quota(QuotaRequest(gib=1))


def test_a_tier_comes_and_goes_while_fetches_are_in_flight(kept: Kept, tmp_path: Path) -> None:
    prompts = [kept.source.keys(prompt_of(4 * CHUNK, seed)).by_group[0] for seed in range(3)]
    shape = kept.source.groups[0].shape
    (tmp_path / "more").mkdir()
    kept.put(0, prompts[0])
    assert kept.desk.add_tier(AddTierRequest(url=f"file://{tmp_path}/more")) == {"place": "shared_dir"}
    assert kept.store.places == ("memory", "stub", "shared_dir")
    kept.put(0, prompts[1])
    kept.store.clear(places=["memory", "stub"])
    assert kept.store.flush(WAIT_S)
    assert set(kept.store.lookup(prompts[1], WAIT_S).places) == {2}
    kept.put(0, prompts[2])
    kept.store.clear(places=["memory", "shared_dir"])
    assert kept.store.flush(WAIT_S)
    kept.tier.going.clear()
    found = kept.store.lookup(prompts[2], WAIT_S)
    assert found.places == (1,) * 4
    fetch = kept.store.fetch(found, shape, "r")
    assert kept.tier.stalled.wait(WAIT_S)
    removing = threading.Thread(target=kept.desk.remove_tier, args=[RemoveTierRequest(place="stub")])
    removing.start()
    until(lambda: kept.store._below.tiers[0].removed, "the tier is removed")
    kept.tier.going.set()
    assert len(fetch.done.result(WAIT_S)) <= 4
    assert fetch.close()
    removing.join(WAIT_S)
    assert kept.tier.closed
    assert kept.store.places == ("memory", "stub (removed)", "shared_dir")
    assert kept.store.lookup(prompts[0], WAIT_S).keys == ()
    assert [place["name"] for place in kept.desk.state()["places"]] == ["memory", "shared_dir"]
    kept.put(0, prompts[0])
    assert kept.desk.remove_tier(RemoveTierRequest(place="shared_dir")) == {"drained": True}
    assert kept.desk.add_tier(AddTierRequest(url=f"file://{tmp_path}/more")) == {"place": "shared_dir"}
    kept.store.clear(places=["memory"])
    assert kept.store.lookup(prompts[0], WAIT_S).places == (3,) * 4, "what it has stays there"
    with pytest.raises(InvalidRequest, match="expected memory, shared_dir; use"):
        kept.desk.remove_tier(RemoveTierRequest(place="shared_dir (removed)"))
    kept.put(0, prompts[2])
    kept.store.clear(places=["memory"])
    assert kept.store.lookup(prompts[2], WAIT_S).places == (3,) * 4, "the new tier of that name is written to"
    kept.store.check()


def test_a_tier_that_takes_nothing_is_removed_and_says_that_it_lacks_something(kept: Kept) -> None:
    kept.tier.error = OSError("it is away")
    keys, shape = kept.source.keys(prompt_of(4 * CHUNK, 1)).by_group[0], kept.source.groups[0].shape
    kept.store.commit(kept.store.reserve(keys, shape), shape)
    assert kept.desk.remove_tier(RemoveTierRequest(place="stub")) == {"drained": False}
    assert sum(kept.store.holds(keys)) == 4
    assert kept.store.flush(WAIT_S), "nobody is owed anything"
    kept.store.clear()
    kept.store.check()
    assert kept.store.held() == {"leases": 0, "reservations": 0}


def test_clients_of_a_store_hear_of_a_tier_before_anything_is_found_in_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key_file = tmp_path / "key"
    key_file.write_text("secret-of-operators")
    key_file.chmod(0o600)
    tiers = {"max_local_cpu_size": 0.01}
    key = ("--key-file", str(key_file))
    with process(tmp_path, tiers=tiers, http_key_file=str(key_file)) as store, worker(tmp_path, "a") as engine:
        operator = operator_of(store, capsys)
        assert engine.source is not None
        (tmp_path / "tier").mkdir()
        url = f"file://{tmp_path}/tier"
        assert operator("add-tier", (), "--tier", url, "--codec", "zstd", *key) == {"place": "shared_dir"}
        compute(engine, KEPT)
        assert operator("clear", KEPT, "--place", "memory", *key)["records"] == 3
        prompt = engine.source.prompt("r", engine.source.keys(KEPT))
        assert prompt.lookup() == 96
        assert prompt.tokens_by_place(0, 96) == {"shared_dir": 96}
        answers(engine, [KEPT], at_once=False)
        assert operator("remove-tier", (), "--place", "shared_dir", *key) == {"drained": True}
        known = engine.source.store
        until(lambda: "shared_dir (removed)" in known.places, "the client hears of it")
        for words, said in (
            (("remove-tier", "--place", "shared_dir"), "place: got 'shared_dir'"),
            (("remove-tier", "--place", "memory"), "expected a tier below it"),
            (("add-tier", "--tier", "os:system"), "url: got none"),
            (("add-tier", "--tier", "ftp://x"), "url: got"),
        ):
            assert said in operator.said(*words, *key, status=2)


def test_a_store_without_a_key_takes_no_tier_from_callers(
    store: Process, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = operator_of(store, capsys).said("add-tier", "--tier", f"file://{tmp_path}/mine", status=2)
    assert "http_key_file: got none, and a tier gets the KV of all callers" in refused


def test_a_store_remembers_the_last_scopes_alone(kept: Kept) -> None:
    (scope,) = kept.store.scopes.all().values()
    scopes = Scopes()
    for number in range(300):
        scopes.add(Scope(f"m{number}", scope.chunk_tokens, scope.groups))
    assert list(scopes.all().values())[0].model == "m44"
    last = Scope("m299", scope.chunk_tokens, scope.groups)
    scopes.add(scope, former=last)
    assert last.id not in scopes.all()
