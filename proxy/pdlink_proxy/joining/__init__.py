"""What a client has of a stream, and how events of another worker follow it: a file for each kind of events."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..openai import GENERATE, MESSAGES, RESPONSES
from .base import Diverged, Had
from .choices import Choices
from .generated import Generated
from .named import Named

if TYPE_CHECKING:
    from ..openai import Call

_KINDS: dict[str, type[Choices | Generated | Named]] = {GENERATE: Generated, RESPONSES: Named, MESSAGES: Named}


def nothing_had(call: Call) -> Had:
    """Of a stream of which the client has nothing yet."""
    return _KINDS.get(call.path, Choices)()


__all__ = ["Choices", "Diverged", "Generated", "Had", "Named", "nothing_had"]
