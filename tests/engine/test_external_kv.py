"""The prompt's KV comes from elsewhere: it is waited for, used as if computed here, and never trusted too early."""

from __future__ import annotations

import random
import re
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pdlink.engine import engine as engine_module
from pdlink.engine.request import GenerationRequest, SamplingParams
from pdlink.errors import EngineFailure, InvalidRequest, ProtocolError, TransferFailed
from tests.engine.small import BLOCK, NUM_LAYERS, Rig, oracle, prompt_of, rig

if TYPE_CHECKING:
    from collections.abc import Iterable

LAYERS = range(NUM_LAYERS)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a pass takes longer than the engine waits for its layers."""
    monkeypatch.setattr(engine_module, "_EARLY_WAIT_S", 20.0)


def _fill_from(
    source: Rig, source_id: str, target: Rig, target_id: str, start: int, end: int, layers: Iterable[int] = LAYERS
) -> None:
    """What a link does: copy the KV of tokens [start, end)."""
    positions = torch.arange(start, end)
    src, dst = (
        torch.tensor(worker.heard.tables[name])[positions // BLOCK]
        for worker, name in ((source, source_id), (target, target_id))
    )
    for layer in layers:
        for ours, theirs in zip(target.cache.views(layer), source.cache.views(layer), strict=True):
            ours[dst, positions % BLOCK] = theirs[src, positions % BLOCK]


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 43])
def test_decode_from_given_kv_continues_as_one_process_would(length: int) -> None:
    prompt = prompt_of(length)
    prefill = rig()
    first = prefill.generate(prompt, 1)[0]
    decode = rig()
    decode.submit("r", prompt, 10, external=len(prompt))
    decode.run()
    assert (decode.engine.num_awaiting_kv, decode.engine.num_running) == (1, 0)
    assert len(decode.heard.tables["r"]) == -(-(length + 10) // BLOCK)
    _fill_from(prefill, "r", decode, "r", 0, length)
    decode.engine.kv_arrived("r", length, first)
    decode.run()
    assert decode.heard.tokens("r") == oracle(prompt, 10)
    assert decode.heard.layers == [], "nothing of the prompt was computed here"
    assert decode.heard.outputs["r"][0].text == prefill.heard.text("r")


@pytest.mark.parametrize("came", [0, 5, BLOCK, 2 * BLOCK + 3])
def test_kv_that_ends_early_is_computed_from_there_in_the_same_blocks(came: int) -> None:
    prompt = prompt_of(3 * BLOCK + 2)
    prefill, worker = rig(), rig(share_prefixes=True)
    prefill.generate(prompt, 1)
    worker.submit("r", prompt, 6, external=3 * BLOCK)
    worker.run()
    table = worker.heard.tables["r"]
    _fill_from(prefill, "r", worker, "r", 0, came)
    worker.engine.kv_ends("r", came)
    worker.run()
    assert worker.heard.tokens("r") == oracle(prompt, 6)
    assert worker.heard.tables["r"] == table
    assert worker.heard.order == ["r"]
    assert worker.heard.written("r")[0] == (0, came, len(prompt))
    worker.engine.kv_ends("r", came)
    worker.engine.kv_ends("unknown", came)
    worker.run()
    assert worker.generate(prompt, 6, "again") == oracle(prompt, 6)


def test_given_kv_is_found_again_by_name_up_to_a_full_hit() -> None:
    prompt = prompt_of(3 * BLOCK)
    prefill, decode = rig(), rig(share_prefixes=True)
    first = prefill.generate(prompt, 1)[0]
    for name, cached, max_tokens in (("a", 0, 1), ("b", 3 * BLOCK, 5)):
        decode.submit(name, prompt, max_tokens, external=len(prompt))
        decode.run()
        assert decode.heard.cached[name] == cached
        if name == "a":
            _fill_from(prefill, "r", decode, "a", 0, len(prompt))
        decode.engine.kv_arrived(name, len(prompt), first)
        decode.run()
        assert decode.heard.tokens(name) == oracle(prompt, max_tokens)
    assert decode.generate(prompt, 5, "ordinary") == oracle(prompt, 5)
    assert decode.heard.cached["ordinary"] == 2 * BLOCK


def test_blocks_that_wait_for_kv_are_not_found_by_name() -> None:
    """vllm#53314: tokens were counted as computed that had never been stored."""
    decode = rig(share_prefixes=True)
    prompt = prompt_of(3 * BLOCK)
    decode.submit("a", prompt, 5, external=len(prompt))
    decode.run()
    assert decode.generate(prompt, 5, "b") == oracle(prompt, 5)
    assert decode.heard.cached["b"] == 0


