"""Who has the KV of which prefix, from published events (`csrc/index`)."""

import numpy as np

class Prefixes:
    """Of one model and one number of tokens per block. Not thread-safe.

    A holder is a number that the caller chooses, small ones without gaps: it costs memory by the largest. A root is a
    non-zero number for everything besides the tokens that the KV depends on. 16 bytes per block and holder and 16 per
    prefix, by a fill of 3/8 to 3/4.
    """

    def __init__(self, block_tokens: int, max_blocks: int) -> None:
        """max_blocks: of all holders together; further ones are not noted."""

    def stored(self, holder: int, medium: int, ids: bytes, parent: bytes | None, root: int, tokens: bytes) -> int:
        """The holder has these blocks, which follow the one named `parent`, or `root`; how many were noted.

        medium: 0 to 3, the quickest first. A holder has a block until each copy of it was removed from each medium it
        was stored in. A block that is stored again is another copy, unless no parent is given: see `prefixes.h`.
        ids, parent, tokens: in MessagePack: a list of the blocks' names (integers or bytes), one name, a list
        of token ids. None are noted where the parent is unknown, as after missed events. Raises ValueError for other
        bytes.
        """

    def removed(self, holder: int, medium: int, ids: bytes) -> None:
        """The holder does not have these blocks in this medium any more."""

    def cleared(self, holder: int) -> None:
        """The holder has nothing."""

    def lookup(self, root: int, tokens: np.ndarray[tuple[int], np.dtype[np.uint32]]) -> list[tuple[int, list[int]]]:
        """Each holder of the first block, with the number of leading tokens that it has, by medium: each counts in
        the quickest one only. tokens: uint32."""

    @property
    def block_tokens(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

def words_of_json(json: bytes) -> bytes:
    """The token ids of a JSON list, as native uint32. Raises ValueError for anything else."""
