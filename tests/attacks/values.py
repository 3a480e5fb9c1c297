"""Odd values for every field of a message or an invitation, by its type, and honest ones with some of them inside."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable
from typing import Any

import msgspec
from hypothesis import strategies as st

INTEGERS = sorted(
    {
        edge + near
        for edge in (0, 2**8, 2**16, 2**31, 2**32, 2**40, 2**53, 2**62, 2**63)
        for near in (-1, 0, 1)
    }
    | {-(2**31), -(2**63), -(2**63) + 1, 2**64 - 1, 2, 3, 4, 7, 8, 4095, 4096, 4097}
)  # fmt: skip
"""All that MessagePack can say lies between -2^63 and 2^64 - 1."""
WORST = [-1, 0, 1, 2**63 - 1, 2**63, 2**64 - 1]
FLOATS = [0.0, -0.0, -1.0, 1e-320, 1.0, 1e308, float("inf"), -float("inf"), float("nan")]
STRINGS = [
    "", "a", "\0", "\n", "a\r\nb", "\x1b[2J", "::1%lo", "::1", "0.0.0.0", "127.0.0.1", "localhost", "%s%n{0}",
    "../../x", "tcp://127.0.0.1:1", "ffffffff", "\N{REPLACEMENT CHARACTER}", "\U0010ffff", "\u202e", "é" * 100,
    "x" * 64, "x" * 128, "x" * 256, "x" * 257, "x" * 5000, "decode", "prefill", "a@b", "a#1>", "loopback", "mapped",
    "tcp", "ucx", "1.20", "9" * 32, "all", "sample",
]  # fmt: skip
BYTES = [b"", b"\0", b"\xff" * 8, b"\0" * 16, b"\0" * 64, b"\x80\x04\x95", b"x" * 5000]
MANY = 2000
"""Elements of a tuple that is longer than anybody needs."""


def _hints(kind: type) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set(kind.__struct_fields__)  # type: ignore[attr-defined]  # fmt: skip  # noqa: E501
    return {name: hint for name, hint in typing.get_type_hints(kind).items() if name in names}


def leaf(kind: Any) -> st.SearchStrategy[Any]:
    """Odd values of a type; of a compound one, only values that need no knowledge of it."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return st.one_of([leaf(argument) for argument in arguments])
    if origin in (tuple, list):
        return st.just(())
    if origin is typing.Literal:
        return st.sampled_from([*arguments, *STRINGS])
    if kind is bool:
        return st.booleans()
    if kind is int:
        return st.sampled_from(WORST) | st.sampled_from(INTEGERS)
    if kind is float:
        return st.sampled_from(FLOATS)
    if kind is str:
        return st.sampled_from(STRINGS)
    if kind is bytes:
        return st.sampled_from(BYTES)
    if kind in (None, types.NoneType):
        return st.none()
    if isinstance(kind, type) and (dataclasses.is_dataclass(kind) or issubclass(kind, msgspec.Struct)):
        make: Callable[..., Any] = kind
        return st.builds(make, **{name: leaf(hint) for name, hint in _hints(kind).items()})
    raise NotImplementedError(f"no odd values for {kind}")


_Path = tuple[str, ...]
"""Names of fields; `EACH` goes into the elements of a tuple."""
EACH = "*"


def _is_struct(value: object) -> bool:
    return dataclasses.is_dataclass(value) or isinstance(value, msgspec.Struct)


def places(honest: Any, kind: Any, without: frozenset[str] = frozenset()) -> dict[_Path, Any]:
    """Every place in a value, however deep, with its type; the elements of a tuple count as one place."""
    if _is_struct(honest):
        return {
            (name, *path): inner
            for name, hint in _hints(type(honest)).items()
            if name not in without
            for path, inner in places(getattr(honest, name), hint, without).items()
        }
    found: dict[_Path, Any] = {(): kind}
    if isinstance(honest, tuple | list) and honest:
        for path, inner in places(honest[0], (typing.get_args(kind) or (type(honest[0]),))[0], without).items():
            found[(EACH, *path)] = inner
    return found


@st.composite
def spoiled(draw: st.DrawFn, honest: Any, kind: Any, without: frozenset[str] = frozenset()) -> Any:
    """`honest` with one place changed, in one element of every tuple on the way there or in all of them.

    without: fields that stay as they are. All places are as likely: most of what goes wrong does so deep inside.
    """
    found = places(honest, kind, without)
    if not found:
        return honest
    path = draw(st.sampled_from(sorted(found)))
    return _changed(draw, honest, path, found[path], everywhere=draw(st.booleans()))


def _changed(draw: st.DrawFn, value: Any, path: _Path, kind: Any, *, everywhere: bool) -> Any:
    if not path and isinstance(value, tuple | list):
        items = tuple(value)
        return draw(st.sampled_from([(), items[:1], items[:-1], items * 2, (items[:1] or (0,)) * MANY]))
    if not path:
        return draw(leaf(kind))
    if path[0] != EACH:
        new = _changed(draw, getattr(value, path[0]), path[1:], kind, everywhere=everywhere)
        if isinstance(value, msgspec.Struct):
            return msgspec.structs.replace(value, **{path[0]: new})
        return dataclasses.replace(value, **{path[0]: new})
    items = tuple(value)
    if not items:
        return items
    at = draw(st.integers(0, len(items) - 1))
    new = _changed(draw, items[at], path[1:], kind, everywhere=everywhere)
    if everywhere and len(path) == 2 and _is_struct(items[at]):  # the same odd value in all, the rest as it is
        name, odd = path[1], getattr(new, path[1])
        return tuple(
            msgspec.structs.replace(item, **{name: odd})
            if isinstance(item, msgspec.Struct)
            else dataclasses.replace(item, **{name: odd})
            for item in items
        )
    return (*items[:at], new, *items[at + 1 :])


@st.composite
def often_spoiled(draw: st.DrawFn, honest: Any, kind: Any, without: frozenset[str] = frozenset()) -> Any:
    """The honest value now and then, mostly with one to three places changed."""
    value = honest
    for _ in range(draw(st.sampled_from([0, 0, 1, 1, 1, 2, 3]))):
        value = draw(spoiled(value, kind, without))
    return value