@pytest.mark.parametrize("max_tokens", [1, 3])
def test_given_first_token_can_end_the_answer(max_tokens: int) -> None:
    worker = rig()
    worker.submit(
        "r", prompt_of(5), max_tokens, external=5, stop_token_ids=frozenset(() if max_tokens == 1 else (65,))
    )
    worker.run()
    worker.engine.kv_arrived("r", 5, 65)
    worker.run()
    assert [output.finish_reason for output in worker.heard.outputs["r"]] == ["length" if max_tokens == 1 else "stop"]
    assert worker.pool.num_held == 0


def test_failed_kv_is_recomputed_first_in_line_in_fresh_blocks() -> None:
    worker = rig(num_blocks=8, max_running=2)
    prompt = prompt_of(2 * BLOCK)
    worker.submit("r", prompt, 6, external=len(prompt))
    worker.submit("runs", prompt_of(5), 30)
    worker.submit("queued", prompt_of(5), 3)
    worker.engine.step()
    table = worker.heard.tables["r"]
    worker.pool.share(table)  # a peer may still write there: the link holds them until it cannot
    worker.engine.kv_failed("r", recompute=True, error=TransferFailed("reset"))
    worker.run()
    assert worker.heard.order == ["r", "runs", "r", "queued"], "it was in line before the one that is queued"
    assert not set(worker.heard.tables["r"]) & set(table)
    assert worker.heard.tokens("r") == oracle(prompt, 6)
    worker.pool.give_back(table)
    assert worker.pool.num_held == 0


def test_recomputation_waits_for_blocks_that_a_peer_may_still_write() -> None:
    worker = rig(num_blocks=4)
    worker.submit("r", prompt_of(2 * BLOCK), 6, external=2 * BLOCK)
    worker.engine.step()
    table = worker.heard.tables["r"]
    worker.pool.share(table)
    worker.engine.kv_failed("r", recompute=True, error=TransferFailed("reset"))
    worker.run()
    assert worker.heard.order == ["r"]
    worker.pool.give_back(table)
    worker.engine.wake()
    worker.run()
    assert worker.heard.tokens("r") == oracle(prompt_of(2 * BLOCK), 6)


def test_failed_kv_ends_the_request_with_the_reason_where_that_is_configured() -> None:
    worker = rig()
    error = TransferFailed("the peer is gone")
    worker.submit("r", prompt_of(9), 6, external=9)
    worker.run()
    worker.engine.kv_failed("r", recompute=False, error=error)
    worker.run()
    assert worker.heard.errors == {"r": error}
    assert worker.pool.num_held == 0


def test_late_early_and_unknown_news_of_kv_is_ignored() -> None:
    """A transfer that fails after its KV was taken, or succeeds after it was given up, must change nothing."""
    worker = rig(max_running=1)
    prompt = prompt_of(9)
    error = TransferFailed("late")
    worker.submit("r", prompt, 6, external=len(prompt))
    worker.submit("early", prompt, 2, external=len(prompt))
    worker.engine.kv_arrived("unknown", 9, 5)
    worker.engine.kv_failed("unknown", recompute=True, error=error)
    worker.engine.kv_arrived("early", 9, 5)
    worker.engine.step()
    worker.engine.kv_failed("r", recompute=True, error=error)
    worker.engine.kv_arrived("r", 9, 5)
    worker.engine.kv_failed("r", recompute=False, error=error)
    worker.engine.step()
    worker.engine.kv_failed("r", recompute=True, error=error)
    worker.run()
    assert worker.heard.tokens("r") == oracle(prompt, 6)
    assert worker.heard.errors == {"r": None}
    assert worker.engine.num_awaiting_kv == 1, "early has its blocks now and still waits"


def test_failure_before_admission_is_heard() -> None:
    worker = rig(max_running=1)
    worker.submit("runs", prompt_of(4), 6)
    worker.submit("recomputed", prompt_of(9), 4, external=9)
    worker.submit("failed", prompt_of(9), 4, external=9)
    worker.engine.step()
    worker.engine.kv_failed("recomputed", recompute=True, error=TransferFailed("x"))
    worker.engine.kv_failed("failed", recompute=False, error=TransferFailed("x"))
    worker.run()
    assert worker.heard.tokens("recomputed") == oracle(prompt_of(9), 4)
    assert isinstance(worker.heard.errors["failed"], TransferFailed)


