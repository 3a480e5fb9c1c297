"""A file with one line of JSON for each request: what was decided about it, and what came of it.

The first fields are those of Mooncake's traces, so that a log is a trace: `timestamp` in ms, `input_length`,
`output_length`, `hash_ids`. Lines are in the order in which requests end. They are written by a thread, some at a
time, because a disk may be slow; what a full disk does not take is dropped, counted and said once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from typing import TYPE_CHECKING

import msgspec

from pdlink.errors import ConfigError

from .decisions import Considered, Decision  # noqa: TC001  (msgspec reads the annotation at run time)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from .fleet import PlacementRequest
    from .records import EndedRequest

log = logging.getLogger("pdlink.proxy")

FLUSH_S = 0.5
MAX_PENDING_NBYTES = 32 * 2**20
_HASH_NBYTES = 6
"""Of a key, of 8 or more: as a number it is exact in every JSON reader, and two of a million prompts are equal by
chance once in 300 such logs."""
_TOKEN_IDS = re.compile(rb'"token_ids":\[([0-9, ]+)\]')


class LoggedLeg(msgspec.Struct, frozen=True, omit_defaults=True):
    worker: str
    """Its label."""
    end: str
    """served, cancelled, "let go", or how it failed."""
    load: float | None = None
    """Tokens that the worker had to do before."""
    cached_tokens: int = 0
    """Of the prompt, expected there."""
    considered: Considered | None = None


class LoggedAttempt(msgspec.Struct, frozen=True, omit_defaults=True):
    why: str
    transfer_id: str
    after_s: float
    """Since the request came."""
    decode: LoggedLeg
    prefill: LoggedLeg | None = None
    reason: str = ""
    """Why decode worked alone."""


class Logged(msgspec.Struct, frozen=True):
    """One line."""

    timestamp: int
    """Of the request's arrival, unix time in ms."""
    input_length: int
    """Tokens of the prompt: counted where the answer says so, else estimated."""
    output_length: int
    """Tokens of the answer: as its usage says, else its token ids, else events of the stream; 0 is not known."""
    hash_ids: list[int]
    """Names of the prompt's beginnings, each 512 tokens longer than the one before: equal names, equal beginnings."""
    request_id: str
    model: str
    outcome: str
    kv: str
    """The way of its KV, as in X-Pdlink-KV."""
    reason: str
    """What was decided last."""
    queued_s: float
    """In the queue, until the attempt that gave the first token had workers."""
    prefill_s: float | None
    ttft_s: float | None
    total_s: float
    attempts: list[LoggedAttempt]
    lost_s: float = 0.0
    """In attempts before that one, which were lost."""


def logged_attempt(placed: Decision, transfer_id: str, ends: Mapping[str, str]) -> LoggedAttempt:
    """placed: its decision. ends: by leg."""

    def leg(name: str, label: str, load: float | None, cached_tokens: int = 0) -> LoggedLeg:
        considered = placed.considered.get(name)
        end = ends.get(name, "not begun")
        return LoggedLeg(worker=label, end=end, load=load, cached_tokens=cached_tokens, considered=considered)

    decode = leg("decode", placed.decode or "", placed.decode_load)
    prefill = None
    if placed.prefill is not None:
        prefill = leg("prefill", placed.prefill, placed.prefill_load, placed.cached_tokens)
    return LoggedAttempt(
        why=placed.why,
        transfer_id=transfer_id,
        after_s=placed.waited_s,
        decode=decode,
        prefill=prefill,
        reason=placed.reason,
    )


def hash_ids(keys: Iterable[int | bytes]) -> list[int]:
    """`PlacementRequest.keys`, which are hashes, as numbers."""
    return [key >> 16 if isinstance(key, int) else int.from_bytes(key[:_HASH_NBYTES]) for key in keys]


class Tally:
    """Counts the tokens of a stream that passes, which may not say their number."""

    __slots__ = ("_events", "_ids")

    def __init__(self) -> None:
        self._events, self._ids = 0, 0

    def add(self, data: bytes) -> None:
        """A part of the answer, which holds whole events."""
        self._events += data.count(b'"choices":[{')
        if b'"token_ids":[' in data:
            self._ids += sum(found.count(b",") + 1 for found in _TOKEN_IDS.findall(data))

    @property
    def answer_tokens(self) -> int:
        return self._ids or self._events


def logged(
    kept: EndedRequest,
    wanted: PlacementRequest,
    answer_tokens: int,
    attempts: list[LoggedAttempt],
) -> Logged:
    """The line of a request that has ended."""
    record, (*decided, _) = kept.record(), kept.decisions()
    return Logged(
        timestamp=int((record.at_s - record.total_s) * 1000),
        input_length=record.prompt_tokens,
        output_length=answer_tokens,
        hash_ids=hash_ids(wanted.keys),
        request_id=record.request_id,
        model=wanted.model,
        outcome=record.outcome,
        kv=record.kv,
        reason=decided[-1].reason if decided else "",
        queued_s=record.queued_s,
        lost_s=record.lost_s,
        prefill_s=record.prefill_s,
        ttft_s=record.ttft_s,
        total_s=record.total_s,
        attempts=attempts,
    )


class DecisionLog:
    """Appends to a file. Several processes may append to the same one."""

    def __init__(self, path: str) -> None:
        """Raises ConfigError for a file that cannot be written."""
        self._path = path
        self._pending: list[bytes] = []
        self._nbytes = 0
        self._failed = False
        self.num_dropped = 0
        try:
            self._file = self._open()
        except OSError as error:
            raise ConfigError(f"decision_log: cannot write {path}: {error.strerror}; give another file") from None

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def add(self, line: Logged) -> None:
        data = msgspec.json.encode(line) + b"\n"
        if self._nbytes + len(data) > MAX_PENDING_NBYTES:
            self.num_dropped += 1
            return
        self._pending.append(data)
        self._nbytes += len(data)

    def reopen(self) -> None:
        """The file has been renamed: go on in a new one."""
        try:
            file = self._open()
        except OSError as error:
            log.error("decision_log: goes on in the old file: cannot open %s: %s", self._path, error.strerror)
            return
        os.close(self._file)
        self._file = file

    async def follow(self) -> None:
        """Write what comes, until cancelled; then the rest."""
        try:
            while True:
                await asyncio.sleep(FLUSH_S)
                if self._pending:
                    await asyncio.shield(asyncio.to_thread(self._write, self._take()))
        finally:
            self._write(self._take())
            os.close(self._file)

    def _take(self) -> list[bytes]:
        taken, self._pending, self._nbytes = self._pending, [], 0
        return taken

    def _write(self, lines: list[bytes]) -> None:
        data = b"".join(lines)
        try:
            while data:  # lines of other processes come between two writes, not into one
                data = data[os.write(self._file, data) :]
            if self._failed:
                self._failed = False
                log.error("decision_log: lines are written again: %s; %d were dropped", self._path, self.num_dropped)
        except OSError as error:
            self.num_dropped += len(lines)
            if not self._failed:
                self._failed = True
                log.error("decision_log: lines are dropped: %s: %s", self._path, error.strerror)
