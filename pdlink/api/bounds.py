"""Numbers from outside, and the ranges in which they make sense. Each is checked where it enters.

What is kept of them is added up, put into columns of 64-bit floats, and written as JSON with integers of 64 bits. A
number in its range can do no harm there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec

from pdlink.api.presence import Count
from pdlink.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["RANGES", "Count", "OutOfRange", "Priority", "Seed", "Tokens", "check_numbers", "check_sampling"]

MAX_TOKENS = 2**31 - 1

Tokens = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
Seed = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Priority = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]

_TOKENS, _ANSWERS = (0, MAX_TOKENS), (0, 2**16)
RANGES: Mapping[str, tuple[int, int]] = {
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens"), _TOKENS),
    "num_tokens": (1, MAX_TOKENS),
    "n": _ANSWERS,
    "seed": (-(2**63), 2**63 - 1),
    "priority": (-(2**31), 2**31 - 1),
}
"""Of the fields of a request that the proxy reads, least and most. Others are the worker's to judge."""
SAMPLING: Mapping[str, tuple[int, int]] = {"max_new_tokens": _TOKENS, "n": _ANSWERS}
"""The same of SGLang's `sampling_params`."""

_NUMBER = msgspec.json.Decoder(int | float)
_FIRST_OF_NUMBERS = b"-0123456789"
_SAMPLING = msgspec.json.Decoder(dict[str, msgspec.Raw] | list[dict[str, msgspec.Raw]])


class OutOfRange(InvalidRequest):
    """A number of a request's body that makes no sense."""

    def __init__(self, name: str, least: int, most: int) -> None:
        super().__init__(f"field {name!r} must be a number from {least} to {most}")
        self.param = name


def check_numbers(fields: Mapping[str, msgspec.Raw], ranges: Mapping[str, tuple[int, int]] = RANGES) -> None:
    """Raises OutOfRange. Values of other types are passed over: the code that needs them refuses them."""
    for name, (least, most) in ranges.items():
        if name not in fields:
            continue
        raw = memoryview(fields[name])
        if raw[0] not in _FIRST_OF_NUMBERS:
            continue
        try:
            well = least <= _NUMBER.decode(raw) <= most
        except msgspec.DecodeError:  # no 64-bit float holds it
            well = False
        if not well:
            raise OutOfRange(name, least, most)


def check_sampling(raw: msgspec.Raw | None) -> None:
    """The same of `sampling_params`: an object, or a list of some. Raises OutOfRange."""
    try:
        found = _SAMPLING.decode(raw) if raw is not None else {}
    except (ValueError, RecursionError):
        return
    for fields in found if isinstance(found, list) else [found]:
        check_numbers(fields, SAMPLING)
