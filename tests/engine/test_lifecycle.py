"""Every request ends exactly once, gives its blocks back, and nothing impossible is let in."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from pdlink.engine import engine as engine_module
from pdlink.engine.request import GenerationRequest, SamplingParams
from pdlink.errors import (
    CapacityExceeded,
    EngineFailure,
    InvalidRequest,
    Overloaded,
    PoolExhausted,
    RequestAborted,
    TransferFailed,
)
from tests.engine.small import BLOCK, MAX_TOKENS, NUM_LAYERS, oracle, prompt_of, rig, small_model

# --- The end of an answer


def test_answer_ends_by_length_with_every_token_told() -> None:
    worker = rig()
    worker.generate(prompt_of(10), 5)
    outputs = worker.heard.outputs["r"]
    assert [output.finish_reason for output in outputs] == [None] * 4 + ["length"]
    assert worker.heard.text("r") == bytes(worker.heard.tokens("r")).decode()
    assert worker.pool.num_held == 0


def test_stop_token_ends_the_answer_and_has_no_text() -> None:
    prompt = prompt_of(10)
    tokens = oracle(prompt, 8)
    worker = rig()
    end = tokens.index(tokens[5])
    assert worker.generate(prompt, 8, stop_token_ids=frozenset([tokens[5]])) == tokens[: end + 1]
    assert worker.heard.outputs["r"][-1].finish_reason == "stop"
    assert worker.heard.text("r") == bytes(tokens[:end]).decode()


def test_eos_ends_the_answer_unless_it_is_ignored() -> None:
    worker = rig()
    eos = next(iter(small_model().eos_token_ids))
    for ignore_eos, errors in ((False, 1), (True, 2)):
        worker.submit(f"r{errors}", prompt_of(4), 3, external=4, ignore_eos=ignore_eos)
        worker.run()
        worker.engine.kv_arrived(f"r{errors}", 4, eos)
        worker.run()
    assert [output.finish_reason for output in worker.heard.outputs["r1"]] == ["stop"]
    assert [output.finish_reason for output in worker.heard.outputs["r2"]] == [None, None, "length"]


def test_stop_string_ends_the_answer_and_is_cut_off() -> None:
    prompt = prompt_of(10)
    text = bytes(oracle(prompt, 10)).decode()
    worker = rig()
    stop = text[4:7]
    worker.generate(prompt, 10, stop=(stop,))
    assert worker.heard.text("r") == text[: text.index(stop)]
    assert worker.heard.outputs["r"][-1].finish_reason == "stop"


# --- What can never be served is refused at once


def test_impossible_requests_are_refused_with_both_numbers() -> None:
    worker = rig(num_blocks=4)
    with pytest.raises(CapacityExceeded, match=r"5 KV blocks.* 4$"):
        worker.submit("r", prompt_of(4 * BLOCK), 1)
    with pytest.raises(CapacityExceeded, match=rf"{MAX_TOKENS + 1}, .*{MAX_TOKENS}$"):
        worker.submit("r", prompt_of(10), MAX_TOKENS - 9)
    with pytest.raises(InvalidRequest, match="empty"):
        worker.submit("r", ())
    for token in (-1, small_model().vocab_size):
        with pytest.raises(InvalidRequest, match=f"token {token} .*{small_model().vocab_size}"):
            worker.submit("r", (1, token, 2))
    worker.submit("r", prompt_of(4 * BLOCK - 1), 1)
    with pytest.raises(InvalidRequest, match="in use"):
        worker.submit("r", prompt_of(3))
    worker.run()
    assert worker.heard.errors == {"r": None}
    worker.generate(prompt_of(3), 2, "again")
    worker.heard.errors.clear()
    worker.heard.outputs.clear()
    assert worker.generate(prompt_of(3), 2, "again") == oracle(prompt_of(3), 2), "an ended id is free again"


def test_more_than_running_and_waiting_is_overloaded() -> None:
    """sglang#10110: admission without a bound, and then everything timed out."""
    worker = rig(max_running=2, max_waiting=1)
    for name in "abc":
        worker.submit(name, prompt_of(5))
    with pytest.raises(Overloaded, match="3 .* 3$"):
        worker.submit("d", prompt_of(5))
    assert (worker.engine.num_running, worker.engine.num_waiting) == (0, 3)
    worker.engine.step()
    assert (worker.engine.num_running, worker.engine.num_waiting) == (2, 1)
    requests = [sequence.request for sequence in worker.engine._sequences.values()]
    assert worker.engine.tokens_held == sum(len(r.prompt_token_ids) + r.sampling.max_tokens for r in requests) > 0
    assert worker.engine.tokens_to_compute == len(requests[-1].prompt_token_ids), "of the one that waits"
    worker.run()
    worker.submit("d", prompt_of(5))
    worker.run()
    assert worker.heard.errors == dict.fromkeys("abcd")


# --- Admission


