"""The engine's greedy tokens are those of transformers alone, however a request is computed."""

from __future__ import annotations

from itertools import permutations

import pytest

from tests.engine.small import BLOCK, NUM_LAYERS, oracle, prompt_of, rig

CHUNK = 12
LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * CHUNK + 7)


@pytest.mark.parametrize("length", LENGTHS)
def test_tokens_are_those_of_transformers(length: int) -> None:
    prompt = prompt_of(length)
    assert rig().generate(prompt, 10) == oracle(prompt, 10)


@pytest.mark.parametrize("length", LENGTHS)
def test_chunked_prefill_gives_the_same_tokens(length: int) -> None:
    prompt = prompt_of(length)
    assert rig(max_batched_tokens=CHUNK).generate(prompt, 10) == oracle(prompt, 10)


@pytest.mark.parametrize("length", LENGTHS)
def test_prefix_hit_gives_the_same_tokens(length: int) -> None:
    prompt = prompt_of(length)
    worker = rig(share_prefixes=True)
    worker.generate(prompt, 10, "first")
    assert worker.generate(prompt, 10, "second") == worker.heard.tokens("first") == oracle(prompt, 10)
    assert worker.heard.cached == {"first": 0, "second": (length - 1) // BLOCK * BLOCK}


@pytest.mark.parametrize("kernels", [False, True], ids=["torch", "kernels"])
def test_sixteen_requests_at_once_give_the_tokens_of_each_alone(kernels: bool) -> None:
    worker = rig(num_blocks=256, max_batched_tokens=40, kernels=kernels)
    lengths = [1, 2, 7, 8, 9, 15, 16, 17, 23, 31, 43, 48, 60, 77, 90, 119]
    for length in lengths:
        worker.submit(f"r{length}", prompt_of(length), 10)
    worker.run()
    for length in lengths:
        assert worker.heard.tokens(f"r{length}") == oracle(prompt_of(length), 10), length
    assert worker.pool.num_held == 0


def test_any_order_of_axes_gives_the_same_tokens() -> None:
    prompt = prompt_of(30)
    for order in list(permutations("LPBTH"))[::7]:
        worker = rig(order="".join(order), num_blocks=8, max_batched_tokens=CHUNK)
        assert worker.generate(prompt, 6) == oracle(prompt, 6), order


def test_prompt_that_continues_an_answer_reuses_its_blocks() -> None:
    """The second turn of a chat: prompt, answer and more."""
    worker = rig(share_prefixes=True)
    first = prompt_of(20)
    answer = worker.generate(first, 13, "first")
    second = (*first, *answer, *prompt_of(5))
    assert worker.generate(second, 8, "second") == oracle(second, 8)
    # The last answer token was never computed, so 20 + 13 - 1 tokens have KV: four full blocks.
    assert worker.heard.cached["second"] == 32


def test_concurrent_requests_share_what_is_already_computed() -> None:
    worker = rig(share_prefixes=True, max_batched_tokens=2 * BLOCK)
    prompt = prompt_of(5 * BLOCK)
    worker.submit("first", prompt)
    worker.engine.step()
    worker.submit("second", prompt)
    worker.run()
    assert worker.heard.cached["second"] == 2 * BLOCK
    assert worker.heard.tokens("first") == worker.heard.tokens("second") == oracle(prompt, 8)


def test_one_changed_prompt_token_changes_the_continuation() -> None:
    """Otherwise equal tokens would prove nothing about the KV they were computed from."""
    prompt = prompt_of(40)
    base = rig().generate(prompt, 12)
    assert len(set(base)) > 4, "the continuation hardly varies"
    for position in (0, 13, 26, 38):
        changed = (*prompt[:position], prompt[position] ^ 1, *prompt[position + 1 :])
        assert rig().generate(changed, 12) != base, position


def test_wrong_kv_in_one_block_of_one_layer_changes_the_continuation() -> None:
    prompt = prompt_of(40)
    base = rig().generate(prompt, 12)
    for layer in range(NUM_LAYERS):
        worker = rig()
        worker.submit("r", prompt, 12)
        worker.engine.step()
        for part in worker.cache.views(layer):
            part[worker.heard.tables["r"][1]] = 0
        worker.run()
        assert worker.heard.tokens("r")[0] == base[0]
        assert worker.heard.tokens("r") != base, layer