@pytest.mark.parametrize(
    ("length", "external", "upto", "first_token", "message"),
    [
        (5, 5, 5, 10**6, "first token: got 1000000"),
        (5, 5, 5, -1, "first token: got -1"),
        (5, 5, 5, None, "first token: got None"),
        (5, 5, 6, 65, "upto: got 6, .* 5 tokens"),
        (20, 9, 10, None, "upto: got 10, .* 9 tokens"),
    ],
)
def test_a_report_that_cannot_be_true_ends_the_request(
    length: int, external: int, upto: int, first_token: int | None, message: str
) -> None:
    worker = rig()
    worker.submit("r", prompt_of(length), 6, external=external)
    worker.run()
    worker.engine.kv_arrived("r", upto, first_token)
    worker.run()
    assert isinstance(worker.heard.errors["r"], ProtocolError)
    assert re.search(message, str(worker.heard.errors["r"]))
    assert worker.pool.num_held == 0


@pytest.mark.parametrize("external", [-1, 22])
def test_no_more_tokens_than_the_prompt_has_come_from_elsewhere(external: int) -> None:
    request = GenerationRequest("r", prompt_of(21), SamplingParams(max_tokens=2), external_tokens=external)
    with pytest.raises(InvalidRequest, match=f"external_tokens: got {external}; the prompt has 21 tokens"):
        rig().engine.submit(request)


