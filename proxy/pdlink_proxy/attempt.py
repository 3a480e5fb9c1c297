"""One attempt of a request at its workers: its transfer id, its legs, and how its KV came."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

from pdlink.api import kv_path
from pdlink.observe.spans import new_span_id

from .decision_log import logged_attempt
from .dialects import TransferTerms
from .http_client import header_lines
from .ids import new_id
from .leg import WorkerLeg
from .steps import Leg

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdlink.api.openai import Call

    from .admission import Admission
    from .decision_log import LoggedAttempt
    from .leg import Hears
    from .shared import Shared
    from .spans import RequestTrace


class Attempt:
    """This request at these two workers, or at decode's alone."""

    __slots__ = (
        "_cached_tokens",
        "_call",
        "_decode_headers",
        "_leg_headers",
        "_lines",
        "_seed",
        "_shared",
        "_wanted",
        "chosen",
        "decision",
        "decode_spoke",
        "kv",
        "legs",
        "number",
        "trace",
        "transfer_id",
    )

    def __init__(
        self,
        shared: Shared,
        number: int,
        admission: Admission,
        call: Call,
        leg_headers: Mapping[str, str],
        seed: int,
    ) -> None:
        """admission: has just placed it. call: what the workers are asked. leg_headers: for both legs."""
        self._shared, self.number, self._call = shared, number, call
        self._leg_headers, self._lines, self._seed = leg_headers, header_lines(leg_headers), seed
        self._wanted, self._cached_tokens = admission.wanted, admission.cached_tokens
        self.chosen, self.decision = admission.chosen, admission.decision
        self.transfer_id = f"xfer-{new_id()}"
        self.legs: dict[Leg, WorkerLeg] = {}
        self.kv = admission.recomputed
        """How its KV came, once known."""
        self.trace: RequestTrace | None = None
        """Of its request, if it has one."""
        self.decode_spoke = False
        """Decode has sent its headers."""
        self._decode_headers: Mapping[str, str] = {}
        """Its dialect's, for a decode leg that follows prefill's."""

    def start(self, hears: Hears, *, at_once: bool) -> None:
        """Send both legs, or only prefill's if decode's follows it."""
        prefill = self.chosen.get(Leg.PREFILL)
        if prefill is None:
            self._start(hears, Leg.DECODE, self._call.body)
            return
        shared = self._shared
        dialect = shared.dialect
        transfer = TransferTerms(
            transfer_id=self.transfer_id,
            created=int(time.time()),
            seed=self._seed,
            prefill=prefill.address,
            prefill_url=prefill.url,
            link=prefill.link,
        )
        prefill_body, decode_body = dialect.legs(self._call, transfer)
        to_prefill, self._decode_headers = dialect.headers(transfer) if dialect.headers is not None else ({}, {})
        self._start(hears, Leg.PREFILL, prefill_body, to_prefill)
        if at_once:
            self._start(hears, Leg.DECODE, decode_body, self._decode_headers)

    def start_decode(self, hears: Hears, params: bytes) -> None:
        """Send decode's leg, after prefill's answer, with these `kv_transfer_params`."""
        self._start(hears, Leg.DECODE, self._call.with_params(msgspec.Raw(params)), self._decode_headers)

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
        assert self.decision is not None
        ends = {leg.value: running.fate or "let go" for leg, running in self.legs.items()}
        return logged_attempt(self.decision, self.transfer_id, ends)

    def note_kv(self, said: str | None) -> None:
        """What decode says of how the KV came."""
        if self.kv is None and said is not None:  # or there was no transfer
            self.kv = kv_path.checked(said)

    def _start(self, hears: Hears, leg: Leg, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        shared, asked = self._shared, self._wanted
        if leg is Leg.PREFILL:
            tokens = max(1, asked.num_tokens - self._cached_tokens)
        else:
            tokens = asked.num_tokens + asked.answer_tokens
        streams = self._call.streaming and (leg is Leg.DECODE or shared.dialect.prefill_streams)
        worker = self.chosen[leg]
        account = shared.account(asked, worker, tokens)
        self.legs[leg] = running = WorkerLeg(
            hears,
            self.number,
            leg,
            worker,
            self.transfer_id,
            account,
            shared.alarms,
            max_nbytes=shared.max_body_nbytes,
            streams=streams,
        )
        if self.trace is not None:
            running.span_id = new_span_id()
            headers = {**(headers or {}), "traceparent": self.trace.below(running.span_id)}
        lines = header_lines({**self._leg_headers, **headers}) if headers else self._lines
        running.start(shared.clients[leg], self._call.path, body, lines)
