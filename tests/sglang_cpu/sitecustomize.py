"""What SGLang's wheel needs from a machine without a GPU. Python imports this at its start from PYTHONPATH.

torchvision of the package index registers kernels of operators that only its build for GPUs declares: they are
declared here first. The names of SGLang's native kernels are in the package `sgl_kernel` beside this file.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any


class _DeclareOperators(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            import torch

            make: Any = torch.library.Library
            library = make("torchvision", "DEF")
            library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            torch._pdlink_declared = library  # type: ignore[attr-defined] # a library ends with its object
        return None


sys.meta_path.insert(0, _DeclareOperators())
