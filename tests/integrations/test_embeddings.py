"""What names the KV of prompts that are given as embeddings, from vLLM's own requests."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM and torch warn about each other while they are imported
    pytest.importorskip("vllm.v1.request", exc_type=ImportError)
    pytest.importorskip("blake3")

import torch  # noqa: E402
from vllm import SamplingParams  # noqa: E402
from vllm.v1.request import Request  # noqa: E402

from pdlink.integrations.vllm_parts import versions  # noqa: E402
from pdlink.integrations.vllm_parts.embeddings import Embeddings  # noqa: E402
from pdlink.kv import hashing  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

ROWS = torch.arange(40 * 8, dtype=torch.float32).reshape(40, 8)
CHUNK = 16
takes_mixed = pytest.mark.skipif(
    "prompt_is_token_ids" not in Request.__init__.__code__.co_varnames, reason="vLLM takes no mixed prompts"
)
SEED = b"s" * hashing.KEY_NBYTES


def request(rows: torch.Tensor, ids: list[int] | None = None, is_ids: list[bool] | None = None) -> Any:
    more = {} if is_ids is None else {"prompt_is_token_ids": is_ids}
    return Request("r", ids, SamplingParams(max_tokens=4), None, prompt_embeds=rows, **more)


def words(rows: torch.Tensor, ids: list[int] | None = None, is_ids: list[bool] | None = None) -> tuple[str, ...]:
    given = Embeddings.of(request(rows, ids, is_ids))
    assert given is not None
    return given.words


def keys(rows: torch.Tensor, ids: list[int] | None = None, is_ids: list[bool] | None = None) -> list[bytes]:
    """Of the chunks of a store."""
    made = request(rows, ids, is_ids)
    given = Embeddings.of(made)
    assert given is not None
    return hashing.chain(SEED, versions.prompt_of(made), CHUNK, given.media(CHUNK))


def other_in(row: int) -> torch.Tensor:
    changed = ROWS.clone()
    changed[row, 7] += 1
    return changed


def test_a_prompt_of_token_ids_has_no_embeddings() -> None:
    assert Embeddings.of(Request("r", [1, 2], SamplingParams(), None)) is None


def test_a_transfer_is_named_by_all_that_the_embeddings_hold() -> None:
    assert words(ROWS) == words(ROWS.clone())
    others = [other_in(0), other_in(39), ROWS[:39], ROWS.view(torch.int32), ROWS.reshape(80, 4), ROWS.reshape(20, 16)]
    assert len({words(each) for each in (ROWS, *others)}) == 1 + len(others)


def test_keys_of_chunks_are_equal_as_far_as_the_embeddings_are() -> None:
    assert len(keys(ROWS)) == 2
    assert keys(ROWS) == keys(ROWS[:32]) == keys(other_in(32)), "the third chunk is not whole"
    assert keys(other_in(31))[0] == keys(ROWS)[0]
    assert keys(other_in(31))[1] != keys(ROWS)[1]
    assert not set(keys(other_in(0))) & set(keys(ROWS)), "what follows depends on it"
    assert not set(keys(ROWS.view(torch.int32))) & set(keys(ROWS)), "equal bytes, other numbers"
    assert not set(hashing.chain(SEED, [0] * 40, CHUNK)) & set(keys(ROWS)), "vLLM's placeholders are token ids, too"


def test_the_key_of_an_answers_chunk_depends_on_the_embeddings_in_it() -> None:
    """`save_decode_cache`: the prompt ends inside of a chunk that the answer fills."""
    last = []
    for rows in (ROWS, other_in(39)):
        given = Embeddings.of(request(rows))
        assert given is not None
        last.append(hashing.chain(SEED, [0] * 40 + [7] * 8, CHUNK, given.media(CHUNK))[2])
    assert last[0] != last[1]


@takes_mixed
def test_of_a_mixed_prompt_both_kinds_count_and_where_they_stand() -> None:
    """A chat with embeddings among its parts: rows of token ids hold zeros, ids of embeddings are one placeholder."""
    is_ids = [not 10 <= token < 20 for token in range(40)]
    ids = [511 if not mine else token for token, mine in enumerate(is_ids)]
    rows = torch.where(torch.tensor(is_ids)[:, None], 0.0, ROWS)
    made = request(rows, ids, is_ids)
    assert versions.prompt_of(made)[8:22] == [8, 9, *[0] * 10, 20, 21], "no placeholder, which no vocabulary has"
    moved = [not 11 <= token < 21 for token in range(40)]
    assert words(rows, ids, is_ids) == words(rows.clone(), list(ids), list(is_ids))
    assert words(rows, ids, is_ids) != words(rows, ids, moved)
    changed = rows.clone()
    changed[17] += 1
    assert words(changed, ids, is_ids) != words(rows, ids, is_ids)
    assert keys(changed, ids, is_ids)[0] == keys(rows, ids, is_ids)[0], "the second run's part of chunk 2"
    assert keys(changed, ids, is_ids)[1] != keys(rows, ids, is_ids)[1]
    other_ids = [*ids[:3], 99, *ids[4:]]
    assert not set(keys(rows, other_ids, is_ids)) & set(keys(rows, ids, is_ids))


def test_rows_that_do_not_lie_side_by_side_are_read_as_they_count() -> None:
    assert words(torch.cat([ROWS, ROWS], dim=1)[:, :8]) == words(ROWS)


def test_the_last_token_of_embeddings_can_be_left_to_decode() -> None:
    made = request(ROWS)
    versions.leave_last_token(made)
    assert len(made.prompt_embeds) == made.num_prompt_tokens == made.num_tokens == 39
    assert made.prompt_token_ids is None


@takes_mixed
def test_all_that_a_mixed_prompt_is_made_of_becomes_shorter() -> None:
    """vLLM compares the lengths."""
    made = request(ROWS, list(range(40)), [False] * 39 + [True])
    versions.leave_last_token(made)
    assert [len(each) for each in (made.prompt_embeds, made.prompt_token_ids, made.prompt_is_token_ids)] == [39] * 3
    assert list(versions.prompt_of(made)) == [0] * 39


def test_what_was_computed_for_embeddings_and_their_answer_has_an_id_for_each_token() -> None:
    made = request(ROWS)
    made.append_output_token_ids([5, 6])
    made.status = SimpleNamespace(name="FINISHED_STOPPED")
    made.num_computed_tokens = 41
    assert list(versions.computed_tokens(made)) == [0] * 40 + [5]
