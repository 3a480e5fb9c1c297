"""What a client has of a stream, and how events of another worker follow it: a file for each kind of events."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..openai import GENERATE, MESSAGES, RESPONSES, has_several
from .base import Diverged, Had
from .choices import Choices
from .generated import Generated
from .named import Named

if TYPE_CHECKING:
    from ..openai import Call

_WITH_NAMES = frozenset((RESPONSES, MESSAGES))


def nothing_had(call: Call) -> Had:
    """Of a stream of which the client has nothing yet."""
    if call.path == GENERATE:
        return Generated(batch=has_several(call.prompt))
    return Named() if call.path in _WITH_NAMES else Choices()


__all__ = ["Choices", "Diverged", "Generated", "Had", "Named", "nothing_had"]