def test_admission_reserves_prompt_and_answer_and_keeps_order() -> None:
    """vllm#44560: half-done prefills and loads held blocks and waited for each other's."""
    worker = rig(num_blocks=8)
    worker.submit("big", prompt_of(4 * BLOCK), 2 * BLOCK)
    worker.submit("waits", prompt_of(3 * BLOCK), 1)
    worker.submit("small", prompt_of(2), 2)
    worker.engine.step()
    assert len(worker.heard.tables["big"]) == 6
    assert worker.heard.order == ["big"], "small must not overtake: it would starve the one before it"
    worker.run()
    assert worker.heard.order == ["big", "waits", "small"]
    assert worker.pool.num_held == 0


def test_blocks_given_back_by_somebody_else_let_the_next_in() -> None:
    worker = rig(num_blocks=4)
    others = worker.pool.take(3)
    worker.submit("r", prompt_of(BLOCK), 2)
    assert worker.engine.step()
    assert not worker.engine.step(), "waiting for memory must not spin"
    worker.pool.give_back(others)
    worker.engine.wake()
    worker.run()
    assert worker.heard.tokens("r") == oracle(prompt_of(BLOCK), 2)


def test_prefixes_are_not_shared_across_salts_or_when_switched_off() -> None:
    prompt = prompt_of(4 * BLOCK)
    worker = rig(share_prefixes=True)
    for name, salt in (("a", "one"), ("b", "two"), ("c", "one")):
        worker.generate(prompt, 2, name, salt=salt)
    assert worker.heard.cached == {"a": 0, "b": 0, "c": 3 * BLOCK}
    alone = rig()
    for name in "ab":
        alone.generate(prompt, 2, name)
    assert alone.heard.cached == {"a": 0, "b": 0}


def test_long_prompt_does_not_stop_others_from_decoding() -> None:
    worker = rig(max_batched_tokens=8)
    worker.submit("quick", prompt_of(3), 12)
    worker.engine.step()
    worker.submit("long", prompt_of(60), 1)
    for _ in range(4):
        before = len(worker.heard.tokens("quick"))
        worker.engine.step()
        assert len(worker.heard.tokens("quick")) == before + 1
    worker.run()
    assert worker.heard.tokens("quick") == oracle(prompt_of(3), 12)
    assert worker.heard.tokens("long") == oracle(prompt_of(60), 1)


def test_more_decoding_requests_than_a_pass_holds_take_turns_and_leave_room_for_prompts() -> None:
    worker = rig(max_batched_tokens=4)
    names = [f"r{i}" for i in range(7)]
    for i, name in enumerate(names):
        worker.submit(name, prompt_of(2, seed=i), 20)
    while worker.engine.num_running < 7 or worker.heard.written("r6") == []:
        worker.engine.step()
    before = [len(worker.heard.tokens(name)) for name in names]
    for _ in range(7):
        worker.engine.step()
    assert [len(worker.heard.tokens(name)) for name in names] == [num + 4 for num in before]
    worker.submit("late", prompt_of(9), 2)
    for _ in range(8):
        worker.engine.step()
    assert worker.heard.written("late"), "the prompt got no turn"
    worker.run()
    for i, name in enumerate(names):
        assert worker.heard.tokens(name) == oracle(prompt_of(2, seed=i), 20)


# --- Abort and failure


def test_abort_ends_a_request_in_any_state() -> None:
    worker = rig(max_running=3, max_batched_tokens=16)
    worker.submit("decoding", prompt_of(3), 40)
    worker.submit("prefilling", prompt_of(60), 4)
    worker.submit("awaiting", prompt_of(9), 4, external=9)
    worker.submit("waiting", prompt_of(9), 4)
    worker.engine.step()
    states = (worker.engine.num_running, worker.engine.num_awaiting_kv, worker.engine.num_waiting)
    assert states == (2, 1, 1)
    worker.submit("in the inbox", prompt_of(3), 4)
    for name in ("decoding", "prefilling", "awaiting", "waiting", "in the inbox", "unknown", "decoding"):
        worker.engine.abort(name)
    worker.run()
    assert len(worker.heard.errors) == 5
    assert all(isinstance(error, RequestAborted) for error in worker.heard.errors.values())
    assert (worker.pool.num_held, worker.engine.num_running, worker.engine.num_waiting) == (0, 0, 0)


def test_listener_may_abort_from_within_a_call() -> None:
    worker = rig()
    report = worker.heard.layer_written

    def layer_written(layer: int, spans: Any) -> None:
        report(layer, spans)
        worker.engine.abort("r")

    worker.heard.layer_written = layer_written  # type: ignore[method-assign]
    worker.submit("r", prompt_of(5), 6)
    worker.run()
    assert isinstance(worker.heard.errors["r"], RequestAborted)


