"""The memory of vLLM's KV cache, as buffers that transports can register.

vLLM allocates its cache itself. Since 0.31 it does so inside a context of the connector's, and
`SharedAllocation` then puts it into shared memory, so that a server on this host can write straight into
it. Memory that was allocated in another way is *borrowed*: tcp and ucx can use it, mapped memory cannot. That of a
GPU is borrowed, too, by the allocation that a tensor lies in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdlink.integrations.vllm_parts.layout import UnsupportedCache
from pdlink.memory.borrowed import BorrowedPlace, borrow_place

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from pdlink.memory.buffers import AnyBuffer, Buffer


def regions(
    tensors: Sequence[torch.Tensor], shared: Sequence[Buffer], *, stays: bool = True
) -> tuple[list[AnyBuffer], list[tuple[int, int]]]:
    """The buffers under these tensors, and for each tensor (region, offset of its first element in bytes).

    stays: False for a server that may sleep, and wake up with other memory at the same addresses.
    Raises UnsupportedCache for memory that is neither the host's nor all of one GPU, CudaUnavailable, CudaFailure.
    """
    buffers: list[AnyBuffer] = []
    devices = {str(tensor.device) for tensor in tensors}
    if len(devices) > 1 or any(tensor.device.type not in ("cpu", "cuda") for tensor in tensors):
        raise UnsupportedCache(f"the KV cache is on {', '.join(sorted(devices))}; it must be on the CPU or one GPU")
    by_address: dict[int, int] = {}
    places = []
    for tensor in tensors:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in by_address:
            by_address[address] = len(buffers)
            ours = next((buffer for buffer in shared if buffer.ptr == address), None)
            gpu = tensor.device.index if tensor.device.type == "cuda" else None
            buffers.append(ours or borrow_place(BorrowedPlace(address, storage.nbytes(), gpu, storage, stays)))
        places.append((by_address[address], tensor.data_ptr() - address))
    return buffers, places
