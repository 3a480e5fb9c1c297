"""Two real vLLM servers, each with a store: decode keeps what it received and answered.

Prefix caching is off: what is not pushed and not computed comes from a store. Run with `make test-vllm`.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.e2e.conftest import VLLM_CONCURRENT, Alone  # noqa: E402
from tests.e2e.engine_servers import place_of, prompt_of, until  # noqa: E402
from tests.e2e.test_vllm_store import CHUNK, tiers_of  # noqa: E402
from tests.e2e.vllm_servers import COMPUTES, Pair, Server  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def pair(vllm_folder: Path, alone: Alone) -> Iterator[Pair]:
    place = place_of(vllm_folder, "store-decode")
    pair = Pair.of(
        place,
        prefill_flags=[*COMPUTES, "--block-size", "128"],
        decode_flags=["--enforce-eager", "--no-enable-prefix-caching", "--block-size", "32"],
        store=tiers_of(place),
        decode_store=tiers_of(place, save_decode_cache=True),
    )
    yield pair
    pair.stop()


def tokens(server: Server, source: str) -> float:
    """Of prompts, from this source, so far."""
    return server.metric("vllm:pdlink_prompt_tokens_total", f'source="{source}"')


def sourced(server: Server) -> dict[str, float]:
    return {source: tokens(server, source) for source in ("device", "host", "prefill", "computed")}


def rest(pair: Pair) -> None:
    for server in (pair.prefill, pair.decode):
        until(server.holds_nothing, f"{server.name} holds nothing")
        assert server.metric("vllm:pdlink_transfer_failures_total") == 0


@pytest.mark.parametrize("length", [513, 1024, 2000])
def test_decode_asks_only_for_what_its_store_lacks(pair: Pair, alone: Alone, length: int) -> None:
    """Of 513 tokens all that prefill would push is in decode's store the second time: nothing is."""
    prompt = prompt_of(length, length)
    kept = min(length - 1, length // CHUNK * CHUNK)
    for loaded in (0, kept):
        before = sourced(pair.decode)
        assert pair.tokens(prompt) == [alone[tuple(prompt)]]
        rest(pair)
        now = sourced(pair.decode)
        assert {source: now[source] - before[source] for source in now} == {
            "device": 0,
            "host": loaded,
            "prefill": length - 1 - loaded,
            "computed": 1,
        }


def test_the_next_turn_of_a_conversation_begins_with_what_decode_kept_of_the_last_one(pair: Pair) -> None:
    first = prompt_of(4 * CHUNK - 8, 77)
    (answer,) = pair.tokens(first, max_tokens=20)
    rest(pair)
    second = [*first, *answer, *prompt_of(300, 78)]
    (expected,) = pair.prefill.complete(second).tokens
    before = sourced(pair.decode)
    assert pair.tokens(second) == [expected]
    now = sourced(pair.decode)
    assert now["host"] - before["host"] == 4 * CHUNK, "its last chunk ends within the answer"
    assert now["prefill"] - before["prefill"] == len(second) - 1 - 4 * CHUNK
    rest(pair)


def test_sixteen_at_once_do_not_mix(pair: Pair, alone: Alone) -> None:
    prompts = [prompt_of(count, count) for count in VLLM_CONCURRENT]
    for _ in range(2):
        with ThreadPoolExecutor(len(prompts)) as threads:
            answers = list(threads.map(pair.tokens, prompts))
        assert answers == [[alone[tuple(prompt)]] for prompt in prompts]
    rest(pair)
