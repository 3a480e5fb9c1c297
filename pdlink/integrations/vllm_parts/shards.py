"""Which parts of a server's KV travel by themselves: its shards, and which of them a rank has.

A shard is a part of the KV heads of the layers of one pipeline stage, or of that part those tokens that a decode
context parallel rank keeps (`contexts.py`), and has a node of its own. Both servers count in as many stages and
parts, whichever ranks hold them, so shard s of prefill sends to shard s of decode.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdlink.integrations.vllm_parts.layout import UnsupportedCache

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Of a rank among those of its server."""

    stage: int
    num_stages: int
    rank: int
    """In its stage. Ranks that share tokens out count as one."""
    num_ranks: int
    """Tensor parallel: of a stage, counted likewise."""
    copy: int = 0
    """Prefill context parallel: which of the ranks that have the same KV, all of it. The first one sends."""
    num_copies: int = 1
    context: int = 0
    """Decode context parallel: which of the ranks that share the tokens of the same heads out."""
    num_contexts: int = 1

    @property
    def of_all(self) -> int:
        """Its number among all ranks, as vLLM counts them."""
        before = (self.stage * self.num_copies + self.copy) * self.num_ranks + self.rank
        return before * self.num_contexts + self.context

    @property
    def num_all(self) -> int:
        return self.num_stages * self.num_copies * self.num_ranks * self.num_contexts


@dataclass(frozen=True, slots=True)
class Shard:
    number: int
    """Among those of the server."""
    stage: int
    part: int
    """Of the heads that the rank has."""
    context: int = 0
    """Of the tokens of these."""


def dealt(rank: int, num_ranks: int, num_parts: int, what: str = "shards") -> range:
    """The parts that a rank holds. Raises UnsupportedCache if they cannot be dealt out evenly."""
    each, left = divmod(num_parts, num_ranks)
    if left or not each:
        raise UnsupportedCache(
            f"{what}: got {num_parts}, which cannot be dealt out to {num_ranks} ranks; expected multiples of "
            f"{num_ranks}; set the larger number of both servers on both"
        )
    return range(rank * each, (rank + 1) * each)


def shards_of(
    place: RankPlace, num_stages: int, num_parts: int, num_contexts: int = 1, *, sends_alike: bool = False
) -> list[Shard]:
    """The shards of a rank, ascending; none of one that has another's KV.

    num_stages: in which the layers travel. num_parts: in which the heads of a stage do. num_contexts: in which the
    tokens of those do. sends_alike: whether all ranks of a stage have all tokens of the same heads, and only send:
    then parts of tokens are dealt out to them, too. Raises UnsupportedCache.
    """
    stages = dealt(place.stage, place.num_stages, num_stages, "stages") if not place.copy else ()
    if sends_alike and place.num_contexts == 1 and num_parts % place.num_ranks:
        each = num_parts * num_contexts
        mine = dealt(place.rank, place.num_ranks, each, "shards x context_shards")
        return [Shard(stage * each + one, stage, 0, one % num_contexts) for stage in stages for one in mine]
    parts = dealt(place.rank, place.num_ranks, num_parts)
    contexts = range(num_contexts) if place.num_contexts == 1 else (place.context,)
    return [
        Shard((stage * num_parts + part) * num_contexts + context, stage, part - parts.start, context)
        for stage in stages
        for part in parts
        for context in contexts
    ]


def by_stage(
    names: Sequence[str], mine: Sequence[int], num_stages: int, stage_of: Callable[[str, int], int]
) -> dict[int, list[str]]:
    """The layers of a rank, by the stages in which they travel.

    mine: stages of this rank. stage_of: of a layer's name, among so many. Raises UnsupportedCache for layers that
    would travel in a stage of another rank, and for stages without layers.
    """
    if len(mine) == 1:  # its layers are what its engine says
        return {mine[0]: list(names)}
    found: dict[int, list[str]] = {stage: [] for stage in mine}
    for name in names:
        stage = stage_of(name, num_stages)
        if stage not in found:
            raise UnsupportedCache(
                f"stages: got {num_stages}, of which {stage} has layer {name}, and this rank has {list(mine)}; "
                "expected stages that begin where this server's begin; "
                "use the same number of pipeline stages on both servers"
            )
        found[stage].append(name)
    empty = [stage for stage, layers in found.items() if not layers]
    if empty:
        raise UnsupportedCache(f"stages: got {num_stages}, of which {empty} have no layer with KV; take fewer")
    return found