def test_failing_pass_ends_its_requests_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = rig(share_prefixes=True, max_running=1)
    prompt = prompt_of(3 * BLOCK)
    worker.submit("bad", prompt, 4)
    worker.submit("good", prompt, 4)
    update = worker.cache.update

    def broken(key: torch.Tensor, value: torch.Tensor, layer: int, *rest: object) -> Any:
        if layer == NUM_LAYERS - 1:
            raise RuntimeError("out of memory")
        return update(key, value, layer, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(worker.cache, "update", broken)
        worker.engine.step()
    worker.run()
    assert isinstance(worker.heard.errors["bad"], EngineFailure)
    assert worker.heard.cached["good"] == 0, "half-written blocks must have no name"
    assert worker.heard.tokens("good") == oracle(prompt, 4)
    assert worker.pool.num_held == 0


def test_the_listener_hears_of_prefill_and_of_its_end_also_when_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = rig(max_batched_tokens=4)
    worker.generate(prompt_of(8), 5)
    assert worker.heard.prefilling_said == [True, False] * 2, "of two chunks; decoding is no prefill"
    monkeypatch.setattr(worker.cache, "update", _out_of_memory)
    worker.submit("bad", prompt_of(3), 4)
    worker.run()
    assert isinstance(worker.heard.errors["bad"], EngineFailure)
    assert worker.heard.prefilling_said == [True, False] * 3


def _out_of_memory(*_: object, **__: object) -> None:
    raise RuntimeError("out of memory")


def test_numbers_that_are_none_end_the_request_and_are_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = rig(share_prefixes=True)
    prompt = prompt_of(3 * BLOCK)
    update = worker.cache.update
    with monkeypatch.context() as patch:
        patch.setattr(worker.cache, "update", lambda key, value, *rest: update(key, value * float("nan"), *rest))
        worker.submit("bad", prompt, 4)
        worker.run()
    assert isinstance(worker.heard.errors["bad"], EngineFailure)
    assert worker.generate(prompt, 4, "good") == oracle(prompt, 4)
    assert worker.heard.cached["good"] == 0


@pytest.mark.parametrize("seed", range(3))
def test_any_schedule_ends_every_request_once_and_leaks_nothing(seed: int) -> None:
    """Random arrivals, aborts and news of KV at random steps. Recorder refuses wrong order and second ends."""
    rng = random.Random(seed)
    worker = rig(
        num_blocks=rng.choice([12, 30]),
        share_prefixes=rng.random() < 0.7,
        max_batched_tokens=rng.choice([2, 9, 64]),
        max_running=rng.choice([2, 6]),
    )
    invents_kv = seed % 2 == 1  # says that KV arrived where none did; tokens mean nothing then
    sizes: dict[str, tuple[tuple[int, ...], int]] = {}
    external: set[str] = set()
    others: list[int] = []
    for step in range(120):
        action = rng.random()
        if action < 0.3:
            name = f"r{step}"
            prompt, max_tokens = prompt_of(rng.randrange(1, 40), rng.randrange(2)), rng.randrange(1, 9)
            outside = rng.random() < 0.4
            worker.submit(name, prompt, max_tokens, external=len(prompt) if outside else 0)
            sizes[name] = prompt, max_tokens
            if outside:
                external.add(name)
        elif action < 0.4 and sizes:
            worker.engine.abort(rng.choice(list(sizes)))
        elif action < 0.5 and external:
            worker.engine.kv_failed(
                rng.choice(list(external)), recompute=rng.random() < 0.6, error=TransferFailed("x")
            )
        elif action < 0.55 and external and invents_kv:
            name = rng.choice(list(external))
            worker.engine.kv_arrived(name, len(sizes[name][0]), rng.randrange(32, 127))
        elif action < 0.6:
            worker.pool.give_back(others)
            others = []
            try:
                others = worker.pool.take(rng.randrange(4))
            except PoolExhausted:
                others = []
        worker.engine.step()
        worker.pool.check()
    worker.pool.give_back(others)
    for name in external:
        worker.engine.kv_failed(name, recompute=True, error=TransferFailed("x"))
    worker.run()
    assert worker.heard.errors.keys() == sizes.keys()
    assert (worker.pool.num_held, worker.engine.num_waiting, worker.engine.num_awaiting_kv) == (0, 0, 0)
    complete = [name for name, error in worker.heard.errors.items() if error is None]
    assert complete
    for name in complete:
        assert len(worker.heard.tokens(name)) == sizes[name][1]
        assert invents_kv or worker.heard.tokens(name) == oracle(*sizes[name])


def test_text_that_is_held_back_is_left_to_the_process_that_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "choose", lambda _logits, _sampling, _index: ord("E"))
    worker = rig()
    for name, goes_on in (("alone", False), ("first", True)):
        sampling = SamplingParams(max_tokens=1, stop=("END",))
        worker.engine.submit(GenerationRequest(name, (1, 2, 3), sampling, goes_on=goes_on))
    worker.run()
    assert worker.heard.text("alone") == "E"
    assert worker.heard.text("first") == ""
