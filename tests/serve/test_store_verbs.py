"""Operators name prompts by token ids to a store process, which knows no model: the engines that use it tell it how
their keys are made."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from pdlink.cli import main
from pdlink.kv.layout import KVLayout, LayerLayout, Part, paged_layout
from pdlink.memory.buffers import Buffer
from pdlink.serve.cache_routes import (
    CacheDesk,
    ClearRequest,
    MoveRequest,
    NamedPrompt,
    PinRequest,
)
from pdlink.store.eviction import Lru
from pdlink.store.groups import RecordGroup
from pdlink.store.scope import Scope, Scopes
from pdlink.store.source import CallersBlocks, Source
from pdlink.store.store import Store

from ..store.process import process, until
from ..store.stubs import StubTier
from .test_shared_store import worker
from .tiered import CHUNK, WAIT_S, Computed, answers, prompt_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from pdlink.serve.worker import Worker
    from tests.store.process import Process

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
        assert operator("pin", KEPT, "--name", "p") == {"tokens": 96}
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

    def __init__(self, *, verify: bool = False) -> None:
        self.tier = StubTier()
        self.store = Store(1 << 20, Lru(), [self.tier], pin_quota_nbytes=1 << 20, verify=verify)
        groups = [
            RecordGroup(one, model="m", revision=f"group {index}", chunk_tokens=CHUNK)
            for index, one in enumerate(layouts())
        ]
        buffers = [Buffer(one.extent(region)) for region, one in enumerate(layouts())]
        self.source = Source(self.store, groups, buffers, CallersBlocks())
        self.store.open()
        self.desk = CacheDesk(self.store)

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
    assert kept.desk.pin(PinRequest(**named(prompt, name="p"))) == {"tokens": 4 * CHUNK}
    assert kept.store.unpin("p") == 7
    moved = MoveRequest(**named(prompt, source="memory", destination="stub", keep=False))
    assert kept.desk.move(moved) == {"tokens": 4 * CHUNK}
    assert kept.desk.clear(ClearRequest(**named(prompt)))["records"] == 0
    assert kept.store.flush(WAIT_S)
    assert not kept.tier.records


def test_a_store_remembers_the_last_scopes_alone(kept: Kept) -> None:
    (scope,) = kept.store.scopes.all().values()
    scopes = Scopes()
    for number in range(300):
        scopes.add(Scope(f"m{number}", scope.chunk_tokens, scope.groups))
    assert list(scopes.all().values())[0].model == "m44"
    last = Scope("m299", scope.chunk_tokens, scope.groups)
    scopes.add(scope, former=last)
    assert last.id not in scopes.all()
