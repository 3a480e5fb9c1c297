"""Every kernel on small and odd shapes, compared with its CPU build: what compute-sanitizer is given to watch."""

from __future__ import annotations

import sys

import torch

from pdlink import _cuda
from pdlink.cuda.driver import Device, Stream
from pdlink.cuda.kernels import Kernels

BLOCKS, BLOCK_TOKENS, HEADS = 7, 3, 3
CASES = [
    # kernel, bytes of a head at the source, conversion, bytes by which both sides are off a multiple of 16
    ("copy16", 48, "none", 0),
    ("copy8", 40, "none", 8),
    ("copy4", 36, "none", 4),
    ("copy2", 34, "none", 2),
    ("copy1", 33, "none", 1),
    ("quantize16", 64, "quantize", 0),
    ("quantize1", 34, "quantize", 0),
    ("dequantize16", 48, "dequantize", 0),
    ("dequantize1", 33, "dequantize", 0),
]
WIDTHS = {"none": 1.0, "quantize": 0.5, "dequantize": 2.0}


def place(base: int, head_nbytes: int, slots: torch.Tensor, *, flat: bool) -> _cuda.Place:
    """Two planes, tokens in blocks; heads apart unless `flat`."""
    head = head_nbytes if flat else 2 * head_nbytes
    token = HEADS * head
    return _cuda.Place(
        base=base,
        layer_stride=BLOCKS * BLOCK_TOKENS * token,
        block_stride=BLOCK_TOKENS * token,
        token_stride=token,
        head_stride=head,
        block_tokens=BLOCK_TOKENS,
        slots=slots.data_ptr(),
        num_slots=BLOCKS * BLOCK_TOKENS,
    )


def reshape_case(kernels: Kernels, kernel: str, nbytes: int, conversion: str, shift: int, *, flat: bool) -> str:
    dst_nbytes = int(nbytes * WIDTHS[conversion])
    itemsize = 2 if conversion == "quantize" else 1
    size = 2 * BLOCKS * BLOCK_TOKENS * HEADS * 2 * 64 + 16
    # Not every bit pattern: NaN of bfloat16 and what lies beyond float8 are compared elsewhere.
    host_src = (
        torch.randn(size // 2).bfloat16().view(torch.uint8)
        if itemsize == 2
        else torch.randint(0, 120, (size,)).to(torch.uint8)
    )
    host_dst = torch.zeros(2 * size, dtype=torch.uint8)
    slots = [torch.randperm(BLOCKS * BLOCK_TOKENS) for _ in range(2)]
    slots[0][3], slots[1][5] = -1, -1
    scales = torch.tensor([0.5, 1.0, 1.7])
    launches = {}
    sides = {"cpu": (host_src, host_dst, *slots, scales)}
    sides["cuda"] = tuple(tensor.cuda() for tensor in sides["cpu"])
    for device, (src, dst, src_slots, dst_slots, factors) in sides.items():
        launches[device] = _cuda.plan_reshape(
            place(src.data_ptr() + shift, nbytes, src_slots, flat=flat),
            place(dst.data_ptr() + shift, dst_nbytes, dst_slots, flat=flat),
            num_tokens=BLOCKS * BLOCK_TOKENS,
            num_layers=2,
            num_heads=HEADS,
            chunk_elements=nbytes // itemsize,
            itemsize=itemsize,
            conversion=conversion,  # type: ignore[arg-type]
            scales=0 if conversion == "none" else factors.data_ptr(),
            scale_strides=(0, 0, 0 if flat else 1),
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
    if name.removeprefix("pdlink_").removesuffix("_flat") != kernel:
        raise RuntimeError(f"{name} was taken, not {kernel}")
    return name


def runs_case(kernels: Kernels, shift: int) -> str:
    src, dst = (
        torch.randint(0, 256, (1 << 17,)).to(torch.uint8).cuda(),
        torch.zeros(1 << 17, dtype=torch.uint8).cuda(),
    )
    rows = [(0, 70_000, 40_007), (50_000, 16, 1), (60_000, 1024, 4096), (90_000 + shift, 9000 + shift, 333)]
    runs = torch.tensor([[src.data_ptr() + a, dst.data_ptr() + b, n] for a, b, n in rows]).cuda()
    torch.cuda.synchronize()
    launch = _cuda.plan_runs(runs.data_ptr(), len(rows), 40_007)
    kernels.launch(launch, 0)
    torch.cuda.synchronize()
    expected = torch.zeros(1 << 17, dtype=torch.uint8)
    for a, b, n in rows:
        expected[b : b + n] = src[a : a + n].cpu()
    if not torch.equal(dst.cpu(), expected):
        raise RuntimeError("runs landed wrong")
    return launch.kernel


def main() -> int:
    torch.cuda.set_device(0)
    device = Device(0)
    device.open()
    kernels = Kernels(device)
    Stream(device).close()
    seen = {reshape_case(kernels, *case, flat=flat) for case in CASES for flat in (True, False)}
    seen |= {runs_case(kernels, shift) for shift in (0, 4, 1)}
    missing = set(_cuda.kernel_names()) - seen
    kernels.close()
    device.close()
    print(f"{len(seen)} kernels equal their CPU builds" + (f"; not run: {sorted(missing)}" if missing else ""))
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
