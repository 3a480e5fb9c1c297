"""Decode context parallel servers: ranks of vLLM's that share the tokens of a cache out among them."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import torch

from pdlink.integrations.vllm_parts import host_copy, versions
from pdlink.integrations.vllm_parts.layout import UnsupportedCache
from pdlink.integrations.vllm_parts.requests import Scheduled
from tests.integrations.context_slots import slot_of
from tests.integrations.vllm_engine import NAMES, Engine
from tests.waiting import WAIT_S

if TYPE_CHECKING:
    from collections.abc import Sequence

BLOCKS, SIZE = 12, 4
TABLE = [7, 3, 9, 1, 11, 0, 8, 4, 6, 2, 10, 5]


class Case(NamedTuple):
    """Two servers: tensor and decode context parallel ranks of each, and what they are told."""

    prefill: tuple[int, int]
    decode: tuple[int, int]
    told: tuple[dict[str, Any], dict[str, Any]]
    heads: int = 0
    """0: latents."""
    receives: bool = True
    """Whether the prefill server may be a decode server as well."""


CASES = {
    "one rank of latents to two that share": Case((1, 1), (2, 2), ({"context_shards": 2}, {})),
    "two that take turns to two that share": Case(
        (2, 1), (2, 2), ({"context_shards": 2, "shards": 1}, {}), receives=False
    ),
    "two of latents to two pairs": Case((2, 1), (4, 2), ({"context_shards": 2}, {})),
    "two that share to one": Case((2, 2), (1, 1), ({}, {"context_shards": 2})),
    "two that share to two of latents": Case((2, 2), (2, 1), ({"shards": 2}, {"context_shards": 2})),
    "two that share to two that share": Case((2, 2), (2, 2), ({}, {})),
    "all heads to two pairs": Case((1, 1), (4, 2), ({"shards": 2, "context_shards": 2}, {}), heads=2),
    "two pairs to all heads": Case((4, 2), (1, 1), ({}, {"shards": 2, "context_shards": 2}), heads=2),
    "pairs to pairs": Case((4, 2), (4, 2), ({}, {}), heads=2),
}
PROMPT = list(range(91))


class Played:
    """A server, whose caches hold the tokens of `kv` that were filled in, and noise elsewhere."""

    def __init__(
        self,
        engine: str,
        ranks: tuple[int, int],
        interleave: int,
        block_tokens: int,
        case: Case,
        told: dict[str, Any],
    ) -> None:
        self.ranks, self.shared = ranks
        self.table = TABLE if engine == "p" else TABLE[::-1]
        self.interleave, self.block_tokens, self.heads = interleave, block_tokens, case.heads
        groups = self.ranks // self.shared
        mine = max(1, case.heads // groups)
        """Heads of a rank."""
        random = np.random.default_rng(5)
        shape = (BLOCKS, mine, block_tokens, 2 * SIZE) if case.heads else (BLOCKS, block_tokens, 2 * SIZE)
        self.caches = [
            {name: torch.from_numpy(random.random(shape, np.float32)) for name in NAMES} for _ in range(self.ranks)
        ]
        parallel = {
            "tensor_parallel_size": self.ranks,
            "decode_context_parallel_size": self.shared,
            "cp_kv_cache_interleave_size": interleave,
        }
        self.server = Engine(
            engine,
            self.caches,
            block_tokens=block_tokens,
            head_size=SIZE,
            latent=not case.heads,
            receives=case.receives or engine == "d",
            parallel=parallel,
            settings=told,
        )

    def rows(
        self, caches: Sequence[dict[str, torch.Tensor]], name: str, token: int
    ) -> list[tuple[slice, torch.Tensor]]:
        """Of each rank that has this token: which heads those are, and [head, element]. caches: of all ranks."""
        slot = slot_of(token, ranks=self.shared, interleave=self.interleave, block_tokens=self.block_tokens)
        found = []
        for rank in range(slot.rank, self.ranks, self.shared):
            cache = caches[rank][name]
            cache = cache if self.heads else cache[:, None]
            first = rank // self.shared * self.heads // (self.ranks // self.shared)
            found.append((slice(first, first + cache.shape[1]), cache[self.table[slot.block], :, slot.offset]))
        return found


def kv_of(heads: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(3)
    return {name: torch.rand(len(PROMPT), max(1, heads), 2 * SIZE, generator=random) for name in NAMES}


@pytest.mark.parametrize("interleave", [1, 4])
@pytest.mark.parametrize("cached", [0, 32])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("through_host", [False, True])
def test_ranks_that_share_tokens_out_send_and_receive_them(
    case: Case, cached: int, interleave: int, through_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt that is computed in chunks which end anywhere; of which decode has a part, or nothing.

    through_host: the caches are taken for ones on another device, into which whole blocks are copied.
    """
    monkeypatch.setattr(versions, "content", lambda _: "digest")
    monkeypatch.setattr(host_copy, "is_needed", lambda tensors, _: through_host)
    kv = kv_of(case.heads)
    told = [{**one, "context_interleave": interleave} if "context_shards" in one else dict(one) for one in case.told]
    with ExitStack() as opened:
        prefill = Played("p", case.prefill, interleave, 32 // case.prefill[1], case, told[0])
        opened.callback(prefill.server.close)
        decode = Played("d", case.decode, interleave, 16, case, told[1])
        opened.callback(decode.server.close)
        ask(prefill.server, decode.server, cached)
        before = [{name: cache.clone() for name, cache in caches.items()} for caches in decode.caches]
        blocks = -(-len(PROMPT) // 32)
        for start, end in ((0, 13), (13, 50), (50, 89), (89, 91)):
            for name in NAMES:
                for token in range(start, end):
                    for heads, row in prefill.rows(prefill.caches, name, token):
                        row[:] = kv[name][token, heads]
            given = tuple(TABLE[:blocks]) if not start else ()
            prefill.server.step([Scheduled("p", (given,), not start, start, end - start)])
        prefill.server.over.add("p")
        prefill.server.book.ended("p")
        wait(prefill.server, decode.server)
        assert not decode.server.reasons
        step = max(case.prefill[1], case.decode[1]) * interleave
        step = decode.block_tokens * decode.shared if through_host else step
        for name in NAMES:
            for token in range(cached, -(-(len(PROMPT) - 1) // step) * step):
                now, then = (decode.rows(caches, name, token) for caches in (decode.caches, before))
                for (heads, row), (_, old) in zip(now, then, strict=True):
                    assert token >= len(PROMPT) - 1 or torch.equal(row, kv[name][token, heads]), (name, token)
                    old[:] = row
        for were, are in zip(before, decode.caches, strict=True):
            assert all(torch.equal(were[name], are[name]) for name in NAMES), "and nothing else is written"


def ask(prefill: Engine, decode: Engine, cached: int) -> None:
    """Both legs come, and decode offers for what it lacks."""
    prefill.book.arrived("p", {"transfer_id": "a", "leg": "prefill"}, PROMPT)
    peer = {"control": prefill.addresses()}
    decode.book.arrived("d", {"transfer_id": "a", "leg": "decode", "prefill": peer}, PROMPT)
    count, parked = decode.book.missing("d", cached)
    assert parked
    assert count == len(PROMPT) - 1 - cached
    decode.book.allocated("d", (TABLE[::-1],), count)
    decode.step()


def wait(prefill: Engine, decode: Engine) -> None:
    """Until every rank of both has reported."""
    deadline_s = time.monotonic() + WAIT_S
    while not all(prefill.reported) or not all(decode.reported):
        assert time.monotonic() < deadline_s, (prefill.reported, decode.reported)
        prefill.step()
        decode.step()
        decode.ranks[0][0].steps.pause(0.01)


@pytest.mark.parametrize(
    ("told", "interleave"),
    [({}, 1), ({"context_shards": 2}, 4), ({"context_shards": 4}, 1), ({"shards": 2}, 1)],
    ids=["not told", "another interleave", "another number", "as many shards of heads"],
)
def test_servers_that_share_otherwise_refuse_each_other(
    told: dict[str, Any], interleave: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "content", lambda _: "digest")
    case = CASES["one rank of latents to two that share"]
    with ExitStack() as opened:
        prefill = Played("p", (1, 1), 1, 32, case, {**told, "timeouts": {"other_leg_s": 0.5}})
        opened.callback(prefill.server.close)
        decode = Played("d", (2, 2), interleave, 16, case, {})
        opened.callback(decode.server.close)
        before = [caches[name].clone() for caches in decode.caches for name in NAMES]
        ask(prefill.server, decode.server, 0)
        prefill.server.step([Scheduled("p", (tuple(TABLE[:3]),), True, 0, len(PROMPT))])
        prefill.server.over.add("p")
        prefill.server.book.ended("p")
        wait(prefill.server, decode.server)
        assert decode.server.reasons.keys() == {"d"}
        after = [caches[name] for caches in decode.caches for name in NAMES]
        assert all(map(torch.equal, before, after))


def test_heads_are_not_dealt_out_in_turns() -> None:
    """Two ranks with a head each cannot send one shard of both."""
    told = {"context_shards": 2, "shards": 1}
    with pytest.raises(UnsupportedCache, match="cannot be dealt out to 2 ranks"):
        Played("p", (2, 1), 1, 32, Case((2, 1), (2, 2), (told, {}), heads=2, receives=False), told)
