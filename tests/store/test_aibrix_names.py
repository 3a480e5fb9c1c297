"""Callers of AIBrix' manager find its verbs: prefix and query, statuses, handles of blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from pdlink.integrations.aibrix import KVCacheManager, StatusCodes

from .test_cache import CHUNK, HEAD_NBYTES, HEADS, LAYERS, PROMPT, Pages

if TYPE_CHECKING:
    from collections.abc import Iterator

SHAPE = (LAYERS, 2, CHUNK, HEADS * HEAD_NBYTES // 2)
PREFIX, QUERY = PROMPT[: 2 * CHUNK], PROMPT[2 * CHUNK :]  # two blocks; four, and four tokens


class Theirs:
    """A handle over memory that is not ours."""

    def __init__(self, blocks: int, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        self.tensors = [torch.randn(SHAPE, generator=random).to(torch.float16) for _ in range(blocks)]

    def to_tensors(self) -> list[torch.Tensor]:
        return self.tensors


@pytest.fixture
def manager() -> Iterator[KVCacheManager]:
    with Pages() as pages:
        yield KVCacheManager(pages.cache, torch.float16)


def test_what_is_put_comes_back_by_copy_and_without_one(manager: KVCacheManager) -> None:
    first, rest = Theirs(2, 1), Theirs(4, 2)
    assert manager.put(None, PREFIX, first).get() == 2 * CHUNK
    assert manager.put(PREFIX, QUERY, rest).get() == 4 * CHUNK
    into = Theirs(4, 3)
    assert manager.get(PREFIX, QUERY, into).get() == 4 * CHUNK
    assert all(map(torch.equal, into.tensors, rest.tensors))
    num_tokens, handle = manager.acquire(None, PROMPT).get() or (0, None)
    assert handle is not None
    assert (num_tokens, len(handle)) == (6 * CHUNK, 6)
    assert all(map(torch.equal, handle.to_tensors(), first.tensors + rest.tensors))
    handle.truncate(2)
    assert len(handle) == 2
    assert handle.release()
    assert manager.cache._store.state().leases == []


def test_a_block_is_filled_in_the_caches_own_memory(manager: KVCacheManager) -> None:
    manager.put(None, PREFIX, Theirs(2, 1))
    handle = manager.allocate_for(PREFIX[:CHUNK], PROMPT[CHUNK:]).get()
    assert handle is not None
    assert len(handle) == 5, "also the block that is here already"
    mine = Theirs(5, 4).tensors
    for block, values in zip(handle.to_tensors(), mine, strict=True):
        block.copy_(values)
    assert manager.exists(PREFIX, QUERY).is_not_found(), "before it is put"
    assert manager.put(PREFIX[:CHUNK], PROMPT[CHUNK:], handle).get() == 5 * CHUNK
    into = Theirs(5, 5)
    manager.get(PREFIX[:CHUNK], PROMPT[CHUNK:], into)
    assert torch.equal(into.tensors[0], Theirs(2, 1).tensors[1]), "what was here stays"
    assert all(map(torch.equal, into.tensors[1:], mine[1:]))


def test_what_is_not_there_or_cannot_be_is_a_status(manager: KVCacheManager) -> None:
    assert manager.acquire(None, PROMPT).is_not_found()
    assert manager.get(None, PROMPT, Theirs(6, 1)).is_not_found()
    assert manager.exists(PREFIX, QUERY).is_not_found()
    status = manager.put(PROMPT[:5], QUERY, Theirs(4, 1))
    assert status.is_invalid()
    with pytest.raises(Exception, match="prefix: got 5 tokens; expected multiples of the block size"):
        status.raise_if_not_ok()
    assert manager.acquire(None, [-1] * 64).error_code is StatusCodes.INVALID
    assert manager.put(None, [1] * 3, Theirs(0, 1)).is_invalid(), "less than a block"


def test_no_room_is_out_of_memory_or_less(manager: KVCacheManager) -> None:
    manager.cache.freeze()
    assert manager.allocate_for(None, PROMPT).is_out_of_memory()


def test_delete_takes_the_query_and_leaves_the_prefix(manager: KVCacheManager) -> None:
    manager.put(None, PROMPT, Theirs(6, 1))
    assert manager.delete(PREFIX, QUERY).is_ok()
    assert manager.exists(None, PROMPT).get() == len(PREFIX)
    assert manager.flush().is_ok()
    assert manager.prefetch(None, PROMPT).is_ok()


def test_keys_of_chunks_name_what_is_before_and_after(manager: KVCacheManager) -> None:
    keys = list(manager.cache_chunk_keys(PREFIX, QUERY))
    assert len(keys) == 4
    assert keys[0] == (PREFIX, QUERY[:CHUNK], QUERY[CHUNK : 2 * CHUNK], PROMPT[: 3 * CHUNK])
    assert keys[-1][2] is None
    assert manager.block_size == manager.chunk_size == CHUNK
    assert manager.feature.zero_copy


def test_a_get_into_wrong_tensors_gives_its_lease_back(manager: KVCacheManager) -> None:
    class Short:
        def to_tensors(self) -> list[torch.Tensor]:
            return [torch.zeros(3)]

    manager.put(None, PROMPT, Theirs(6, 1))
    status = manager.get(None, PROMPT, Short())
    assert status.is_invalid()
    with pytest.raises(Exception, match=r"kv_tensors: got one of shape \(3,\)"):
        status.raise_if_not_ok()
    assert manager.cache._store._catalog.num_leases == 0
