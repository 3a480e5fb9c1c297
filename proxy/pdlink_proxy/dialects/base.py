"""What the workers behind a proxy are asked, by the engine they run.

A dialect is data for the flow (`Rules`) and a few functions: which requests go to one worker whole, what each leg is
sent, and how a worker is asked for its health.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from ..bounds import Count  # noqa: TC001  (msgspec reads the annotation at run time)
from ..openai import CHAT, COMPLETIONS
from ..rules import Rules

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Mapping

    from pdlink.observe.sources import Sourced
    from pdlink.protocol.presence import Load

    from ..http_client import HttpClient
    from ..openai import Call
    from ..recovery import Resumes
    from ..upstream import Asking


class PrefillAddress(msgspec.Struct, frozen=True, omit_defaults=True):
    """The address of the prefill worker, for the decode worker of its request."""

    name: str
    control: str | tuple[str, ...]
    """By rank, if there are several."""
    data_parallel_rank: int | None = None
    """Of several engines behind one URL, which this is."""


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt: its transfer id, and its workers."""

    transfer_id: str
    created: int
    """Unix seconds; the same in both legs' answers."""
    seed: int
    """The sampling seed if the client gave none."""
    prefill: PrefillAddress
    decode_ranks: int | None = None
    """Of the decode worker, if it differs from the prefill worker's."""
    prefill_url: str = ""
    link: Mapping[str, Any] = {}
    """`Health.link` of the prefill worker."""


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


class Curves(msgspec.Struct, frozen=True):
    """What a worker has measured of its own forward passes (`pdlink.engine.pace`), in seconds; None: too few yet."""

    prefill: tuple[float, float, float] | None = None
    """A pass over n tokens of prompts behind c others takes [0] + [1] n + [2] n (c + n / 2)."""
    decode: tuple[float, float, float] | None = None
    """A pass over n answers with c tokens in all takes [0] + [1] n + [2] c."""


class Health(msgspec.Struct, frozen=True):
    """A worker's health: the body of a pdlink worker's GET /health. None for values that it does not report."""

    status: str
    name: str
    epoch: str
    role: str | None
    model: str
    control: str | tuple[str, ...] | None
    running: Count | None = None
    waiting: Count | None = None
    load_tokens: Count | None = None
    """Of prompts that it has yet to compute, and for decode of all it holds: what requests of others weigh."""
    free_blocks: Count | None = None
    num_blocks: Count | None = None
    block_tokens: Count | None = None
    refused: tuple[Refused, ...] = ()
    aliases: tuple[str, ...] = ()
    """Other valid model names, of adapters for example."""
    kv_events: tuple[str, ...] = ()
    """Where it publishes which KV it has: ENDPOINT or ENDPOINT,REPLAY of each source."""
    fingerprint: str = ""
    """Of all that must be equal for its KV to be of use elsewhere; empty if it does not say."""
    roles: tuple[str, ...] = ()
    """Legs that it can serve, if they may change while it runs; it serves `role` now."""
    link: dict[str, Any] = {}
    """What its dialect must know to reach its KV: names and ports, by the engine's own words."""
    queue_tokens: Count | None = None
    """Of prompts, to be computed here."""
    kv_used_tokens: Count | None = None
    """That requests hold."""
    prefill_s: float | None = None
    """Seconds of forward passes that computed prompts, since the start."""
    decode_s: float | None = None
    """The same of passes that made only further tokens of answers."""
    curves: Curves | None = None

    def with_load(self, load: Load) -> Health:
        """The same with what a beat says of its load."""
        return msgspec.structs.replace(
            self,
            running=load.running,
            waiting=load.waiting,
            load_tokens=load.load_tokens,
            free_blocks=load.free_blocks,
            queue_tokens=load.queue_tokens,
            kv_used_tokens=load.kv_used_tokens,
            prefill_s=load.prefill_s,
            decode_s=load.decode_s,
        )

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
    rules_of: Callable[[Call], Rules | None] | None = None
    """Other rules for this request."""
    paths: tuple[str, ...] = (COMPLETIONS, CHAT)
    """What is served in two legs."""
    prefill_streams: bool = False
    """Prefill streams, and its first event is output token 0, as decode's is. Otherwise prefill answers in one piece,
    and the client gets decode's answer only."""
    whole: Callable[[Call], bool] | None = None
    """Whether decode must serve a request alone."""
    headers: Callable[[Attempt], tuple[Mapping[str, str], Mapping[str, str]]] | None = None
    """More headers of the prefill and the decode leg."""
    decode_computes: bool = True
    """A decode worker can compute a prompt itself. If not, requests that no pair can serve are refused."""
    abort: Callable[[HttpClient, str, str, Call], Coroutine[Any, Any, None]] | None = None
    """Tells the worker of this URL that the leg with this transfer id was given up. Its connection is closed, too."""
    engine_paths: tuple[str, ...] = ()
    """What a prefill server with several data-parallel engines behind one URL computes by the engine that a header
    names (`engines.HEADER`): with such servers decode serves other paths alone. Empty: it takes no such header."""
    needs_control: bool = False
    """Prefill workers cannot be used without addresses in `ProxyConfig.control`."""
    kv_path: Callable[[Mapping[str, str], bytes], str | None] = lambda _headers, _body: None
    """How decode got the KV, from its answer's headers and body: a value of `pdlink.protocol.kv_path`, or None.
    Called for a request with a prefill leg; for a stream with its headers and an empty body."""
    resumes: Resumes | None = None
    """How a stream goes on when its worker dies; None if it cannot."""
    sources: Callable[[Asking, str], Awaitable[tuple[Sourced, ...]]] | None = None
    """Asks a worker where the KV of a request's prompt came from, by the request's id; None for an engine that does
    not say. Raises as `upstream.ask`, and ValueError for another answer."""
    told: Callable[[bytes], Sourced | None] | None = None
    """The same, of an engine that says it in a leg's whole answer; None if this one does not say."""
    key_as_bearer: bool = False
    """The secret shared by proxy and workers is the engine's API key."""
    key_setting: str = "worker_key_file must hold the secret of the worker's security.http_key_file"
    """The setting to check if a worker refuses the proxy's key."""
