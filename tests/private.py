"""Files that only this user can read."""

from __future__ import annotations

import os
from pathlib import Path


def write_private(path: Path, text: str) -> str:
    """Write a secret as pdlink wants it; returns the path."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
    return str(path)
