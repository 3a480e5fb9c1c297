"""SGLang's KV pool, as its `KVArgs` describe it, as a layout and buffers.

An entry is one tensor of one layer: all of K, then all of V, or a latent for each layer. A page of an entry is dense,
and what is inside is the same on both sides, because SGLang compares page size, dtype and layout of its servers. So a
token is a slice of its page here, whatever it holds, and only whole pages travel.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, NamedTuple

from pdlink.integrations.sglang_parts.versions import UnsupportedSglang
from pdlink.kv.groups import KVGroups
from pdlink.kv.layout import KVLayout, LayerLayout, Part
from pdlink.memory.borrowed import BorrowedPlace, borrow_place

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdlink.memory.buffers import AnyBuffer, Buffer


def layout_of(
    places: Sequence[tuple[int, int]],
    lens: Sequence[int],
    item_lens: Sequence[int],
    layer_ids: Sequence[int],
    page_tokens: int,
    dtype: str,
) -> tuple[KVGroups, list[int]]:
    """The layouts, and SGLang's number of each layer. K and V of one width are one group; of other widths, two.

    places: (region, offset in it) of each entry. lens, item_lens: bytes of an entry and of a page in it.
    Raises UnsupportedSglang for entries that fit no model.
    """
    sizes = sorted(set(item_lens))
    if not sizes or len({lens[i] // item_lens[i] for i in range(len(lens))}) != 1 or sizes[0] % page_tokens:
        raise UnsupportedSglang(
            f"KV pool: got entries with pages of {sizes} bytes; expected equally many pages in all, of a multiple of "
            f"page_size ({page_tokens})"
        )
    # Where a layer is named once for K and V, they are two entries as far apart as there are layers.
    parts_each, rest = divmod(len(places), len(layer_ids) or 1)
    if parts_each not in (1, 2) or rest:
        raise UnsupportedSglang(
            f"KV pool: got {len(places)} entries for {len(layer_ids)} layers; expected one or two a layer; draft "
            "models are not transferred yet"
        )
    order = list(dict.fromkeys(layer_ids))
    groups = []
    for item in dict.fromkeys(item_lens):
        entries: dict[int, list[Part]] = {}
        for number, place in enumerate(places):
            if item_lens[number] == item:
                entries.setdefault(layer_ids[number % len(layer_ids)], []).append(Part(*place))
        if list(entries) != order or len({len(parts) for parts in entries.values()}) != 1:
            raise UnsupportedSglang(
                f"KV pool: got pages of {item} bytes in layers {list(entries)}; expected the same in all of {order}; "
                "models whose layers differ are not transferred yet"
            )
        token = item // page_tokens
        layers = tuple(LayerLayout(tuple(parts), item, token, token) for parts in entries.values())
        groups.append(KVLayout(dtype, page_tokens, lens[0] // item_lens[0], 1, token, layers))
    return KVGroups(tuple(groups)), order


def state_of(
    pointers: Sequence[int], lens: Sequence[int], item_lens: Sequence[int], memory: Memory
) -> tuple[KVGroups, list[AnyBuffer]]:
    """What a model keeps beside its KV, as tensors of places of some bytes: a group for each size of them."""
    buffers, places = buffers_of(pointers, lens, memory)
    groups = []
    for item in dict.fromkeys(item_lens):
        mine = [number for number in range(len(item_lens)) if item_lens[number] == item]
        layers = tuple(LayerLayout((Part(*places[number]),), item, item, item) for number in mine)
        groups.append(KVLayout("uint8", 1, min(lens[number] // item for number in mine), 1, item, layers))
    if not groups:
        raise UnsupportedSglang("KV pool: got a kind of states without tensors; expected one or more")
    return KVGroups(tuple(groups)), buffers


def numbers_of(kv_args: Any, first: int, *, latent: bool) -> list[int]:
    """SGLang's numbers of the layers; it does not give those of plain pools, whose entries are all K, then all V.

    first: the one with which this pipeline stage begins."""
    if kv_args.kv_layer_ids:
        return list(kv_args.kv_layer_ids)
    num = len(kv_args.kv_data_ptrs) // (1 if latent else 2)
    return list(range(first, first + num))


def buffers_of(
    pointers: Sequence[int], lens: Sequence[int], memory: Memory
) -> tuple[list[AnyBuffer], list[tuple[int, int]]]:
    """The memory of the entries, by region, and the place of each entry in it.

    Raises CudaUnavailable, CudaFailure.
    """
    buffers: list[AnyBuffer] = []
    places = []
    for pointer, nbytes in zip(pointers, lens, strict=True):
        found: AnyBuffer | None = next((one for one in memory.shared if _holds(one, pointer, nbytes)), None)
        buffer = found or borrow_place(BorrowedPlace(pointer, nbytes, memory.gpu, memory.owner, memory.stays))
        if buffer not in buffers:
            buffers.append(buffer)
        places.append((buffers.index(buffer), pointer - buffer.ptr))
    return buffers, places


class Memory(NamedTuple):
    """What SGLang's pools lie in."""

    owner: object
    """Keeps them."""
    shared: Sequence[Buffer] = ()
    """What servers of this host can map. SGLang may have put K and V of a layer into one piece of it."""
    gpu: int | None = None
    """Number of the GPU; None on the host."""
    stays: bool = True
    """False on a GPU if SGLang may take it away and give it back (`--enable-memory-saver`)."""


def _holds(buffer: Buffer, pointer: int, nbytes: int) -> bool:
    return buffer.ptr <= pointer and pointer + nbytes <= buffer.ptr + buffer.nbytes


class MetadataRows:
    """SGLang's metadata buffers: a row for each request in each of them, in the host's memory."""

    def __init__(self, kv_args: Any) -> None:
        self._pointers: list[int] = list(kv_args.aux_data_ptrs)
        self._nbytes: list[int] = list(kv_args.aux_item_lens)
        self._num = [size // row for size, row in zip(kv_args.aux_data_lens, self._nbytes, strict=True)]

    def read(self, row: int) -> tuple[bytes, ...]:
        return tuple(ctypes.string_at(self._place(buffer, row), nbytes) for buffer, nbytes in enumerate(self._nbytes))

    def write(self, row: int, data: Sequence[bytes]) -> None:
        """Raises UnsupportedSglang for rows of other buffers than those here."""
        if [len(one) for one in data] != self._nbytes:
            raise UnsupportedSglang(
                f"metadata buffers: got rows of {[len(one) for one in data]} bytes; expected {self._nbytes}; start "
                "both servers with the same flags"
            )
        for buffer, one in enumerate(data):
            ctypes.memmove(self._place(buffer, row), one, len(one))

    def _place(self, buffer: int, row: int) -> int:
        if not 0 <= row < self._num[buffer]:
            raise UnsupportedSglang(f"metadata buffers: got row {row}; expected {self._num[buffer]} rows")
        return self._pointers[buffer] + row * self._nbytes[buffer]
