"""Who runs next: queues of requests, their blocks, and the tokens of the next forward pass.

A request moves waiting → (awaiting KV →) running → gone. It is admitted only when every block it can ever need is
there, so that a running request never waits for memory and none is ever preempted; requests are admitted in order of
arrival. Of a pass's tokens, one goes to each decoding request first and the rest to prompts in order, in chunks:
a long prompt delays the others by one chunk at most.

All of it belongs to the engine's thread; only the pool is shared.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

import torch

from pdlink.errors import PoolExhausted
from pdlink.kv import hashing

if TYPE_CHECKING:
    from pdlink.engine.answer import Detokenizer
    from pdlink.engine.request import GenerationRequest
    from pdlink.memory.blocks import BlockPool


@dataclass(slots=True, eq=False)
class Sequence:
    request: GenerationRequest
    request_id: str
    num_prompt: int
    """Tokens of the prompt."""
    detokenizer: Detokenizer
    tokens: list[int]
    """Prompt, then answer."""
    chain: hashing.Chain
    """Names the full blocks of `tokens`, as far as names are needed."""
    external_end: int
    """Prompt tokens [0, external_end) come from elsewhere; 0 once they are here or have failed."""
    awaits_lookup: bool = False
    """Others may be admitted before it: look-ups are short."""
    num_computed: int = 0
    """Tokens whose KV is in the cache for all layers."""
    num_cached: int = 0
    """Prompt tokens that were in the cache at admission, or that a source had in advance (`Engine.kv_ends`)."""
    blocks: list[int] = field(default_factory=list)
    """Empty while waiting, except for blocks that were complete when the rest of the KV failed."""
    table: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    num_named: int = 0
    """Leading blocks whose name the pool has been told."""
    arriving: bool = False
    """Whether its external KV arrives layer by layer, and no pass has begun on it."""
    given_token: int | None = None
    """First token of the answer, where the whole prompt's KV arrives."""
    early: EarlyPass | None = None

    @property
    def is_all_external(self) -> bool:
        """Whether nothing of the prompt is computed here, nor the first token."""
        return self.external_end == self.num_prompt

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt


@dataclass(frozen=True, slots=True)
class EarlyPass:
    """A pass that was computed while KV arrived. It counts once `kv_arrived` confirms all of that KV."""

    first_token: int
    """What it was computed from."""
    logits: torch.Tensor


@dataclass(frozen=True, slots=True)
class PassWork:
    """Tokens [start, end) of a sequence, to be computed in the next pass."""

    sequence: Sequence
    start: int
    end: int


