"""What counts as a whole answer: as a whole parser reads it."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec
import pytest

from pdlink._http import is_answer
from tests.api.test_long_bodies import anything, spoiled

LISTS = ("choices", "output", "content")
_VALUE = msgspec.json.Decoder(dict[str, msgspec.Raw] | list[dict[str, msgspec.Raw]])


def has(fields: dict[str, msgspec.Raw], name: str, begins: bytes) -> bool:
    return bytes(fields.get(name, b""))[:1] == begins


def read(data: bytes) -> bool:
    """As msgspec does."""
    try:
        value = _VALUE.decode(data)
    except (ValueError, RecursionError):
        return False
    if isinstance(value, list):
        return bool(value) and all(has(each, "meta_info", b"{") for each in value)
    return has(value, "meta_info", b"{") or any(has(value, name, b"[") for name in LISTS)


def answer(rng: random.Random) -> Any:
    names = rng.sample([*LISTS, "meta_info", "usage", "id", "choice", "meta_infos"], rng.randrange(6))
    found = {name: anything(rng, 2) for name in names}
    if rng.random() < 0.5:
        found["choices"] = [anything(rng)]
    if rng.random() < 0.2:
        found["meta_info"] = {"id": anything(rng)}
    return found


@pytest.mark.parametrize("seed", range(3))
def test_an_answer_is_what_a_whole_parser_takes_for_one(seed: int) -> None:
    rng, counts = random.Random(seed), [0, 0]
    for number in range(5000):
        value = answer(rng) if rng.random() < 0.7 else [answer(rng) for _ in range(rng.randrange(3))]
        text = json.dumps(value, ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, None, 1]))
        data = (rng.choice(["", " ", "\r\n\t"]) + text + rng.choice(["", "\n"])).encode()
        if rng.random() < 0.5:
            data = spoiled(rng, data)
            if b"\\u" in data or b"\xff" in data:  # names that are escaped, or no UTF-8, are not looked into
                continue
        wanted = read(data)
        assert is_answer(data) == wanted, (seed, number, data)
        counts[wanted] += 1
    assert min(counts) > 500, counts


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        (b'{"choices":[]}', True),
        (b'{"choices":[],"usage":7}', True),
        (b'{"object":"response","output":[]}', True),
        (b'{"type":"message","content":[]}', True),
        (b'{"text":"x","meta_info":{}}', True),
        (b'[{"text":"x","meta_info":{}}]', True),
        (b'[{"meta_info":{}},{}]', False),
        (b'[{},{"meta_info":{}}]', False),
        (b'[{"choices":[]}]', False),
        (b"[]", False),
        (b"{}", False),
        (b"", False),
        (b" ", False),
        (b'"choices"', False),
        (b'{"choices":null}', False),
        (b'{"choices":{}}', False),
        (b'{"meta_info":[]}', False),
        (b'{"a":{"choices":[]}}', False),
        (b'{"choices":[]} x', False),
        (b'{"choices":[],}', False),
        (b'{"choices":[]', False),
        (b"[" * 100_000, False),
        (b'{"choices":' + b"[" * 100_000, False),
        (b'{"choices":' + b"[" * 9999 + b"]" * 9999 + b"}", True),
        (b'{"choices":' + b'[{"a":' * 9999 + b"[]" + b"}]" * 9999 + b"}", True),
        (b'{"choices":' + b'[{"a":' * 9999 + b"[]" + b"]}" * 9999 + b"}", False),
        (b'{"choices":[],"choices":null}', False),
        (b'{"choices":null,"choices":[]}', True),
        (b'{"meta_info":{},"meta_info":null}', False),
    ],
)
def test_an_answer_has_choices_output_content_or_meta_info(data: bytes, wanted: bool) -> None:
    assert is_answer(data) is wanted
