"""`KVCacheManager`: `pdlink.Cache` by the names of AIBrix' offloading framework.

Its block is our chunk: open the cache with its `block_ntokens` as `chunk_tokens`. A prompt is a prefix and a query;
answers are about the query, which counts only while its prefix is here, too. Tensors of a block have the layout LCND:
[layers, 2, tokens, heads x dim]. Nothing is raised but by `close`: an answer is a `Status`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, cast

import numpy as np
import torch

from pdlink.errors import CapacityExceeded, InvalidRequest, PdlinkError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pdlink.store.cache import Cache
    from pdlink.store.handle import Handle

_T = TypeVar("_T")


class StatusCodes(enum.Enum):
    OK = enum.auto()
    ERROR = enum.auto()
    NOT_FOUND = enum.auto()
    INVALID = enum.auto()
    OUT_OF_MEMORY = enum.auto()
    TIMEOUT = enum.auto()


@dataclass(frozen=True)
class Status(Generic[_T]):
    error_code: StatusCodes
    value: _T | Exception | None = None

    def is_ok(self) -> bool:
        return self.error_code is StatusCodes.OK

    def is_not_found(self) -> bool:
        return self.error_code is StatusCodes.NOT_FOUND

    def is_invalid(self) -> bool:
        return self.error_code is StatusCodes.INVALID

    def is_out_of_memory(self) -> bool:
        return self.error_code is StatusCodes.OUT_OF_MEMORY

    def is_timeout(self) -> bool:
        return self.error_code is StatusCodes.TIMEOUT

    def get(self, default: _T | None = None) -> _T | None:
        """The value, if all went well."""
        return cast("_T", self.value) if self.is_ok() else default

    def raise_if_not_ok(self) -> None:
        if isinstance(self.value, Exception):
            raise self.value
        if not self.is_ok():
            raise RuntimeError(self.error_code.name)


class Feature(NamedTuple):
    zero_copy: bool = True
    non_blocking_put: bool = False
    """Whether a tensor must stay as it is after `put` returns."""
    gdr_put: bool = False
    gdr_get: bool = False


class KVCacheHandle:
    """Blocks of a query in the cache's own memory. Release it."""

    def __init__(self, handle: Handle, tensors: list[torch.Tensor]) -> None:
        self._handle, self._tensors = handle, tensors

    def to_tensors(self) -> list[torch.Tensor]:
        """Not for use after `release`."""
        return list(self._tensors)

    def truncate(self, length: int) -> None:
        self._tensors = self._tensors[:length]

    def put(self) -> bool:
        return self._handle.put()

    def release(self) -> bool:
        """Whether what was read is right: False if its lease had ended before."""
        return self._handle.release()

    def __len__(self) -> int:
        """Blocks."""
        return len(self._tensors)


