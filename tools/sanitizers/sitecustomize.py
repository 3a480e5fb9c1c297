"""On PYTHONPATH of what runs under a sanitizer, helper processes too: native modules come from beside this file."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

_BUILD = Path(__file__).parent


class _Instrumented:
    """Finds `pdlink._tcp` and its like where the sanitized ones are."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, module = name.rpartition(".")
        file = _BUILD / f"{module}{EXTENSION_SUFFIXES[0]}"
        if package != "pdlink" or not file.exists():
            return None
        return importlib.util.spec_from_file_location(name, file)


sys.meta_path.insert(0, _Instrumented)
