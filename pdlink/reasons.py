"""Why a transfer ended without its KV: a code for labels and headers, with words for people.

As text, in messages and events, a reason is `CODE: words` or only `CODE`.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Self

import msgspec


class Code(StrEnum):
    """Stable names: the `reason` of metrics and of `X-Pdlink-KV`."""

    meaning: str

    def __new__(cls, code: str, meaning: str) -> Self:
        member = str.__new__(cls, code)
        member._value_ = code
        member.meaning = meaning
        return member

    ABORTED = "aborted", "the request was aborted, its client has left or the other leg has failed"
    ALREADY_SENT = "already_sent", "it was sent before; every attempt needs an id of its own"
    BAD_OFFER = "bad_offer", "decode's offer does not fit prefill's prompt or layers"
    CHECKSUM = "checksum", "the bytes that arrived differ from those sent, or could not be compared"
    DEADLINE = "deadline", "it was not over within timeouts.request_s"
    GPU_FAILED = "gpu_failed", "a kernel or copy that it waits for has failed"
    HANDLING_FAILED = "handling_failed", "an unexpected error, which the log has"
    INCOMPLETE = "incomplete", "prefill reports fewer or other tokens, layers or bytes than decode offered for"
    LEASE_EXPIRED = (
        "lease_expired",
        "the other side gave no sign of life within a lease (10/3 of timeouts.peer_s)",
    )
    NO_OFFER = (
        "no_offer",
        "decode had no blocks for it within half a lease, and other requests wait for those it holds here",
    )
    NO_RECEIVER = "no_receiver", "no decode server asked for it within timeouts.other_leg_s"
    NO_REQUEST = "no_request", "prefill was sent no request with this id within timeouts.other_leg_s"
    NOT_CONNECTED = "not_connected", "decode cannot connect to prefill"
    NOT_NEEDED = "not_needed", "decode has the whole prompt in its own prefix cache"
    """No failure."""
    NOT_WRITTEN = "not_written", "prefill ended without having written all layers in order"
    OTHER = "other", "anything else; the log has the words"
    OTHER_PROMPT = (
        "other_prompt",
        "prefill computes another prompt under this id: the two servers make different tokens of one request (chat "
        "template, tokenizer), or it names another adapter, cache salt or image there",
    )
    PEER_LOST = "peer_lost", "the other server is gone"
    PREEMPTED = "preempted", "prefill took its blocks away before they were sent"
    PUSH_FAILED = "push_failed", "the transport could not write it"
    REFUSED = "refused", "the two workers differ in FACTOR; `pdlink doctor` has both values"
    """As `refused:FACTOR`."""
    REQUEST_FAILED = "request_failed", "the request failed at one of the two servers"
    SHUTDOWN = "shutdown", "one of the two servers shuts down"
    TAKEN_BY_ANOTHER_RECEIVER = "taken_by_another_receiver", "another decode server asked for it first"
    TOO_MANY_DIALS = "too_many_dials", "too many prefill servers have not answered yet"
    TOO_MANY_EARLY_OFFERS = "too_many_early_offers", "too many offers wait at prefill for their requests"
    WEIGHTS_CHANGED = (
        "weights_changed",
        "the weights of one of the two servers were changed in place while it was under way",
    )
    WHOLE_PROMPT = (
        "whole_prompt",
        "decode computes the whole prompt, because the request asks for its log-probabilities",
    )
    WINDOW_BLOCKS = (
        "window_blocks",
        "prefill keeps sliding windows in blocks that are no multiple of decode's: give prefill a block size that is "
        "a multiple of decode's",
    )


_CODES = {code.value: code for code in Code}
_LEFT_OVER = re.compile(r"[^a-z0-9]+")


class Reason(msgspec.Struct, frozen=True, gc=False):
    """Why one transfer ended. Its code comes from here; its words may be a peer's."""

    code: Code
    words: str = ""
    """Of this case, such as sizes and addresses; empty if the code says it all."""
    factor: str = ""
    """The property that differs, of REFUSED: [a-z0-9_], 40 characters at most."""

    @classmethod
    def refused(cls, factor: str, words: str = "") -> Reason:
        """Of a handshake. factor: the property that differs, in words, which may be a peer's."""
        return cls(Code.REFUSED, words, _LEFT_OVER.sub("_", factor.lower()).strip("_")[:40])

    @classmethod
    def of(cls, text: str) -> Reason:
        """The reason that wrote this text; for a code that is not known here, OTHER with the text as its words."""
        label, _, words = text.partition(": ")
        code, _, factor = label.partition(":")
        if code == Code.REFUSED:
            return cls.refused(factor, words)
        known = _CODES.get(label)
        return cls(Code.OTHER, text) if known is None else cls(known, words)

    @property
    def label(self) -> str:
        """The code, and the factor behind it: one word of [a-z0-9_:] for headers."""
        return f"{self.code}:{self.factor}" if self.factor else self.code.value

    @property
    def sentence(self) -> str:
        """For a log: what happened, and the code if there is one."""
        words = self.words or self.code.meaning.replace("FACTOR", self.factor.replace("_", " ") or "something")
        return words if self.code is Code.OTHER else f"{words} ({self.label})"

    def __str__(self) -> str:
        return f"{self.label}: {self.words}" if self.words else self.label


ABORTED = Reason(Code.ABORTED)
"""What a transfer is cancelled for if nothing else is said."""
