"""A device other than the host's, on the CPU: tensors on "meta" that have numbers, and are refused where those of a
GPU are.

PyTorch asks every operation of its device. Here each runs on the CPU with the numbers behind its tensors, if all of
them are on one device. torch says no to `.numpy()` of a tensor there, and this file to an operation on tensors of
both, as CUDA does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = torch.device("meta")
_HOST = torch.device("cpu")
_aten = torch.ops.aten
_BETWEEN_DEVICES = (_aten._to_copy.default, _aten.copy_.default)
_TAKES_INDICES_OF_THE_HOST = (_aten.index.Tensor, _aten.index_put_.default, _aten._index_put_impl_.default)


class TensorThere(torch.Tensor):
    numbers: torch.Tensor
    """The same on the CPU."""

    @staticmethod
    def __new__(cls, numbers: torch.Tensor) -> TensorThere:
        made: TensorThere = torch.Tensor._make_wrapper_subclass(
            cls,
            numbers.size(),
            strides=numbers.stride(),
            storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype,
            device=DEVICE,
        )
        made.numbers = numbers
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _run(operation, args, kwargs or {})


class OtherDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, `DEVICE` is such a device."""

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(operation, args, kwargs or {})


def _run(operation: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, torch.Tensor)]
    there = [one for one in tensors if isinstance(one, TensorThere)]
    here = [one for one in tensors if not isinstance(one, TensorThere) and one.dim()]
    if there and here and operation not in _BETWEEN_DEVICES:
        takes = operation in _TAKES_INDICES_OF_THE_HOST and isinstance(args[0], TensorThere)
        if not takes or any(one.dtype != torch.int64 for one in here):
            raise RuntimeError(f"expected all tensors on one device, got {DEVICE} and {_HOST} ({operation})")
    result_there = bool(there)
    if kwargs.get("device") is not None:
        result_there = torch.device(kwargs["device"]) == DEVICE
        kwargs = {**kwargs, "device": _HOST}
    wrappers = {id(one.numbers): one for one in there}
    given_args, given = tree_map(_numbers, (args, kwargs))
    result = operation(*given_args, **given)

    def placed(one: Any) -> Any:
        if not isinstance(one, torch.Tensor) or not result_there:
            return one
        known = wrappers.get(id(one))  # the same object after an operation in place
        return TensorThere(one) if known is None else known

    return tree_map(placed, result)


def _numbers(one: Any) -> Any:
    return one.numbers if isinstance(one, TensorThere) else one
