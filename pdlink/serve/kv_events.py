"""What a worker or a store keeps, told to subscribers."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol

from pdlink.observe.kv_ledger import BlockPlace, parents_first
from pdlink.observe.kv_publisher import KVPublisher
from pdlink.store.interface import MEMORY
from pdlink.store.late import Late

if TYPE_CHECKING:
    from pdlink.config import KVEventsConfig
    from pdlink.kv.hashing import Preimage
    from pdlink.memory.blocks import BlockChange, BlockPool
    from pdlink.store.interface import AnyStore, RecordChange
    from pdlink.store.preimages import PreimageFile

_MAX_GONE = 4096


class Teller(Protocol):
    """As `KVPublisher`. By any thread."""

    def stored(self, place: BlockPlace, key: bytes, preimage: Preimage | None = None) -> None: ...

    def removed(self, place: BlockPlace, key: bytes) -> None: ...


def open_publisher(config: KVEventsConfig, name: str, incarnation: str) -> KVPublisher | None:
    """None where nobody is to be told. Raises ConfigError."""
    if config.endpoint is None:
        return None
    return KVPublisher(
        config.endpoint,
        config.replay_endpoint,
        topic=config.topic.replace("{name}", name),
        incarnation=incarnation,
    )


def tell_blocks(publisher: KVPublisher, pool: BlockPool, block_tokens: int, *, on_gpu: bool) -> None:
    """From now on tell what is in the blocks of an engine."""
    place = BlockPlace(block_tokens, "GPU" if on_gpu else "CPU")

    def changed(change: BlockChange) -> None:
        if change.kind == "stored":
            publisher.stored(place, change.key, change.preimage)
        else:
            publisher.removed(place, change.key)

    pool.listen(changed)


def tell_records(publisher: KVPublisher, store: AnyStore, chunk_tokens: int) -> None:
    """From now on tell what is in the memory and on the disk of a store; what others share does not say."""

    store.listen(lambda change: _tell(publisher, change, chunk_tokens, change.preimage))


def tell_shared_records(publisher: Teller, store: AnyStore, file: PreimageFile | None) -> None:
    """The same of a store whose records are of several models, and may have been on its disk before.

    file: where tokens of what is on the disk are kept. A record whose tokens nobody has said is not told, and nothing
    before the file has been read: a frozen disk holds up nobody but those who wait for what is on it.
    """
    records = _SharedRecords(publisher, file)
    store.listen(records.changed)
    if file is None:
        records.begin()
    else:
        Late(f"{file.path}", records.begin).wait()


class _SharedRecords:
    def __init__(self, publisher: Teller, file: PreimageFile | None) -> None:
        self._publisher, self._file = publisher, file
        self._lock, self._writing = threading.Lock(), threading.Lock()
        """Places tell at the same time. The second one is for the file, and only for who tells of a disk."""
        self._known: dict[bytes, Preimage] = {}
        self._places: dict[bytes, set[str]] = {}
        self._gone: dict[bytes, Preimage] = {}
        """Records that may come back without one: on their way to the disk, or in a tier that does not tell."""
        self._has_begun = False

    def begin(self) -> bool:
        """Read the file, and tell all that is there. True. The rest of the file may be of a disk that opens later."""
        said = self._file.load() if self._file is not None else {}
        with self._lock:
            self._has_begun = True
            self._known = said | self._known
            there = {
                (_place(where, len(self._known[key].tokens)), key): self._known[key]
                for key in self._known.keys() & self._places.keys()
                for where in self._places[key]
            }
            for place, key, known in parents_first(there):
                self._publisher.stored(place, key, known)
        with self._writing:
            self._rewrite()
        return True

    def changed(self, change: RecordChange) -> None:
        key, on_disk = change.key, change.place != MEMORY
        with self._lock:
            known = change.preimage or self._known.get(key) or self._gone.get(key)
            places = self._places.setdefault(key, set())
            if change.is_there:
                places.add(change.place)
            else:
                places.discard(change.place)
                if not places:
                    del self._places[key]
            if known is None:
                return
            if change.is_there:
                self._gone.pop(key, None)
                self._known[key] = known
            elif not places:
                self._gone[key] = self._known.pop(key, known)
                if len(self._gone) > _MAX_GONE:
                    del self._gone[next(iter(self._gone))]
            if self._has_begun:
                _tell(self._publisher, change, len(known.tokens), known)
        if on_disk and self._file is not None:
            with self._writing:
                if change.is_there:
                    self._file.add(key, known)
                elif self._file.forget(known):
                    self._rewrite()

    def _rewrite(self) -> None:
        if self._file is not None:
            with self._lock:
                on_disk = (key for key, places in self._places.items() if places - {MEMORY})
                there = {key: self._known[key] for key in on_disk if key in self._known}
            self._file.rewrite(there)


def _tell(publisher: Teller, change: RecordChange, chunk_tokens: int, known: Preimage | None) -> None:
    place = _place(change.place, chunk_tokens)
    if change.is_there:
        publisher.stored(place, change.key, known)
    else:
        publisher.removed(place, change.key)


def _place(name: str, chunk_tokens: int) -> BlockPlace:
    return BlockPlace(chunk_tokens, "CPU") if name == MEMORY else BlockPlace(chunk_tokens, "STORAGE", "LOCAL", name)
