"""A stream whose worker dies goes on at another one. No I/O.

After a failure another worker is asked for the rest of the answer, behind the tokens that the client has
(`Resumes.behind`), or for all of it again, of which `join` drops what the client has. Either way the client's events
keep their ids, and what is dropped must be what was sent (`choices.py`): otherwise the stream ends with an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from pdlink.api.openai import CHAT, COMPLETIONS
from pdlink.api.sse import payloads, rewritten

from .choices import Choices, Diverged

if TYPE_CHECKING:
    from pdlink.api.openai import Call

PATHS = (COMPLETIONS, CHAT)
"""Of requests whose streams may go on."""

Links: TypeAlias = Sequence[Mapping[str, Any]]
"""`Health.link` of every worker that may get a request."""


@dataclass(frozen=True, slots=True)
class Resumes:
    """How the workers of a dialect give the rest of an answer."""

    refusal: Callable[[Call, Links], str]
    """Why another worker would answer something else; empty if it would not."""
    begin: Callable[[Call, int], Call] = lambda call, _seed: call
    """What to ask of each stream, with a seed for clients that gave none."""
    behind: Callable[[Call, Sequence[int]], Call] | None = None
    """Asks for the rest, behind these tokens; None: the whole answer is made again."""


class Recovery:
    """Of one stream."""

    def __init__(
        self, call: Call, resumes: Resumes, limit: int, seed: int, links: Callable[[], Links] = tuple
    ) -> None:
        """limit: how often it may go on. links: asked when it is to."""
        self.call = resumes.begin(call, seed)
        """What its workers are asked now."""
        self.num_behind = 0
        """Tokens of the answer that its workers are told with the prompt, to go on behind them."""
        self.joins = False
        """The client has tokens of an earlier attempt: what a worker sends must pass `join`."""
        self._first_call, self._resumes, self._left, self._links = self.call, resumes, limit, links
        self._had = Choices()
        self.sent = self._had.sent
        """The client gets these whole events."""
        self._strange = ""

    def go_on(self) -> str:
        """Make `call` the one for another worker; why that is not possible, or nothing."""
        if not self._left:
            return "it has gone on elsewhere too often (recover_streams)"
        self._read()
        refusal = self._resumes.refusal(self._first_call, self._links())
        if refusal and self._had.said:  # any answer may follow what says nothing yet
            return refusal
        if self._strange:
            return f"it holds {self._strange}"
        if self._resumes.behind is None:
            self._had.begin()
        else:
            token_ids = self._had.go_behind()
            if token_ids is None:
                return "its worker told no token ids"
            self.call = self._resumes.behind(self._first_call, token_ids)
            self.num_behind = len(token_ids)
        self._left -= 1
        self.joins = True
        return ""

    def join(self, data: bytes) -> bytes:
        """Whole events of another worker as the client's next ones. Raises Diverged."""
        return rewritten(data, self._had.mark, self._had.joined)

    def _read(self) -> None:
        for payload in payloads(self._had.take()):
            if self._had.mark in payload:
                self._strange = self._had.read(payload) or self._strange


__all__ = ["Diverged", "Links", "Recovery", "Resumes"]
