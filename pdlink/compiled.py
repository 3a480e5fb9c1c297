"""Functions that numba compiles."""

from __future__ import annotations

import contextlib
import inspect
import os
import threading
from typing import TYPE_CHECKING, Final, ParamSpec, TypeVar

import llvmlite
import numba

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")

_VERSIONS: Final = f"numba-{numba.__version__}-llvmlite-{llvmlite.__version__}"
_setting = threading.Lock()


def compiled(function: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
    """Compile with numba on first use, without the GIL, keeping the machine code on disk where that is possible.

    numba looks for a place in a folder that is named, beside the function's file and in the user's cache folder.
    Where none is writable it refuses to decorate (0.68: RuntimeError "no locator available"): then every process
    compiles anew.
    """
    try:
        with _place_of_versions(function):
            found: Callable[_Args, _Result] = numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:
        found = numba.njit(nogil=True)(function)
    return found


@contextlib.contextmanager
def _place_of_versions(function: Callable[..., object]) -> Iterator[None]:
    """Meanwhile machine code is kept in a folder of this numba and llvmlite, below NUMBA_CACHE_DIR if that is set.

    numba tells versions apart by an index, but their files have the same names. Where environments share a source
    tree, a process could read one that another numba had just written: "LLVM bitcode parsing error".
    """
    with _setting:
        before = numba.config.CACHE_DIR
        folder = before or os.path.join(os.path.dirname(inspect.getfile(function)), "__pycache__")
        numba.config.CACHE_DIR = os.path.join(folder, _VERSIONS)
        try:
            yield
        finally:
            numba.config.CACHE_DIR = before
