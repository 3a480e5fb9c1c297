"""Real vLLM servers that keep prompts of models with windows, or with recurrent states, in a store.

What is loaded can be spoiled in a group of layers: the tokens compared here depend on every group. vLLM's own
prefix cache is emptied before a prompt is asked for again, so what is not computed comes from the store.

Run with `make test-vllm`.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch  # noqa: E402

from tests.e2e.engine_servers import post, prompt_of, until  # noqa: E402
from tests.e2e.hybrid_models import save_recurrent_model, save_window_model  # noqa: E402
from tests.e2e.test_vllm_hybrid import SPOILING  # noqa: E402
from tests.e2e.test_vllm_store import loaded, tiers_of  # noqa: E402
from tests.e2e.vllm_servers import Pair, Server  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

FLAGS = ["--enforce-eager", "--max-model-len", "4096", "--enable-prefix-caching"]
PACKS_BLOCKS = torch.cpu._is_amx_tile_supported()
"""vLLM's attention in bfloat16 does then, and records are whole blocks."""
DEV = {"VLLM_SERVER_DEV_MODE": "1"}
"""For `/reset_prefix_cache`."""


@dataclass(frozen=True)
class Kind:
    save: Any
    flags: list[str]
    chunk: int
    """Tokens of a record. Prefill computes 256 at a time."""
    lengths: tuple[int, ...]
    num_groups: int
    tight: list[str]
    """Too few blocks for the answers of many prompts."""
    at_once: bool = True
    """Answers do not depend on what else is computed in a step: not so in bfloat16."""


KINDS = {
    "windows": Kind(
        save_window_model,
        ["--block-size", "32", "--max-num-batched-tokens", "256"],
        64,
        (64, 65, 129, 257, 513, 1200, 2600),
        3,
        ["--num-gpu-blocks-override", "160", "--no-scheduler-reserve-full-isl"],
    ),
    # With AMX in blocks that only its kernel can read.
    "windows in bfloat16": Kind(
        save_window_model,
        ["--block-size", "32", "--max-num-batched-tokens", "256", "--dtype", "bfloat16"],
        64,
        (257, 513, 1025, 2561),
        3,
        [],
        at_once=False,
    ),
    # vLLM makes a block of 1,152 tokens: as long as a state. The last token of each prompt is a step of its own.
    "states": Kind(
        save_recurrent_model,
        ["--block-size", "128", "--max-num-batched-tokens", "256", "--dtype", "bfloat16"],
        1152 if PACKS_BLOCKS else 128,
        (257, 513, 1153, 2305),
        2,
        [],
        at_once=False,
    ),
}


@dataclass
class Kept:
    """A server with a store, and the answers of one without any connector."""

    kind: Kind
    server: Server
    place: Path
    spoil: Path
    alone: dict[int, list[list[int]]]
    """By length of the prompt, which is its seed."""

    @property
    def num_threads(self) -> int:
        """That ask at once."""
        return len(self.alone) if self.kind.at_once else 1

    def again(self, length: int, **fields: Any) -> list[list[int]]:
        """The answer to a prompt of which vLLM's own blocks have nothing."""
        until(self.server.holds_nothing, "the server holds nothing")
        forget(self.server)
        return self.server.complete(prompt_of(length, length), **fields).tokens

    def hit(self, length: int) -> int:
        """Tokens of a prompt that a store has once it was computed."""
        return (length - 1) // self.kind.chunk * self.kind.chunk


def forget(server: Server) -> None:
    """Empty vLLM's own prefix cache."""
    until(lambda: post(f"{server.url}/reset_prefix_cache", {}).body.get("success"), "the prefix cache is empty")


def connector(place: Path, kind: Kind, name: str) -> dict[str, Any]:
    return {
        **SPOILING,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "fail",  # nothing of these tests may fail
        "kv_connector_extra_config": {"name": name, "tiers": tiers_of(place, chunk_size=kind.chunk)},
    }


@pytest.fixture(scope="module", params=list(KINDS))
def kept(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept]:
    kind = KINDS[request.param]
    place = tmp_path_factory.mktemp(request.param)
    kind.save(place / "model")
    spoil = place / "spoil"
    spoil.write_text("")
    flags = [*FLAGS, *kind.flags]
    single = Server("alone", place / "model", place / "alone.log", flags).start()
    try:
        single.wait_ready()
        alone = {length: single.complete(prompt_of(length, length)).tokens for length in kind.lengths}
    finally:
        single.kill()
    environment = DEV | {"PDLINK_TEST_SPOIL": str(spoil)}
    ours = connector(place, kind, "solo")
    server = Server("solo", place / "model", place / "solo.log", flags, ours, environment=environment)
    try:
        server.start().wait_ready()
        yield Kept(kind, server, place, spoil, alone)
    finally:
        server.kill()


