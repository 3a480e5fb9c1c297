"""One tree of errors: who is to blame, whether trying again can help, and what an HTTP client is told.

`LocalError` is our own configuration, capacity or use; `RemoteError` is something a peer did or failed to do.
Neither base is raised itself. A message names the field, both values and the remedy.
"""

from __future__ import annotations

from typing import ClassVar


class PdlinkError(Exception):
    """Base of every error of this package. Carries what the edges need to report it."""

    code: ClassVar[str] = "internal_error"
    """Stable name: `error.code` in HTTP bodies, the `reason` label of metrics."""
    retryable: ClassVar[bool] = False
    """True if the same request may succeed when tried again, here or on another worker."""
    http_status: ClassVar[int] = 500


class LocalError(PdlinkError):
    """The cause is on this side."""


class RemoteError(PdlinkError):
    """The cause is a peer."""


class ConfigError(LocalError):
    """A setting is unknown, of the wrong type or out of range."""

    code = "invalid_config"


class InvalidRequest(LocalError):
    """A client's request can never be served as it is."""

    code = "invalid_request"
    http_status = 400


class UnknownModel(InvalidRequest):
    """The request names a model that this server does not hold."""

    code = "model_not_found"
    http_status = 404


class InvalidApiKey(InvalidRequest):
    """The caller did not prove that it may use this server."""

    code = "invalid_api_key"
    http_status = 401


class PeerNotAllowed(InvalidRequest):
    """The request names a worker that this one must not connect to; the message says what would allow it."""

    code = "peer_not_allowed"
    http_status = 403


class CapacityExceeded(InvalidRequest):
    """The request needs more than this worker can ever give (both numbers are in the message)."""

    code = "capacity_exceeded"


class Overloaded(LocalError):
    """The bounded queue is full now; a later try may succeed."""

    code = "overloaded"
    retryable = True
    http_status = 503


class Draining(LocalError):
    """The worker was told to stop and takes no new requests; another one may."""

    code = "draining"
    retryable = True
    http_status = 503


class WorkerKeyRefused(LocalError):
    """The workers do not let this proxy in: its own key is wrong or missing, which is no fault of a client."""

    code = "worker_key_refused"
    http_status = 502


class NoWorker(LocalError):
    """No healthy worker of a role that the request needs, or this process shuts down; a later try may succeed."""

    code = "no_worker"
    retryable = True
    http_status = 503


class PoolExhausted(LocalError):
    """Fewer free blocks than were asked for, at this moment."""

    code = "pool_exhausted"
    retryable = True
    http_status = 503


class RequestAborted(LocalError):
    """The client went away, the other leg failed or the worker is stopping; nobody waits for the answer."""

    code = "request_aborted"
    http_status = 499


class EngineFailure(LocalError):
    """A forward pass failed or gave numbers that are none; the request's tokens so far are still right."""

    code = "engine_failure"
    retryable = True


class LayoutMismatch(LocalError):
    """Two KV layouts cannot be copied into each other; the message names the factor and both values."""

    code = "layout_mismatch"


class TransportUnavailable(LocalError):
    """A transport was asked for that cannot work here; the message says why and what would help."""

    code = "transport_unavailable"


class TransportFailure(RemoteError):
    """A data connection failed: reset, deadline passed, or the peer is gone."""

    code = "transport_failure"
    retryable = True
    http_status = 502


class ProtocolError(RemoteError):
    """A peer sent something that the protocol does not allow."""

    code = "protocol_error"
    http_status = 502


class HandshakeRefused(RemoteError):
    """Two workers do not fit together. `factor` names what differs, `local` and `remote` the two values."""

    code = "handshake_refused"
    http_status = 502

    _REMEDIES: ClassVar[dict[str, str]] = {
        "content": "the models have one name and unlike files; load the same config, tokenizer and weights on both",
        "name_in_use": "give one of the two workers another `name`, or a key of its own",
    }
    """By factor, where the two values alone do not say it."""

    def __init__(self, factor: str, local: str, remote: str) -> None:
        remedy = self._REMEDIES.get(factor)
        super().__init__(f"{factor} differs: local {local}, remote {remote}" + (f"; {remedy}" if remedy else ""))
        self.factor, self.local, self.remote = factor, local, remote


class PeerLost(RemoteError):
    """A peer stopped answering, closed its connection or was restarted."""

    code = "peer_lost"
    retryable = True
    http_status = 502


class TransferFailed(RemoteError):
    """KV that was promised did not arrive; the message gives the reason the other side or the link gave."""

    code = "transfer_failed"
    retryable = True
    http_status = 502

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason or message
        """What is known of the cause, without the frame of the message."""


class DeadlineExceeded(RemoteError):
    """A wait ended by its deadline."""

    code = "deadline_exceeded"
    retryable = True
    http_status = 504
