"""Prompts given as embeddings, all or some of them: KV from the other server, and the answer that one server gives.

Most of them are rows of the model's own table, so that what the token ids say is what they must say.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import until

pytest.importorskip("vllm")

import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from .deployment import prompt_of  # noqa: E402
from .proxied_vllm import Pair, proxied  # noqa: E402
from .vllm_servers import Server  # noqa: E402

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
GREEDY = {"temperature": 0, "max_tokens": 8, "return_token_ids": True}
CHUNK = 256


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("embeddings")


@pytest.fixture(scope="module")
def pair(folder: Path) -> Iterator[Pair]:
    with proxied(folder, "pdlink", "--enable-prompt-embeds", "--trust-request-chat-template") as made:
        yield made


@pytest.fixture(scope="module")
def table(folder: Path, pair: Pair) -> torch.Tensor:
    """The embedding of each token."""
    return load_file(folder / "model" / "model.safetensors")["model.embed_tokens.weight"]


def encoded(rows: torch.Tensor) -> str:
    file = io.BytesIO()
    torch.save(rows.clone(), file)
    return base64.b64encode(file.getvalue()).decode()


def tokens(body: Any) -> list[list[int]]:
    return [choice["token_ids"] for choice in body["choices"]]


def received(pair: Pair) -> float:
    """Prompt tokens whose KV came from prefill."""
    return pair.sum_of("decode", "vllm:external_prefix_cache_hits_total")


def test_embeddings_are_answered_as_their_token_ids_by_one_server(pair: Pair, table: torch.Tensor) -> None:
    """Of more than two chunks of prefill's, and of less than a block."""
    for length in (600, 257, 20):
        ids = prompt_of(length, length)
        got = pair.ask("proxy", COMPLETIONS, {"prompt_embeds": encoded(table[ids]), **GREEDY})
        assert got.status == 200, got.body
        assert got.headers["X-Pdlink-KV"] == "transferred"
        wanted = pair.ask("prefill", COMPLETIONS, {"prompt": ids, **GREEDY})
        assert tokens(got.body) == tokens(wanted.body)


def test_two_that_differ_in_one_row_do_not_mix(pair: Pair, table: torch.Tensor) -> None:
    """At once and one after the other: token ids say nothing of either, and both have the prefix in common."""
    ids = prompt_of(500, 7)
    rows = [table[ids], table[ids].clone()]
    rows[1][470] = table[99]
    others = [ids, [*ids[:470], 99, *ids[471:]]]
    with ThreadPoolExecutor(4) as threads:
        asked = [{"prompt_embeds": encoded(each), **GREEDY} for each in rows * 2]
        answers = list(threads.map(lambda body: pair.ask("proxy", COMPLETIONS, body), asked))
    wanted = [tokens(pair.ask("prefill", COMPLETIONS, {"prompt": each, **GREEDY}).body) for each in others]
    assert wanted[0] != wanted[1]
    assert [tokens(answer.body) for answer in answers] == wanted * 2
    assert pair.sum_of("decode", "vllm:pdlink_transfer_failures_total") == 0


def test_lists_of_embeddings_and_prompts_make_a_transfer_each(pair: Pair, table: torch.Tensor) -> None:
    """Two of one length, which have equal token ids in vLLM; it answers embeddings first."""
    prompts = [prompt_of(*each) for each in ((300, 21), (300, 22), (200, 23))]
    before = received(pair)
    body = {"prompt_embeds": [encoded(table[ids]) for ids in prompts[:2]], "prompt": [prompts[2]], **GREEDY}
    got = pair.ask("proxy", COMPLETIONS, body)
    assert got.status == 200, got.body
    until(lambda: received(pair) == before + 300 + 300 + 200 - 3, "all but the last tokens came from prefill")
    assert tokens(got.body) == tokens(pair.ask("prefill", COMPLETIONS, {"prompt": prompts, **GREEDY}).body)


def test_a_stream_of_random_embeddings_is_that_of_one_server(pair: Pair, table: torch.Tensor) -> None:
    torch.manual_seed(3)
    body = {"prompt_embeds": encoded(torch.randn(333, table.shape[1])), **GREEDY}

    def said(at: str) -> str:
        return "".join(choice["text"] for event in pair.events(at, COMPLETIONS, body) for choice in event["choices"])

    assert said("proxy") == said("prefill")


def test_a_chat_with_embeddings_between_its_texts_is_that_of_one_server(pair: Pair, table: torch.Tensor) -> None:
    """The mixed prompts of 0.32. Two chats of equal token ids, with other embeddings between them."""
    answers = []
    for seed in (1, 2):
        part = {"type": "prompt_embeds", "data": encoded(table[prompt_of(200, seed)])}
        texts = [{"type": "text", "text": text} for text in ("What does this say? ", " Answer in one word.")]
        body = {"messages": [{"role": "user", "content": [texts[0], part, texts[1]]}], **GREEDY}
        got = pair.ask("proxy", CHAT, body)
        assert got.status == 200, got.body
        assert got.headers["X-Pdlink-KV"] == "transferred"
        wanted = pair.ask("prefill", CHAT, body)
        assert tokens(got.body) == tokens(wanted.body)
        answers.append(tokens(got.body))
    assert answers[0] != answers[1]


def test_a_store_has_embeddings_by_what_they_hold(pair: Pair, folder: Path, table: torch.Tensor) -> None:
    """A server alone. What is loaded are whole chunks of equal embeddings, whatever the ids say."""
    connector = {
        "kv_role": "kv_both",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {
            "name": "solo",
            "tiers": {"chunk_size": CHUNK, "load_if_faster": False, "max_local_cpu_size": 0.2},
        },
    }
    flags = ["--enforce-eager", "--no-enable-prefix-caching", "--enable-prompt-embeds"]
    server = Server("solo", folder / "model", folder / "solo.log", flags, connector)
    ids = prompt_of(800, 11)
    changed = [*ids[:600], 99, *ids[601:]]

    def loaded() -> float:
        return server.metric("vllm:external_prefix_cache_hits_total")

    with server.serving():
        for asked, num_loaded in ((ids, 0), (ids, 768), (changed, 512), (changed, 768), (prompt_of(800, 12), 0)):
            before = loaded()
            answer = server.complete(None, prompt_embeds=encoded(table[asked]), **GREEDY, ignore_eos=False)
            until(lambda: loaded() == before + num_loaded, f"{num_loaded} tokens are loaded")  # noqa: B023
            assert answer.tokens == tokens(pair.ask("prefill", COMPLETIONS, {"prompt": asked, **GREEDY}).body)
            until(server.holds_nothing, "all of it is kept")
