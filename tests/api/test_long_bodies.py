"""The fields of a long body are found natively: as msgspec finds them, which goes byte by byte, or not at all."""

from __future__ import annotations

import json
import random
import string
from typing import Any

import msgspec
import pytest

from pdlink._http import shortened
from pdlink.api.fields import BadField
from pdlink.api.openai import CHAT, COMPLETIONS, KV_PARAMS, parse

_fields_in = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
LONG = 12
CHARS = string.printable + '\\"\x01\x7f\u00e9\U0001f600'


def anything(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(6 if depth < 4 else 4)
    if kind == 0:
        return rng.choice([None, True, False, 0, -0.0, 17, -4, 1.5e300, 2e-7, 10**30])
    if kind < 4:
        return "".join(rng.choices(CHARS, k=rng.choice([0, 1, 5, 40, 200])))
    if kind == 4:
        return [anything(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {str(anything(rng, 4)): anything(rng, depth + 1) for _ in range(rng.randrange(4))}


def written(rng: random.Random) -> bytes:
    value = {f"{number}{rng.choice(CHARS)}": anything(rng) for number in range(rng.randrange(5))}
    text = json.dumps(value, ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, None, 1]))
    return (rng.choice(["", " ", "\r\n\t"]) + text + rng.choice(["", "\n"])).encode()


def spoiled(rng: random.Random, data: bytes) -> bytes:
    found = bytearray(data)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(found) + 1)
        if rng.random() < 0.5:
            del found[at : at + rng.randrange(1, 3)]
        else:
            found[at : at + rng.randrange(2)] = rng.choice(b'{}[],:"\\u0123efDd.-+ \x00\x1f\xff').to_bytes()
    return bytes(found)


def read(data: bytes) -> dict[str, bytes] | None:
    """As msgspec does."""
    try:
        return {name: bytes(raw) for name, raw in _fields_in(data).items()}
    except ValueError:
        return None


@pytest.mark.parametrize("seed", range(3))
def test_fields_are_found_as_msgspec_finds_them_or_not_at_all(seed: int) -> None:
    rng, taken = random.Random(seed), 0
    for number in range(5000):
        data = written(rng)
        if not (honest := rng.random() < 0.4):
            data = spoiled(rng, data)
        found = shortened(data, LONG)
        if found is None:
            assert not honest or not data.isascii() or b"\\" in data or data.strip() == b"{}", (seed, number, data)
            continue
        small, num, longs = found
        names, whole = read(small), read(data)
        assert (names is None) == (whole is None), (seed, number, data)  # a name in other bytes than UTF-8
        taken += 1
        if names is not None and len(names) == num:
            assert {**names, **longs} == whole, (seed, number, data)
        assert all(len(value) >= LONG for value in longs.values())
    assert taken > 1000, taken


@pytest.mark.parametrize(
    "value",
    [
        '"\\ud83d\\ude00"', '"\\ud83d"', '"\\ud83d\\u0041"', '"\\ude00"', '"\\u12g4"', '"\\x"', '"\x01"', '"\x7f"',
        '"', "01", "1.", "-", "1e", "1e+", "-0.5E-7", ".5", "NaN", "truE", "nul", "", "[1,]", "[,1]", "[",
        '{"a":1,}', '{"a"}', "{1:2}", "[" * 63 + "]" * 63, "[" * 70 + "]" * 70,
    ],
)  # fmt: skip
def test_each_kind_of_value_is_judged_as_by_msgspec(value: str) -> None:
    data = b'{"x":[%s]}' % value.encode()
    found = shortened(data, 1)
    assert (found[2] if found is not None else None) == (read(data) if len(value) < 140 else None), "too deep"


WORDS = "word " * 4000


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_long_body_is_read_as_a_short_one(path: str) -> None:
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": WORDS}]} if path == CHAT else {"prompt": WORDS}
    said = {"model": "m", **prompt, "max_tokens": 3, "user": "u"}
    call = parse(path, json.dumps(said, indent=1).encode() + b"\r\n")
    assert json.loads(call.body) == said
    assert json.loads(call.prompt) in prompt.values()
    assert (call.model, call.max_tokens, call.said.user) == ("m", 3, "u")
    assert json.loads(call.with_params({"a": 1})) == {**said, KV_PARAMS: {"a": 1}}


def test_a_long_body_loses_the_clients_transfer_params() -> None:
    for params in ('{"remote":"tcp://x"}', "null", json.dumps({"remote": WORDS})):
        data = f'{{"prompt":"{WORDS}","kv_transfer_param\\u0073":{params},"model":"m"}}'.encode()
        call = parse(COMPLETIONS, data)
        assert json.loads(call.body).keys() == {"prompt", "model"} == call.fields.keys()


@pytest.mark.parametrize("name", ["prompt", "prom\\u0070t"])
@pytest.mark.parametrize(("first", "last"), [(WORDS, "x"), ("x", WORDS), (WORDS, f"{WORDS} x")])
def test_of_a_field_that_comes_twice_the_last_counts_and_alone_is_passed_on(first: str, last: str, name: str) -> None:
    for one, other in (("prompt", name), (name, "prompt")):
        data = f'{{"model":"a","{one}":"{first}","model":"m","{other}":"{last}","suffix":"{WORDS}"}}'.encode()
        call = parse(COMPLETIONS, data)
        assert json.loads(call.prompt) == last
        assert json.loads(call.body, object_pairs_hook=sorted) == [
            ("model", "m"),
            ("prompt", last),
            ("suffix", WORDS),
        ]


def test_a_common_field_that_is_long_is_read() -> None:
    call = parse(COMPLETIONS, json.dumps({"model": "m", "user": WORDS, "prompt": WORDS}).encode())
    assert call.said.user == WORDS


def test_what_is_wrong_in_a_long_body_is_told_as_in_a_short_one() -> None:
    for spoil, told in ((b'"max_tokens":-1', "max_tokens: Expected"), (b'"n":', "not valid JSON")):
        with pytest.raises(BadField, match=told):
            parse(COMPLETIONS, b'{"model":"m","prompt":"%s",%s}' % (WORDS.encode(), spoil))