class KVCacheManager:
    """dtype: of the tensors; as wide as the cache's layout says."""

    def __init__(self, cache: Cache, dtype: torch.dtype) -> None:
        self.cache, self._dtype = cache, dtype
        layout = cache.layout
        num_parts = len(layout.layers[0].parts)
        self.block_shape = (
            len(layout.layers),
            num_parts,
            cache.chunk_tokens,
            layout.num_heads * layout.head_nbytes // dtype.itemsize,
        )
        self.feature = Feature()

    @property
    def block_size(self) -> int:
        return self.cache.chunk_tokens

    chunk_size = block_size

    def exists(self, prefix: Sequence[int] | None, query: Sequence[int]) -> Status[int]:
        """Tokens of the query that are here or in a tier."""
        return _answered(lambda: self._of_query(prefix, self.cache.lookup(_whole(prefix, query)).num_tokens))

    def prefetch(self, prefix: Sequence[int] | None, query: Sequence[int]) -> Status[None]:
        """Begin to bring the query into memory; it is kept there for `lease_s`."""

        def do() -> Status[None]:
            self.cache.prefetch(_whole(prefix, query))
            return Status(StatusCodes.OK)

        return _answered(do)

    def allocate_for(self, prefix: Sequence[int] | None, query: Sequence[int]) -> Status[KVCacheHandle]:
        """Room for the query's full blocks: fill all of them, then `put`. What is here already is filled in vain."""

        def do() -> Status[KVCacheHandle]:
            first = self._first(prefix)
            whole = _whole(prefix, query)
            handle = self.cache.allocate(whole)
            end = len(whole) // self.block_size
            known = self.cache.lookup(whole).num_tokens // self.block_size
            end = min(end, max([known, *(index + 1 for index in handle.arrays)]))
            if end <= first:
                handle.release()
                return Status(StatusCodes.OUT_OF_MEMORY if len(query) >= self.block_size else StatusCodes.INVALID)
            return Status(StatusCodes.OK, KVCacheHandle(handle, self._tensors(handle, range(first, end))))

        return _answered(do)

    def acquire(self, prefix: Sequence[int] | None, query: Sequence[int]) -> Status[tuple[int, KVCacheHandle]]:
        """How many tokens of the query are here now, and their blocks, to be read until they are released."""

        def do() -> Status[tuple[int, KVCacheHandle]]:
            first = self._first(prefix)
            handle = self.cache.acquire(_whole(prefix, query))
            if len(handle) <= first:
                handle.release()
                return Status(StatusCodes.NOT_FOUND)
            tensors = self._tensors(handle, range(first, len(handle)))
            return Status(StatusCodes.OK, (len(tensors) * self.block_size, KVCacheHandle(handle, tensors)))

        return _answered(do)

    def get(self, prefix: Sequence[int] | None, query: Sequence[int], kv_tensors: Any) -> Status[int]:
        """Copy what is here of the query into `kv_tensors.to_tensors()`; its tokens."""
        acquired = self.acquire(prefix, query)
        if not acquired.is_ok():
            return Status(acquired.error_code, cast("Exception | None", acquired.value))
        _, mine = cast("tuple[int, KVCacheHandle]", acquired.value)

        def do() -> Status[int]:
            copied, stood = 0, False
            try:
                for theirs, block in zip(kv_tensors.to_tensors(), mine.to_tensors(), strict=False):
                    if theirs.numel() != block.numel():
                        raise InvalidRequest(
                            f"kv_tensors: got one of shape {tuple(theirs.shape)}; expected {self.block_shape}; pass "
                            "tensors of whole blocks"
                        )
                    theirs.copy_(block.view(theirs.shape))
                    copied += self.block_size
            finally:
                stood = mine.release()
            return Status(StatusCodes.OK, copied) if stood else Status(StatusCodes.NOT_FOUND)

        return _answered(do)

    def put(self, prefix: Sequence[int] | None, query: Sequence[int], kv_tensors: Any) -> Status[int]:
        """Keep the query's blocks: those of `allocate_for`, or copies of others; how many tokens are here now."""
        mine = kv_tensors
        if not isinstance(kv_tensors, KVCacheHandle):
            allocated = self.allocate_for(prefix, query)
            if not allocated.is_ok():
                return Status(allocated.error_code, cast("Exception | None", allocated.value))
            mine = cast("KVCacheHandle", allocated.value)
            for block, theirs in zip(mine.to_tensors(), kv_tensors.to_tensors(), strict=False):
                block.copy_(theirs.view(block.shape))
        mine.put()
        return self.exists(prefix, query)

    def delete(self, prefix: Sequence[int] | None, query: Sequence[int]) -> Status[None]:
        def do() -> Status[None]:
            whole = _whole(prefix, query)
            mask = np.arange(len(whole)) >= self._first(prefix) * self.block_size
            self.cache.clear(whole, mask=cast("Sequence[bool]", mask))
            return Status(StatusCodes.OK)

        return _answered(do)

    def flush(self) -> Status[None]:
        return _answered(lambda: Status(StatusCodes.OK if self.cache.flush() else StatusCodes.TIMEOUT))

    def cache_chunk_keys(
        self, prefix: Sequence[int] | None, query: Sequence[int]
    ) -> Iterator[tuple[Sequence[int], Sequence[int], Sequence[int] | None, Sequence[int]]]:
        """Per full block: what is before it, its tokens, those of the next one, and all up to its end."""
        whole, size = _whole(prefix, query), self.block_size
        begins = range(len(prefix or ()), len(whole) - size + 1, size)
        for begin in begins:
            end = begin + size
            following = whole[end : end + size] if begin != begins[-1] else None
            yield whole[:begin], whole[begin:end], following, whole[:end]

    def close(self) -> None:
        self.cache.close()

    def _first(self, prefix: Sequence[int] | None) -> int:
        """Number of the query's first block."""
        num_tokens = len(prefix or ())
        if num_tokens % self.block_size:
            raise InvalidRequest(
                f"prefix: got {num_tokens} tokens; expected multiples of the block size ({self.block_size}); move "
                "the rest into the query"
            )
        return num_tokens // self.block_size

    def _of_query(self, prefix: Sequence[int] | None, num_tokens: int) -> Status[int]:
        found = num_tokens - self._first(prefix) * self.block_size
        return Status(StatusCodes.OK, found) if found > 0 else Status(StatusCodes.NOT_FOUND)

    def _tensors(self, handle: Handle, blocks: range) -> list[torch.Tensor]:
        """For blocks that the handle does not hold, memory of their own."""
        nbytes = int(np.prod(self.block_shape)) * self._dtype.itemsize
        held = (handle.arrays.get(block) for block in blocks)
        flat = (np.empty(nbytes, np.uint8) if array is None else array.reshape(-1) for array in held)
        return [torch.from_numpy(_writable(array)).view(self._dtype).view(self.block_shape) for array in flat]


class _Memory:
    """An array's memory, for numpy."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array = array
        pointer, _ = array.__array_interface__["data"]
        self.__array_interface__ = {**array.__array_interface__, "data": (pointer, False)}


def _writable(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The same memory; torch knows no tensor that may not be written to."""
    return np.asarray(_Memory(array))


def _whole(prefix: Sequence[int] | None, query: Sequence[int]) -> list[int]:
    return [*(prefix or ()), *query]


def _answered(do: Callable[[], Status[_T]]) -> Status[_T]:
    try:
        return do()
    except CapacityExceeded as error:
        return Status(StatusCodes.OUT_OF_MEMORY, error)
    except InvalidRequest as error:
        return Status(StatusCodes.INVALID, error)
    except PdlinkError as error:
        return Status(StatusCodes.ERROR, error)
