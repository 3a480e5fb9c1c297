"""A router's signed decision about one leg: lets a worker serve callers who do not know its secret.

Checked without state, by the secret that both share, until it expires. It is about a leg and not its prompt: its
owner may send any, and decode alone more than once.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdlink.errors import InvalidApiKey

if TYPE_CHECKING:
    from pdlink.api.legs import PrefillAddress

HEADER = "X-Pdlink-Route"
"""Of a leg's request: LEG,ID,PEER,EXPIRES,SIGNATURE."""
MAX_CHARS = 512


@dataclass(frozen=True, slots=True)
class RouteToken:
    """What a router allows."""

    leg: str
    """prefill or decode."""
    transfer_id: str
    peer: str
    """`peer_of` the prefill worker that decode gets the KV from; empty on the prefill leg, and for decode alone."""
    expires: int
    """Unix seconds."""

    def signed(self, secret: bytes) -> str:
        """For `HEADER`: these words and their HMAC-SHA256 in hex."""
        words = f"{self.leg},{self.transfer_id},{self.peer},{self.expires}"
        return f"{words},{hmac.new(secret, words.encode(), hashlib.sha256).hexdigest()}"


def read_token(secret: bytes, text: str, now: float) -> RouteToken:
    """What `text` allows. now: Unix seconds. Raises InvalidApiKey; constant time in the signature."""
    words, _, signature = text.rpartition(",")
    made = hmac.new(secret, words.encode(errors="surrogateescape"), hashlib.sha256).hexdigest()
    if len(text) > MAX_CHARS or not hmac.compare_digest(made.encode(), signature.encode(errors="surrogateescape")):
        raise InvalidApiKey(f"{HEADER}: its signature is not of a router that shares route_key_file; ask POST /route")
    leg, transfer_id, peer, expires = words.split(",")
    if now >= int(expires):
        raise InvalidApiKey(f"{HEADER}: got one that expired {now - int(expires):.0f} s ago; ask POST /route again")
    return RouteToken(leg, transfer_id, peer, int(expires))


def peer_of(address: PrefillAddress) -> str:
    """Stands for a worker's name and control addresses."""
    return hashlib.sha256(f"{address.name}\n{','.join(address.addresses)}".encode()).hexdigest()
