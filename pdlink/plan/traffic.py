"""What a fleet is asked: requests of a trace, or drawn from quantiles.

Traces that are known: Mooncake's JSON lines (FAST 2025: `timestamp` in ms, `input_length`, `output_length`,
`hash_ids`), the proxy's decision log, which begins with the same fields, and Azure's CSV (`TIMESTAMP`,
`ContextTokens`, `GeneratedTokens`).
"""

from __future__ import annotations

import csv
import itertools
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, TypeAlias

import msgspec
import numpy as np

from pdlink.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    Seconds: TypeAlias = np.ndarray[tuple[int], np.dtype[np.float64]]
    Tokens: TypeAlias = np.ndarray[tuple[int], np.dtype[np.int64]]

KEY_TOKENS = 512
"""Tokens of one entry of `hash_ids`."""
_AZURE = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]


@dataclass(frozen=True, slots=True, eq=False)
class Traffic:
    """Requests in the order of their arrival; the first one comes at 0."""

    name: str
    at_s: Seconds
    prompt_tokens: Tokens
    """At least 1 each."""
    answer_tokens: Tokens
    """At least 1 each."""
    keys: tuple[tuple[int, ...], ...] = ()
    """Of each prompt its beginnings, each 512 tokens longer than the one before; empty if the trace has none."""

    def __len__(self) -> int:
        return len(self.at_s)

    @property
    def per_s(self) -> float:
        """Mean rate."""
        return (len(self) - 1) / float(self.at_s[-1]) if len(self) > 1 and self.at_s[-1] > 0 else 0.0

    def poisson(self, num: int, seed: int) -> Seconds:
        """When `num` requests come at random, one a second in the mean."""
        return np.cumsum(np.random.default_rng(seed).exponential(size=num))

    def repeated(self, num: int) -> tuple[Tokens, Tokens]:
        """Prompt and answer tokens of `num` requests, from the beginning again where the trace ends."""
        return np.resize(self.prompt_tokens, num), np.resize(self.answer_tokens, num)


class _Line(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()
    outcome: str = "ok"
    """Of a decision log."""


def read_trace(path: Path, limit: int | None = None) -> Traffic:
    """At most `limit` requests of a trace, in one of the formats above. Requests of a decision log that failed, or
    whose answer nobody counted, are left out.

    Raises ConfigError with the number of the line that is wrong.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            first = file.readline()
            lines = itertools.chain([first], file)
            rows = list(itertools.islice(_azure(lines) if first.startswith(_AZURE[0]) else _json(lines), limit))
    except OSError as error:
        raise ConfigError(f"trace: cannot read {path}: {error.strerror}; name a file that can be read") from None
    except UnicodeDecodeError:
        raise ConfigError(f"trace: cannot read {path}: it is no text; expected JSON lines, or Azure's CSV") from None
    except _Bad as error:
        raise ConfigError(
            f"trace: cannot read {path}, line {error.number}: {error}; expected JSON lines with `timestamp`, "
            "`input_length` and `output_length`, or CSV with TIMESTAMP, ContextTokens, GeneratedTokens"
        ) from None
    if not rows:
        raise ConfigError(f"trace: cannot read {path}: got no request; expected 1 at least; name another one")
    rows.sort(key=lambda row: row.timestamp)
    begin = rows[0].timestamp
    has_keys = any(row.hash_ids for row in rows)
    return Traffic(
        path.name,
        np.array([row.timestamp - begin for row in rows]) / 1000,
        np.array([row.input_length for row in rows], np.int64),
        np.array([row.output_length for row in rows], np.int64),
        tuple(row.hash_ids for row in rows) if has_keys else (),
    )


class _Bad(ValueError):
    def __init__(self, number: int, what: object) -> None:
        super().__init__(str(what))
        self.number = number


def _json(lines: Iterable[str]) -> Iterator[_Line]:
    decode = msgspec.json.Decoder(_Line).decode
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = decode(line)
        except msgspec.MsgspecError as error:
            raise _Bad(number, error) from None
        if row.outcome == "ok" and row.output_length > 0 and row.input_length > 0:
            yield row


def _azure(lines: Iterable[str]) -> Iterator[_Line]:
    rows = csv.DictReader(lines)
    for row in rows:
        try:
            # Seven digits of a second, where Python takes six.
            at = datetime.fromisoformat(row["TIMESTAMP"][:26])
            yield _Line(at.timestamp() * 1000, max(1, int(row["ContextTokens"])), max(1, int(row["GeneratedTokens"])))
        except (KeyError, TypeError, ValueError) as error:
            raise _Bad(rows.line_num, repr(error)) from None


def from_quantiles(prompt: Mapping[float, float], answer: Mapping[float, float], num: int, seed: int) -> Traffic:
    """Requests with such lengths, one a second. prompt, answer: tokens by percentile, such as {50: 1000, 99: 8000};
    between them tokens grow geometrically, and outside of them they stay."""
    draw = np.random.default_rng(seed)
    prompts, answers = (_drawn(quantiles, draw.random(num)) for quantiles in (prompt, answer))
    name = " and ".join(
        "/".join(f"p{percent:g} {tokens:g}" for percent, tokens in sorted(quantiles.items()))
        for quantiles in (prompt, answer)
    )
    return Traffic(f"prompts and answers of {name} tokens", np.arange(num, dtype=np.float64), prompts, answers)


def _drawn(quantiles: Mapping[float, float], shares: Seconds) -> Tokens:
    percents = sorted(quantiles)
    tokens: Sequence[float] = [quantiles[percent] for percent in percents]
    found = np.exp(np.interp(shares * 100, percents, np.log(tokens)))
    return np.maximum(1, np.rint(found)).astype(np.int64)
