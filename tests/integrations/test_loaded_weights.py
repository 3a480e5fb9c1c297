"""Weights that an engine changes in place: what is loaded counts, on every rank, for links and for stores."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pdlink.integrations.loaded_weights import LoadedWeights, digest_of
from pdlink.integrations.sglang_parts import pages
from pdlink.integrations.sglang_parts import weights as sglang
from pdlink.integrations.vllm_parts import weights as vllm
from pdlink.kv import hashing
from pdlink.store.slots import WHOLE

KINDS = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.int64]


def model(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    chance = torch.Generator().manual_seed(seed)
    one = torch.nn.Module()
    for name, shape in (("experts", (3, 8, 5)), ("proj", (16, 8)), ("norm", (8,)), ("scale", ())):
        value = (torch.rand(shape, generator=chance) * 200).to(dtype)
        one.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))
    return one


def digest(one: torch.nn.Module) -> str:
    return digest_of(one.named_parameters())


# -- the digest ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_every_element_counts(dtype: torch.dtype) -> None:
    """A step of training in bf16 leaves most elements as they were."""
    known = {digest(model(dtype=dtype))}
    assert digest(model(dtype=dtype)) in known, "equal weights"
    for name, parameter in model().named_parameters():
        for index in range(max(1, parameter.numel())):
            one = model(dtype=dtype)
            words = one.get_parameter(name).view(-1).view(torch.uint8)
            words[index * parameter.new_empty(0, dtype=dtype).element_size()] ^= 1
            found = digest(one)
            assert found not in known, (name, index)
            known.add(found)


def test_changes_that_add_up_to_nothing_and_rows_that_change_places_count() -> None:
    first = digest(model())
    changes: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda w: w[[1, 0, *range(2, 16)]],
        lambda w: w[:, [1, 0, *range(2, 8)]],
        lambda w: w.flip(0),
    ]
    for change in changes:
        one = model()
        proj = one.get_parameter("proj")
        proj.copy_(change(proj.clone()))
        assert digest(one) != first
    one = model()
    words = one.get_parameter("proj").view(torch.int16)
    words[3, 4] += 1
    words[3, 5] -= 1
    assert digest(one) != first


def test_how_a_tensor_lies_in_memory_does_not_count_and_large_ones_are_summed_in_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, other = model(), model()
    turned = one.get_parameter("proj").t().contiguous().t()
    other.proj = torch.nn.Parameter(turned, requires_grad=False)
    assert digest(one) == digest(other)
    empty = torch.nn.Module()
    empty.proj = torch.nn.Parameter(torch.empty(4, 4, device="meta"))
    assert digest(empty) == digest(empty), "in the middle of a reload there is no memory"
    monkeypatch.setattr("pdlink.integrations.loaded_weights._MOST_ELEMENTS", 24)
    in_parts = digest(one)
    assert in_parts == digest(model()) != digest(model(1))


# -- vLLM ------------------------------------------------------------------------------------------------------------


class Worker:
    """As far as the connector knows vLLM's, with weights of its own and a place of its own for what is loaded."""

    def __init__(self, *, eplb: bool = False) -> None:
        self.model, self.loaded = model(), LoadedWeights()
        self.model_runner = SimpleNamespace(get_model=lambda: self.model)
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(enable_eplb=eplb))
        self.is_active = False

    def load(self, seed: int) -> None:
        for mine, new in zip(self.model.parameters(), model(seed).parameters(), strict=True):
            mine.copy_(new)

    def start_weight_update(self) -> None:
        self.is_active = True

    def update_weights(self, seed: int) -> None:
        self.load(seed)

    def finish_weight_update(self) -> None:
        self.is_active = False

    def reload_weights(self, seed: int) -> None:
        self.load(seed)

    def breaks_off(self) -> None:
        self.load(9)
        raise RuntimeError("a trainer has left")


class Executor:
    def __init__(self, workers: list[Worker], monkeypatch: pytest.MonkeyPatch) -> None:
        self.workers, self._patch = workers, monkeypatch
        self.sleeping_tags: set[str] = set()

    def collective_rpc(self, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None) -> list[Any]:
        answers = []
        for worker in self.workers:
            with self._patch.context() as patch:
                patch.setattr(vllm, "HERE", worker.loaded)
                call = getattr(worker, method) if isinstance(method, str) else lambda *a, w=worker: method(w, *a)
                answers.append(call(*args, **(kwargs or {})))
        return answers


def engine_class() -> Any:
    class EngineCore:
        def __init__(self, executor: Executor) -> None:
            self.model_executor = executor
            self.resets = 0

        def collective_rpc(self, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None) -> list[Any]:
            return self.model_executor.collective_rpc(method, timeout, args, kwargs)

        def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
            self.resets += 1
            return True

        def sleep(self, level: int = 1) -> None:
            self.model_executor.sleeping_tags = {"weights", "kv_cache"}
            if level == 2:
                for worker in self.model_executor.workers:
                    worker.load(99)  # whatever is in that memory

    return EngineCore


