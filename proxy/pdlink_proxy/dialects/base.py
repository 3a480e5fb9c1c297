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
    """The address of the prefill worker, for the decode worker of its request."""

    name: str
    control: str | tuple[str, ...]
    """By rank, if there are several."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt: its transfer id, and its prefill worker."""

    transfer_id: str
    created: int
    """Unix seconds; the same in both legs' answers."""
    seed: int
    """The sampling seed if the client gave none."""
    prefill: PrefillAddress
    decode_ranks: int | None = None
    """Of the decode worker, if it differs from the prefill worker's."""


class Refused(msgspec.Struct, frozen=True):
    """A worker of the other side that this worker reports as refused."""

    peer: str = ""
    """Its name; empty if unknown."""
    address: str = ""
    """Its control address, if it was dialed."""
    factor: str = ""
    """The property that differs; its two values follow."""
    local: str = ""
    remote: str = ""
    retry_s: float = 0.0
    """Until the next try; 0 if it is due, or not this worker's to make."""


class Health(msgspec.Struct, frozen=True):
    """A worker's health: the body of a pdlink worker's GET /health. None for values that it does not report."""

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
    """Other valid model names, of adapters for example."""

    def serves(self, model: str | None) -> bool:
        """Whether it serves this model; None is any model."""
        return model is None or model == self.model or model in self.aliases


@dataclass(frozen=True, slots=True)
class Known:
    """The state of a worker before the next poll."""

    last: Health | None
    """Its last valid answer."""
    well: bool
    """Whether it has been healthy since."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """One engine's HTTP interface for the two legs of a request."""

    name: str
    legs: Callable[[Call, Attempt], tuple[bytes, bytes]]
    """The bodies of the prefill and the decode leg. With `Rules.handover` the second is not used: decode's leg gets
    the client's own body, with the parameters from prefill's answer."""
    look: Callable[[Asking, Known], Awaitable[Health | str]]
    """Polls a worker's health; returns a text if the answer is invalid. Raises as `upstream.ask`, and
    WorkerKeyRefused if the worker refuses this proxy's key."""
    rules: Rules = field(default_factory=Rules)
    prefill_streams: bool = False
    """Prefill streams, and its first event is output token 0, as decode's is. Otherwise prefill answers in one piece,
    and the client gets decode's answer only."""
    whole: Callable[[Call], bool] = lambda _: False
    """Whether decode must serve a request alone."""
    kv_path: Callable[[Mapping[str, str], bytes], str | None] = lambda _headers, _body: None
    """How decode got the KV, from its answer's headers and body: a value of `pdlink.protocol.kv_path`, or None.
    Called for a request with a prefill leg; for a stream with its headers and an empty body."""
    key_as_bearer: bool = False
    """The secret shared by proxy and workers is the engine's API key."""
    key_setting: str = "worker_key_file must hold the secret of the worker's security.http_key_file"
    """The setting to check if a worker refuses the proxy's key."""
