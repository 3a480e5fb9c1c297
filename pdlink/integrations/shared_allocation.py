"""`SharedAllocation`: an engine's KV cache in shared memory, into which servers of this host can write straight."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from pdlink.memory.buffers import Buffer

if TYPE_CHECKING:
    from collections.abc import Sequence

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
