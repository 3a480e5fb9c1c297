"""pydantic's kinds of errors, in the words of people who write YAML."""

from __future__ import annotations

from typing import Any

_MUST = {
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "string_type": "must be text",
    "tuple_type": "must be a list",
    "dict_type": "must be keys with values",
}


def must_be(item: Any) -> str:
    """What a value must be, of one of pydantic's errors."""
    return _MUST.get(item["type"]) or item["msg"].replace("Input should be ", "must be ").replace(
        "String should", "must"
    )
