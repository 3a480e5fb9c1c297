"""Prompts that vLLM is given as embeddings, all or some of them: what names their KV in place of token ids.

Where embeddings stand vLLM has token ids that are the same for all of them. A transfer is told apart by a digest of
what they hold, made with XXH3: it only has to tell prompts of one client's request apart. Keys of stored KV may not
collide for anybody (`pdlink.kv.hashing`), so for these every chunk is hashed with BLAKE3, which vLLM requires.
Both run in the scheduler's thread, once for each request: a prompt of 4,096 tokens with 4,096 elements of 16 bits
takes 1.4 ms, with a store 6 (one core of a Xeon with AVX-512).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from blake3 import blake3
from xxhash import xxh3_128

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


@dataclass(frozen=True, slots=True, eq=False)
class Embeddings:
    """Those of one prompt."""

    rows: np.ndarray[tuple[int, int], np.dtype[np.uint8]]
    """The bytes of each token's; of one that was given as an id they say nothing."""
    kind: str
    """Type and number of the elements of a row: equal bytes of other types are other numbers."""
    runs: tuple[tuple[int, int], ...]
    """[begin, end) of tokens that were given as embeddings, ascending."""

    @classmethod
    def of(cls, request: Any) -> Embeddings | None:
        """None if all of the prompt was given as token ids (and images, which vLLM names by their content)."""
        import torch  # only where vLLM is

        given = request.prompt_embeds
        if given is None:
            return None
        rows = given.detach().cpu().contiguous().view(torch.uint8).numpy()
        mask = getattr(request, "prompt_is_token_ids", None)
        return cls(rows, f"{given.dtype} {given.shape[1]}", _runs(mask, len(rows)))

    @property
    def words(self) -> tuple[str, ...]:
        """What a transfer's id depends on beside token ids (`params.transfer_id`)."""
        digest = xxh3_128(f"{self.kind} {self.runs}".encode())
        for begin, end in self.runs:
            digest.update(self.rows[begin:end].data)
        return (f"embeddings {digest.hexdigest()}",)

    def media(self, chunk_tokens: int) -> tuple[tuple[int, str], ...]:
        """(First token, digest) of what each chunk has of them, ascending: as of images for `hashing.chain`."""
        return tuple(
            (begin, f"embeddings {self.kind} {end - begin} {blake3(self.rows[begin:end].data).hexdigest()}")
            for begin, end in self._pieces(chunk_tokens)
        )

    def _pieces(self, chunk_tokens: int) -> Iterator[tuple[int, int]]:
        """The runs, cut where chunks end."""
        for begin, last in self.runs:
            while begin < last:
                end = min(last, (begin // chunk_tokens + 1) * chunk_tokens)
                yield begin, end
                begin = end


def _runs(is_token_ids: Sequence[bool] | None, num_tokens: int) -> tuple[tuple[int, int], ...]:
    if is_token_ids is None:
        return ((0, num_tokens),)
    given = np.zeros(num_tokens + 2, np.int8)
    given[1:-1] = ~np.asarray(is_token_ids, bool)
    edges = np.flatnonzero(np.diff(given)).tolist()
    return tuple(zip(edges[::2], edges[1::2], strict=True))
