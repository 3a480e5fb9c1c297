"""What the workers behind a proxy are asked, by the engine they run.

A dialect is data for the flow (`Rules`) and a few functions: which requests go to one worker whole, what each leg is
sent, and how a worker is asked for its health.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from ..rules import Rules

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from ..openai import Call
    from ..upstream import Asking


class PrefillAddress(msgspec.Struct, frozen=True):
    """Where the decode worker finds the prefill worker of its request."""

    name: str
    control: str | tuple[str, ...]
    """Of every rank, if there are several."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """What an attempt is known by, and who prefills it."""

    transfer_id: str
    created: int
    """Unix seconds; the same in both legs' answers."""
    seed: int
    """To sample with if the client gave none."""
    prefill: PrefillAddress
    decode_ranks: int | None = None
    """Of the decode worker, if it has another number than the prefill worker."""


class Refused(msgspec.Struct, frozen=True):
    """A worker of the other side that a worker cannot exchange KV with, by its own account."""

    peer: str = ""
    """Its name; empty if that is not known."""
    address: str = ""
    """Its control address, if it was dialed."""
    factor: str = ""
    """What differs, and both values."""
    local: str = ""
    remote: str = ""
    retry_s: float = 0.0
    """Until the next try; 0 if it is due, or not this worker's to make."""


class Health(msgspec.Struct, frozen=True):
    """What a worker says of itself: the body of a pdlink worker's GET /health. None is what it does not say."""

    status: str
    name: str
    epoch: str
    role: str | None
    model: str
    control: str | tuple[str, ...] | None
    running: int | None = None
    waiting: int | None = None
    free_blocks: int | None = None
    num_blocks: int | None = None
    block_tokens: int | None = None
    refused: tuple[Refused, ...] = ()
    aliases: tuple[str, ...] = ()
    """More names that requests may ask for, of adapters for example."""

    def serves(self, model: str | None) -> bool:
        """Whether a request for this model may come here; None is any model."""
        return model is None or model == self.model or model in self.aliases


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a worker before it is asked again."""

    last: Health | None
    """Its last valid answer."""
    well: bool
    """Whether it has been well since."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """One engine's way to be asked for the two legs of a request."""

    name: str
    legs: Callable[[Call, Attempt], tuple[bytes, bytes]]
    """The bodies of the prefill and the decode leg. Where decode follows prefill's answer (`Rules.handover`), the
    second is not used: the client's own body is sent, with what that answer says."""
    look: Callable[[Asking, Known], Awaitable[Health | str]]
    """Asks a worker how it is. A text says what is wrong with something that answers, but is no worker of this kind.
    Raises what `upstream.ask` raises, and WorkerKeyRefused if the worker does not let this proxy in."""
    rules: Rules = field(default_factory=Rules)
    prefill_streams: bool = False
    """The first event of prefill's stream is output token 0, as it is of decode's. Otherwise prefill's leg is
    answered in one piece, and all that the client gets is decode's."""
    whole: Callable[[Call], bool] = lambda _: False
    """Requests that decode must serve alone, from prompt to end."""
    kv_path: Callable[[Mapping[str, str], bytes], str | None] = lambda _headers, _body: None
    """How decode got the KV, from its answer's headers and body: a value of `pdlink.protocol.kv_path`, or None if the
    answer does not say. Called for a request with a prefill leg; for a stream with its headers and an empty body."""
    key_as_bearer: bool = False
    """The secret that proxy and workers share is the engine's API key."""
    key_setting: str = "worker_key_file must hold the secret of the worker's security.http_key_file"
    """What to mend where a worker does not let the proxy in."""
