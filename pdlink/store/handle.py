"""`Handle`: chunks of a prompt in the store's own memory, without a copy."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy as np

    Chunk = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]


class Handle:
    """Of `Cache.acquire` (to read) or `Cache.allocate` (to write). Release it, or use it as a context manager."""

    def __init__(self, arrays: Mapping[int, Chunk], chunk_tokens: int, end: Callable[[bool], bool]) -> None:
        """end: called once, with whether the chunks were put."""
        self.arrays = dict(arrays)
        """By number of the chunk in the prompt: uint8 [layer, part, token, head, byte]. Not for use after the end."""
        self.num_tokens = len(self.arrays) * chunk_tokens
        self._end: Callable[[bool], bool] | None = end
        self._stood = False

    def put(self) -> bool:
        """All chunks of an `allocate` are filled: keep them. Returns False if they were released before."""
        return self._finish(put=True)

    def release(self) -> bool:
        """End the use of the memory; safe to call twice. What was allocated and not put is dropped.

        Returns whether what was read is right: False if the lease had ended before (`lease_s`).
        """
        return self._finish(put=False)

    def _finish(self, *, put: bool) -> bool:
        if self._end is not None:
            end, self._end = self._end, None
            self._stood = end(put)
        return self._stood

    def __del__(self) -> None:
        if self._end is not None and any(array.flags.writeable for array in self.arrays.values()):
            warnings.warn(
                f"{len(self)} allocated chunks were neither put nor released: their memory is lost until the cache "
                "is closed, because somebody may still write to it",
                ResourceWarning,
                stacklevel=2,
            )

    def __len__(self) -> int:
        """Chunks."""
        return len(self.arrays)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()
