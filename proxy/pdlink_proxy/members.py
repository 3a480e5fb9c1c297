"""Who is listed: the workers of a proxy, as settings, a file, a source or an operator name them."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec

from pdlink.config.proxy import MAX_ENGINES

from .steps import Leg

Role: TypeAlias = Literal["prefill", "decode", "both"]


class ListedWorker(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One worker."""

    url: str
    """Its base URL."""
    drain: bool = False
    """It gets no new requests."""
    control: tuple[str, ...] = ()
    """Control addresses, by rank, as in `ProxyConfig`."""
    kv_events: tuple[str, ...] = ()
    """Where it publishes its KV, as in `ProxyConfig`."""
    data_parallel: Annotated[int, msgspec.Meta(ge=1, le=MAX_ENGINES)] = 1
    """Engines of a prefill server behind its URL, as in `ProxyConfig`."""
    cell: str = ""
    """KV moves within a cell only, a rack or one RDMA network; without one it moves to and from every cell."""
    store: str = ""
    """Where other stores ask the one that it keeps KV in, as in `ProxyConfig.stores`."""


class Members(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All workers."""

    prefill: tuple[ListedWorker, ...] = ()
    decode: tuple[ListedWorker, ...] = ()
    both: tuple[ListedWorker, ...] = ()
    """Plain servers: they serve requests by themselves."""

    def of(self, side: Leg) -> tuple[ListedWorker, ...]:
        return self.prefill if side is Leg.PREFILL else self.decode

    def with_entry(self, role: Role, entry: ListedWorker) -> Members:
        """The same with this worker, in place of one of its URL."""
        entries: tuple[ListedWorker, ...] = getattr(self, role)
        kept = (each for each in entries if each.url.rstrip("/") != entry.url.rstrip("/"))
        return msgspec.structs.replace(self, **{role: (*kept, entry)})

    def without(self, url: str) -> Members:
        """The same without the workers of this URL."""
        kept = (
            tuple(each for each in entries if each.url.rstrip("/") != url.rstrip("/"))
            for entries in (self.prefill, self.decode, self.both)
        )
        return Members(*kept)
