"""Builds a native module of the copy with a mutant in it, and gives back the build without one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_COMMON = "pdlink_common"
"""What modules share."""


class Native:
    def __init__(self, copy: Path) -> None:
        self._copy = copy
        self._build = copy / "build" / "mutants"
        self._whole: dict[str, Path] = {}

    def build(self, module: str) -> bool:
        """Build what has changed and put the module into the package. False if it does not compile."""
        if not (self._build / "build.ninja").exists():
            configure = [
                *("cmake", "-S", self._copy, "-B", self._build, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release"),
                *(f"-DPython_EXECUTABLE={sys.executable}", "-DPDLINK_CUDA=OFF"),
            ]
            _run(*configure).check_returncode()
        if _run("cmake", "--build", self._build, "--target", module).returncode != 0:
            return False
        (built,) = self._build.glob(f"{module}.*.so")
        target = self._copy / "pdlink" / built.name
        target.unlink(missing_ok=True)  # another process may have the old one mapped
        shutil.copy2(built, target)
        return True

    def keep(self, module: str) -> None:
        """Build the module as it is, and remember the objects."""
        if module not in self._whole:
            if not self.build(module):
                raise SystemExit(f"{module} does not build")
            self._whole[module] = self._build / f"whole-{module}"
            for target in (module, _COMMON):
                shutil.copytree(self._objects(target), self._whole[module] / target)

    def give_back(self, module: str) -> None:
        """Undo builds since `keep`. The source has to have its old time again: then nothing is compiled for it."""
        for target in (module, _COMMON):
            shutil.rmtree(self._objects(target))
            shutil.copytree(self._whole[module] / target, self._objects(target))
        (self._build / f"lib{_COMMON}.a").unlink(missing_ok=True)  # newer than its objects are now

    def _objects(self, module: str) -> Path:
        return self._build / "CMakeFiles" / f"{module}.dir"


def _run(*command: str | Path) -> subprocess.CompletedProcess[bytes]:
    path = f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(command, capture_output=True, env={**os.environ, "PATH": path})
