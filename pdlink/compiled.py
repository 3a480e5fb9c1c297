"""Functions that numba compiles."""

from __future__ import annotations

from typing import TYPE_CHECKING, ParamSpec, TypeVar

import numba

if TYPE_CHECKING:
    from collections.abc import Callable

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


def compiled(function: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
    """Compile with numba on first use, without the GIL, keeping the machine code on disk where that is possible.

    numba looks for a place in NUMBA_CACHE_DIR, beside the function's file and in the user's cache folder, and refuses
    to decorate where none is writable (0.68: RuntimeError "no locator available"): then every process compiles anew.
    """
    try:
        found: Callable[_Args, _Result] = numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:
        found = numba.njit(nogil=True)(function)
    return found
