"""One attempt of a request at its workers: its transfer id, its legs, and how its KV came."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

from pdlink._http import header_lines
from pdlink.observe.spans import new_span_id

from .decision_log import logged_attempt
from .decisions import decision
from .dialects import TransferTerms
from .fleet import KEY_TOKENS
from .ids import new_id
from .leg import WorkerLeg
from .steps import DECODE, PREFILL, Leg

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdlink.api.openai import Call

    from .admission import Admission
    from .decision_log import LoggedAttempt
    from .leg import Hears
    from .shared import Shared
    from .spans import RequestTrace

_NO_HEADERS: Mapping[str, str] = {}


class Attempt:
    """This request at these two workers, or at decode's alone."""

    decode_spoke = False
    """Decode has sent its headers."""
    _decode_headers = _NO_HEADERS
    """Its dialect's, for a decode leg that follows prefill's."""

    def __init__(
        self,
        *,
        shared: Shared,
        number: int,
        admission: Admission,
        call: Call,
        leg_headers: Mapping[str, str],
        trace: RequestTrace | None,
    ) -> None:
        """admission: has just placed it. call: what the workers are asked. leg_headers: for both legs. trace: of its
        request, if it has one."""
        self._shared, self._number, self._call = shared, number, call
        self._leg_headers, self._lines = leg_headers, header_lines(leg_headers)
        self._wanted, self._cached_tokens, self._trace = admission.wanted, admission.cached_tokens, trace
        self._source = "" if admission.source is None else admission.source.address
        self.chosen, self._placed = admission.chosen, admission.decided[-1]
        self.transfer_id = f"xfer-{new_id()}"
        self.legs: dict[Leg, WorkerLeg] = {}
        self.kv = admission.recomputed
        """How its KV came, once known: decode says it, unless there was no transfer."""
        prefill = self.chosen.get(PREFILL)
        of_prefill = f"X-Pdlink-Prefill: {prefill.label}\r\n" if prefill is not None else ""
        decode = self.chosen[DECODE].label
        self.lines = f"X-Pdlink-Transfer: {self.transfer_id}\r\n{of_prefill}X-Pdlink-Decode: {decode}\r\n"
        """Headers of the client's answer: which transfer, and which workers, by their labels: names may contain host
        names."""

    def start(self, hears: Hears, seed: int, *, at_once: bool) -> None:
        """Send both legs, or only prefill's if decode's follows it. seed: of a client that gave none."""
        prefill, dialect = self.chosen.get(PREFILL), self._shared.dialect
        if prefill is None:
            alone = dialect.alone if self._source else None
            body = self._call.body if alone is None else alone(self._call, self._source)
            self._send(hears, (DECODE, body, _NO_HEADERS))
            return
        transfer = TransferTerms(
            transfer_id=self.transfer_id,
            created=int(time.time()),
            seed=seed,
            prefill=prefill.address,
            prefill_url=prefill.url,
            link=prefill.link,
            turn=self._wanted.turn,
            source=self._source,
        )
        prefill_body, decode_body = dialect.legs(self._call, transfer)
        to_prefill = _NO_HEADERS
        if dialect.headers is not None:
            to_prefill, self._decode_headers = dialect.headers(transfer)
        of_prefill, of_decode = (PREFILL, prefill_body, to_prefill), (DECODE, decode_body, self._decode_headers)
        self._send(hears, *((of_prefill, of_decode) if at_once else (of_prefill,)))

    def start_decode(self, hears: Hears, params: bytes) -> None:
        """Send decode's leg, after prefill's answer, with these `kv_transfer_params`."""
        self._send(hears, (DECODE, self._call.with_params(msgspec.Raw(params)), self._decode_headers))

    def cancel(self, leg: Leg) -> None:
        """Close the leg's connection; the worker aborts."""
        running = self.legs.get(leg)
        if running is None:  # our own code failed before it was sent
            return
        running.cancel()
        if (abort := self._shared.dialect.abort) is not None:
            self._shared.spawn(abort(self._shared.control, running.worker.url, self.transfer_id, self._call))

    def logged(self) -> LoggedAttempt:
        """For the decision log."""
        ends = {leg.value: running.fate for leg, running in self.legs.items()}
        return logged_attempt(decision("", self._placed), self.transfer_id, ends)

    def _send(self, hears: Hears, *legs: tuple[Leg, bytes, Mapping[str, str]]) -> None:
        """Each with its body, and with headers beyond those of both legs."""
        shared, call, asked, noting = self._shared, self._call, self._wanted, self._shared.pools.noting
        now_s, most_nbytes = time.monotonic(), shared.max_body_nbytes
        for leg, body, headers in legs:
            worker = self.chosen[leg]
            if leg is PREFILL:
                tokens = max(1, asked.num_tokens - self._cached_tokens)
            else:
                tokens = asked.num_tokens + asked.answer_tokens
            if leg in noting and noting[leg](asked, worker.work) >= KEY_TOKENS:  # a block at least, whatever its size
                shared.pools.kv_events.sent(worker.id, now_s)
            self.legs[leg] = running = WorkerLeg(worker, tokens, now_s, shared)
            running.leg, running.attempt, running.transfer_id = leg, self._number, self.transfer_id
            running.hears, running.max_nbytes = hears, most_nbytes
            if not (call.streaming and (leg is DECODE or shared.dialect.prefill_streams)):
                running.most_nbytes = most_nbytes
            lines = self._lines
            if self._trace is not None:
                running.span_id = new_span_id()
                headers = {**headers, "traceparent": self._trace.below(running.span_id)}
            if headers:
                lines = header_lines({**self._leg_headers, **headers})
            if worker.headers:
                lines += header_lines(worker.headers)
            worker.legs.add(running)
            running.url = worker.url + call.path
            running.connection = shared.clients[leg].send("POST", running.url, running, body, lines)
