"""What `make sglang` installs beside `pip install --no-deps sglang`: its list without what computes on GPUs only.

Run with the environment's own Python. The wheel asks for gigabytes of kernels for GPUs, and for builds of
torchvision and torchaudio of another torch. `requirements` prints the rest of its list; what the tests need of the
kernels' Python names is in `tests/sglang_cpu`, and torchvision is installed without its dependencies.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys

WHEEL = "sglang"
NOT_NEEDED = {
    "anthropic",
    "cuda-python",
    "deepseek-recipe",
    "flash-attn-4",
    "flashinfer-python",
    "humming-kernels",
    "modelscope",
    "nvidia-cutlass-dsl",
    "nvidia-mathdx",
    "nvidia-ml-py",
    "nvshmem4py-cu13",
    "py-spy",
    "quack-kernels",
    "sgl-deep-ep",
    "sgl-deep-gemm",
    "sgl-flash-mla",
    "sglang-kernel",
    "smg-grpc-servicer",
    "tilelang",
    "tml-renderers",
    "torch",
    "torch-memory-saver",
    "torchaudio",
    "torchcodec",
    "torchvision",
}


def requirements() -> list[str]:
    """What the wheel needs on a CPU, but for torch, which is there."""
    found = importlib.metadata.requires(WHEEL) or []
    return [line for line in found if "extra ==" not in line and _name(line) not in NOT_NEEDED]


def _name(line: str) -> str:
    return re.split(r"[^A-Za-z0-9_.-]", line, maxsplit=1)[0].lower().replace("_", "-")


if __name__ == "__main__":
    if sys.argv[1:] != ["requirements"]:
        sys.exit("usage: sglang_cpu.py requirements")
    print("\n".join(requirements()))
