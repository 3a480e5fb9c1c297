"""Prefill context parallel servers: every such rank of vLLM's has all of the KV, and one of them sends it."""

from __future__ import annotations

import time
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pdlink.integrations.vllm_parts import host_copy, versions
from pdlink.integrations.vllm_parts.layout import UnsupportedCache
from pdlink.integrations.vllm_parts.requests import Scheduled
from pdlink.integrations.vllm_parts.settings import read
from tests.integrations.vllm_engine import DST, HEADS, NAMES, PROMPT, SIZE, SRC, Server
from tests.waiting import WAIT_S


@pytest.mark.parametrize("through_host", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_one_of_the_ranks_with_the_same_kv_sends_and_all_report(
    ranks: int, through_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """through_host: their caches are taken for ones on another device."""
    monkeypatch.setattr(versions, "content", lambda _: "digest")
    monkeypatch.setattr(host_copy, "is_needed", lambda tensors, _: through_host)
    with ExitStack() as opened:
        prefill, decode = Server("p", ranks=ranks, copies=2), Server("d", ranks=ranks, copies=1)
        for server in (prefill, decode):
            opened.callback(server.close)
        assert [len(rank._nodes) for rank, _ in prefill.ranks] == [1] * ranks + [0] * ranks
        assert all((rank.steps.host is not None) == through_host for rank, _ in (*prefill.ranks, *decode.ranks))
        prefill.book.arrived("p", {"transfer_id": "a", "leg": "prefill"}, PROMPT)
        peer = {"control": prefill.addresses()}
        decode.book.arrived("d", {"transfer_id": "a", "leg": "decode", "prefill": peer}, PROMPT)
        count, parked = decode.book.missing("d", 0)
        assert parked
        assert count == len(PROMPT) - 1
        decode.book.allocated("d", (DST,), count)
        decode.step()
        prefill.step([Scheduled("p", (tuple(SRC),), True, 0, len(PROMPT))])
        assert not any(prefill.reported), "vLLM still has the request"
        prefill.over.add("p")
        prefill.book.ended("p")
        deadline_s = time.monotonic() + WAIT_S
        while prefill.reported != [{"p"}] * 2 * ranks or decode.reported != [{"d"}] * ranks:
            assert time.monotonic() < deadline_s, (prefill.reported, decode.reported)
            prefill.step()
            decode.step()
            decode.ranks[0][0].steps.pause(0.01)
        for (_, theirs), (_, ours) in zip(prefill.ranks, decode.ranks, strict=False):
            for name in NAMES:
                sent, got = (
                    cache[name][blocks].transpose(1, 2).reshape(-1, HEADS, 2 * SIZE)[: len(PROMPT) - 1]
                    for cache, blocks in ((theirs, SRC), (ours, DST))
                )
                assert torch.equal(got, sent), name


def test_ranks_are_counted_as_vllm_counts_them() -> None:
    """Stages, copies in a stage, tensor parallel ranks in a copy."""

    def place_of(rank: int) -> Any:
        parallel = SimpleNamespace(
            rank=rank, tensor_parallel_size=2, pipeline_parallel_size=2, prefill_context_parallel_size=3
        )
        return versions.place(SimpleNamespace(parallel_config=parallel))

    places = [place_of(rank) for rank in range(12)]
    assert [place.of_all for place in places] == list(range(12))
    assert {place.num_all for place in places} == {12}
    assert [(place.stage, place.copy, place.rank) for place in places[5:9]] == [
        (0, 2, 1),
        (1, 0, 0),
        (1, 0, 1),
        (1, 1, 0),
    ]


@pytest.mark.parametrize(
    ("version", "receives", "more", "message"),
    [
        ((0, 31), False, {}, r"got 2 with vLLM 0\.31; expected 0\.32, where every rank keeps all KV"),
        ((0, 32), True, {}, r"got 2 for a server that receives KV; expected 1; take kv_role: kv_producer"),
        ((0, 32), False, {"tiers": True}, r"got 2 beside tiers; expected 1; remove tiers"),
        ((0, 32), False, {"decode": 2}, r"got 2 beside prefill_context_parallel_size: 2; expected 1"),
        ((0, 32), False, {}, None),
    ],
)
def test_what_is_not_carried_is_refused_at_start(
    version: tuple[int, int], receives: bool, more: dict[str, Any], message: str | None
) -> None:
    parallel = SimpleNamespace(prefill_context_parallel_size=2, decode_context_parallel_size=more.get("decode", 1))
    config = SimpleNamespace(parallel_config=parallel, kv_transfer_config=SimpleNamespace(is_kv_consumer=receives))
    cache = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=SimpleNamespace(), layer_names=[])])
    tiers = read({"tiers": {"max_local_cpu_size": 1}}).tiers if more.get("tiers") else None
    if message is None:
        versions.check_config(config, cache, version, tiers=tiers)
        return
    with pytest.raises(UnsupportedCache, match=message):
        versions.check_config(config, cache, version, tiers=tiers)
