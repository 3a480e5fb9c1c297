"""The bytes lie where the layout says: that is what a peer goes by."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
import torch

from pdlink.engine.forward import PagedCache, QuerySpan
from pdlink.memory.buffers import Buffer
from tests.engine.small import BLOCK, NUM_LAYERS, oracle_model, prompt_of, rig, small_model


@pytest.mark.parametrize("kernels", [False, True], ids=["torch", "kernels"])
@pytest.mark.parametrize("order", ["".join(order) for order in list(permutations("LPBTH"))[::11]])
def test_every_vector_lies_where_the_layout_says(order: str, kernels: bool) -> None:
    model = small_model()
    cache = PagedCache(model, num_blocks=5, block_tokens=4, order=order, kernels=kernels)
    blocks = [3, 0, 4]
    num_tokens = 11
    key, value = (torch.randn(1, model.num_kv_heads, num_tokens, model.head_dim) for _ in range(2))
    layer = 1
    cache.begin([QuerySpan(torch.tensor(blocks), 0, num_tokens)])
    cache.update(key, value, layer)
    layout = cache.layout
    assert isinstance(cache.buffer, Buffer)
    memory = cache.buffer.array
    strides = layout.layers[layer]
    for part, new in zip(strides.parts, (key, value), strict=True):
        for token in range(num_tokens):
            for head in range(model.num_kv_heads):
                at = (
                    part.offset
                    + blocks[token // 4] * strides.block_stride
                    + token % 4 * strides.token_stride
                    + head * strides.head_stride
                )
                stored = memory[at : at + layout.head_nbytes].view(np.float32)
                assert np.array_equal(stored, new[0, head, token].numpy())
    for copy, new in zip(cache.gather(layer, torch.tensor(blocks)), (key, value), strict=True):
        assert torch.equal(copy[:num_tokens], new[0].transpose(0, 1))
    written = int(np.count_nonzero(memory.view(np.float32)))
    assert written == 2 * num_tokens * model.num_kv_heads * model.head_dim, "something else was written too"
    cache.close()


def test_kv_is_that_of_transformers() -> None:
    """What is sent to a peer is the model's KV, not merely something that gives the right tokens here."""
    prompt = prompt_of(21)
    worker = rig(max_batched_tokens=9)
    worker.submit("r", prompt, 1)
    worker.run()
    expected = oracle_model()(torch.tensor([prompt]), use_cache=True).past_key_values
    table = torch.tensor(worker.heard.tables["r"])
    positions = torch.arange(len(prompt))
    for layer in range(NUM_LAYERS):
        wanted = (expected.layers[layer].keys, expected.layers[layer].values)
        for stored, part in zip(worker.cache.views(layer), wanted, strict=True):
            ours = stored[table[positions // BLOCK], positions % BLOCK]
            torch.testing.assert_close(ours, part[0].transpose(0, 1), rtol=1e-3, atol=1e-4)


def test_layers_are_reported_in_order_with_each_chunk_of_the_prompt_once() -> None:
    worker = rig(max_batched_tokens=10)
    worker.submit("a", prompt_of(14), 4)
    worker.submit("b", prompt_of(9), 4)
    worker.run()
    layers = range(NUM_LAYERS)
    assert worker.heard.written("a") == [(i, 0, 10) for i in layers] + [(i, 10, 14) for i in layers]
    assert worker.heard.written("b") == [(i, 0, 6) for i in layers] + [(i, 6, 9) for i in layers]


def test_cached_and_generated_tokens_are_not_reported() -> None:
    worker = rig(share_prefixes=True)
    prompt = prompt_of(3 * BLOCK)
    worker.generate(prompt, 6, "first")
    worker.generate(prompt, 6, "second")
    assert worker.heard.written("second") == [(layer, 2 * BLOCK, 3 * BLOCK) for layer in range(NUM_LAYERS)]


def test_a_layers_kv_is_in_the_pool_when_it_is_reported() -> None:
    worker = rig()
    seen: list[bool] = []
    report = worker.heard.layer_written

    def layer_written(layer: int, spans: tuple[tuple[str, int, int], ...]) -> None:
        report(layer, spans)
        table = torch.tensor(worker.heard.tables["r"])
        stored = worker.cache.views(layer)[0][table].flatten(0, 1)
        seen.append(bool(stored[:12].any(dim=-1).all()) and not bool(stored[12:].any()))

    worker.heard.layer_written = layer_written  # type: ignore[method-assign,assignment]
    worker.generate(prompt_of(12), 3)
    assert seen == [True] * NUM_LAYERS