class Vllm:
    """A server of one or more ranks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_ranks: int = 1, **more: Any) -> None:
        self.workers = [Worker(**more) for _ in range(num_ranks)]
        kind = engine_class()
        self.eras: list[str] = []
        vllm.watch(kind, self.eras.append)
        self.engine = kind(Executor(self.workers, monkeypatch))

    @property
    def names(self) -> list[str]:
        return [worker.loaded.named("files") for worker in self.workers]

    def call(self, method: Any, *args: Any) -> Any:
        return self.engine.collective_rpc(method, args=args)


Change = Callable[[Vllm, int], object]


def by_parts(server: Vllm, seed: int) -> None:
    server.call("start_weight_update")
    server.call("update_weights", seed)
    server.call("finish_weight_update")


def by_its_own(server: Vllm, seed: int) -> None:
    """A trainer in the same process that reaches the model past the engine."""
    server.engine.reset_prefix_cache()
    for worker in server.workers:
        worker.load(seed)
    server.engine.reset_prefix_cache()


CHANGES: dict[str, Change] = {
    "update_weights": by_parts,
    "reload_weights": lambda server, seed: server.call("reload_weights", seed),
    "keywords": lambda server, seed: server.engine.collective_rpc(method="reload_weights", kwargs={"seed": seed}),
    "a function": lambda server, seed: server.call(lambda worker: worker.load(seed)),
    "past the engine": by_its_own,
}


@pytest.mark.parametrize("how", CHANGES)
def test_servers_fit_where_both_have_files_or_equal_changes_and_no_others(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = Vllm(monkeypatch, 2), Vllm(monkeypatch, 2)
    assert prefill.names == decode.names == ["files", "files"]
    CHANGES[how](prefill, 1)
    assert all(mine != its for mine, its in zip(prefill.names, decode.names, strict=True)), "refused"
    CHANGES[how](decode, 2)
    assert all(mine != its for mine, its in zip(prefill.names, decode.names, strict=True)), "refused"
    CHANGES["reload_weights"](decode, 1)
    assert prefill.names == decode.names, "equal again, whichever way they came"
    assert len(prefill.eras) >= 1
    assert len(set(decode.eras)) >= 2, "the store's keys change with every change"
    assert prefill.eras[-1] == decode.eras[-1]


def test_what_changes_nothing_names_nothing_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Vllm(monkeypatch)
    server.call(lambda worker: "a question")
    server.call("reload_weights", 0)
    server.engine.reset_prefix_cache()
    assert (server.names, server.eras) == (["files"], [])


def test_in_the_middle_of_a_change_and_after_a_broken_one_a_server_fits_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, other = Vllm(monkeypatch), Vllm(monkeypatch)
    seen = set[str]()
    for server in (one, other):
        for method, *args in (("start_weight_update",), ("update_weights", 1), ("update_weights", 1)):
            server.call(method, *args)
            assert server.names[0] not in seen | {"files"}
            seen.update(server.names)
    for server in (one, other):
        server.call("finish_weight_update")
    assert one.names == other.names
    with pytest.raises(RuntimeError, match="a trainer has left"):
        one.call("breaks_off")
    assert one.names != other.names


def test_a_rank_whose_weights_cannot_be_told_fits_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = Vllm(monkeypatch), Vllm(monkeypatch)
    for server in (one, other):
        server.workers[0].model_runner = SimpleNamespace()
        assert server.call(lambda worker: 7) == [7], "vLLM's call ends as it would"
        assert server.eras == [] or server.names != ["files"]
    assert one.names != other.names


def test_weights_that_slept_and_were_loaded_again_are_those_of_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Level 2 gives their memory up; nobody reads it while it is not there."""
    server = Vllm(monkeypatch)
    server.engine.sleep(2)
    before = server.workers[0].model
    server.workers[0].model = None  # type: ignore[assignment]  # reading it would raise
    server.call(lambda worker: None)
    server.workers[0].model = before
    server.engine.model_executor.sleeping_tags.clear()
    server.call("reload_weights", 0)
    assert (server.names, server.eras) == (["files"], [])
    server.call("reload_weights", 1)
    assert server.names != ["files"]


