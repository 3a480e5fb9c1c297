"""SGLang's servers on a machine without a GPU, as `make sglang` and the tests run them."""

from __future__ import annotations

import os
from pathlib import Path

from pdlink.config import environment_with

_SHIM = Path(__file__).parents[2] / "tests/sglang_cpu"
"""The names of SGLang's kernels, and memory of the host where SGLang says that of a GPU."""


def environment() -> dict[str, str]:
    """What such a server needs beside ours. Raises FileNotFoundError without it."""
    if not _SHIM.is_dir():
        raise FileNotFoundError(f"{_SHIM}: SGLang on CPUs needs pdlink's source tree; pass --sglang-arg for GPUs")
    before = environment_with({}).get("PYTHONPATH")
    path = f"{_SHIM}{os.pathsep}{before}" if before else str(_SHIM)
    return {"PYTHONPATH": path, "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
