"""The names that SGLang imports from its native kernels. What a CPU without AMX really calls is written out in
torch; the others exist, and raise when they are called. `convert_weight_packed` is absent on purpose: without it
SGLang takes torch's own operators."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


def assign_req_to_token_pool_cpu(
    req_pool_indices: Any, req_to_token: Any, start_offset: Any, end_offset: Any, out_cache_loc: Any, *_: Any
) -> None:
    """Row req_pool_indices[i] of req_to_token takes the next slots at [start_offset[i], end_offset[i])."""
    taken = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        req_to_token[row, start:end] = out_cache_loc[taken : taken + end - start].to(req_to_token.dtype)
        taken += end - start


class _Missing:
    """A kernel, or a namespace of constants such as `scalar_types`, that is not here."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> _Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self._name}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{self._name}: not on CPUs without SGLang's native kernels")


def _missing(module: str) -> Callable[[str], _Missing]:
    return _Missing(module).__getattr__


__getattr__ = _missing(__name__)


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Any `sgl_kernel.NAME` is there, with any name in it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.startswith(f"{__name__}."):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = _missing(module.__name__)  # type: ignore[method-assign]


sys.meta_path.append(_Submodules())