class Scheduler:
    def __init__(
        self,
        pool: BlockPool,
        *,
        block_tokens: int,
        max_batched_tokens: int,
        max_running: int,
        share_prefixes: bool,
    ) -> None:
        self._pool = pool
        self._block_tokens = block_tokens
        self._max_batched_tokens = max_batched_tokens
        self._max_running = max_running
        self._share_prefixes = share_prefixes
        self.waiting: deque[Sequence] = deque()
        self.awaiting_kv: dict[str, Sequence] = {}
        self.prefilling: deque[Sequence] = deque()
        self.decoding: deque[Sequence] = deque()

    def blocks_for(self, request: GenerationRequest) -> int:
        """Blocks of the prompt and the longest answer."""
        return -(-(len(request.prompt_token_ids) + request.sampling.max_tokens) // self._block_tokens)

    def admit(self) -> list[Sequence]:
        """Reserve blocks for requests from the head of the line, while there is room; returns these requests."""
        admitted: list[Sequence] = []
        for sequence in [sequence for sequence in self.waiting if not sequence.awaits_lookup]:
            if len(self.prefilling) + len(self.decoding) + len(self.awaiting_kv) >= self._max_running:
                break
            try:
                self._reserve(sequence)
            except PoolExhausted:
                break
            self.waiting.remove(sequence)
            if sequence.is_all_external or sequence.num_computed < sequence.external_end:
                self.awaiting_kv[sequence.request_id] = sequence
            else:
                self.start(sequence)
            admitted.append(sequence)
        return admitted

    def next_pass(self) -> list[PassWork]:
        """At most `max_batched_tokens` tokens; decoding requests that do not all fit take turns."""
        budget = self._max_batched_tokens
        num_decoding = len(self.decoding)
        if num_decoding >= budget:
            num_decoding = max(1, budget // 2) if self.prefilling else budget
        batch = [
            PassWork(sequence, sequence.num_computed, len(sequence.tokens))
            for sequence in islice(self.decoding, num_decoding)
        ]
        self.decoding.rotate(-num_decoding)
        budget -= len(batch)
        for sequence in self.prefilling:
            if budget == 0:
                break
            end = min(sequence.num_computed + budget, len(sequence.tokens))
            batch.append(PassWork(sequence, sequence.num_computed, end))
            budget -= end - sequence.num_computed
        return batch

    def behind_external(self, sequence: Sequence) -> PassWork:
        """The first tokens behind the external ones."""
        start = sequence.external_end
        return PassWork(sequence, start, min(start + self._max_batched_tokens, len(sequence.tokens)))

    def computed(self, sequence: Sequence, end: int) -> None:
        """The KV of tokens up to `end` is in the cache for all layers: full blocks get their names."""
        sequence.num_computed = end
        if not self._share_prefixes:
            return
        num_full = end // self._block_tokens
        sequence.chain.extend(sequence.tokens)
        keys = sequence.chain.blocks
        for index in range(sequence.num_named, num_full):
            preimage = partial(
                hashing.preimage,
                *(keys, index, sequence.tokens, self._block_tokens),
                salt=sequence.request.salt,
            )
            self._pool.name(sequence.blocks[index], keys[index], preimage)
        sequence.num_named = max(sequence.num_named, num_full)

    def start(self, sequence: Sequence) -> None:
        """Its external KV is here: compute the rest of the prompt, or the answer behind its first token."""
        self._leave(sequence)
        sequence.external_end = 0
        (self.decoding if sequence.num_output else self.prefilling).append(sequence)

    def start_anew(self, sequence: Sequence) -> None:
        """The rest of the external KV will not come: first in line, to compute from where it ends.

        Full blocks of what has arrived are kept. All others are given back, because the source may still write to
        them. A request that keeps blocks in line cannot block others for ever: it was admitted together with the
        running ones, so the blocks are enough for all of them, and nobody overtakes.
        """
        self._leave(sequence)
        # The last prompt token is computed here: its logits give the first token of the answer.
        kept = min(sequence.num_computed, sequence.num_prompt - 1) // self._block_tokens
        self._pool.give_back(sequence.blocks[kept:])
        sequence.blocks = sequence.blocks[:kept]
        sequence.external_end, sequence.arriving, sequence.early = 0, False, None
        self.waiting.appendleft(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take the sequence out of its queue, whichever it is, and give its blocks back."""
        self._leave(sequence)
        self._pool.give_back(sequence.blocks)
        sequence.blocks = []

    def forget(self, sequence: Sequence) -> None:
        """Drop the names of the sequence's blocks: its KV is not to be trusted."""
        for block in sequence.blocks:
            self._pool.forget(block)

    def _leave(self, sequence: Sequence) -> None:
        self.awaiting_kv.pop(sequence.request_id, None)
        for queue in (self.waiting, self.prefilling, self.decoding):
            if sequence in queue:
                queue.remove(sequence)

    def _reserve(self, sequence: Sequence) -> None:
        """All blocks of the sequence, those of a known prefix first. Raises PoolExhausted and takes none."""
        known = list(sequence.blocks)
        found: list[int] = []
        if self._share_prefixes:
            # The last prompt token is computed here: its logits give the first token of the answer.
            shareable = sequence.num_prompt if sequence.is_all_external else sequence.num_prompt - 1
            num_shareable = shareable // self._block_tokens
            sequence.chain.extend(sequence.tokens)
            found = self._pool.find(sequence.chain.blocks[len(known) : num_shareable])
        try:
            fresh = self._pool.take(self.blocks_for(sequence.request) - len(known) - len(found))
        except PoolExhausted:
            self._pool.give_back(found)
            raise
        known += found
        sequence.blocks = known + fresh
        sequence.table = torch.tensor(sequence.blocks)
        sequence.num_named = len(known)
        sequence.num_computed = sequence.num_cached = len(known) * self._block_tokens
