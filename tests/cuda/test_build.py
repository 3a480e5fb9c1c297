"""What nvcc makes of the kernels: targets, no spills, accesses of 16 bytes. Needs the toolkit, no GPU."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

import pytest

from pdlink import _cuda

TARGETS = ("80", "90")
CSRC = Path(__file__).parents[2] / "csrc"
WHEELS = Path(sysconfig.get_path("platlib")) / "nvidia/cu13/bin"
"""Where nvidia-cuda-cuobjdump, nvidia-cuda-nvdisasm and nvidia-cuda-nvcc put their programs."""


def program(name: str) -> str | None:
    places = (None, "/usr/local/cuda/bin", str(WHEELS))
    return next((found for place in places if (found := shutil.which(name, path=place))), None)


NVCC, CUOBJDUMP = program("nvcc"), program("cuobjdump")

with_nvcc = pytest.mark.skipif(NVCC is None, reason="no nvcc")
with_cuobjdump = pytest.mark.skipif(CUOBJDUMP is None or NVCC is None, reason="no cuobjdump")
if_built_with_nvcc = pytest.mark.skipif(not _cuda.fatbin(), reason="this build has no GPU kernels")


def run(*command: str) -> str:
    # cuobjdump looks for nvdisasm on the path.
    environment = {**os.environ, "PATH": f"{os.environ['PATH']}:{WHEELS}"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def compile_kernels(target: Path, *options: str) -> str:
    assert NVCC is not None
    source = str(CSRC / "cuda/kernels.cu")
    return run(NVCC, "-std=c++20", "-O3", "-I", str(CSRC), *options, "-o", str(target), source)


@functools.cache
def machine_code(target: str) -> dict[str, str]:
    """Of every kernel in the built module, by name."""
    assert CUOBJDUMP is not None
    with tempfile.NamedTemporaryFile(suffix=".fatbin") as image:
        image.write(_cuda.fatbin())
        image.flush()
        listing = run(CUOBJDUMP, "--dump-sass", "-arch", f"sm_{target}", image.name)
    names, codes = re.split(r"Function : (\w+)", listing)[1::2], re.split(r"Function : \w+", listing)[1:]
    return dict(zip(names, codes, strict=True))


@with_nvcc
def test_no_kernel_spills_or_uses_a_stack(tmp_path: Path) -> None:
    targets = [f"-gencode=arch=compute_{target},code=sm_{target}" for target in TARGETS]
    report = compile_kernels(tmp_path / "k.fatbin", "-fatbin", *targets, "-Xptxas", "-v")
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report)
    assert len(frames) == len(TARGETS) * len(_cuda.kernel_names())
    assert set(frames) == {("0", "0", "0")}
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", report)]
    assert max(registers) <= 128, "256 threads of a block would not fit twice on a multiprocessor"


@with_nvcc
def test_every_kernel_is_in_the_ptx_with_wide_accesses(tmp_path: Path) -> None:
    compile_kernels(tmp_path / "k.ptx", "-ptx", "-arch=compute_90")
    bodies = dict(re.findall(r"\.visible \.entry (\w+)\((.*?)\n}", (tmp_path / "k.ptx").read_text(), re.DOTALL))
    assert sorted(bodies) == sorted(_cuda.kernel_names())
    for name in ("pdlink_copy16_flat", "pdlink_copy16"):
        assert bodies[name].count("ld.global.v4.u32") == bodies[name].count("st.global.v4.u32") == 4


@with_cuobjdump
@if_built_with_nvcc
def test_the_module_holds_machine_code_for_both_and_ptx_for_the_rest(tmp_path: Path) -> None:
    assert CUOBJDUMP is not None
    image = tmp_path / "kernels.fatbin"
    image.write_bytes(_cuda.fatbin())
    listed = run(CUOBJDUMP, "--list-elf", "--list-ptx", str(image))
    assert sorted(re.findall(r"sm_(\d+)\.cubin|sm_(\d+)\.ptx", listed)) == [("", "90"), ("80", ""), ("90", "")]
    for target in TARGETS:
        assert sorted(machine_code(target)) == sorted(_cuda.kernel_names())


@with_cuobjdump
@if_built_with_nvcc
@pytest.mark.parametrize("target", TARGETS)
def test_machine_code_moves_16_bytes_at_once(target: str) -> None:
    """And in order: every load of a strand is under way before the first store. Nothing goes to local memory."""
    codes = machine_code(target)
    for name, code in codes.items():
        assert not re.search(r"\b(LDL|STL)\b", code), name
    for kernel in ("pdlink_copy16", "pdlink_copy16_flat"):
        wide = re.findall(r"\b(LDG|STG)\.E\.128\b", codes[kernel])
        assert wide == ["LDG"] * 4 + ["STG"] * 4


@with_cuobjdump
@if_built_with_nvcc
@pytest.mark.parametrize("target", TARGETS)
def test_pairs_in_an_argument_are_read_from_constant_memory(target: str) -> None:
    for name, code in machine_code(target).items():
        assert re.search(r"\bLDC(\.64)? R\d+, c\[0x0\]\[R\d+", code), name
