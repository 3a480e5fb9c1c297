"""Real SGLang servers, one of which computes prompts for the other, behind pdlink's proxy.

The answers are those of one server: in float32, greedily, from a model whose every token depends on all KV before it.
Prompts are computed in chunks of 256 tokens. Run with `make test-sglang`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

if importlib.util.find_spec("sglang") is None:
    pytest.skip("needs SGLang", allow_module_level=True)

from pdlink.engine import tiny  # noqa: E402
from tests.e2e.deployment import until  # noqa: E402
from tests.e2e.sglang_servers import SglangPair, SglangServer, complete, tokens_of  # noqa: E402
from tests.e2e.vllm_servers import prompt_of, save_model  # noqa: E402

pytestmark = [pytest.mark.sglang, pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(580)]

LENGTHS = (64, 300, 1000)
CONCURRENT = tuple(40 + 11 * index for index in range(8))
PREFIXED = (prompt_of(300, 1), prompt_of(300, 1)[:200] + prompt_of(60, 2))
Alone = dict[tuple[int, ...], list[int]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sglang")
    save_model(path / "model")
    tiny.build_tokenizer().save_pretrained(path / "model")
    return path


@pytest.fixture(scope="module")
def alone(folder: Path) -> Alone:
    """What one server answers."""
    prompts = [*(prompt_of(count, count) for count in (*LENGTHS, *CONCURRENT)), *PREFIXED]
    server = SglangServer("alone", folder / "model", folder / "alone.log", []).start()
    try:
        server.wait_ready()
        return {tuple(prompt): tokens_of(server.url, prompt) for prompt in prompts}
    finally:
        server.kill()


@pytest.fixture(scope="module")
def pair(folder: Path, alone: Alone) -> Iterator[SglangPair]:
    pair = SglangPair.of(folder)
    yield pair
    pair.stop()


@pytest.mark.parametrize("length", LENGTHS)
def test_tokens_equal_those_of_one_server(pair: SglangPair, alone: Alone, length: int) -> None:
    prompt = prompt_of(length, length)
    assert pair.tokens(prompt) == alone[tuple(prompt)]


def test_eight_at_once_do_not_mix(pair: SglangPair, alone: Alone) -> None:
    prompts = [prompt_of(count, count) for count in CONCURRENT]
    with ThreadPoolExecutor(len(prompts)) as threads:
        assert list(threads.map(pair.tokens, prompts)) == [alone[tuple(prompt)] for prompt in prompts]


def test_a_prefix_that_prefill_has_cached_is_sent_too(pair: SglangPair, alone: Alone) -> None:
    for prompt in PREFIXED:
        assert pair.tokens(prompt) == alone[tuple(prompt)]


def test_layers_are_pushed_while_the_forward_pass_runs(pair: SglangPair) -> None:
    pair.tokens(prompt_of(40, 9))
    assert "was pushed layer by layer" in pair.prefill.log.read_text(errors="replace")


def test_prefill_killed_in_a_prompt_is_an_error_and_its_next_life_serves(pair: SglangPair, alone: Alone) -> None:
    before = pair.prefill.num_prefill_passes()
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(complete, pair.url, prompt_of(6000, 3))
        until(lambda: pair.prefill.num_prefill_passes() >= before + 2, "the prompt is being computed", 120)
        pair.prefill.kill()
        answer = asked.result()
    assert answer.status >= 500, answer
    assert "error" in answer.body["text"], answer
    pair.prefill.start().wait_ready()
    pair.wait_routed()
    prompt = prompt_of(300, 300)
    assert pair.tokens(prompt) == alone[tuple(prompt)]
