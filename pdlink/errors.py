"""One tree of errors: the side at fault, whether a retry can help, and the HTTP status.

`LocalError` is our own configuration, capacity or use; `RemoteError` is something a peer did or failed to do.
Neither base is raised itself. A message names the field, both values and the remedy.
"""

from __future__ import annotations

import re
from typing import ClassVar

from pdlink.reasons import Code, Reason

_CREDENTIALS = re.compile(r"(?<=://)[^\s/'\"]+@")


def without_credentials(text: str) -> str:
    """The same with *** for what stands before the host in its URLs: a user, often with a password."""
    return _CREDENTIALS.sub("***@", text) if "@" in text else text


class PdlinkError(Exception):
    """Base of every error of this package, with the values to report it. Its text shows no password of a URL."""

    def __init__(self, text: str = "") -> None:
        super().__init__(without_credentials(text))

    code: ClassVar[str] = "internal_error"
    """Stable name: `error.code` in HTTP bodies, the `reason` label of metrics."""
    retryable: ClassVar[bool] = False
    """True if a retry of the same request may succeed, here or on another worker."""
    http_status: ClassVar[int] = 500

    @property
    def reason(self) -> Reason:
        """Why a transfer has ended that ends with this error."""
        return Reason(Code.REQUEST_FAILED, str(self))


class LocalError(PdlinkError):
    """The cause is on this side."""


class RemoteError(PdlinkError):
    """The cause is a peer."""

    http_status = 502


class ConfigError(LocalError):
    """A setting is unknown, of the wrong type or out of range."""

    code = "invalid_config"


class InvalidRequest(LocalError):
    """A client's request can never be served as it is."""

    code = "invalid_request"
    http_status = 400


class UnknownModel(InvalidRequest):
    """The request names a model that this server does not serve."""

    code = "model_not_found"
    http_status = 404


class InvalidApiKey(InvalidRequest):
    """The caller's key is missing or wrong."""

    code = "invalid_api_key"
    http_status = 401


class PeerNotAllowed(InvalidRequest):
    """The request names a worker that this one may not connect to; the message has the remedy."""

    code = "peer_not_allowed"
    http_status = 403


class CapacityExceeded(InvalidRequest):
    """The request exceeds the capacity of this worker (both numbers are in the message)."""

    code = "capacity_exceeded"


class Overloaded(LocalError):
    """The bounded queue is full now; a later try may succeed."""

    code = "overloaded"
    retryable = True
    http_status = 503


class RateLimited(LocalError):
    """A client has asked more than its key may in a minute."""

    code = "rate_limited"
    retryable = True
    http_status = 429


class Draining(LocalError):
    """The worker is stopping and takes no new requests; another one may."""

    code = "draining"
    retryable = True
    http_status = 503


class WorkerKeyRefused(LocalError):
    """The workers refuse this proxy's key: it is wrong or missing, which is not the client's fault."""

    code = "worker_key_refused"
    http_status = 502


class NoWorker(LocalError):
    """No healthy worker of a role that the request needs, or this process shuts down; a later try may succeed."""

    code = "no_worker"
    retryable = True
    http_status = 503


class PoolExhausted(LocalError):
    """Fewer free blocks than requested, at this moment."""

    code = "pool_exhausted"
    retryable = True
    http_status = 503


class RequestAborted(LocalError):
    """The client left, the other leg failed or the worker is stopping; nobody waits for the answer."""

    code = "request_aborted"
    http_status = 499

    @property
    def reason(self) -> Reason:
        return Reason(Code.ABORTED, str(self))


class EngineFailure(LocalError):
    """A forward pass failed or produced NaN or Inf; the request's tokens so far are right."""

    code = "engine_failure"
    retryable = True


class LayoutMismatch(LocalError):
    """Two KV layouts cannot be copied into each other; the message names the factor and both values."""

    code = "layout_mismatch"


class TransportUnavailable(LocalError):
    """A configured transport cannot work here; the message has the reason and the remedy."""

    code = "transport_unavailable"


class TransportFailure(RemoteError):
    """A data connection failed: reset, deadline passed, or the peer is gone."""

    code = "transport_failure"
    retryable = True


class ProtocolError(RemoteError):
    """A peer sent something that the protocol does not allow."""

    code = "protocol_error"


class HandshakeRefused(RemoteError):
    """Two workers do not fit together: `factor` differs, with the values `local` and `remote`."""

    code = "handshake_refused"

    REMEDIES: ClassVar[dict[str, str]] = {
        "content": "the models have one name and unlike files; load the same config, tokenizer and weights on both",
        "name_in_use": "give one of the two workers another `name`, or a key of its own",
    }
    """By factor, where the two values alone do not say it."""

    def __init__(self, factor: str, local: str, remote: str) -> None:
        remedy = self.REMEDIES.get(factor)
        super().__init__(f"{factor} differs: local {local}, remote {remote}" + (f"; {remedy}" if remedy else ""))
        self.factor, self.local, self.remote = factor, local, remote


class PeerLost(RemoteError):
    """A peer stopped answering, closed its connection or was restarted."""

    code = "peer_lost"
    retryable = True


class TransferFailed(RemoteError):
    """Promised KV did not arrive; the message has the reason from the other side or the link."""

    code = "transfer_failed"
    retryable = True

    def __init__(self, message: str, reason: Reason | None = None) -> None:
        super().__init__(message)
        self._reason = reason or Reason(Code.OTHER, message)

    @property
    def reason(self) -> Reason:
        """The cause alone, without the rest of the message."""
        return self._reason


class DeadlineExceeded(RemoteError):
    """A wait ended by its deadline."""

    code = "deadline_exceeded"
    retryable = True
    http_status = 504
