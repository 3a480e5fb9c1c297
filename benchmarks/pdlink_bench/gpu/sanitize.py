"""Every kernel on small and odd shapes, compared with its CPU build: what compute-sanitizer is given to watch."""

from __future__ import annotations

import sys
from contextlib import closing

import numpy as np
import torch

from pdlink import _cuda
from pdlink.cuda.driver import CudaStream, Device
from pdlink.cuda.kernels import Kernels
from pdlink.cuda.launches import Launches
from pdlink.kv.layout import RunList

BLOCKS, BLOCK_TOKENS, HEADS = 7, 3, 3
CASES = [
    # bytes of a unit and of a head, bytes by which both sides are off a multiple of 16
    (16, 48, 0),
    (8, 40, 8),
    (4, 36, 4),
    (2, 34, 2),
    (1, 33, 1),
]


def strides(base: int, head_nbytes: int, slots: torch.Tensor, *, flat: bool) -> _cuda.Rows:
    """Two planes, tokens in blocks; heads apart unless `flat`."""
    head = head_nbytes if flat else 2 * head_nbytes
    token = HEADS * head
    return _cuda.Rows(
        base=base,
        layer_stride=BLOCKS * BLOCK_TOKENS * token,
        block_stride=BLOCK_TOKENS * token,
        token_stride=token,
        head_stride=head,
        block_tokens=BLOCK_TOKENS,
        slots=slots.data_ptr(),
        num_slots=BLOCKS * BLOCK_TOKENS,
    )


def reshape_case(kernels: Kernels, unit_nbytes: int, nbytes: int, shift: int, *, flat: bool) -> str:
    size = 2 * BLOCKS * BLOCK_TOKENS * HEADS * 2 * 64 + 16
    host_src = torch.randint(0, 256, (size,)).to(torch.uint8)
    host_dst = torch.zeros(size, dtype=torch.uint8)
    slots = [torch.randperm(BLOCKS * BLOCK_TOKENS) for _ in range(2)]
    slots[0][3], slots[1][5] = -1, -1
    launches = {}
    sides = {"cpu": (host_src, host_dst, *slots)}
    sides["cuda"] = tuple(tensor.cuda() for tensor in sides["cpu"])
    for device, (src, dst, src_slots, dst_slots) in sides.items():
        launches[device] = _cuda.plan_reshape(
            strides(src.data_ptr() + shift, nbytes, src_slots, flat=flat),
            strides(dst.data_ptr() + shift, nbytes, dst_slots, flat=flat),
            num_tokens=BLOCKS * BLOCK_TOKENS,
            num_layers=2,
            num_heads=HEADS,
            head_nbytes=nbytes,
        )
    torch.cuda.synchronize()
    for launch in launches["cpu"]:
        _cuda.run_on_cpu(launch)
    for launch in launches["cuda"]:
        kernels.launch(launch, 0)
    torch.cuda.synchronize()
    name = launches["cuda"][0].kernel
    if not torch.equal(sides["cuda"][1].cpu(), host_dst):
        raise RuntimeError(f"{name} differs from its CPU build")
    if name.removeprefix("pdlink_").removesuffix("_flat") != f"copy{unit_nbytes}":
        raise RuntimeError(f"{name} was taken, not copy{unit_nbytes}")
    return name


def moves_case(device: Device, kernels: Kernels, num_runs: int, shift: int) -> None:
    """Runs of two lengths between any addresses: pairs in the argument, or a list that is copied."""
    each = 40 if num_runs < 200 else 16
    size = num_runs * 2 * each + 64
    src = torch.randint(0, 256, (size,)).to(torch.uint8).cuda()
    dst = torch.zeros(size, dtype=torch.uint8).cuda()
    at = np.random.default_rng(num_runs).permutation(num_runs) * 2 * each + shift
    runs = np.stack([at, np.roll(at, 1), np.where(np.arange(num_runs) % 2, each, each // 2)], axis=1).astype(np.int64)
    regions = [[(int(one.data_ptr()), size)] for one in (src, dst)]
    torch.cuda.synchronize()
    with closing(Launches[str](device, kernels, wake=-1, gpu_share=0.01)) as launches:
        launches.launch("runs", _cuda.Moves([RunList(0, 0, 0, 0, runs)], *regions))
        torch.cuda.synchronize()
    expected = torch.zeros(size, dtype=torch.uint8)
    for a, b, n in runs.tolist():
        expected[b : b + n] = src[a : a + n].cpu()
    if not torch.equal(dst.cpu(), expected):
        raise RuntimeError("runs landed wrong")


def main() -> int:
    torch.cuda.set_device(0)
    device = Device(0)
    device.open()
    kernels = Kernels(device)
    CudaStream(device).close()
    seen = {reshape_case(kernels, *case, flat=flat) for case in CASES for flat in (True, False)}
    for shift in (0, 4, 1):
        for num_runs in (50, 5000):
            moves_case(device, kernels, num_runs, shift)
    missing = set(_cuda.kernel_names()) - seen
    kernels.close()
    device.close()
    print(f"{len(seen)} kernels equal their CPU builds" + (f"; not run: {sorted(missing)}" if missing else ""))
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
