"""What a client is told of a failure: a stable code, a sentence and its request's id.

A worker's own texts are for the log. Only the words in which it rejects a request (4xx) are passed on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdlink.api.errors import error_body, error_code, error_of, excerpt, is_rejection, rejection, stream_error
from pdlink.api.sse import ERROR_MARK, is_error, rewritten
from pdlink.errors import (
    DeadlineExceeded,
    InvalidRequest,
    NoWorker,
    Overloaded,
    PdlinkError,
    PeerLost,
    PeerNotAllowed,
    ProtocolError,
    WorkerKeyRefused,
)

from .steps import EndStream, Leg, Loss, Outcome, Respond

if TYPE_CHECKING:
    from .steps import Unplaced

BROKEN = "decode worker failed in the middle of its answer"

_ERROR_OF: dict[Loss, type[PdlinkError]] = {
    Loss.CONNECT: PeerLost,
    Loss.RESET: PeerLost,
    Loss.STALE: PeerLost,
    Loss.TIMEOUT: DeadlineExceeded,
    Loss.MALFORMED: ProtocolError,
    Loss.DIVERGED: ProtocolError,
    Loss.LOCAL: Overloaded,
    Loss.ERROR: ProtocolError,
    Loss.BARRED: WorkerKeyRefused,
    Loss.MISPAIRED: PeerNotAllowed,
}
_OF_THE_DEPLOYMENT = {
    Loss.BARRED: "the workers refuse this proxy's key; its operator must fix that",
    Loss.MISPAIRED: "the workers refuse each other's keys; their operator must fix that",
}
_MAX_ID_CHARS = 128


class ClientWords:
    """Of one request."""

    __slots__ = ("_named", "_request_id")

    def __init__(self, request_id: str, *, named: bool = False) -> None:
        """request_id: empty tells no id. named: events of its stream have names (`openai.LAST_EVENTS`)."""
        self._request_id, self._named = request_id, named

    def failure(self, error: type[PdlinkError], summary: str) -> Respond:
        """An error of the deployment."""
        status = error.http_status if error.http_status >= 500 else 502
        return self._server_error(status, summary, error.code)

    def unplaced(self, event: Unplaced) -> tuple[Outcome, Respond]:
        """No worker takes the request."""
        if event.barred:
            return Outcome.FAILED, self.failure(WorkerKeyRefused, _OF_THE_DEPLOYMENT[Loss.BARRED])
        if event.unfit:
            body = error_body(event.message, kind="invalid_request_error", code=InvalidRequest.code)
            return Outcome.REJECTED, Respond(InvalidRequest.http_status, body)
        if event.full:
            return Outcome.UNAVAILABLE, self.failure(Overloaded, event.message)
        return Outcome.UNAVAILABLE, self.failure(NoWorker, event.message)

    def lost(self, leg: Leg, loss: Loss) -> tuple[Respond, str]:
        """A leg is lost: the answer, and the same as a sentence."""
        summary = _OF_THE_DEPLOYMENT.get(loss, f"{leg.value} worker lost ({loss.value})")
        return self.failure(_ERROR_OF[loss], summary), summary

    def answered(self, leg: Leg, status: int, body: bytes) -> tuple[Respond, str]:
        """A worker answered with such a status: the answer, and the same as a sentence."""
        summary = f"{leg.value} worker answered {status}"
        if 400 <= status < 500:
            return Respond(status, rejection(status, body)), summary
        if leg is Leg.PREFILL:  # its engine's message is for the operator, not for the client
            return self.failure(PeerLost, summary), summary
        if status < 400:  # following a redirect would send the prompt to any address the worker names
            return self.failure(ProtocolError, summary), summary
        return self._server_error(status, summary, error_code(body)), summary

    def malformed(self, summary: str, document: bytes) -> Respond:
        """A worker sent something other than tokens. document: an error that it sent, or nothing."""
        code = error_code(document) if document else ProtocolError.code
        return self._server_error(ProtocolError.http_status, summary, code)

    def broken(self, document: bytes) -> Respond:
        """Decode sent this error in the middle of its stream."""
        body = error_body(self._with_id(BROKEN), kind="stream_error", code=error_code(document))
        return Respond(ProtocolError.http_status, body)

    def end(self, summary: str, code: str) -> EndStream:
        """Of a stream that cannot go on."""
        return EndStream(stream_error(self._with_id(summary), code=code, named=self._named))

    def as_end(self, answer: Respond) -> EndStream:
        """The same error at the end of a stream."""
        return EndStream(stream_error(error_of(answer.body).message, code=error_code(answer.body), named=self._named))

    def in_our_words(self, events: bytes) -> tuple[bytes, list[tuple[Loss | int, str]]]:
        """Decode's events with its errors rewritten for clients; and the reason and the worker's text of each."""
        found: list[tuple[Loss | int, str]] = []

        def rewrite(document: bytes) -> bytes:
            if not is_error(document):
                return document
            rejects = is_rejection(document)
            found.append((400 if rejects else Loss.ERROR, excerpt(document)))
            return rejection(400, document) if rejects else self.broken(document).body

        return rewritten(events, ERROR_MARK, rewrite), found

    def _server_error(self, status: int, summary: str, code: str) -> Respond:
        return Respond(status, error_body(self._with_id(summary), kind="server_error", code=code))

    def _with_id(self, summary: str) -> str:
        """A message with the request's id, under which the log has the details."""
        return f"{summary} (request {self._request_id[:_MAX_ID_CHARS]})" if self._request_id else summary
