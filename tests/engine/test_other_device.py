"""The engine on a device other than the host's: it loads, computes the same tokens, and reads nothing by the host."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from pdlink.config import ModelConfig
from pdlink.engine import forward, models, tiny
from pdlink.engine.models import load_model
from pdlink.memory.buffers import Buffer
from tests.engine.other_device import DEVICE, OtherDevice, TensorThere
from tests.engine.small import BLOCK, MAX_TOKENS, NUM_LAYERS, oracle, prompt_of, rig, small_model


@pytest.fixture
def other_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def allocate(nbytes: int, device: torch.device) -> tuple[Buffer, torch.Tensor]:
        assert device == DEVICE
        buffer = Buffer(nbytes)
        return buffer, TensorThere(torch.from_numpy(buffer.array))

    monkeypatch.setattr(forward, "_allocate", allocate)
    monkeypatch.setattr(torch, "inference_mode", torch.no_grad)  # it refuses tensors of a class of ours
    with OtherDevice():  # type: ignore[no-untyped-call]
        yield


def test_host_reads_no_tensor_of_the_other_device(other_device: None) -> None:
    """What the tests below rest on."""
    there = torch.arange(6).to(DEVICE)
    assert there.device == DEVICE
    assert there.cpu().tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(RuntimeError, match="numpy"):
        there.numpy()
    with pytest.raises(RuntimeError, match="one device"):
        there + torch.arange(6)
    view = there.view(2, 3)[1]
    view.add_(10)
    assert there.cpu().tolist() == [0, 1, 2, 13, 14, 15]


def test_built_model_on_another_device_gives_the_tokens_and_the_identity_of_the_host(other_device: None) -> None:
    model = load_model(ModelConfig(num_layers=NUM_LAYERS, max_tokens=MAX_TOKENS), str(DEVICE))
    assert {weight.device for weight in model.model.state_dict().values()} == {DEVICE}
    assert model.content == small_model().content
    worker = rig(model=model, max_batched_tokens=10, share_prefixes=True)
    prompts = {"a": prompt_of(2 * BLOCK + 3), "b": prompt_of(BLOCK - 1)}
    for name, prompt in prompts.items():
        worker.submit(name, prompt, 6)
    worker.run()
    for name, prompt in prompts.items():
        assert worker.heard.errors[name] is None
        assert worker.heard.tokens(name) == oracle(prompt, 6)


def test_other_device_computes_what_transformers_does_there(other_device: None) -> None:
    """What is looked at once a model is loaded from files."""
    built = tiny.build_model(seed=0, num_layers=NUM_LAYERS, max_tokens=MAX_TOKENS, dtype=torch.float32)
    config = ModelConfig(num_layers=NUM_LAYERS, max_tokens=MAX_TOKENS)
    loaded = models._describe(built.to(DEVICE), tiny.build_tokenizer(), config, "", "", DEVICE)
    models._compare_with_transformers(loaded)
    assert rig(model=loaded).generate(prompt_of(19), 5) == oracle(prompt_of(19), 5)
