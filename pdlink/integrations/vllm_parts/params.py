"""`kv_transfer_params`: what the proxy says about a request to the two servers of an attempt.

The id of a transfer is the proxy's plus a digest of the prompt. So a list of prompts in one HTTP request makes one
transfer each, and two servers that disagree about a prompt (another tokenizer, another chat template) never match:
the decode server computes it itself, and nobody gets somebody else's KV.
"""

from __future__ import annotations

import hashlib
import logging
from array import array
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from pdlink.api.legs import MAX_ADDRESS_CHARS, AnyParams
from pdlink.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pdlink.api.legs import PrefillParams

log = logging.getLogger(__name__)

_LOAD_TIERS = "kv_load_tiers"
_SOURCE = "source"
_OF_THE_STORE = {"max_load_tokens", "max_offload_tokens", _LOAD_TIERS, _SOURCE}
_OF_THE_STORE |= {"session_id", "session_ttl_s", "session_owner"}
"""What a request may say that is served without a transfer. The session is read by `versions.session_of`."""
_DIGEST_NBYTES = 8
"""Distinguishes the prompts of one HTTP request; a client that makes two collide hurts only its own request."""


_MEDIA, _LOCALITIES = ("CPU", "STORAGE"), ("LOCAL", "REMOTE")
_WHERE = {
    "disk": ("STORAGE", "LOCAL"),
    "shared_dir": ("STORAGE", "REMOTE"),
    "objects": ("STORAGE", "REMOTE"),
    "valkey": ("STORAGE", "REMOTE"),
    "peer": ("CPU", "REMOTE"),
}
"""Medium and locality of the store's tiers, as vLLM calls them; who brings a tier of his own does not say."""


class Caps(NamedTuple):
    """How much of a request the store may load and keep, as vLLM's OffloadingConnector is asked; None: no cap."""

    load: int | None = None
    """Tokens after what vLLM has."""
    keep: int | None = None
    """Tokens from the first one on."""
    tiers: tuple[tuple[str | None, str | None], ...] = ()
    """Medium and locality of those below memory that may be loaded from, None for any; empty: from all."""

    @classmethod
    def of(cls, params: Mapping[str, object]) -> tuple[Caps, Mapping[str, object]]:
        """The caps in `kv_transfer_params`, and what is in them for a transfer. A wrong value is logged, and caps
        nothing."""
        others = {name: value for name, value in params.items() if name not in _OF_THE_STORE}
        load, keep = (_cap(params, name) for name in ("max_load_tokens", "max_offload_tokens"))
        tiers = params.get(_LOAD_TIERS)
        if tiers == []:
            load = 0
        return cls(load, keep, _tiers(tiers)), others

    def barred(self, places: Sequence[str]) -> frozenset[int]:
        """Which of the store's places (`AnyStore.places`) are not loaded from. Memory always is."""
        where = [_WHERE.get(name.partition(" ")[0].rstrip("-0123456789"), (None, None)) for name in places]
        allowed = [any(all(map(_matches, each, tier)) for each in self.tiers) for tier in where]
        return frozenset(index for index, may in enumerate(allowed) if index and self.tiers and not may)


NO_CAPS = Caps()


def source_of(params: Mapping[str, object]) -> str:
    """Address of the store that the proxy says has most of the prompt; empty for none."""
    named = params.get(_SOURCE)
    return named if isinstance(named, str) and len(named) <= MAX_ADDRESS_CHARS else ""


def _matches(asked: str | None, has: str | None) -> bool:
    return asked is None or has is None or asked == has


def _tiers(given: object) -> tuple[tuple[str | None, str | None], ...]:
    """Entries that are wrong are logged; without a right one nothing is barred."""
    found = []
    for entry in given if isinstance(given, list) else () if given is None else (given,):
        medium, locality = (_word(entry, *each) for each in (("medium", _MEDIA), ("locality", _LOCALITIES)))
        if medium == "" or locality == "":
            log.warning(
                "kv_transfer_params: %s: got %.100r; expected a list of {medium: CPU or STORAGE, locality: LOCAL or "
                "REMOTE}, either left out for any; this entry counts for nothing",
                _LOAD_TIERS,
                entry,
            )
        else:
            found.append((medium, locality))
    return tuple(found)


def _word(entry: object, name: str, known: Sequence[str]) -> str | None:
    """In capitals; None if it is left out, empty if it is wrong."""
    value = entry.get(name) if isinstance(entry, dict) else ""
    if value is None:
        return None
    return value.upper() if isinstance(value, str) and value.upper() in known else ""


def _cap(params: Mapping[str, object], name: str) -> int | None:
    value = params.get(name)
    if value is None or (type(value) is int and value >= 0):
        return value
    log.warning("kv_transfer_params: %s: got %.100r; expected an integer >= 0; nothing is capped", name, value)
    return None


def check_engine(params: PrefillParams, engine: int) -> None:
    """Raises InvalidRequest if vLLM has given the request to another engine than decode asks."""
    if params.data_parallel_rank != engine:
        raise InvalidRequest(
            f"kv_transfer_params: data_parallel_rank: got {params.data_parallel_rank} at data-parallel engine "
            f"{engine}; expected the engine that decode asks; send the leg with the header X-data-parallel-rank: "
            f"{params.data_parallel_rank}, as the proxy does for servers with data_parallel"
        )


def parse(params: Mapping[str, object]) -> AnyParams:
    """Raises InvalidRequest: anybody who reaches the server can send this field."""
    try:
        found: AnyParams = msgspec.convert(params, AnyParams)
        return found
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"kv_transfer_params: {error}") from None


def transfer_id(attempt: str, prompt: Sequence[int], identity: Iterable[str] = ()) -> str:
    """The id of one prompt's transfer in one attempt. identity: what else its KV depends on (LoRA, images, salt)."""
    digest = hashlib.blake2b(array("q", prompt).tobytes(), digest_size=_DIGEST_NBYTES)
    for word in identity:
        digest.update(b"\0" + word.encode())
    return f"{attempt}-{digest.hexdigest()}"
