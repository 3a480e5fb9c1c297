"""Objects of other packages, which a setting names by `path.to.module:name`."""

from __future__ import annotations

import importlib
from typing import Any

from pdlink.errors import ConfigError


def make_by_path(setting: str, path: str, takes: str, *arguments: object) -> Any:
    """What the callable at `path` returns for these arguments. takes: what `setting` does, for the error.

    Raises ConfigError if there is no such callable, or it does not take the arguments.
    """
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)(*arguments)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{setting}: got {path!r}, which cannot be made ({error}); {takes}; put its module on PYTHONPATH"
        ) from error
