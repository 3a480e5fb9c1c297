"""Real vLLM servers that draft tokens ahead, with the KV of their drafts, and servers that keep KV in FP8.

The draft model of one pair is the model itself: each draft is accepted while its own KV is right, and hardly one
otherwise. Other pairs have an EAGLE head or a layer for multi-token prediction (MTP), with random weights, so that
nobody accepts a draft: what has arrived of their KV is compared with what was sent, by the checksums of its blocks.

Run with `make test-vllm`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.e2e.engine_servers import prompt_of, save_eagle_head, save_model, save_mtp_model, until  # noqa: E402
from tests.e2e.vllm_servers import Pair, Server  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

LENGTHS = [16, 33, 100, 513, 1200]
FLAGS = ["--enforce-eager", "--block-size", "32", "--max-num-batched-tokens", "256", "--max-model-len", "4096"]


def speculating(method: str, model: Path, num_tokens: int = 3) -> list[str]:
    config = {"method": method, "model": str(model), "num_speculative_tokens": num_tokens}
    return ["--speculative-config", json.dumps(config)]


@pytest.mark.parametrize("kind", ["draft_model", "eagle", "mtp", "fp8"])
def test_tokens_and_accepted_drafts_equal_those_of_one_server(kind: str, tmp_path: Path) -> None:
    (save_mtp_model if kind == "mtp" else save_model)(tmp_path / "model")
    save_eagle_head(tmp_path / "head")
    flags = {
        "draft_model": speculating("draft_model", tmp_path / "model"),
        "eagle": speculating("eagle", tmp_path / "head"),
        "mtp": speculating("mtp", tmp_path / "model", 1),
        "fp8": ["--kv-cache-dtype", "fp8"],
    }[kind]

    def accepted(server: Server) -> float:
        return server.metric("vllm:spec_decode_num_accepted_tokens_total")

    with Server("one", tmp_path / "model", tmp_path / "one.log", FLAGS + flags).serving() as one:
        expected = [one.complete(prompt_of(length, length)).tokens for length in LENGTHS]
        drafts = accepted(one)
    assert (drafts > 2 * len(LENGTHS)) == (kind == "draft_model")
    pair = Pair.of(tmp_path, prefill_flags=FLAGS + flags, decode_flags=FLAGS + flags, verify="all", on_failure="fail")
    try:
        assert [pair.tokens(prompt_of(length, length)) for length in LENGTHS] == expected
        assert pair.transferred() == sum(LENGTHS) - len(LENGTHS), "all but the last tokens came from prefill"
        assert accepted(pair.decode) == drafts
        until(pair.prefill.holds_nothing, "prefill holds nothing")
        until(pair.decode.holds_nothing, "decode holds nothing")
    finally:
        pair.stop()
