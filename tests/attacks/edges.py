"""Every message of a type, with every number in it at every edge: found in the type, so a new message is covered."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from msgspec import inspect as types

INTEGERS = (0, -1, 2**31, 2**53, 2**63 - 1, 2**63, 2**64 - 1, -(2**63))
"""What MessagePack can say."""
FLOATS = (math.nan, 1e308, -1e308, math.inf, 0.0, -1.0)


def members(kind: Any) -> list[Any]:
    """The structs of a union, or the only one."""
    found: Any = types.type_info(kind)
    every: list[Any] = [*found.types] if isinstance(found, types.UnionType) else [found]
    return [each.cls for each in every]


def honest(kind: Any) -> Any:
    """A small value that a decoder of this type takes, as plain objects."""
    return _honest(types.type_info(kind))


def spoiled(kind: Any) -> Iterator[tuple[str, Any]]:
    """The same with one number changed, of each struct of a union: where and to what, and the whole value."""
    for one in members(kind):
        info = types.type_info(one)
        for path in _numbers(info):
            for edge in (*INTEGERS, *FLOATS):
                yield f"{one.__name__}{''.join(f'.{each}' for each in path)} = {edge}", _changed(info, path, edge)


def numbers(kind: Any) -> Iterator[tuple[Any, ...]]:
    """Where the numbers of a type are, for `with_number`."""
    return _numbers(kind if isinstance(kind, types.Type) else types.type_info(kind))


def with_number(kind: Any, path: tuple[Any, ...], number: Any) -> Any:
    """An honest value of this type with that number there."""
    return _changed(kind if isinstance(kind, types.Type) else types.type_info(kind), path, number)


def _honest(info: Any) -> Any:
    match info:
        case types.StructType():
            return _struct(info, {})
        case types.UnionType():
            return _honest(next((each for each in info.types if not isinstance(each, types.NoneType)), info.types[0]))
        case types.BoolType():
            return True
        case types.IntType():
            return max(1, info.ge or 0, (info.gt or 0) + 1) if info.multiple_of is None else info.multiple_of
        case types.FloatType():
            return float(max(1.0, info.ge or 0.0)) if info.le is None or info.le >= 1 else info.le
        case types.StrType():
            return "a" * max(1, info.min_length or 0)
        case types.BytesType() | types.ByteArrayType() | types.MemoryViewType():
            return bytes(max(0, info.min_length or 0))
        case types.VarTupleType() | types.ListType() | types.SetType() | types.FrozenSetType():
            return [_honest(info.item_type)] * max(1, info.min_length or 0)
        case types.TupleType():
            return [_honest(each) for each in info.item_types]
        case types.DictType():
            return {_honest(info.key_type): _honest(info.value_type)}
        case types.LiteralType():
            return info.values[0]
        case types.EnumType():
            return next(iter(info.cls)).value
        case types.NoneType():
            return None
        case types.DataclassType():
            return {field.encode_name: _honest(field.type) for field in info.fields}
        case types.NamedTupleType():
            return [_honest(field.type) for field in info.fields]
        case types.AnyType() | types.RawType():
            return 1
    raise NotImplementedError(f"no honest value for {info}")


def _struct(info: Any, values: dict[str, Any]) -> Any:
    found = {field.encode_name: values.get(field.encode_name, _honest(field.type)) for field in info.fields}
    tag = [] if info.tag is None else [info.tag]
    if info.array_like:
        return [*tag, *found.values()]
    return {**({info.tag_field: info.tag} if tag else {}), **found}


def _numbers(info: Any) -> Iterator[tuple[Any, ...]]:
    """Paths to all numbers; `0` goes into the elements of a list."""
    match info:
        case types.StructType() | types.DataclassType() | types.NamedTupleType():
            for field in info.fields:
                for path in _numbers(field.type):
                    yield (field.encode_name, *path)
        case types.UnionType():
            for each in info.types:
                yield from _numbers(each)
        case types.IntType() | types.FloatType() | types.AnyType() | types.RawType():
            yield ()
        case types.VarTupleType() | types.ListType():
            for path in _numbers(info.item_type):
                yield (0, *path)
        case types.TupleType():
            for index, each in enumerate(info.item_types):
                for path in _numbers(each):
                    yield (index, *path)
        case types.DictType():
            for path in _numbers(info.value_type):
                yield ("value", *path)


def _changed(info: Any, path: tuple[Any, ...], edge: Any) -> Any:
    if not path:
        return edge
    match info:
        case types.UnionType():
            return next(_changed(each, path, edge) for each in info.types if path in set(_numbers(each)))
        case types.StructType():
            field = next(each for each in info.fields if each.encode_name == path[0])
            return _struct(info, {path[0]: _changed(field.type, path[1:], edge)})
        case types.DataclassType():
            field = next(each for each in info.fields if each.encode_name == path[0])
            return {**_honest(info), path[0]: _changed(field.type, path[1:], edge)}
        case types.NamedTupleType():
            index = [field.encode_name for field in info.fields].index(path[0])
            found = _honest(info)
            found[index] = _changed(info.fields[index].type, path[1:], edge)
            return found
        case types.TupleType():
            found = _honest(info)
            found[path[0]] = _changed(info.item_types[path[0]], path[1:], edge)
            return found
        case types.DictType():
            return {_honest(info.key_type): _changed(info.value_type, path[1:], edge)}
    return [_changed(info.item_type, path[1:], edge)] * max(1, info.min_length or 0)
