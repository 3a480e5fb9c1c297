"""Packages that pdlink works without, and the extra that brings each of them."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from pdlink.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

EXTRA_OF = {
    "torch": "engine",
    "transformers": "engine",
    "tokenizers": "engine",
    "safetensors": "engine",
    "libucx": "ucx",
    "obstore": "store",
    "zstandard": "store",
    "opentelemetry": "otel",
}
"""Name that is imported to the extra of pyproject.toml."""


@contextlib.contextmanager
def needed() -> Iterator[None]:
    """Within it, a missing package of an extra raises ConfigError, which names the extra, instead of ImportError."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRA_OF:
            raise
        raise ConfigError(missing(package)) from error


def missing(package: str) -> str:
    """For a package in EXTRA_OF: what is wrong, and what to do."""
    return f"{package}: not installed, and this needs it; {installing(EXTRA_OF[package])}"


def installing(extra: str) -> str:
    """The command that adds an extra to this installation: from the checkout or wheel that pdlink came from.

    A package index may have another project under this name, so it is named only where pdlink came from one.
    """
    try:
        said = importlib.metadata.distribution("pdlink").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        said = None
    source = urlsplit(json.loads(said)["url"] if said else "")
    if source.scheme == "file":
        return f"pip install '{unquote(source.path)}[{extra}]'"
    return (
        f"pip install 'pdlink[{extra}]'"
        if not source.scheme
        else f"pip install 'pdlink[{extra}] @ {source.geturl()}'"
    )
