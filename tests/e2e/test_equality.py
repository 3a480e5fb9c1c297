"""Tokens through the link are those of one process, over every transport, and the bytes really went that way."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.waiting import until

from .deployment import Answer, Deployment, prompt_of, worker_settings

pytestmark = pytest.mark.e2e

SRC_BLOCK, DST_BLOCK, CHUNK = 16, 24, 128
LENGTHS = [1, SRC_BLOCK - 1, SRC_BLOCK, SRC_BLOCK + 1, 3 * CHUNK + 7, 2000]
TOKEN_NBYTES = 8 * 2 * 4 * 32 * 4
"""Layers, K and V, heads, head size, float32: of the built model."""

Expected = Callable[..., Answer]

LANES = {
    "ucx-tcp": ({"kind": "ucx", "ucx": {"tls": "tcp"}}, "tcp"),
    "tcp": ({"kind": "tcp"}, "tcp"),
    "ucx-shm": ({"kind": "ucx", "ucx": {"tls": "shm"}}, "cma"),
    "mapped": ({"kind": "mapped"}, "mapped"),
}


@pytest.fixture(scope="module")
def alone() -> Iterator[Deployment]:
    """One process without a link."""
    settings = worker_settings("both", engine={"max_batched_tokens": 512})
    with Deployment.launch({"alone": settings}, routed=False) as deployment:
        yield deployment


@pytest.fixture(scope="module")
def expected(alone: Deployment) -> Expected:
    """What that process answers to a prompt and the request's fields: it is asked once for all lanes."""
    known: dict[str, Answer] = {}

    def of(prompt: list[int], **fields: Any) -> Answer:
        asked = json.dumps([prompt, fields])
        if asked not in known:
            known[asked] = alone.complete(prompt, at="alone", **fields)
        return known[asked]

    return of


@pytest.fixture(scope="module", params=LANES)
def linked(request: pytest.FixtureRequest) -> Iterator[tuple[Deployment, str]]:
    transport, lane = LANES[request.param]
    workers = {
        "prefill": worker_settings(
            "prefill",
            transport=transport,
            cache={"block_tokens": SRC_BLOCK, "share_prefixes": False},
            engine={"max_batched_tokens": CHUNK},
        ),
        "decode": worker_settings(
            "decode",
            transport=transport,
            cache={"block_tokens": DST_BLOCK, "order": "BLPHT", "share_prefixes": False},
            on_transfer_failure="fail",
        ),
    }
    with Deployment.launch(workers) as deployment:
        yield deployment, lane


def test_greedy_tokens_are_those_of_one_process(expected: Expected, linked: tuple[Deployment, str]) -> None:
    deployment, lane = linked
    prompts = [prompt_of(length, seed=length) for length in LENGTHS]
    before = deployment.metric("prefill", f'pdlink_transfer_bytes_total{{transport="{lane}"}}')
    for prompt in prompts:
        answer = deployment.complete(prompt)
        assert answer.status == 200, answer.body
        assert answer.body["choices"] == expected(prompt).body["choices"], len(prompt)
        assert answer.body["usage"]["prompt_tokens"] == len(prompt)
        assert answer.body["usage"]["completion_tokens"] == 16
    crossed = deployment.metric("prefill", f'pdlink_transfer_bytes_total{{transport="{lane}"}}') - before
    assert crossed == sum(LENGTHS) * TOKEN_NBYTES, "every byte crossed, and by this lane"


def test_sixteen_requests_at_once_are_those_of_one_process(
    expected: Expected, linked: tuple[Deployment, str]
) -> None:
    deployment, _ = linked
    prompts = [prompt_of(LENGTHS[index % 5], seed=100 + index) for index in range(16)]
    answers = deployment.complete_all(prompts)
    assert [answer.status for answer in answers] == [200] * 16
    texts = [expected(prompt).text for prompt in prompts]
    assert [answer.text for answer in answers] == texts
    assert len(set(texts)) == 16


def test_seeded_sampling_is_that_of_one_process(expected: Expected, linked: tuple[Deployment, str]) -> None:
    deployment, _ = linked
    prompt = prompt_of(50)
    texts = []
    for seed in (1, 2):
        fields: dict[str, Any] = {"temperature": 1.0, "top_p": 0.9, "seed": seed, "max_tokens": 24}
        texts.append(deployment.complete(prompt, **fields).text)
        assert texts[-1] == expected(prompt, **fields).text
    assert texts[0] != texts[1]


def test_workers_hold_nothing_afterwards(linked: tuple[Deployment, str]) -> None:
    deployment, _ = linked
    deployment.complete(prompt_of(40))
    for label in ("prefill", "decode"):
        until(lambda label=label: deployment.idle(label), f"{label} is idle")  # type: ignore[misc]


def test_model_depends_on_every_prompt_token(alone: Deployment) -> None:
    """Without this the tests above could pass with foreign KV."""
    prompt = prompt_of(200)
    clean = alone.complete(prompt, at="alone").text
    for position in (0, 77, 150, 199):
        changed = [*prompt]
        changed[position] = 33 + (changed[position] - 32) % 90
        assert alone.complete(changed, at="alone").text != clean, position
    assert len(set(clean)) > 4, "the answer does not repeat one token"
