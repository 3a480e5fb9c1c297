"""What a source of workers is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from pdlink.errors import ConfigError, LocalError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..members import Members

ROLES = ("prefill", "decode", "both")


class SourceDown(LocalError):
    """The source cannot be asked now. What it said last stays in use."""

    code = "source_down"


class WorkerSource(Protocol):
    """Lists workers. A list replaces the one before; it is never a change to it."""

    async def follow(self, tell: Callable[[Members], None]) -> None:
        """Tell the whole list at once, and again whenever it changes. Raises SourceDown; is then called again, and
        begins with a whole list."""
        ...


def pairs_of(text: str, what: str) -> dict[str, str]:
    """From `prefill=X,decode=Y`. Raises ConfigError."""
    found: dict[str, str] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if not name or not value or name in found:
            raise ConfigError(f"discover: got {what!r}; expected NAME=VALUE pairs, each name once; correct {part!r}")
        found[name] = value
    return found
