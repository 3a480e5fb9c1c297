"""Pushes in parts: large ones are cut, small ones of the same moment share a part. Values only, no I/O.

Each part costs a native call and a wake-up. A push (some tokens of one layer) has landed when all its parts have.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from pdlink.kv.plan import bind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdlink.endpoint.outgoing import Outgoing
    from pdlink.kv.plan import Plan, Template
    from pdlink.protocol.actions import Push

SHARED_NBYTES = 2**20
"""Size limit of a part that several pushes share. Moving as many bytes takes 0.1 ms or more; handing over a part
takes up to 0.05 ms (measured, 2 cores)."""


@dataclass(slots=True, eq=False)
class Flight:
    """One push on its way."""

    transfer: Outgoing
    push: Push
    asked_s: float
    """When the machine asked for it."""
    left: int = 0
    """Parts that wait or are in flight. A lost part counts until the fence."""
    submitted_s: float = 0.0
    """When its first part was handed to the transport."""
    nbytes: int = 0
    """Of the parts that have landed."""
    whole: bool = True
    """False once a waiting part of it was taken back."""

    def take_back(self) -> None:
        """A part of it will not go."""
        self.left -= 1
        self.whole = False


class Slice(NamedTuple):
    """Tokens [start, end) of a flight's layer."""

    flight: Flight
    start: int
    end: int
    nbytes: int


Job = list[Slice]
"""What is in a part: one slice of a large push, or several small pushes of one transfer."""


def jobs_of(
    templates: Sequence[Template], index_of: Sequence[int], flights: Sequence[Flight], part_nbytes: int
) -> list[tuple[int, Job]]:
    """Jobs with their bytes: large pushes cut, small pushes joined.

    templates: by group. index_of: by layer, which one of its group it is.
    """
    most_nbytes = min(SHARED_NBYTES, part_nbytes)
    jobs: list[tuple[int, Job]] = []
    shared: Job = []
    shared_nbytes = 0
    for flight in flights:
        push = flight.push
        template = templates[push.group]
        token_nbytes = template.layers[index_of[push.layer]].token_nbytes
        nbytes = (push.end - push.start) * token_nbytes
        if nbytes > most_nbytes:
            block_tokens = math.lcm(template.src.block_tokens, template.dst.block_tokens)
            ranges = cut(push.start, push.end, token_nbytes, block_tokens, part_nbytes)
            flight.left = len(ranges)
            for start, end in ranges:
                piece = Slice(flight, start, end, (end - start) * token_nbytes)
                jobs.append((piece.nbytes, [piece]))
            continue
        if shared and shared_nbytes + nbytes > most_nbytes:
            jobs.append((shared_nbytes, shared))
            shared, shared_nbytes = [], 0
        flight.left = 1
        shared.append(Slice(flight, push.start, push.end, nbytes))
        shared_nbytes += nbytes
    if shared:
        jobs.append((shared_nbytes, shared))
    return jobs


def cut(start: int, end: int, token_nbytes: int, block_tokens: int, part_nbytes: int) -> list[tuple[int, int]]:
    """[start, end) in about equal ranges; all but the first begin at multiples of `block_tokens`.

    As few ranges as `part_nbytes` allows; rounding may make one larger, by less than a block.
    """
    count = -(-(end - start) * token_nbytes // part_nbytes)
    if count <= 1:
        return [(start, end)]
    step = -(-(end - start) // count // block_tokens) * block_tokens
    first = start // block_tokens * block_tokens + step
    edges = [start, *range(first, end, step), end]
    return list(zip(edges, edges[1:], strict=False))


def plan_of(template: Template, push: Push, start: int, end: int) -> Plan:
    """Byte runs of tokens [start, end) of a push."""
    src_tokens, dst_tokens = template.src.block_tokens, template.dst.block_tokens
    first_dst = start // dst_tokens - push.first // dst_tokens
    dst_blocks = push.offer.blocks[push.group][first_dst:]
    return bind(template, push.blocks[start // src_tokens :], dst_blocks, start, end)
