"""What is read of a whole answer: whether it is one, and what it took."""

from __future__ import annotations

import msgspec

from pdlink.api.fields import Count  # noqa: TC001  (msgspec reads the annotation at run time)
from pdlink.api.sse import fails


class _Answer(msgspec.Struct):
    choices: list[msgspec.Raw] | None = None
    output: list[msgspec.Raw] | None = None
    """Of `RESPONSES`."""
    content: list[msgspec.Raw] | None = None
    """Of `MESSAGES`."""
    meta_info: dict[str, msgspec.Raw] | None = None
    """Of `GENERATE`; a batch is answered with a list of such objects."""
    usage: msgspec.Raw = msgspec.Raw()


class Usage(msgspec.Struct, frozen=True, gc=False):
    """Tokens that an answer says it took; 0 where it does not."""

    prompt_tokens: Count = 0
    completion_tokens: Count = 0


class _Usual(msgspec.Struct, gc=False):
    choices: list[msgspec.Raw]
    usage: Usage | None = None


_NOTHING = (None,) * 3
_USUAL, _ANSWER = msgspec.json.Decoder(_Usual), msgspec.json.Decoder(_Answer | list[_Answer])
_USAGE, _NO_USAGE = msgspec.json.Decoder(Usage), Usage()


def read_answer(content_type: str, body: bytes) -> Usage | str:
    """What an answer with status 200 took, or why it is invalid."""
    if content_type != "application/json":
        return "the answer's type is not application/json"
    try:
        usual = _USUAL.decode(body)
        if b'"error"' not in body:
            return usual.usage or _NO_USAGE
    except (ValueError, RecursionError):
        pass  # of another kind, or with a usage of which only a part can be read
    try:
        found = _ANSWER.decode(body)
    except (ValueError, RecursionError):
        found = []
    if not isinstance(found, _Answer):
        well = bool(found) and all(each.meta_info is not None for each in found)
    elif found.choices is None:
        well = (found.output, found.content, found.meta_info) != _NOTHING
    elif b'"error"' in body and fails(body):
        return "the answer ended with finish_reason error"
    else:
        try:
            return _USAGE.decode(found.usage) if found.usage else _NO_USAGE
        except (ValueError, RecursionError):
            return _NO_USAGE
    return _NO_USAGE if well else "the answer is not a JSON object with choices"
