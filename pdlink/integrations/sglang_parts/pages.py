"""Pages that SGLang names by a hash, as records of a store. Knows no object of SGLang's.

A page whose hash is in the store is a hit; a prefix ends with the first one that is not. Whatever fails is a miss.
Calls come from SGLang's own threads for prefetch and backup, which may wait for a tier.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from pdlink.integrations.loaded_weights import HERE
from pdlink.kv import hashing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdlink.store.interface import AnyFetch, AnyStore
    from pdlink.store.record import RecordShape
    from pdlink.store.sessions import SessionTerms
    from pdlink.store.slots import Share, Slot


class CopyPages(Protocol):
    """Copies between records and pages of the host pool, in the calling thread.

    slots: (index in `pages`, record).
    """

    def __call__(self, slots: Sequence[tuple[int, Slot]], pages: Sequence[int], *, loading: bool) -> None: ...


class StillCopied(Exception):
    """Copies into records may be under way that nobody can wait for. The records stay reserved."""


class PageRecords:
    """The pages of one host pool in a store. Thread-safe, as the store is."""

    def __init__(
        self, store: AnyStore, shape: RecordShape, share: Share, namespace: bytes, copy: CopyPages, timeout_s: float
    ) -> None:
        """share: which part of each record this rank fills. timeout_s: longest wait for what the tiers have."""
        self._store, self._shape, self._share, self._copy = store, shape, share, copy
        self._namespace, self._timeout_s = namespace, timeout_s

    def _keys(self, hashes: Sequence[str]) -> list[bytes]:
        return hashing.named(self._namespace, map(HERE.named, hashes))

    def clear(self) -> None:
        """Forget the pages of this namespace, from any server, and of no other. Waits for the tiers."""
        self._store.clear(ending=hashing.ending(self._namespace))

    def comes_from(self, address: str, hashes: Sequence[str]) -> None:
        """As `AnyStore.comes_from`."""
        self._store.comes_from(address, self._keys(hashes))

    def num_known(self, hashes: Sequence[str]) -> int:
        """How many leading ones are in the store."""
        return len(self._store.lookup(self._keys(hashes), self._timeout_s).keys)

    def known(self, hashes: Sequence[str]) -> list[bool]:
        """Which ones are. Cost: a look-up for every run of known ones."""
        keys = self._keys(hashes)
        found: list[bool] = []
        while len(found) < len(keys):
            run = len(self._store.lookup(keys[len(found) :], self._timeout_s).keys)
            found += [True] * run + [False] * (len(found) + run < len(keys))
        return found

    def get(self, hashes: Sequence[str], pages: Sequence[int], request: str = "hicache") -> list[bool]:
        """Fill pages with the leading records that are there, verified where they come from below memory."""
        keys = self._keys(hashes)
        found = self._store.lookup(keys, self._timeout_s)
        fetch = self._store.fetch(found, self._shape, request)
        try:
            slots = fetch.done.result()
            if slots:
                self._copy(list(enumerate(slots)), pages, loading=True)
        finally:
            stood = fetch.close()
        num = len(slots) if stood else 0
        return [index < num for index in range(len(keys))]

    def hold(self, hashes: Sequence[str], request: str) -> AnyFetch | None:
        """Bring all of them into memory, and keep them there until the fetch is closed; None if one is missing."""
        keys = self._keys(hashes)
        found = self._store.lookup(keys, self._timeout_s)
        return self._store.fetch(found, self._shape, request) if len(found.keys) == len(keys) else None

    def keep(self, session: SessionTerms, hashes: Sequence[str], *, waits: bool) -> int:
        """Have a session keep these pages, and no others; how many leading ones. As `AnyStore.hold`."""
        return self._store.hold(session, self._keys(hashes), [self._shape.nbytes], waits=waits)

    def end(self, session: str, tenant: str, owner: str | None) -> bool:
        """As `AnyStore.end_session`."""
        return self._store.end_session(session, tenant, owner)

    def get_any(self, hashes: Sequence[str], pages: Sequence[int]) -> list[bool]:
        """The same where one that is missing does not end it."""
        result: list[bool] = []
        while len(result) < len(hashes):
            rest = len(result)
            run = sum(self.get(hashes[rest:], pages[rest:]))
            result += [True] * run + [False] * (rest + run < len(hashes))
        return result

    def set(self, hashes: Sequence[str], pages: Sequence[int], copy: CopyPages | None = None) -> list[bool]:
        """Keep what is not there yet; for each page whether it is there now, or this rank's share of it.

        copy: in place of the usual one.
        """
        keys = self._keys(hashes)
        index_of = {key: index for index, key in enumerate(keys)}
        slots = self._store.reserve(list(index_of), self._shape, "engine", self._share)
        try:
            if slots:
                (copy or self._copy)([(index_of[slot.key], slot) for slot in slots], pages, loading=False)
        except StillCopied:
            raise
        except BaseException:
            self._store.abandon(slots)
            raise
        self._store.commit(slots, self._shape)
        kept = max([0, *(index_of[slot.key] + 1 for slot in slots)])
        if kept < len(keys):
            kept += len(self._store.lookup(keys[kept:], self._timeout_s).keys)
        return [index < kept for index in range(len(keys))]


def restorable(num_kv: int, known: Sequence[bool], trailing: int) -> set[int]:
    """Prefix lengths in pages, up to `num_kv`, of which another pool has what it needs.

    known: of that pool, by page. trailing: it needs that many last pages; 0: all of them.
    """
    if not trailing:
        run = next((index for index, there in enumerate(known[:num_kv]) if not there), num_kv)
        return set(range(1, run + 1))
    return {end for end in range(1, num_kv + 1) if all(known[max(0, end - trailing) : end])}


def guarded(call: Callable[[], list[bool]], num: int, failed: Callable[[Exception], None]) -> list[bool]:
    """What `call` returns, or as many misses: SGLang's threads go on, whatever a store does."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001  a page is worth nothing beside a scheduler
        failed(error)
        return [False] * num
