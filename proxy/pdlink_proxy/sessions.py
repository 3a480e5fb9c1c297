"""`KnownSessions`: where the KV of agents' sessions lies, by the turns that this process placed. Time is an argument.

The next turn goes to the workers of the last one, whatever the policy is, unless they are gone or have more to do
than another one would have with all of the prompt.
"""

from __future__ import annotations

from collections import OrderedDict
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_SESSIONS = 16384
"""Beyond them the session that was silent for longest is forgotten."""
_NOWHERE: Mapping[str, str] = MappingProxyType({})


class SessionTurn(NamedTuple):
    """Of a session: what one request is."""

    owner: str
    """`owner_of` the API key that it came with: each has sessions of its own."""
    id: str
    salt: str
    """Its `cache_salt`."""
    model: str
    ttl_s: float


class KnownSession(msgspec.Struct, kw_only=True):
    """What operators see of one."""

    id: str
    salt: str
    model: str
    turns: int = 0
    running: int = 0
    """Turns that are not answered yet."""
    moved: int = 0
    """Turns that a worker got which had not the one before."""
    tokens: int = 0
    """Of the last prompt."""
    kept_tokens: int | None = None
    """Of a prompt, that the session keeps; None where the engine does not say."""
    workers: dict[str, str] = {}
    """By leg, the label of the worker of the last turn."""
    ttl_s: float = 0.0
    heard_s: float = 0.0
    """When its last turn began or ended."""

    def is_over(self, now_s: float) -> bool:
        return not self.running and self.heard_s + self.ttl_s <= now_s


class KnownSessions:
    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, str, str, str], KnownSession] = OrderedDict()
        """By owner, id, salt and model, as workers keep them; the one that was heard of last at the end."""

    def where(self, turn: SessionTurn, now_s: float) -> Mapping[str, str]:
        """By leg, the label of the worker that had the last turn."""
        known = self._known.get(turn[:4])
        return _NOWHERE if known is None or known.is_over(now_s) else known.workers

    def placed(self, turn: SessionTurn, workers: Mapping[str, str], tokens: int, now_s: float, *, again: bool) -> str:
        """A turn goes to these workers; what to tell people of it. again: it was placed before."""
        known = self._known.get(turn[:4])
        if known is None or known.is_over(now_s):
            known = KnownSession(id=turn.id, salt=turn.salt, model=turn.model)
        self._known[turn[:4]] = known
        self._known.move_to_end(turn[:4])
        while len(self._known) > MAX_SESSIONS:
            self._known.popitem(last=False)
        left = [label for leg, label in known.workers.items() if workers.get(leg, label) != label]
        known.moved += bool(left)
        known.turns += not again
        known.running += not again
        known.workers = {**known.workers, **workers}
        known.tokens, known.ttl_s, known.heard_s = tokens, turn.ttl_s, now_s
        told = f"turn {known.turns} of session {turn.id}"
        if left:
            return f"{told}, not where the last one was: {', '.join(left)} gone or too busy"
        return told if known.turns == 1 else f"{told}, where the last one was"

    def kept(self, turn: SessionTurn, tokens: int) -> None:
        """A worker has said how many tokens of the prompt the session keeps."""
        if (known := self._known.get(turn[:4])) is not None:
            known.kept_tokens = tokens

    def ended(self, turn: SessionTurn, now_s: float) -> None:
        """A turn that was placed is over."""
        if (known := self._known.get(turn[:4])) is not None:
            known.running, known.heard_s = max(0, known.running - 1), now_s

    def end(self, owner: str | None, session_id: str) -> list[str]:
        """It is known no more. owner: None for all. Gives the salts under which it was known."""
        found = [key for key in self._known if key[1] == session_id and owner in (None, key[0])]
        return [self._known.pop(key).salt for key in found]

    def shown(self, now_s: float) -> list[KnownSession]:
        """The one that was heard of last first."""
        return [each for each in reversed(self._known.values()) if not each.is_over(now_s)]
