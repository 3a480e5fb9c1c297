"""Fields of JSON from outside: the types that several readers share, and the one way to read them.

A type holds the range in which its number makes sense. What is kept of numbers is added up, put into columns of
64-bit floats, and written as JSON with integers of 64 bits; a number in its range can do no harm there.
"""

from __future__ import annotations

import contextlib
import re
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta, inspect

from pdlink.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_TOKENS = 2**31 - 1

MOST = 2**53
Count = Annotated[int, Meta(ge=0, le=MOST)]
Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Tokens = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
SomeTokens = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
NumAnswers = Annotated[int, Meta(ge=0, le=2**16)]

_SHOWN_NBYTES = 64 * 1024
"""JSON up to this size is read again to show the wrong value."""
_MAX_SHOWN_CHARS = 100


class BadField(InvalidRequest):
    """A body that is not JSON, or one invalid field of it."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        """Name of the field at the top of the body, for OpenAI's error object."""


@cache
def decoder(kind: Any, *, strict: bool = True) -> msgspec.json.Decoder[Any]:
    """Made once for each type: `msgspec.json.decode` with a type works it out anew."""
    return msgspec.json.Decoder(kind, strict=strict)


def decoded(data: bytes | msgspec.Raw, kind: Any, field: str = "", *, strict: bool = True) -> Any:
    """The value of this JSON. field: its name in the request; empty for the body. strict: False takes "5" and 5.0 for
    an integer. Raises BadField."""
    try:
        return decoder(kind, strict=strict).decode(data)
    except msgspec.ValidationError as error:
        raise _explained(str(error), data, kind, field) from None
    except (ValueError, RecursionError) as error:
        raise BadField(f"{field or 'the body'}: not valid JSON: {error}", field or None) from None


def _explained(problem: str, data: bytes | msgspec.Raw, kind: Any, field: str) -> BadField:
    """msgspec's "Expected X - at `$.path`" as "path: Expected X, got VALUE"."""
    what, _, path = problem.partition(" - at `$")
    path = path.rstrip("`")
    keys = re.findall(r"[^.\[\]]+", path)
    name = (field + path).lstrip(".")
    if expected := _range_of(kind, keys):
        what = expected
    if keys and len(memoryview(data)) <= _SHOWN_NBYTES:
        with contextlib.suppress(msgspec.DecodeError):  # a number too large for any type
            value = msgspec.json.decode(data)
            for key in keys:
                value = value[int(key)] if isinstance(value, list) else value[key]
            if isinstance(value, str | int | float) and len(repr(value)) < _MAX_SHOWN_CHARS:
                what = f"{what.partition(', got ')[0]}, got {value!r}"
    return BadField(f"{name or 'the body'}: {what}", re.split(r"[.\[]", name)[0] or None)


def _range_of(kind: Any, keys: Sequence[str]) -> str:
    """Of an integer there; empty for anything else."""
    found = _alternatives(inspect.type_info(kind))
    for key in keys:
        below: list[inspect.Type] = []
        for each in found:
            if isinstance(each, inspect.StructType):
                below += [inner.type for inner in each.fields if inner.encode_name == key]
            elif isinstance(each, inspect.ListType | inspect.VarTupleType):
                below.append(each.item_type)
        found = [inner for each in below for inner in _alternatives(each)]
    ranges = [(each.ge, each.le) for each in found if isinstance(each, inspect.IntType) and each.ge is not None]
    return f"Expected an integer from {ranges[0][0]} to {ranges[0][1]}" if ranges else ""


def _alternatives(kind: inspect.Type) -> Sequence[inspect.Type]:
    return kind.types if isinstance(kind, inspect.UnionType) else (kind,)