@pytest.mark.parametrize("external", [1, BLOCK, 2 * BLOCK + 3, 42])
@pytest.mark.parametrize("max_batched_tokens", [5, 512])
def test_a_given_prefix_is_used_and_the_rest_computed(external: int, max_batched_tokens: int) -> None:
    prompt = prompt_of(43)
    source, worker = rig(), rig(share_prefixes=True, max_batched_tokens=max_batched_tokens)
    source.generate(prompt, 1)
    worker.submit("r", prompt, 10, external=external)
    worker.run()
    assert (worker.engine.num_awaiting_kv, worker.heard.layers) == (1, [])
    for upto in sorted({external // 2, external - 1, external}):
        assert worker.heard.layers == [], "it waits for the whole range"
        _fill_from(source, "r", worker, "r", 0, upto)
        worker.engine.kv_arrived("r", upto)
        worker.run()
    assert worker.heard.tokens("r") == oracle(prompt, 10)
    assert min(start for _, start, _ in worker.heard.written("r")) == external
    assert worker.generate(prompt, 10, "again") == oracle(prompt, 10)
    assert worker.heard.cached["again"] == 5 * BLOCK, "what came and what was computed is found by name"


def test_a_given_prefix_that_is_cached_is_not_waited_for() -> None:
    prompt = prompt_of(3 * BLOCK)
    worker = rig(share_prefixes=True)
    worker.generate(prompt, 3, "first")
    assert worker.generate(prompt, 3, "second", external=2 * BLOCK) == oracle(prompt, 3)
    assert worker.heard.cached["second"] == 2 * BLOCK
    worker.engine.kv_failed("second", recompute=False, error=TransferFailed("late"))
    worker.run()
    assert worker.heard.errors["second"] is None


@pytest.mark.parametrize("share_prefixes", [True, False])
@pytest.mark.parametrize(("arrived", "kept"), [(0, 0), (BLOCK - 1, 0), (2 * BLOCK + 5, 2), (3 * BLOCK, 3)])
def test_recomputation_begins_where_kv_ends(arrived: int, kept: int, share_prefixes: bool) -> None:
    """Full blocks that have arrived are kept. The others may still be written to, so they are exchanged."""
    prompt = prompt_of(5 * BLOCK)
    source, worker = rig(), rig(share_prefixes=share_prefixes)
    source.generate(prompt, 1)
    worker.submit("r", prompt, 6, external=len(prompt))
    worker.engine.step()
    before = worker.heard.tables["r"]
    worker.pool.share(before)  # as a source does while it may write
    _fill_from(source, "r", worker, "r", 0, arrived)
    worker.engine.kv_arrived("r", arrived)
    worker.engine.kv_failed("r", recompute=True, error=TransferFailed("reset"))
    worker.run()
    after = worker.heard.tables["r"]
    assert (worker.heard.cached["r"], after[:kept]) == (kept * BLOCK, before[:kept])
    assert not set(after[kept:]) & set(before)
    assert min(start for _, start, _ in worker.heard.written("r")) == kept * BLOCK
    assert worker.heard.tokens("r") == oracle(prompt, 6)
    worker.pool.give_back(before)
    assert worker.pool.num_held == 0


def test_the_last_token_is_computed_again_where_only_the_first_token_of_the_answer_was_lost() -> None:
    """All KV was found by name, so nothing was to come but the first token. Its block is shared with others."""
    prompt = prompt_of(3 * BLOCK)
    worker = rig(share_prefixes=True)
    worker.generate(prompt, 2, "before")
    worker.submit("r", prompt, 6, external=len(prompt))
    worker.run()
    before = worker.heard.tables["r"]
    assert (worker.heard.cached["r"], worker.engine.num_awaiting_kv) == (3 * BLOCK, 1)
    worker.engine.kv_failed("r", recompute=True, error=TransferFailed("reset"))
    worker.run()
    assert worker.heard.cached["r"] == 2 * BLOCK
    assert worker.heard.tables["r"][:2] == before[:2]
    assert worker.heard.tables["r"][2] != before[2], "somebody else may read that block"
    assert worker.heard.tokens("r") == oracle(prompt, 6)


# --- Layers that are used as they arrive


def _arriving(source: Rig, worker: Rig, prompt: tuple[int, ...], max_tokens: int = 8, name: str = "r") -> int:
    """A request whose KV is on its way: nothing has landed, and what is in its blocks would spoil the answer.

    Returns the first token of the answer.
    """
    first = source.generate(prompt, 1, name)[0]
    worker.submit(name, prompt, max_tokens, external=len(prompt))
    worker.run()
    for layer in LAYERS:
        for part in worker.cache.views(layer):
            part[list(worker.heard.tables[name])] = float("nan")
    return first


@pytest.mark.parametrize("length", [1, BLOCK, 43])
def test_a_pass_begins_before_the_last_layer_has_landed_and_gives_the_same_tokens(length: int) -> None:
    prompt = prompt_of(length)
    source, worker = rig(), rig()
    first = _arriving(source, worker, prompt)
    asked: list[int] = []

    def layer_needed(name: str, layer: int, timeout_s: float) -> bool:
        assert (name, worker.heard.tokens("r")) == ("r", [])
        assert 0 < timeout_s <= engine_module._EARLY_WAIT_S
        asked.append(layer)
        _fill_from(source, "r", worker, "r", 0, length, [layer])  # it lands while the pass waits for it
        return True

    worker.heard.on_layer_needed = layer_needed
    worker.engine.kv_coming("r", length, first)
    worker.run()
    assert asked == list(LAYERS), "each layer once, in order"
    assert worker.heard.tokens("r") == [], "nothing is said before all KV is confirmed"
    worker.engine.kv_arrived("r", length, first)
    worker.engine.step()
    assert worker.heard.tokens("r")[:2] == oracle(prompt, 2), "the second token needs no pass of its own"
    worker.run()
    assert worker.heard.tokens("r") == oracle(prompt, 8)
    assert asked == list(LAYERS)


@pytest.mark.parametrize("missing", LAYERS)
def test_a_pass_is_given_up_when_a_layer_does_not_come_in_time(missing: int) -> None:
    prompt = prompt_of(21)
    source, worker = rig(), rig()
    first = _arriving(source, worker, prompt)
    asked: list[int] = []

    def layer_needed(_name: str, layer: int, _timeout_s: float) -> bool:
        asked.append(layer)
        return layer < missing

    worker.heard.on_layer_needed = layer_needed
    worker.engine.kv_coming("r", 21, first)
    worker.run()
    assert asked == list(range(missing + 1)), "it is not tried again"
    assert (worker.engine.num_awaiting_kv, worker.heard.errors) == (1, {})
    _fill_from(source, "r", worker, "r", 0, 21)
    worker.engine.kv_arrived("r", 21, first)
    worker.run()
    assert worker.heard.tokens("r") == oracle(prompt, 8)


def test_all_waits_of_a_pass_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(engine_module, "time", SimpleNamespace(monotonic=lambda: now_s))
    worker = rig()
    first = _arriving(rig(), worker, prompt_of(9))
    waits: list[float] = []

    def layer_needed(_name: str, _layer: int, timeout_s: float) -> bool:
        nonlocal now_s
        waits.append(timeout_s)
        now_s += 0.75 * engine_module._EARLY_WAIT_S
        return True

    worker.heard.on_layer_needed = layer_needed
    worker.engine.kv_coming("r", 9, first)
    worker.run()
    assert waits == pytest.approx([engine_module._EARLY_WAIT_S, engine_module._EARLY_WAIT_S / 4, 0], abs=1e-9)


@pytest.mark.parametrize("recompute", [True, False])
def test_an_early_pass_does_not_count_when_kv_fails_after_it(recompute: bool) -> None:
    """The layers may be wrong: the comparison of what was sent with what was offered comes after them."""
    prompt = prompt_of(21)
    worker = rig()
    first = _arriving(rig(), worker, prompt)
    worker.heard.on_layer_needed = lambda *_: True  # and nothing has landed
    worker.engine.kv_coming("r", 21, first)
    worker.run()
    worker.engine.kv_failed("r", recompute=recompute, error=TransferFailed("incomplete"))
    worker.run()
    assert worker.heard.tokens("r") == (oracle(prompt, 8) if recompute else [])
    assert isinstance(worker.heard.errors["r"], TransferFailed) != recompute
    assert worker.pool.num_held == 0


def test_an_early_pass_does_not_count_for_another_first_token() -> None:
    prompt = prompt_of(21)
    source = rig()
    answers = []
    for early in (True, False):
        worker = rig()
        first = _arriving(source, worker, prompt) + early
        source.heard.errors.clear()
        source.heard.outputs.clear()
        _fill_from(source, "r", worker, "r", 0, 21)
        if early:
            worker.heard.on_layer_needed = lambda *_: True
            worker.engine.kv_coming("r", 21, first)
            worker.run()
        worker.engine.kv_arrived("r", 21, first - early)
        worker.run()
        answers.append(worker.heard.tokens("r"))
    assert answers == [oracle(prompt, 8)] * 2


def test_nobody_waits_for_the_layers_of_somebody_else() -> None:
    """An early pass begins only when there is nothing else to compute."""
    prompt = prompt_of(21)
    source, worker = rig(), rig()
    first = _arriving(source, worker, prompt)
    worker.submit("runs", prompt_of(5), 6)
    worker.engine.kv_coming("r", 21, first)
    for _ in range(5):
        worker.engine.step()  # would ask for a layer, which fails the test
    assert len(worker.heard.tokens("runs")) == 5
    _fill_from(source, "r", worker, "r", 0, 21)
    asked: list[int] = []

    def layer_needed(_name: str, layer: int, _timeout_s: float) -> bool:
        asked.append(layer)
        return True

    worker.heard.on_layer_needed = layer_needed
    worker.run()
    assert (len(worker.heard.tokens("runs")), asked) == (6, list(LAYERS))


@pytest.mark.parametrize(("max_tokens", "options"), [(1, {}), (5, {"stop_token_ids": frozenset([65])})])
def test_no_pass_begins_early_where_the_first_token_ends_the_answer(max_tokens: int, options: dict[str, Any]) -> None:
    worker = rig()
    worker.submit("r", prompt_of(9), max_tokens, external=9, **options)
    worker.run()
    worker.engine.kv_coming("r", 9, 65)
    worker.run()  # would ask for a layer, which fails the test
    worker.engine.kv_arrived("r", 9, 65)
    worker.run()
    assert worker.heard.tokens("r") == [65]


@pytest.mark.parametrize(("external", "first_token"), [(9, 10**6), (9, -1), (5, 65)])
def test_news_of_layers_that_cannot_be_used_is_ignored(external: int, first_token: int) -> None:
    worker = rig()
    worker.submit("r", prompt_of(9), 4, external=external)
    worker.engine.kv_coming("unknown", 9, 65)
    worker.engine.kv_coming("r", 9, first_token)
    worker.run()
    worker.engine.kv_coming("r", 9, first_token)
    worker.run()  # would ask for a layer, which fails the test
    assert (worker.engine.num_awaiting_kv, worker.heard.errors) == (1, {})


def test_a_failing_early_pass_ends_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = rig()
    first = _arriving(rig(), worker, prompt_of(9))

    def out_of_memory(*_: object) -> bool:
        raise RuntimeError("out of memory")

    worker.heard.on_layer_needed = out_of_memory
    worker.engine.kv_coming("r", 9, first)
    worker.run()
    assert isinstance(worker.heard.errors["r"], EngineFailure)
    assert worker.pool.num_held == 0
    assert worker.generate(prompt_of(9), 4, "next") == oracle(prompt_of(9), 4)


# --- A prefix that is loaded, layer by layer, while the rest is computed


def _loading(source: Rig, worker: Rig, prompt: tuple[int, ...], external: int) -> set[int]:
    """A request whose prefix is on its way; the layers that have landed, which `layer_needed` lets land in order."""
    source.generate(prompt, 1)
    worker.submit("r", prompt, 8, external=external)
    worker.run()
    for layer in LAYERS:
        for part in worker.cache.views(layer):
            part[list(worker.heard.tables["r"])] = float("nan")
    landed: set[int] = set()

    def layer_needed(name: str, layer: int, timeout_s: float) -> bool:
        if timeout_s > 0 and layer not in landed:
            _fill_from(source, "r", worker, name, 0, external, [layer])
            landed.add(layer)
        return layer in landed

    worker.heard.on_layer_needed = layer_needed
    return landed


@pytest.mark.parametrize("external", [1, BLOCK, 2 * BLOCK + 3, 42])
@pytest.mark.parametrize("max_batched_tokens", [5, 512])
def test_the_rest_is_computed_while_the_prefix_is_loaded(external: int, max_batched_tokens: int) -> None:
    prompt = prompt_of(43)
    source, worker = rig(), rig(share_prefixes=True, max_batched_tokens=max_batched_tokens)
    landed = _loading(source, worker, prompt, external)
    worker.engine.kv_coming("r", external)
    worker.engine.step()
    assert landed == set(LAYERS)
    end = min(43, external + max_batched_tokens)
    assert worker.heard.written("r") == [(layer, external, end) for layer in LAYERS]
    assert len(worker.heard.tokens("r")) == (end == 43)
    worker.engine.kv_ends("r", external)
    worker.run()
    assert worker.heard.tokens("r") == oracle(prompt, 8)
    assert worker.heard.outputs["r"][0].num_cached_tokens == external
    assert worker.generate(prompt, 8, "again") == oracle(prompt, 8)
    assert worker.heard.cached["again"] == 5 * BLOCK, "what came and what was computed is found by name"


@pytest.mark.parametrize("missing", LAYERS)
@pytest.mark.parametrize("came", [0, 5, 30])
def test_nothing_is_told_of_a_pass_over_a_prefix_that_does_not_come(missing: int, came: int) -> None:
    prompt = prompt_of(43)
    source, worker = rig(), rig(share_prefixes=True)
    landed = _loading(source, worker, prompt, 30)
    right = worker.heard.on_layer_needed
    assert right is not None
    worker.heard.on_layer_needed = lambda name, layer, timeout_s: layer < missing and right(name, layer, timeout_s)
    worker.engine.kv_coming("r", 30)
    worker.run()
    assert landed == set(range(missing))
    assert (worker.heard.layers, worker.engine.num_awaiting_kv, worker.heard.errors) == ([], 1, {})
    _fill_from(source, "r", worker, "r", 0, came)
    worker.engine.kv_ends("r", came)
    worker.run()
    assert worker.heard.tokens("r") == oracle(prompt, 8)
    assert worker.heard.written("r") == [(layer, came, 43) for layer in LAYERS]


def test_what_a_pass_writes_is_told_by_layer_once_the_prefix_counts() -> None:
    prompt = prompt_of(43)
    source, worker = rig(), rig()
    landed = _loading(source, worker, prompt, 30)
    right = worker.heard.on_layer_needed
    assert right is not None
    told: list[int] = []

    def layer_needed(name: str, layer: int, timeout_s: float) -> bool:
        told.append(len(worker.heard.layers))
        if layer == 1:
            for later in LAYERS:
                right(name, later, 1.0)
        return right(name, layer, timeout_s)

    worker.heard.on_layer_needed = layer_needed
    worker.engine.kv_coming("r", 30)
    worker.engine.step()
    assert landed == set(LAYERS)
    assert told == [0, 0, 0, 0, 2, 2], "nothing before the last layer is here, then layer by layer"


def test_a_prefix_may_turn_out_shorter_before_its_pass_begins() -> None:
    prompt = prompt_of(43)
    source, worker = rig(), rig()
    _loading(source, worker, prompt, 30)
    worker.engine.kv_coming("r", 9)
    worker.run()
    assert worker.heard.tokens("r") == oracle(prompt, 8)
    assert worker.heard.written("r") == [(layer, 9, 43) for layer in LAYERS]


def test_nobody_waits_for_a_prefix_of_somebody_else() -> None:
    prompt = prompt_of(43)
    source, worker = rig(), rig()
    landed = _loading(source, worker, prompt, 30)
    worker.submit("runs", prompt_of(5), 6)
    worker.engine.kv_coming("r", 30)
    for _ in range(5):
        worker.engine.step()
    assert (len(worker.heard.tokens("runs")), landed) == (5, set())
    worker.run()
    assert worker.heard.tokens("r") == oracle(prompt, 8)


@pytest.mark.parametrize("seed", range(10, 14))
def test_any_order_of_arrivals_failures_and_passes_gives_the_right_tokens(seed: int) -> None:
    """Requests with a given prefix of random length, which lands token by token and layer by layer, or fails."""
    rng = random.Random(seed)
    worker = rig(
        num_blocks=rng.choice([16, 40]),
        share_prefixes=rng.random() < 0.5,
        max_batched_tokens=rng.choice([3, 64]),
        max_running=rng.choice([2, 6]),
    )
    sizes: dict[str, tuple[tuple[int, ...], int]] = {}
    external: dict[str, int] = {}
    firsts: dict[str, int] = {}
    landed: dict[str, int] = {}
    sources: dict[str, Rig] = {}
    early: list[str] = []
    complete: dict[str, set[int]] = {}

    def layer_needed(name: str, layer: int, timeout_s: float) -> bool:
        """Also asked whether all of a prefix is here, without waiting for it."""
        if timeout_s == 0 or rng.random() < 0.1:
            return layer in complete[name]
        if layer == NUM_LAYERS - 1:
            early.append(name)
        if external[name] > worker.heard.cached[name]:
            _fill_from(sources[name], name, worker, name, worker.heard.cached[name], external[name], [layer])
        complete[name].add(layer)
        return True

    worker.heard.on_layer_needed = layer_needed
    for step in range(140):
        action, name = rng.random(), rng.choice([*(known for known in sizes if known not in worker.heard.errors), ""])
        waits = name in worker.engine._scheduler.awaiting_kv
        if action < 0.25:
            name = f"r{step}"
            prompt, max_tokens = prompt_of(rng.randrange(1, 40), rng.randrange(3)), rng.randrange(1, 9)
            sizes[name], landed[name], complete[name] = (prompt, max_tokens), 0, set()
            part = rng.randrange(len(prompt) + 1)
            external[name] = rng.choice([0, part, part, len(prompt), len(prompt)])
            sources[name] = rig(num_blocks=8)
            firsts[name] = sources[name].generate(prompt, 1, name)[0]
            worker.submit(name, prompt, max_tokens, external=external[name])
        elif action < 0.5 and waits:
            if rng.random() < 0.7:
                worker.run()  # until the others have ended
            if external[name] == len(sizes[name][0]):
                worker.engine.kv_coming(name, external[name], firsts[name])
            else:
                worker.engine.kv_coming(name, external[name])
        elif action < 0.75 and waits:
            upto = rng.choice([external[name], rng.randrange(landed[name], external[name] + 1)])
            start = max(landed[name], worker.heard.cached[name])
            if start < upto:
                _fill_from(sources[name], name, worker, name, start, upto)
            landed[name] = upto
            whole = upto == len(sizes[name][0])
            worker.engine.kv_arrived(name, upto, firsts[name] if whole else None)
        elif action < 0.8 and name:
            worker.engine.kv_failed(name, recompute=rng.random() < 0.7, error=TransferFailed("x"))
        elif action < 0.83 and name:
            worker.engine.abort(name)
        worker.engine.step()
        worker.pool.check()
    for name in sizes:
        worker.engine.kv_failed(name, recompute=True, error=TransferFailed("x"))
    worker.run()
    assert worker.heard.errors.keys() == sizes.keys()
    assert (worker.pool.num_held, worker.engine.num_waiting, worker.engine.num_awaiting_kv) == (0, 0, 0)
    right = [name for name, error in worker.heard.errors.items() if error is None]
    assert len(right) > 5
    assert early
    for name in right:
        assert worker.heard.tokens(name) == oracle(*sizes[name]), f"seed {seed}, request {name}"