def test_experts_that_vllm_moves_between_ranks_are_no_change(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Vllm(monkeypatch, eplb=True)
    inner = torch.nn.Module()
    inner.experts = model()
    inner.proj = torch.nn.Parameter(torch.ones(4))
    server.workers[0].model = torch.nn.ModuleDict({"mlp": inner})
    server.call(lambda worker: None)
    server.call(lambda worker: inner.get_parameter("experts.proj").zero_())
    assert server.names == ["files"]
    server.call(lambda worker: inner.get_parameter("proj").data.zero_())
    assert server.names != ["files"]


def test_a_release_without_one_of_the_calls_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    kind, eras = engine_class(), list[str]()
    del kind.sleep
    vllm.watch(kind, eras.append)
    kind(Executor([Worker()], monkeypatch)).collective_rpc("reload_weights", args=(1,))
    assert len(eras) == 1


def test_a_second_connector_of_a_process_hears_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    kind, first, second = engine_class(), list[str](), list[str]()
    vllm.watch(kind, first.append)
    vllm.watch(kind, second.append)
    kind(Executor([Worker()], monkeypatch)).collective_rpc("reload_weights", args=(1,))
    assert (len(first), len(second)) == (0, 1)


def test_a_connector_and_all_tiers_of_one_process_hear(monkeypatch: pytest.MonkeyPatch) -> None:
    kind, connector, near, far = engine_class(), list[str](), list[str](), list[str]()
    asleep = vllm.watch(kind, connector.append)
    assert vllm.watch(kind, near.append, "tier 1") is asleep
    assert vllm.watch(kind, far.append, "tier 2") is asleep
    engine = kind(Executor([Worker()], monkeypatch))
    engine.collective_rpc("reload_weights", args=(1,))
    assert len(connector) == 1
    assert connector == near == far
    vllm.unwatch(kind, "tier 1")
    engine.collective_rpc("reload_weights", args=(2,))
    assert (len(connector), len(near), len(far)) == (2, 1, 2)


def test_a_tier_after_all_others_have_ended_hears_of_its_own_engine_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    kind, first, second = engine_class(), list[str](), list[str]()
    vllm.watch(kind, first.append, "tier 1")
    kind(Executor([Worker()], monkeypatch)).collective_rpc("reload_weights", args=(1,))
    vllm.unwatch(kind, "tier 1")
    vllm.watch(kind, second.append, "tier 2")
    kind(Executor([Worker()], monkeypatch)).collective_rpc("finish_weight_update")
    assert (len(first), len(second)) == (1, 0)


# -- SGLang ----------------------------------------------------------------------------------------------------------


class Sglang:
    """A rank's manager of weights with pdlink's hooks around it, as SGLang puts them there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model, self.loaded, self._patch = model(), LoadedWeights(), monkeypatch
        self.tp_worker = SimpleNamespace(model_runner=SimpleNamespace(model=self.model))
        self.hooks: dict[str, Any] = {}
        sglang.install(lambda name, around: self.hooks.update({name.rpartition(".")[2]: around}))

    def do(self, name: str, seed: int | None = None) -> None:
        def original(manager: Sglang) -> None:
            for mine, new in zip(manager.model.parameters(), model(seed or 0).parameters(), strict=True):
                mine.copy_(new) if seed is not None else None

        with self._patch.context() as patch:
            patch.setattr(sglang, "HERE", self.loaded)
            self.hooks[name](original, self)

    @property
    def name(self) -> str:
        return self.loaded.named("files")


def by_session(kind: str) -> Callable[[Sglang, int], None]:
    def change(rank: Sglang, seed: int) -> None:
        rank.do("begin_weight_update")
        rank.do(f"update_weights_from_{kind}", seed)
        rank.do("end_weight_update")

    return change


@pytest.mark.parametrize("how", ["disk", "ipc", "tensor", "distributed"])
def test_sglang_ranks_fit_where_both_have_files_or_equal_changes_and_no_others(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    change = by_session(how)
    if how in ("disk", "ipc"):
        change = lambda rank, seed: rank.do(f"update_weights_from_{how}", seed)  # noqa: E731
    prefill, decode = Sglang(monkeypatch), Sglang(monkeypatch)
    change(prefill, 1)
    assert (prefill.name == "files", decode.name) == (False, "files")
    change(decode, 2)
    assert prefill.name != decode.name
    change(decode, 1)
    assert prefill.name == decode.name
    change(decode, 0)
    assert decode.name == "files"


def test_in_the_middle_of_a_change_an_sglang_rank_fits_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = Sglang(monkeypatch), Sglang(monkeypatch)
    for rank in (one, other):
        rank.do("begin_weight_update")
    assert len({one.name, other.name, "files"}) == 3


def test_sglang_weights_that_gave_their_memory_back_are_those_of_the_files_once_they_are_loaded_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank = Sglang(monkeypatch)
    rank.do("release_memory_occupation", 99)
    rank.do("update_weights_from_disk", 0)
    assert rank.name == "files"


def test_pages_have_other_keys_after_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = LoadedWeights()
    monkeypatch.setattr(pages, "HERE", loaded)
    asked: list[list[bytes]] = []

    def lookup(keys: Iterable[bytes], timeout_s: float) -> Any:
        asked.append(list(keys))
        return SimpleNamespace(keys=[])

    seed = bytes(range(32))
    store: Any = SimpleNamespace(lookup=lookup)
    shape: Any = None
    records = pages.PageRecords(store, shape, WHOLE, seed, lambda *_, **__: None, 1.0)
    records.num_known(["aa"])
    loaded.changing()
    records.num_known(["aa"])
    assert asked[0] != asked[1]
    assert all(key.endswith(hashing.ending(seed)) for keys in asked for key in keys), "a clear reaches both"
