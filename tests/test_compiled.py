"""Where compiled functions are kept."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import llvmlite
import numba
import pytest
from numba.core import caching

from pdlink import compiled as compiled_module
from pdlink.compiled import compiled

CODE = """
from pdlink.compiled import compiled

@compiled
def double(value):
    return 2 * value
"""


def module_in(folder: Path) -> Any:
    """A module with a function that is compiled, as one of a package in this folder."""
    path = folder / "doubling.py"
    path.write_text(CODE)
    spec = importlib.util.spec_from_file_location("doubling", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def kept_in(folder: Path) -> set[Path]:
    return {path.parent.parent for path in folder.rglob("*.nbi")}


def test_code_of_each_numba_is_kept_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the source, which environments with other versions may share."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    mine = tmp_path / f"__pycache__/numba-{numba.__version__}-llvmlite-{llvmlite.__version__}"
    assert module_in(tmp_path).double(21) == 42
    assert kept_in(tmp_path) == {mine}
    monkeypatch.setattr(compiled_module, "_VERSIONS", "numba-0-llvmlite-0")
    assert module_in(tmp_path).double(21) == 42
    assert kept_in(tmp_path) == {mine, mine.parent / "numba-0-llvmlite-0"}
    assert numba.config.CACHE_DIR == "", "functions of others are kept where they were"


def test_a_folder_that_is_named_has_a_folder_of_the_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By NUMBA_CACHE_DIR."""
    named = tmp_path / "named"
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(named))
    assert module_in(tmp_path).double(21) == 42
    assert kept_in(tmp_path) == {named / compiled_module._VERSIONS}


def test_code_of_a_package_that_is_read_only_is_kept_in_the_user_s_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where not even that can be written, every process compiles anew."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    package, home = tmp_path / "package", tmp_path / "home"
    package.mkdir()
    (package / "__pycache__").write_text("no folder: nothing can be made in it")
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    assert module_in(package).double(21) == 42
    assert [path.suffix for path in sorted(home.rglob("*.nb?"))] == [".nbc", ".nbi"]


def test_no_place_for_compiled_code_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package may be read-only and its user without a home."""
    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])

    def double(value: int) -> int:
        return 2 * value

    assert compiled(double)(21) == 42