def test_a_prompt_that_was_computed_once_is_loaded(kept: Kept) -> None:
    for length in kept.kind.lengths:
        before = loaded(kept.server)
        assert kept.again(length) == kept.alone[length], length
        assert loaded(kept.server) == before
        assert kept.again(length) == kept.alone[length], length
        assert loaded(kept.server) == before + kept.hit(length)


def test_tokens_depend_on_what_is_loaded_of_every_group(kept: Kept) -> None:
    length = kept.kind.lengths[-1]
    for group in range(kept.kind.num_groups):
        kept.spoil.write_text(str(group))
        spoiled = kept.again(length, max_tokens=24)
        kept.spoil.write_text("")
        right = kept.again(length, max_tokens=24)
        assert spoiled != right, group
        assert [right[0][:12]] == kept.alone[length]


def test_what_vllm_has_of_a_prompt_is_not_loaded_and_the_rest_is(kept: Kept) -> None:
    """A prefix of the longest prompt is in vLLM's blocks."""
    length, part = kept.kind.lengths[-1], kept.kind.lengths[-2]
    until(kept.server.holds_nothing, "the server holds nothing")
    forget(kept.server)
    before = loaded(kept.server)
    first = kept.server.complete(prompt_of(length, length)[:part])
    assert first.status == 200
    mine = loaded(kept.server) - before
    assert kept.server.complete(prompt_of(length, length)).tokens == kept.alone[length]
    assert 0 < loaded(kept.server) - before - mine < kept.hit(length)


def test_many_at_once_do_not_mix(kept: Kept) -> None:
    prompts = {length: prompt_of(length, length) for length in kept.kind.lengths}
    for _ in range(2):
        until(kept.server.holds_nothing, "the server holds nothing")
        forget(kept.server)
        with ThreadPoolExecutor(kept.num_threads) as threads:
            answers = dict(zip(prompts, threads.map(kept.server.complete, prompts.values()), strict=True))
        assert {length: answer.tokens for length, answer in answers.items()} == kept.alone


def test_what_was_kept_outlives_sigkill(kept: Kept) -> None:
    length = kept.kind.lengths[-1]
    assert kept.server.complete(prompt_of(length, length)).tokens == kept.alone[length]
    until(kept.server.holds_nothing, "all of it is kept")
    written = ("vllm:pdlink_tier_records_total", 'call="put"')
    until(lambda: kept.server.metric(*written) >= length // kept.kind.chunk, "the disk has it")
    kept.server.kill()
    kept.server.start().wait_ready()
    assert kept.server.complete(prompt_of(length, length)).tokens == kept.alone[length]
    assert loaded(kept.server) == kept.hit(length)


def test_preempted_prompts_are_right_and_beside_pd_too(kept: Kept) -> None:
    """A pair of which both have a store, and decode is short of blocks. Warm in the end."""
    kept.server.kill()
    place, kind = kept.place, kept.kind
    prompts = {length: prompt_of(length, length) for length in kind.lengths}
    flags = [*FLAGS, *kind.flags]
    pair = Pair.of(
        place,
        prefill_flags=flags,
        decode_flags=[*flags, *kind.tight],
        verify="all",
        store=tiers_of(place, chunk_size=kind.chunk),
        decode_store=tiers_of(place, chunk_size=kind.chunk),
        environment=DEV | {"PDLINK_TEST_SPOIL": str(kept.spoil)},
        decode_connector=SPOILING,
    )
    try:
        for turn in range(3):
            for server in (pair.prefill, pair.decode):
                until(server.holds_nothing, f"{server.name} holds nothing")
                forget(server)
            # The blocks of more could all be held by loads that wait for one more each: vLLM is told not to reserve.
            with ThreadPoolExecutor(min(kept.num_threads, 3)) as threads:
                answers = dict(zip(prompts, threads.map(pair.tokens, prompts.values()), strict=True))
            assert answers == kept.alone, turn
        assert loaded(pair.prefill) > 0, "prefill has computed all of it again"
        assert pair.decode.metric("vllm:pdlink_transfer_failures_total") == 0
        alone = [pair.decode.complete(prompt, max_tokens=200) for prompt in prompts.values()]
        with ThreadPoolExecutor(len(prompts)) as threads:
            asked = partial(pair.decode.complete, max_tokens=200)
            assert [answer.status for answer in threads.map(asked, prompts.values())] == [200] * len(prompts)
        assert {length: [answer.tokens[0][:12]] for length, answer in zip(prompts, alone, strict=True)} == kept.alone
        if kind.tight:
            assert pair.decode.metric("vllm:num_preemptions_total") > 0, "there was room for all prompts"
    finally:
        pair.stop()
