"""The prompt's KV comes from elsewhere: it is waited for, used as if computed here, and never trusted too early."""

from __future__ import annotations

import pytest
import torch

from pdlink.errors import ProtocolError, TransferFailed
from tests.engine.small import BLOCK, NUM_LAYERS, Rig, oracle, prompt_of, rig


def _fill_from(source: Rig, source_id: str, target: Rig, target_id: str, start: int, end: int) -> None:
    """What a link does: copy the KV of tokens [start, end) of all layers."""
    positions = torch.arange(start, end)
    src, dst = (
        torch.tensor(worker.heard.tables[name])[positions // BLOCK]
        for worker, name in ((source, source_id), (target, target_id))
    )
    for layer in range(NUM_LAYERS):
        for ours, theirs in zip(target.cache.views(layer), source.cache.views(layer), strict=True):
            ours[dst, positions % BLOCK] = theirs[src, positions % BLOCK]


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 43])
def test_decode_from_given_kv_continues_as_one_process_would(length: int) -> None:
    prompt = prompt_of(length)
    prefill = rig()
    first = prefill.generate(prompt, 1)[0]
    decode = rig()
    decode.submit("r", prompt, 10, external_kv=True)
    decode.run()
    assert (decode.engine.num_awaiting_kv, decode.engine.num_running) == (1, 0)
    assert len(decode.heard.tables["r"]) == -(-(length + 10) // BLOCK)
    _fill_from(prefill, "r", decode, "r", 0, length)
    decode.engine.kv_arrived("r", first)
    decode.run()
    assert decode.heard.tokens("r") == oracle(prompt, 10)
    assert decode.heard.layers == [], "nothing of the prompt was computed here"
    assert decode.heard.outputs["r"][0].text == prefill.heard.text("r")


def test_given_kv_is_found_again_by_name_up_to_a_full_hit() -> None:
    prompt = prompt_of(3 * BLOCK)
    prefill, decode = rig(), rig(share_prefixes=True)
    first = prefill.generate(prompt, 1)[0]
    for name, cached, max_tokens in (("a", 0, 1), ("b", 3 * BLOCK, 5)):
        decode.submit(name, prompt, max_tokens, external_kv=True)
        decode.run()
        assert decode.heard.cached[name] == cached
        if name == "a":
            _fill_from(prefill, "r", decode, "a", 0, len(prompt))
        decode.engine.kv_arrived(name, first)
        decode.run()
        assert decode.heard.tokens(name) == oracle(prompt, max_tokens)
    assert decode.generate(prompt, 5, "ordinary") == oracle(prompt, 5)
    assert decode.heard.cached["ordinary"] == 2 * BLOCK


def test_blocks_that_wait_for_kv_are_not_found_by_name() -> None:
    """vllm#53314: tokens were counted as computed that had never been stored."""
    decode = rig(share_prefixes=True)
    prompt = prompt_of(3 * BLOCK)
    decode.submit("a", prompt, 5, external_kv=True)
    decode.run()
    assert decode.generate(prompt, 5, "b") == oracle(prompt, 5)
    assert decode.heard.cached["b"] == 0


@pytest.mark.parametrize("max_tokens", [1, 3])
def test_given_first_token_can_end_the_answer(max_tokens: int) -> None:
    worker = rig()
    worker.submit(
        "r", prompt_of(5), max_tokens, external_kv=True, stop_token_ids=frozenset(() if max_tokens == 1 else (65,))
    )
    worker.run()
    worker.engine.kv_arrived("r", 65)
    worker.run()
    assert [output.finish_reason for output in worker.heard.outputs["r"]] == ["length" if max_tokens == 1 else "stop"]
    assert worker.pool.num_held == 0


def test_failed_kv_is_recomputed_first_in_line_in_fresh_blocks() -> None:
    worker = rig(num_blocks=8, max_running=2)
    prompt = prompt_of(2 * BLOCK)
    worker.submit("r", prompt, 6, external_kv=True)
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
    worker.submit("r", prompt_of(2 * BLOCK), 6, external_kv=True)
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
    worker.submit("r", prompt_of(9), 6, external_kv=True)
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
    worker.submit("r", prompt, 6, external_kv=True)
    worker.submit("early", prompt, 2, external_kv=True)
    worker.engine.kv_arrived("unknown", 5)
    worker.engine.kv_failed("unknown", recompute=True, error=error)
    worker.engine.kv_arrived("early", 5)
    worker.engine.step()
    worker.engine.kv_failed("r", recompute=True, error=error)
    worker.engine.kv_arrived("r", 5)
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
    worker.submit("recomputed", prompt_of(9), 4, external_kv=True)
    worker.submit("failed", prompt_of(9), 4, external_kv=True)
    worker.engine.step()
    worker.engine.kv_failed("recomputed", recompute=True, error=TransferFailed("x"))
    worker.engine.kv_failed("failed", recompute=False, error=TransferFailed("x"))
    worker.run()
    assert worker.heard.tokens("recomputed") == oracle(prompt_of(9), 4)
    assert isinstance(worker.heard.errors["failed"], TransferFailed)


def test_first_token_outside_the_vocabulary_is_the_peers_fault() -> None:
    worker = rig()
    worker.submit("r", prompt_of(5), 6, external_kv=True)
    worker.run()
    worker.engine.kv_arrived("r", 10**6)
    worker.run()
    assert isinstance(worker.heard.errors["r"], ProtocolError)
    assert worker.pool.num_held == 0
