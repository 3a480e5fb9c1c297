"""`wheels.sh --vllm`: vLLM for a machine that has CUDA and torch and no network, as small as it gets.

    bundle.py FOLDER [--gpu 90] [--has FILE]

Into FOLDER go vllm.tar.xz, which run.sh unpacks, and nixl.tar.xz, with which NixlConnector runs beside ours. Left out
is what only other GPUs or models use: of compiled modules the code of other architectures, flash-attention (Triton's
kernels take its place), mixtures of experts, the Rust server. Python packages that the machine has anyway are left
out, too: those that torch, transformers and numba need, or the names in FILE, as `pip freeze` there writes them.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pip._vendor.packaging.requirements import Requirement

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

VLLM, NIXL = "vllm==0.32.0", ("nixl==1.5.1", "nixl-cu13==1.5.1")
THERE = ("torch", "transformers", "numpy", "numba")
WITHOUT = re.compile(
    r"torch|torchaudio|torchvision|torchcodec|triton|nvidia-.*|nvtx|pynvvideocodec|flashinfer-.*|tilelang|fastsafetensors"
    r"|instanttensor|quack-kernels|tokenspeed-mla|humming-kernels|opencv-python-headless|pip|setuptools"
)
"""Requirements of vLLM that the machine has with torch, or that nothing of the stages imports."""
PARTS_WITHOUT = re.compile(
    r"vllm/(vllm-rs|vllm_flash_attn/.*\.so|third_party/deep_gemm/.*|_flash\w*\.abi3\.so|_qutlass_C.*|_deepselect_C.*"
    r"|_moe_C_stable_libtorch.*)|.*\.(pyc|a)|pycountry/(locales/.*|databases/iso3166-[23].*)|nixl_ep_cu13/.*\.so"
    r"|.*/libplugin_(?!UCX)\w+\.so|.*/lib(ucx_perftest|aws-|azure-|gusli|s2n)[^/]*|nixl_cu13\.scripts/.*"
)
"""Of vLLM, of what it needs, and of NIXL: its plugins but UCX and what they load."""
ENVIRONMENT = {
    "python_version": "3.12", "python_full_version": "3.12.3", "sys_platform": "linux", "os_name": "posix",
    "platform_system": "Linux", "platform_machine": "x86_64", "implementation_name": "cpython",
    "platform_python_implementation": "CPython",
}  # fmt: skip
GLIBC = (39, 35, 34, 31, 28, 27, 24, 18, 17, 12, 5)
PLATFORMS = [*(f"manylinux_2_{minor}_x86_64" for minor in GLIBC), "manylinux2014_x86_64", "manylinux2010_x86_64"]
PIP = [
    *(sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-deps", "--ignore-installed"),
    *("--only-binary=:all:", "--implementation", "cp", "--python-version", "3.12", "--no-compile"),
    *(word for abi in ("cp312", "abi3", "none") for word in ("--abi", abi)),
    *(word for platform in (*PLATFORMS, "any") for word in ("--platform", platform)),
]
ELF_CODE = 2  # of an entry of a fatbin; 1 is PTX


def name_of(text: str) -> str:
    return re.sub(r"[-_.]+", "-", text).lower()


def metadata(requirements: Iterable[str]) -> dict[str, tuple[str, list[str]]]:
    """Version, and what they need, of the newest that fit, as the registry says; nothing is fetched but that."""
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        command = [*PIP, "--dry-run", "--report", report.name, "--target", "/nonexistent", *requirements]
        subprocess.run(command, check=True, timeout=600)
        found = json.loads(Path(report.name).read_text(encoding="utf-8"))["install"]
    return {
        name_of(one["metadata"]["name"]): (one["metadata"]["version"], one["metadata"].get("requires_dist", []))
        for one in found
    }


def closure(first: Iterable[str], without: Iterable[str]) -> dict[str, str]:
    """Name and version of these and all they need, but `without` and what is behind it."""
    known, left_out = dict[str, str](), set(without)
    wanted: dict[str, list[Requirement]] = {}
    todo: list[tuple[Requirement, str]] = [(Requirement(one), "") for one in first]
    while todo:
        for requirement, extra in todo:
            name = name_of(requirement.name)
            if requirement.marker and not requirement.marker.evaluate({**ENVIRONMENT, "extra": extra}):
                continue
            if name not in left_out and not WITHOUT.fullmatch(name):
                wanted.setdefault(name, []).append(requirement)
        again = {
            name: asked
            for name, asked in wanted.items()
            if name not in known or not all(one.specifier.contains(known[name], prereleases=True) for one in asked)
        }
        if not again:
            break
        texts = [
            name + ",".join(str(one.specifier) for one in asked if str(one.specifier))
            for name, asked in again.items()
        ]
        todo = []
        for name, (version, needs) in metadata(texts).items():
            known[name] = version
            extras = {"", *(extra for one in wanted[name] for extra in one.extras)}
            todo += [(Requirement(need), extra) for need in needs for extra in extras]
    return known


@dataclass(frozen=True, slots=True)
class FatbinEntry:
    """Code for one architecture in a fatbin, with its header."""

    at: int
    nbytes: int
    kind: int
    architecture: int


def sections(image: bytes | bytearray) -> Iterator[tuple[str, int, int, int]]:
    """Name, flags, offset and size of each section of a 64-bit ELF file."""
    (table,) = struct.unpack_from("<Q", image, 0x28)
    size, count, names = struct.unpack_from("<HHH", image, 0x3A)
    rows = [struct.unpack_from("<IIQQQQ", image, table + index * size) for index in range(count)]
    for name, _, flags, _, offset, nbytes in rows:
        begin = rows[names][4] + name
        yield bytes(image[begin : image.index(b"\0", begin)]).decode(), flags, offset, nbytes


def fatbins(image: bytes | bytearray) -> Iterator[tuple[int, int, int, list[FatbinEntry]]]:
    """Offset, bytes of its header and of its body, and entries of each."""
    for name, _, begin, nbytes in sections(image):
        if name not in (".nv_fatbin", "__nv_relfatbin"):
            continue
        at = begin
        while at < begin + nbytes:
            magic, _, header, body = struct.unpack_from("<IHHQ", image, at)
            if magic != 0xBA55ED50:
                at += 8
                continue
            entries, inside = [], at + header
            while inside < at + header + body:
                kind, _, head, payload = struct.unpack_from("<HHIQ", image, inside)
                (architecture,) = struct.unpack_from("<I", image, inside + 28)
                entries.append(FatbinEntry(inside, head + payload, kind, architecture))
                inside += head + payload
            yield at, header, body, entries
            at = (at + header + body + 7) // 8 * 8


def slim(path: Path, architecture: int) -> None:
    """Keep of each fatbin what this architecture runs; zeros take the place of the rest, which xz makes nothing of.

    Nothing moves: .nvFatBinSegment points at the fatbins.
    """
    image = bytearray(path.read_bytes())
    if image[:4] != b"\x7fELF":
        return
    for at, header, body, entries in list(fatbins(image)):
        kept = b"".join(
            bytes(image[one.at : one.at + one.nbytes])
            for one in entries
            if one.kind == ELF_CODE and one.architecture == architecture
        )
        image[at + header : at + header + body] = kept + bytes(body - len(kept))
        struct.pack_into("<Q", image, at + 8, len(kept))
    for name, flags, offset, nbytes in sections(image):
        if name in (".symtab", ".strtab", ".gnu.build.attributes", ".comment") and not flags & 2:
            image[offset : offset + nbytes] = bytes(nbytes)
    path.write_bytes(image)


def pack(target: Path, wheels: Iterable[Path], architecture: int) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        site = Path(folder)
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as content:
                for one in content.namelist():
                    if not PARTS_WITHOUT.fullmatch(one):
                        content.extract(one, site)
        for data in site.glob("*.data/*lib"):
            shutil.copytree(data, site, dirs_exist_ok=True)
        for data in site.glob("*.data"):
            shutil.rmtree(data)
        for module in site.rglob("*.so*"):
            slim(module, architecture)
        names = sorted(str(path.relative_to(site)) for path in site.iterdir())
        # By names, so that what is alike lies together.
        command = ["tar", "--sort=name", "--owner=0", "--group=0", "-C", folder, "-cf", "-", *names]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as tar, target.open("wb") as out:
            subprocess.run(["xz", "-T0", "--lzma2=preset=3,dict=64MiB"], stdin=tar.stdout, stdout=out, check=True)
    print(f"{target.name}: {target.stat().st_size / 1e6:.1f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gpu", type=int, default=90, help="compute capability of the GPU, times ten (%(default)s)")
    parser.add_argument("--has", type=Path, help="packages that the machine has, as `pip freeze` there writes them")
    args = parser.parse_args()
    if args.has is None:
        there = set(closure(THERE, ()))
    else:
        lines = args.has.read_text(encoding="utf-8").split()
        there = {name_of(re.split(r"[=<>@\[]", line)[0]) for line in lines}
    versions = closure([VLLM], there)
    print(f"vLLM and {len(versions) - 1} packages")
    wheels = args.folder / "fetched"
    exact = [f"{name}=={version}" for name, version in versions.items()]
    words = [word for word in PIP if word not in ("install", "--ignore-installed", "--no-compile")]
    words.insert(words.index("pip") + 1, "download")
    subprocess.run([*words, "-d", str(wheels), *exact, *NIXL], check=True, timeout=1800)
    nixl = [path for path in wheels.glob("*.whl") if path.name.startswith("nixl")]
    pack(args.folder / "vllm.tar.xz", [path for path in wheels.glob("*.whl") if path not in nixl], args.gpu)
    pack(args.folder / "nixl.tar.xz", nixl, args.gpu)
    shutil.rmtree(wheels)


if __name__ == "__main__":
    main()
