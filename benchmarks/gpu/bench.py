"""`python -m pdlink_bench.gpu.bench --out FILE`: every figure of docs/gpu.md, a short table last."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from pdlink.cuda.driver import Device

from ..measure import machine_facts
from . import kernels, links
from .figures import table, write_json


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="JSON of the run")
    args = parser.parse_args()
    torch.cuda.set_device(0)
    device = Device(0)
    device.open()
    properties = torch.cuda.get_device_properties(0)
    facts = {
        **machine_facts(),
        "device": device.name,
        "driver_cuda": device.driver.version,
        "multiprocessors": properties.multi_processor_count,
        "gpu_memory_nbytes": properties.total_memory,
        "torch": torch.__version__,
    }
    figures = kernels.run(torch.device("cuda", 0))
    torch.cuda.empty_cache()
    figures += links.run()
    device.close()
    write_json(args.out, facts, figures)
    print(f"{facts['device']}, CUDA {facts['driver_cuda']}, torch {facts['torch']}")
    print(table(figures))
    return 1 if any(one.verdict == "MISSED" for one in figures) else 0


if __name__ == "__main__":
    sys.exit(main())
