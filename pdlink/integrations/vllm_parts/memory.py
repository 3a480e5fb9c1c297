"""The memory of vLLM's KV cache, as buffers that transports can register.

vLLM allocates its cache itself. Since 0.31 it does so inside a context of the connector's, and `SharedAllocation`
then puts it into shared memory, so that a server on this host can write straight into it. Memory that was allocated
in another way is *borrowed*: tcp and ucx can use it, mapped memory cannot.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from pdlink.integrations.vllm_parts.layout import UnsupportedCache
from pdlink.memory.borrowed import BorrowedBuffer
from pdlink.memory.buffers import Buffer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdlink.memory.buffers import HostBuffer

_WORTH_SHARING_NBYTES = 1 << 20


class SharedAllocation(TorchFunctionMode):
    """Inside it, large `torch.zeros` on the CPU are shared memory."""

    def __init__(self) -> None:
        super().__init__()
        self.buffers: list[Buffer] = []

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.zeros and torch.device(kwargs.get("device") or "cpu").type == "cpu":
            like = torch.zeros(*args, **{**kwargs, "device": "meta", "pin_memory": False})
            nbytes = math.prod(like.shape) * like.element_size()
            if nbytes >= _WORTH_SHARING_NBYTES:
                buffer = Buffer(nbytes)
                self.buffers.append(buffer)
                return torch.from_numpy(buffer.array)[:nbytes].view(like.dtype).view(like.shape)
        return func(*args, **kwargs)


def regions(
    tensors: Sequence[torch.Tensor], shared: Sequence[Buffer]
) -> tuple[list[HostBuffer], list[tuple[int, int]]]:
    """The buffers under these tensors, and for each tensor (region, offset of its first element in bytes).

    Raises UnsupportedCache for memory that is not the host's.
    """
    buffers: list[HostBuffer] = []
    by_address: dict[int, int] = {}
    places = []
    for tensor in tensors:
        if tensor.device.type != "cpu":
            raise UnsupportedCache(f"the KV cache is on {tensor.device}; KV of that device cannot be moved yet")
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in by_address:
            by_address[address] = len(buffers)
            ours = next((buffer for buffer in shared if buffer.ptr == address), None)
            buffers.append(ours or BorrowedBuffer(address, storage.nbytes(), storage))
        places.append((by_address[address], tensor.data_ptr() - address))
    return buffers, places
