"""Modules of tools/, which is no package."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest


def tool(name: str) -> Any:
    """They import each other by their bare names."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(Path(__file__).parents[1] / "tools"), *sys.path])
        return importlib.import_module(name)
