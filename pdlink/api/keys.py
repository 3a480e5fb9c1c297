"""Keys that callers send, and how they are compared."""

from __future__ import annotations

import hashlib
import hmac
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

KEY_HEADER = "X-Pdlink-Key"
"""Of a leg's request: the secret shared by proxy and workers. Authorization is the client's and passes through."""
_BEARER = "bearer "


def key_of(headers: Mapping[str, str]) -> str:
    """The API key of a client: of Authorization, or of x-api-key in its absence (/v1/messages); empty if none.

    headers: finds names in lower case.
    """
    authorization = headers.get("authorization")
    if authorization is None:
        return headers.get("x-api-key", "").strip()
    return authorization[len(_BEARER) :].strip() if authorization[: len(_BEARER)].lower() == _BEARER else ""


@lru_cache(1024)
def owner_of(key: str) -> str:
    """A name for who sends this API key, which does not tell it; "" for who sends none."""
    given = key.encode(errors="surrogateescape")
    return hashlib.blake2b(given, digest_size=16, person=b"pdlink owner").hexdigest() if key else ""


def is_one_of(sent: str, keys: Sequence[bytes]) -> bool:
    """In constant time."""
    given = sent.encode(errors="surrogateescape")
    return any(hmac.compare_digest(given, key) for key in keys)  # all of them, also after a match
