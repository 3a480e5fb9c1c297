"""What tests with real vLLM servers share; nothing of it is made for the others."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

VLLM_LENGTHS = (1, 2, 33, 127, 128, 129, 255, 256, 257, 513, 1024, 2000, 4096)
VLLM_CONCURRENT = tuple(33 + 61 * index for index in range(16))
VLLM_LONG = 6000
VLLM_TIGHT = tuple((505, 100 + index) for index in range(10))
"""(tokens, seed) of prompts that take four blocks of 128 tokens, and a fifth for their answers."""

Alone = dict[tuple[int, ...], list[int]]
"""Prompt to the tokens that one server without any connector answers."""


@pytest.fixture(scope="session")
def vllm_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the checkpoint `model`."""
    from tests.e2e.engine_servers import save_model

    path = tmp_path_factory.mktemp("vllm")
    save_model(path / "model")
    return path


@pytest.fixture(scope="session")
def alone(vllm_folder: Path) -> Alone:
    """What one server without any connector answers to every prompt of these tests."""
    from tests.e2e.engine_servers import prompt_of
    from tests.e2e.vllm_servers import Server

    prompts = [prompt_of(count, count) for count in (*VLLM_LENGTHS, *VLLM_CONCURRENT, VLLM_LONG)]
    prompts += [prompt_of(700, 1)[:cut] + prompt_of(added, 2) for cut, added in ((700, 0), (640, 0), (513, 200))]
    prompts += [prompt_of(count, 9) for count in (200, 300)]
    prompts += [prompt_of(count, seed) for count, seed in VLLM_TIGHT]
    with Server("alone", vllm_folder / "model", vllm_folder / "alone.log", ["--enforce-eager"]).serving() as server:
        with ThreadPoolExecutor(4) as threads:
            answers = list(threads.map(server.complete, prompts))
        return {tuple(prompt): answer.tokens[0] for prompt, answer in zip(prompts, answers, strict=True)}
