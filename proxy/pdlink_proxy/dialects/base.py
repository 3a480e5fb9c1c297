"""What the workers behind a proxy are asked, by the engine they run.

A dialect is data for the flow (`Rules`) and a few functions: which requests go to one worker whole, what each leg is
sent, and how a worker is asked for its health.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from pdlink.api.openai import CHAT, COMPLETIONS

from ..rules import Rules
from ..sessions import SessionTurn  # noqa: TC001  (msgspec reads the annotation at run time)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Mapping

    from pdlink.api.health import Health
    from pdlink.api.legs import PrefillAddress
    from pdlink.api.openai import Call
    from pdlink.observe.sources import Sourced

    from ..http_client import HttpClient
    from ..recovery import Resumes
    from ..upstream import Asking


class TransferTerms(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt: its transfer id, and its workers."""

    transfer_id: str
    created: int
    """Unix seconds; the same in both legs' answers."""
    seed: int
    """The sampling seed if the client gave none."""
    prefill: PrefillAddress
    prefill_url: str = ""
    link: Mapping[str, Any] = {}
    """`Health.link` of the prefill worker."""
    turn: SessionTurn | None = None
    """Of a session."""
    source: str = ""
    """Address of the store that has more of the prompt than prefill's; empty for none."""


@dataclass(frozen=True, slots=True)
class KnownHealth:
    """The state of a worker before the next poll."""

    last: Health | None
    """Its last valid answer."""
    well: bool
    """Whether it has been healthy since."""
    spoke: bool = False
    """Its legs have been answered well since. A server whose health says no more than that it lives need not be asked
    now."""


class Said(msgspec.Struct, frozen=True, gc=False):
    """Of a leg's KV."""

    kv: str | None = None
    """How decode got it: a value that `kv_path.checked` allows; None if it does not say."""
    source: Sourced | None = None
    """Where that of the leg's prompt came from."""


_NOTHING = Said()


@dataclass(frozen=True, slots=True)
class Dialect:
    """One engine's HTTP interface for the two legs of a request."""

    name: str
    legs: Callable[[Call, TransferTerms], tuple[bytes, bytes]]
    """The bodies of the prefill and the decode leg. With `Rules.handover` the second is not used: decode's leg gets
    the client's own body, with the parameters from prefill's answer."""
    look: Callable[[Asking, KnownHealth], Awaitable[Health | str]]
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
    headers: Callable[[TransferTerms], tuple[Mapping[str, str], Mapping[str, str]]] | None = None
    """More headers of the prefill and the decode leg."""
    alone: Callable[[Call, str], bytes] | None = None
    """The body for decode alone, with the address of a store that has more of the prompt; None for an engine that
    cannot be told."""
    decode_computes: bool = True
    """A decode worker can compute a prompt itself. If not, requests that no pair can serve are refused."""
    abort: Callable[[HttpClient, str, str, Call], Coroutine[Any, Any, None]] | None = None
    """Tells the worker of this URL that the leg with this transfer id was given up. Its connection is closed, too."""
    engine_paths: tuple[str, ...] = ()
    """What a prefill server with several data-parallel engines behind one URL computes by the engine that a header
    names (`engines.HEADER`): with such servers decode serves other paths alone. Empty: it takes no such header."""
    needs_control: bool = False
    """Prefill workers cannot be used without addresses in `ProxyConfig.control`."""
    said: Callable[[Mapping[str, str], bytes], Said] = lambda _headers, _body: _NOTHING
    """What a leg's answer says of KV, by its headers and body: a whole answer, the head of a stream with an empty
    body, or an event of it without headers."""
    head_says: bool = False
    """The head of decode's stream says it."""
    prefill_says: bool = False
    """Prefill's answers say it, too."""
    resumes: Resumes | None = None
    """How a stream goes on when its worker dies; None if it cannot."""
    sources: Callable[[Asking, str], Awaitable[tuple[Sourced, ...]]] | None = None
    """Asks a worker where the KV of a request's prompt came from, by the request's id; None for an engine that does
    not say. Raises as `upstream.ask`, and ValueError for another answer."""
    end_session: Callable[[Asking, str, str, str | None], Awaitable[bool]] | None = None
    """Tells a worker that the session of this id, `cache_salt` and owner, or those of all owners, have ended; whether
    it knew one. None for an engine that keeps none, or cannot be told. Raises as `upstream.ask`, and ValueError for
    another answer."""
    unserved: Mapping[str, str] = field(default_factory=dict)
    """Fields that are refused unless they are null, and why."""
    metrics: str = ""
    """The prefix of the engine's metrics, which its servers have in place of GET /pdlink/state; empty if they have
    that."""
    key_as_bearer: bool = False
    """The secret shared by proxy and workers is the engine's API key."""
    key_setting: str = "worker_key_file must hold the secret of the worker's security.http_key_file"
    """The setting to check if a worker refuses the proxy's key."""
