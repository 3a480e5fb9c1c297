"""What the books know of a record is of the one that is there now, and who listens hears it with its tokens."""

from __future__ import annotations

import pytest

from pdlink.kv.hashing import Preimage
from pdlink.store.books import Books
from pdlink.store.catalog import Catalog
from pdlink.store.eviction import Lru
from pdlink.store.interface import MEMORY, RecordChange

from .stubs import SHAPE

KEY = b"%032d" % 7


def opened(records: int = 4) -> Books:
    catalog = Catalog(Lru())
    catalog.resize(records * SHAPE.nbytes)
    return Books(catalog, lambda: 0.0)


def keep(books: Books, *, summed: bool = False, preimage: Preimage | None = None) -> None:
    slots = books.catalog.reserve([KEY], SHAPE.nbytes, "a")
    assert books.commit(slots, SHAPE, summed=summed, checked=not summed, preimages={KEY: preimage}) == [KEY]


def test_a_record_that_goes_and_is_stored_again_before_anybody_was_told_is_known_as_the_new_one() -> None:
    books = opened()
    with books.lock:
        keep(books)
        books.catalog.remove([KEY])
        keep(books, summed=True)
    books.check()
    assert (books.shapes, books.summed, books.unchecked) == ({KEY: SHAPE}, {KEY}, {KEY})
    with books.lock:
        books.catalog.remove([KEY])
    books.check()
    assert not books.shapes


def test_a_catalog_that_is_wrong_shows() -> None:
    books = opened()
    with books.lock:
        keep(books)
    books.check()
    books.catalog._extents.used_nbytes += 1
    with pytest.raises(AssertionError):
        books.check()


def test_who_listens_hears_of_each_change_once_in_order_with_the_tokens_that_were_said() -> None:
    books, heard, known = opened(), list[RecordChange](), Preimage(None, (1, 2, 3, 4))
    with books.lock:
        keep(books)
    books.listen(heard.append)
    with books.lock:
        books.catalog.remove([KEY])
        keep(books, preimage=known)
    books.tell()
    books.tell()
    present, gone = RecordChange(MEMORY, True, KEY), RecordChange(MEMORY, False, KEY)
    assert heard == [present, gone, RecordChange(MEMORY, True, KEY, known)]


def test_a_commit_compares_keys_by_their_hashes_and_not_with_each_other() -> None:
    compared = 0

    class Key(bytes):
        __hash__ = bytes.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return bytes.__eq__(self, other)

    books, keys = opened(500), [Key(b"%032d" % number) for number in range(500)]
    with books.lock:
        slots = books.catalog.reserve(keys, SHAPE.nbytes, "a")
        assert books.commit(slots, SHAPE, summed=True) == keys
    assert compared < 20 * len(keys)
