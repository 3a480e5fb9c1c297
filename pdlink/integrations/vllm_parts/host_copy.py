"""KV caches on devices whose memory no transport reads, copied through memory of the host.

The host has a mirror of the device's cache: as large, with the same layouts, so that a block has one number in both.
Everything else in this connector (transfers, stores, their fences) knows the mirror alone, which is shared memory
like the cache of a server on CPUs. A block of the mirror belongs to the request that has the device's block: it is
written from the device after that block was computed, and by others only after an offer or a load for that request.
So what keeps vLLM from giving a block to another request keeps the mirror's block, too.

All copies are made by vLLM's thread, with operations that every device of torch's has, and are over when they return:
out of the device in a layer's hook, or after the forward pass; into the device before vLLM hears that KV is there.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from pdlink.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from pdlink.integrations.vllm_parts.layout import CacheGroups
    from pdlink.integrations.vllm_parts.requests import StepPlan
    from pdlink.kv.groups import BlockLists
    from pdlink.kv.layout import KVLayout

log = logging.getLogger(__name__)

_READABLE = frozenset(("cpu", "cuda"))
"""Devices whose memory transports read and write."""
_PIECE_NBYTES = 64 << 20
"""Of a layer's blocks, what is gathered at once: it takes as much of the device's memory."""

_Blocks = list[set[int]]
"""By group: kernel blocks."""


def is_needed(tensors: Iterable[torch.Tensor], buffer_device: str) -> bool:
    """Whether this cache goes through memory of the host. buffer_device: `kv_buffer_device`, if set another than its
    own."""
    kinds = {tensor.device.type for tensor in tensors}
    return not kinds <= _READABLE or (buffer_device == "cpu" and kinds != {"cpu"})


def mirror(
    tensors: Mapping[str, torch.Tensor], allocation: AbstractContextManager[object]
) -> dict[str, torch.Tensor]:
    """The same tensors in memory of the host, over each other as those are. allocation: makes it shared memory.

    Raises ConfigError if the host has not that much memory free.
    """
    storages: dict[int, torch.UntypedStorage] = {}
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        theirs = tensor.untyped_storage()
        if theirs.data_ptr() not in storages:
            try:
                with allocation:
                    ours = torch.zeros(theirs.nbytes(), dtype=torch.uint8)
            except OSError as error:
                raise ConfigError(
                    f"kv_buffer_device: got a cache on {tensor.device}, of which the host keeps a mirror: {error}; "
                    "expected what the host has free; lower --gpu-memory-utilization or set --num-gpu-blocks-override"
                ) from None
            storages[theirs.data_ptr()] = ours.untyped_storage()
        place = tensor.storage_offset(), tensor.shape, tensor.stride()
        found[name] = torch.empty(0, dtype=tensor.dtype).set_(storages[theirs.data_ptr()], *place)
    nbytes = sum(storage.nbytes() for storage in storages.values())
    devices = ", ".join(sorted({str(tensor.device) for tensor in tensors.values()}))
    log.info("the KV cache on %s goes through a mirror of %d MiB in memory of the host", devices, nbytes >> 20)
    return found


class _Coming(NamedTuple):
    """A request whose KV is on its way into the mirror: tokens [begin, end) of it."""

    tables: Sequence[Sequence[int]]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class _Layer:
    """The tensor of one layer and its mirror."""

    device: torch.Tensor
    host: torch.Tensor
    axis: int
    """Of the blocks."""
    num_at_once: int

    @classmethod
    def of(cls, device: torch.Tensor, host: torch.Tensor, layout: KVLayout, block_stride: int) -> _Layer:
        axis = next(
            axis
            for axis, (size, stride) in enumerate(zip(device.shape, device.stride(), strict=True))
            if size == layout.num_blocks and stride * device.element_size() == block_stride
        )
        if device.element_size() == 1:  # nobody selects rows of FP8
            device, host = device.view(torch.uint8), host.view(torch.uint8)
        block_nbytes = device.numel() // layout.num_blocks * device.element_size()
        return cls(device, host, axis, max(1, _PIECE_NBYTES // block_nbytes))

    def take(self, blocks: torch.Tensor) -> None:
        """Copy these blocks out of the device."""
        for part in torch.split(blocks, self.num_at_once):
            rows = self.device.index_select(self.axis, part.to(self.device.device))
            self.host.index_copy_(self.axis, part, rows.cpu())

    def give(self, blocks: torch.Tensor) -> None:
        """Copy these blocks into the device."""
        for part in torch.split(blocks, self.num_at_once):
            rows = self.host.index_select(self.axis, part).to(self.device.device)
            self.device.index_copy_(self.axis, part.to(self.device.device), rows)


class HostCopy:
    """Of one rank. For vLLM's thread."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        mirrored: Mapping[str, torch.Tensor],
        cache: CacheGroups,
        *,
        layerwise: bool,
    ) -> None:
        """mirrored: what `mirror` made. cache: of all layers. layerwise: copy each layer in its hook, for which the
        device is waited for; else all of them when the forward pass has ended."""
        self._cache, self._layerwise = cache, layerwise
        self._layouts = cache.groups.layouts
        self._layers: list[dict[str, _Layer]] = [{} for _ in self._layouts]
        """By group and name."""
        self._group: dict[str, int] = {}
        for name, planes in cache.planes.items():
            if planes:
                group, index = cache.groups.group_of[planes[0]], cache.groups.index_of[planes[0]]
                layout = self._layouts[group]
                stride = layout.layers[index].block_stride
                self._layers[group][name] = _Layer.of(tensors[name], mirrored[name], layout, stride)
                self._group[name] = group
        self._tables: dict[tuple[str, bool], list[list[int]]] = {}
        """By request, and whether it is for a store: by group, kernel blocks from token 0 on."""
        self._coming: dict[str, _Coming] = {}
        self._computed = self._nothing()
        """Blocks that this step writes and others read."""
        self._left: set[str] = set()
        """Layers that have not been copied in this step."""

    # -- in the order of a step --------------------------------------------------------------------------------------

    def prepare(self, plan: StepPlan) -> None:
        """Before the step's offers, loads and keeps are seen by anybody."""
        coming = {load.request_id: self._expected(load.blocks, load.begin, load.end) for load in plan.store.loads}
        for offer in plan.offers:
            loaded = coming.get(offer.request_id) if offer.after_load else None
            begun = self._expected(offer.blocks, offer.start, offer.end)
            coming[offer.request_id] = begun if loaded is None else begun._replace(begin=loaded.begin)
        if len(self._layouts) > 1:
            for each in coming.values():
                self._clear_ends(each)
        self._coming |= coming
        kept = self._nothing()
        for keep in plan.store.keeps:
            for layout, table, mine in zip(self._layouts, self._cache.kernel_blocks(keep.blocks), kept, strict=True):
                mine.update(table[layout.blocks_of(*layout.positions(0, keep.num_tokens))])
        for layers, mine in zip(self._layers, kept, strict=True):
            for layer in layers.values() if mine else ():
                layer.take(_index(mine))

    def compute(self, plan: StepPlan, sending: Collection[str]) -> None:
        """Before the forward pass. sending: requests of which a part of this step is sent."""
        blocks = self._nothing()
        for chunk in plan.chunks:
            tables = self._extended((chunk.request_id, False), chunk.blocks, first=chunk.first)
            if chunk.request_id not in sending:
                continue
            for layout, table, mine in zip(self._layouts, tables, blocks, strict=True):
                sent = layout.blocks_of(*layout.needed(0, chunk.num_tokens))
                now = layout.blocks_of(*layout.positions(chunk.start, chunk.end))
                mine.update(table[max(sent.start, now.start) : min(sent.stop, now.stop)])
        for save in plan.store.saves:
            tables = self._extended((save.request_id, True), save.blocks, first=save.first)
            for layout, table, mine in zip(self._layouts, tables, blocks, strict=True):
                begin = 0 if save.first and layout.keeps_all else save.start
                begin = save.end - 1 if layout.state else begin
                mine.update(table[layout.blocks_of(*layout.positions(begin, save.end))])
        self._computed = blocks
        self._left = {name for name, group in self._group.items() if blocks[group]}

    def layer_saved(self, name: str) -> bool:
        """In the forward pass. Whether this layer's KV of the step's tokens is in the mirror."""
        if self._layerwise:
            self._take(name)
        return self._layerwise

    def end(self) -> None:
        """After the forward pass: what was not copied by then."""
        for name in list(self._left):
            self._take(name)
        self._computed = self._nothing()

    def abandon(self) -> None:
        """The forward pass has failed: nothing of it is copied any more."""
        self._left.clear()
        self._computed = self._nothing()

    def received(self, request_ids: Collection[str], failed: Collection[str]) -> None:
        """Before vLLM hears it: the KV of these is in the mirror; of the failed ones a part, which before 0.30 vLLM
        goes on from. Of several groups (since 0.32) it computes all of it, in blocks that it has zeroed."""
        blocks = self._nothing()
        for request_id in request_ids:
            came = self._coming.pop(request_id, None)
            if came is None or (request_id in failed and len(self._layouts) > 1):
                continue
            for layout, table, mine in zip(self._layouts, came.tables, blocks, strict=True):
                mine.update(table[layout.blocks_of(*layout.needed(came.begin, came.end))])
        for layers, mine in zip(self._layers, blocks, strict=True):
            for layer in layers.values() if mine else ():
                layer.give(_index(mine))

    def over(self, request_ids: Iterable[str]) -> None:
        """vLLM has finished these."""
        for request_id in request_ids:
            self._coming.pop(request_id, None)
            self._tables.pop((request_id, False), None)
            self._tables.pop((request_id, True), None)

    # -- small things ------------------------------------------------------------------------------------------------

    def _take(self, name: str) -> None:
        if name in self._left:
            self._left.discard(name)
            group = self._group[name]
            self._layers[group][name].take(_index(self._computed[group]))

    def _expected(self, blocks: BlockLists, begin: int, end: int) -> _Coming:
        return _Coming(self._cache.kernel_blocks(blocks), begin, end)

    def _clear_ends(self, coming: _Coming) -> None:
        """Behind the last token may be what another group left in the block: bytes that are no numbers, which kernels
        multiply by zero. vLLM zeroes the device's blocks for that, which the mirror's are going to replace."""
        for layout, table, layers in zip(self._layouts, coming.tables, self._layers, strict=True):
            last = table[layout.blocks_of(*layout.needed(coming.begin, coming.end))][-1:]
            if last:
                for layer in layers.values():
                    layer.host.select(layer.axis, last[0]).zero_()

    def _extended(self, key: tuple[str, bool], blocks: BlockLists, *, first: bool) -> list[list[int]]:
        if first or key not in self._tables:
            self._tables[key] = [[] for _ in self._layouts]
        tables = self._tables[key]
        for table, more in zip(tables, self._cache.kernel_blocks(blocks), strict=True):
            table += more
        return tables

    def _nothing(self) -> _Blocks:
        return [set() for _ in self._layouts]


def _index(blocks: set[int]) -> torch.Tensor:
    return torch.tensor(sorted(blocks))
