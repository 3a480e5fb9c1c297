"""Streams that pass from their worker to their client in a native thread, while there is nothing to decide
(`csrc/relay`): no event waits for a request that Python works on.

A request lends a stream when an event of it passes unchanged. It has it back before it decides anything: for
whatever the relay does not pass, and for every other event of the request. Python hears of the events that were sent
some twenty at a time, for its books and for `Recovery`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from pdlink._relay import Relay, Report

log = logging.getLogger("pdlink.proxy")


class Lends(Protocol):
    """Has a stream's worker."""

    def on_passed(self, data: bytes) -> None:
        """Whole events that the client was sent."""

    def on_returned(self, unsent: bytes, unread: bytes) -> None:
        """The stream is no more lent. unsent: the client must be sent these bytes of chunks first. unread: what came
        from the worker since the last whole chunk that was passed."""


class Relays:
    """All lent streams of one process."""

    def __init__(self, native: Relay) -> None:
        self._native: Relay | None = native
        """None when closed: CPython 3.12 and later complain at exit of native objects that are still there."""
        self._loop = asyncio.get_running_loop()
        self._lent: dict[int, Lends] = {}
        self._reports: deque[Report] = deque()
        """Of the present turn, not told yet."""
        self._loop.add_reader(native.fd, self._turn)

    def close(self) -> None:
        """Nothing passes any more; streams that are lent do not return."""
        if self._native is not None:
            self._loop.remove_reader(self._native.fd)
            self._lent.clear()
            self._reports.clear()
            self._native = None

    def __len__(self) -> int:
        return len(self._lent)

    def lend(self, worker: int, client: int, first: bytes, marks: int, lends: Lends) -> tuple[int | None, bytes]:
        """Sends the client `first`, and passes what the worker sends then, until `on_returned`. worker, client: their
        sockets. first: chunks. marks: of events that are not passed. Returns a key; or None, and what could not be
        sent of `first`."""
        if self._native is None:
            return None, first
        key, unsent = self._native.lend(worker, client, first, marks)
        if not key:
            return None, unsent
        self._lent[key] = lends
        return key, b""

    def take_back(self, key: int) -> None:
        """It has returned, when this returns."""
        for report in [each for each in self._reports if each[0] == key]:
            self._reports.remove(report)
            self._tell(report)
        if key in self._lent and self._native is not None:
            self._tell(self._native.take(key))

    def heard_s(self, key: int) -> float:
        """When its worker was last heard, on the loop's clock; of one that is about to return, long ago."""
        return 0.0 if self._native is None else self._native.heard_s(key)

    def _turn(self) -> None:
        if self._native is not None:
            self._reports.extend(self._native.reports())
        while self._reports:
            try:
                self._tell(self._reports.popleft())
            except Exception:  # the others are told all the same: the native part tells each report once
                log.exception("a lent stream failed unexpectedly")

    def _tell(self, report: Report) -> None:
        key, passed, over, unsent, unread = report
        lends = self._lent.pop(key) if over else self._lent[key]
        try:
            if passed:
                lends.on_passed(passed)
        finally:
            if over:  # also if that raised: or its connection would wait for ever
                lends.on_returned(unsent, unread)


def opened_relays() -> Relays | None:
    """None where the native module is not built, as on systems without epoll: events pass through Python there."""
    try:
        from pdlink._relay import Relay
    except ImportError:
        log.info("streams pass through Python: the native relay is not built here")
        return None
    return Relays(Relay())
