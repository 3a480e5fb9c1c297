"""Reasons of failed transfers: as a code for counters and headers, and in words for people.

The reason of a *stop* is a code below or a sentence with numbers; either may be a peer's text. `code_of` maps every
reason to one of a fixed few codes, so a code can be a label.
"""

from __future__ import annotations

import re

from pdlink.errors import PdlinkError

OTHER_PROMPT = "other_prompt"
"""Prefill computes another prompt under this attempt's id."""
NOT_NEEDED = "not_needed"
"""The receiver has all of it in its own prefix cache: no failure."""
WINDOW_BLOCKS = "window_blocks"
"""Prefill's blocks are no multiple of decode's, and windows are kept in whole blocks."""
WEIGHTS_CHANGED = "weights_changed"
"""The server's model was given other weights in place."""
WHOLE_PROMPT = "whole_prompt"
"""The request wants what only the computation of its whole prompt gives."""
OTHER = "other"
"""Any other reason."""

WORDS = {
    "aborted": "the request was aborted, its client has left or the other leg has failed",
    "already_sent": "it was sent before; every attempt needs an id of its own",
    "deadline": "it was not over within timeouts.request_s",
    "lease_expired": "the other side gave no sign of life within a lease (10/3 of timeouts.peer_s)",
    "no_offer": "decode had no blocks for it within half a lease, and other requests wait for those it holds here",
    "no_receiver": "no decode server asked for it within timeouts.other_leg_s",
    "no_request": "prefill was sent no request with this id within timeouts.other_leg_s",
    NOT_NEEDED: "decode has the whole prompt in its own prefix cache",
    OTHER_PROMPT: "prefill computes another prompt under this id: the two servers make different tokens of one "
    "request (chat template, tokenizer), or it names another adapter, cache salt or image there",
    "peer_lost": "the other server is gone",
    "preempted": "prefill took its blocks away before they were sent",
    "shutdown": "the other server shuts down",
    "taken_by_another_receiver": "another decode server asked for it first",
    "too_many_early_blocks": "too many offers wait at prefill for their requests",
    "too_many_early_offers": "too many offers wait at prefill for their requests",
    WEIGHTS_CHANGED: "the weights of one of the two servers were changed in place while it was under way",
    WHOLE_PROMPT: "decode computes the whole prompt, because the request asks for its log-probabilities",
    WINDOW_BLOCKS: "prefill keeps sliding windows in blocks that are no multiple of decode's: give prefill a block "
    "size that is a multiple of decode's",
}
"""Codes, and their meaning in words."""

_SENTENCES = (
    (re.compile(r"cannot connect|cannot dial|no answer to the handshake"), "not_connected"),
    (re.compile(r"silent for|closed by|.* was restarted|lost frame|replaced by|control connection"), "peer_lost"),
    (re.compile(r"its key was taken off|the key of the prefill worker|the prefill worker at .* uses"), "refused:key"),
    (re.compile(r"incomplete: "), "incomplete"),
    (re.compile(r"checksum"), "checksum"),
    (re.compile(r"push "), "push_failed"),
    (re.compile(r"offer (of|names) "), "bad_offer"),
    (re.compile(r"preempted"), "preempted"),
    (re.compile(r"prefill_failed"), "prefill_failed"),
    (re.compile(r".*(connection|socket|process|reset by peer)"), "peer_lost"),
)
"""Beginnings of sentences, and their codes."""

CODES = tuple(sorted({*WORDS, *(code.partition(":")[0] for _, code in _SENTENCES)} - {NOT_NEEDED}))
"""What `label_of` says as a rule; it may also be the code of an error of pdlink."""

_LOST = "peer_lost: "
"""Prefix of a receiver's reason after the end of a session."""

_FACTOR = re.compile(r"refused: (.{1,80}?) differs", re.DOTALL)
_LEFT_OVER = re.compile(r"[^a-z0-9]+")


def _error_codes(error: type[PdlinkError] = PdlinkError) -> set[str]:
    return {error.code}.union(*(_error_codes(kind) for kind in error.__subclasses__()))


def code_of(reason: str) -> str:
    """The code of a reason: [a-z0-9_:], from a fixed set, except for the factor after `refused:`."""
    if reason in WORDS or reason in _error_codes():
        return reason
    refused = _FACTOR.match(reason)
    if refused:
        return refused_code(refused[1])
    sentence = reason.removeprefix(_LOST)  # the sentence behind it says more
    if sentence in WORDS:
        return sentence
    default = "peer_lost" if sentence != reason else OTHER
    return next((code for pattern, code in _SENTENCES if pattern.match(sentence)), default)


def label_of(reason: str) -> str:
    """`code_of` without the factor, which may be a peer's words: for labels of metrics."""
    return code_of(reason).partition(":")[0]


def refused_code(factor: str) -> str:
    """The code of a refused handshake. factor: the property that differs."""
    return "refused:" + _LEFT_OVER.sub("_", factor.lower()).strip("_")[:40]


def in_words(reason: str) -> str:
    """A sentence for a log, with its code if there is one. A peer's text is unchanged."""
    reason = reason.removeprefix(_LOST)
    words = WORDS.get(reason)
    return reason if words is None else f"{words} ({reason})"


def printable(text: str, max_chars: int) -> str:
    """A peer's text for a log or a report: one line without control characters, cut."""
    text = text[:max_chars]
    return text if text.isprintable() else "".join(char if char.isprintable() else "?" for char in text)
