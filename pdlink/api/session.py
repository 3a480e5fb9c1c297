"""Sessions of agents: what requests say of them in their body or in headers, and what answers say in one.

The fields are those of vLLM's `session_id`, with a time to live beside it.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Annotated, NamedTuple

from msgspec import Meta, Struct

from pdlink.api.fields import BadField
from pdlink.config.tiers import MAX_SESSION_CHARS, MAX_SESSION_TTL_S

if TYPE_CHECKING:
    from collections.abc import Mapping

ID_HEADER, TTL_HEADER = "x-session-id", "x-session-ttl"
OWNER_HEADER = "X-Pdlink-Session-Owner"
"""Of a leg's request: `owner_of` the client's API key. The proxy passes no such header of a client's on."""
KEPT_HEADER = "X-Pdlink-Session"
"""Of an answer: how many tokens of the prompt its session keeps, "kept=768 of=1024"; fewer where its quota ends."""
KEPT = re.compile(r"kept=(\d{1,12}) of=\d{1,12}")
MAX_OWNER_CHARS = 32
_OWNER = re.compile(r"[0-9a-f]{0,32}")
_ENCODED = re.compile(r"pdlink:([0-9a-f]{0,32}):(\d+(?:\.\d+)?(?:e[+-]?\d+)?):(.+)")
_SOURCED = "pdlink@"
SGLANG_END = "/pdlink/cache/end_session "
"""What SGLang's servers are asked begins with it; the body of that route follows."""
DEFAULT_TTL_S = 300.0

SessionId = Annotated[str, Meta(min_length=1, max_length=MAX_SESSION_CHARS)]
TimeToLive = Annotated[float, Meta(gt=0, le=MAX_SESSION_TTL_S)]


class EndSessionRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Of POST /pdlink/cache/end_session."""

    session_id: SessionId
    cache_salt: str = ""
    owner: Annotated[str, Meta(max_length=MAX_OWNER_CHARS)] | None = None
    """`owner_of` the API key that its turns came with; None for those of all."""


class AskedSession(NamedTuple):
    id: str
    ttl_s: float
    """How long it keeps its KV after each turn."""
    owner: str = ""
    """Whose it is beside its `cache_salt`: see `OWNER_HEADER`."""


def owner_said(said: Mapping[str, str]) -> str:
    """Of a leg's request. Raises BadField."""
    owner = said.get(OWNER_HEADER, "")
    if not _OWNER.fullmatch(owner):
        raise BadField(f"{OWNER_HEADER}: got {owner!a:.40}; expected what the proxy sends; leave it out")
    return owner


def asked_session(session_id: str | None, ttl_s: float | None, said: Mapping[str, str]) -> AskedSession | None:
    """Whose turn a request is, by its fields or else by its headers; None for no session. said: headers, found by
    their names in lower case. Raises BadField."""
    name = session_id or said.get(ID_HEADER)
    if not name:
        if ttl_s is not None:
            raise BadField("session_ttl_s: has no use without session_id; send both", "session_ttl_s")
        return None
    if session_id:
        if not name.isprintable():
            raise BadField(f"session_id: got {name!a:.40}; expected printable characters; correct it", "session_id")
    elif not (name.isascii() and name.isprintable()):  # proxies pass no other header on
        raise BadField(f"X-Session-ID: got {name!a:.40}; expected printable ASCII; use session_id, or correct it")
    elif len(name) > MAX_SESSION_CHARS:
        raise BadField(f"X-Session-ID: got {len(name)} characters; expected at most {MAX_SESSION_CHARS}; shorten it")
    if ttl_s is None and (text := said.get(TTL_HEADER)):
        try:
            ttl_s = float(text)
        except ValueError:
            ttl_s = math.nan
        if not 0 < ttl_s <= MAX_SESSION_TTL_S:
            raise BadField(
                f"X-Session-TTL: got {text!r:.40}; expected seconds, at most {MAX_SESSION_TTL_S:g}; correct it"
            )
    return AskedSession(name, DEFAULT_TTL_S if ttl_s is None else ttl_s)


def encode_session(session_id: str, ttl_s: float, owner: str) -> str:
    """The session id for an engine that passes on nothing else; `session_id` itself where that says all."""
    is_like_ours = _ENCODED.fullmatch(session_id) or session_id.startswith(_SOURCED)
    says_all = not owner and ttl_s == DEFAULT_TTL_S and not is_like_ours
    return session_id if says_all else f"pdlink:{owner}:{ttl_s!r}:{session_id}"


def with_source(encoded: str, source: str) -> str:
    """The same for a request whose prompt the store at this address has. encoded: empty without a session."""
    return f"{_SOURCED}{source} {encoded}"


def source_of(text: str) -> str:
    """What `with_source` was given; empty for none."""
    return text.removeprefix(_SOURCED).partition(" ")[0] if text.startswith(_SOURCED) else ""


def decode_session(text: str) -> AskedSession | None:
    """What `encode_session` was given, or the session of a client that named it to the engine itself; None as of
    `usable`."""
    if text.startswith(_SOURCED):
        text = text.partition(" ")[2]
    found = _ENCODED.fullmatch(text)
    return usable(AskedSession(found[3], float(found[2]), found[1]) if found else AskedSession(text, DEFAULT_TTL_S))


def usable(asked: AskedSession) -> AskedSession | None:
    """A session that a client may have named past the proxy; None for one that no store takes."""
    is_name = 0 < len(asked.id) <= MAX_SESSION_CHARS and asked.id.isprintable()
    is_right = is_name and 0 < asked.ttl_s <= MAX_SESSION_TTL_S and len(asked.owner) <= MAX_OWNER_CHARS
    return asked._replace(ttl_s=float(asked.ttl_s)) if is_right else None
