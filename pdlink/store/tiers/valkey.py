"""`Valkey`: records on a Valkey or Redis server, for all nodes that reach it.

A record is a head (its envelope and first part) under PREFIX:KEY and further parts under PREFIX:KEY/1, /2, ...: the
server's one thread answers others between parts, and no value comes near its limit of 512 MiB. The head goes last.
How much is kept, and how long, the server decides (maxmemory, TTL); a record of which a part is gone is a miss.
"""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import xxhash

from pdlink.config.listen import in_url

from .base import DAMAGED
from .envelope import NBYTES as ENVELOPE_NBYTES
from .envelope import envelope, key_of, opened
from .resp import CommandRefused, Lying, command, command_with
from .resp_server import PORT, RespServer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .resp import RespConnection

log = logging.getLogger(__name__)

PART_NBYTES = 1 << 20
"""Part of the format: nodes share records only if theirs are equal."""
_MOST_NBYTES = 4 << 30
"""Of a record; the parts of one that says it is longer are left to the server."""
_AHEAD = 2
"""Parts asked for beyond the one that is read: the server copies one while another is on its way."""
_BATCH = 512
"""Small commands sent before their replies are read."""
_CLEAR_S = 60.0


class _Unread(Exception):
    """The reply was left in the connection, which is of no use any more."""

    def __init__(self, *, damaged: bool, lacks_a_part: bool = False) -> None:
        super().__init__()
        self.damaged, self.lacks_a_part = damaged, lacks_a_part


class Valkey:
    """One server (a primary; no cluster slots), over a pool of connections that are made when needed."""

    name = "valkey"
    is_server = True
    verifies = True
    answers = True
    problem = ""
    nbytes = 0
    capacity_nbytes = 0

    def __init__(
        self, url: str, namespace: str, *, ttl_s: float = 0.0, timeout_s: float = 5.0, num_connections: int = 18
    ) -> None:
        """Connects to nobody yet.

        url: see `RespServer`. ttl_s: life of a record, 0 for the server's choice. timeout_s: of a call, connecting
        included. Raises ConfigError for a wrong URL.
        """
        self._server = RespServer(url, timeout_s, num_connections)
        parts = urlsplit(url)
        host = f"{in_url(parts.hostname)}:{parts.port or PORT}" if parts.hostname else ""
        self.medium = f"valkey {host}{parts.path} {namespace}"
        self._prefix = f"pdlink:{namespace}:".encode()
        self._expiry = (b"PX", b"%d" % round(ttl_s * 1000)) if ttl_s else ()

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        def ask(connection: RespConnection) -> list[bool]:
            found = []
            for begin in range(0, len(keys), _BATCH):
                batch = keys[begin : begin + _BATCH]
                connection.send([command(b"EXISTS", self._part(key, 0)) for key in batch])
                found += [connection.reply() == 1 for _ in batch]
            return found

        return self._server.call(ask, [False] * len(keys))

    def get(self, key: bytes, into: memoryview) -> int | None:
        try:
            return self._server.call(partial(self._read, key, into), None)
        except _Unread as unread:
            if unread.damaged or unread.lacks_a_part:
                self.remove(key)
            return DAMAGED if unread.damaged else None

    def put(self, key: bytes, record: memoryview) -> bool:
        """As `Tier.put`. What the server refuses (no memory, no permission, a replica) is False and no error: others
        can read all the same."""
        return len(record) <= _MOST_NBYTES and self._server.call(partial(self._write, key, record), False)

    def remove(self, key: bytes) -> None:
        def drop(connection: RespConnection) -> None:
            connection.send([command(b"GETRANGE", self._part(key, 0), b"0", b"%d" % (ENVELOPE_NBYTES - 1))])
            stored = connection.reply()
            said = opened(stored, key) if isinstance(stored, bytes) else None
            nbytes = said[0] if said and said[0] <= _MOST_NBYTES else 0
            connection.send([command(b"UNLINK", *self._parts(key, nbytes))])
            connection.reply()

        self._server.call(drop, None)

    def clear(self) -> None:
        """As `Tier.clear`. Raises TimeoutError after a minute; what is left can be cleared by another call."""

        def unlink(names: list[bytes], connection: RespConnection) -> None:
            connection.send([command(b"UNLINK", *names)])
            connection.reply()

        self._scan(b"*", unlink)

    def keys_ending(self, ending: bytes) -> list[bytes]:
        """As `ListingTier.keys_ending`. Raises TimeoutError after a minute."""
        found: set[bytes] = set()  # the server may give a key twice

        def add(names: list[bytes], _: RespConnection) -> None:
            text = (name.removeprefix(self._prefix).decode("ascii", "replace") for name in names)
            found.update(key for key in map(key_of, text) if key is not None)

        self._scan(b"*" + ending.hex().encode(), add)
        return list(found)

    def _scan(self, pattern: bytes, each: Callable[[list[bytes], RespConnection], None]) -> None:
        """Give `each` the names of ours that match, some at a time."""

        def step(cursor: bytes, connection: RespConnection) -> bytes:
            connection.send([command(b"SCAN", cursor, b"MATCH", self._prefix + pattern, b"COUNT", b"1000")])
            match connection.reply():
                case [bytes(after), [*found]]:
                    if names := [name for name in found if isinstance(name, bytes) and name.startswith(self._prefix)]:
                        each(names, connection)
                    return after
            raise Lying("got no answer to SCAN")

        deadline_s = time.monotonic() + _CLEAR_S
        cursor = self._server.call(partial(step, b"0"), b"0")
        while cursor != b"0":
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"the server's keys did not end in {_CLEAR_S:.0f} s")
            cursor = self._server.call(partial(step, cursor), b"0")

    def close(self) -> None:
        self._server.close()

    def _read(self, key: bytes, into: memoryview, connection: RespConnection) -> int | None:
        asked = min(_num_parts(len(into)), 1 + _AHEAD)
        connection.send([command(b"GET", self._part(key, index)) for index in range(asked)])
        size, total = connection.bulk_nbytes(), 1
        nbytes = None
        if size is not None:
            first = size - ENVELOPE_NBYTES
            if not 0 <= first <= len(into):
                raise _Unread(damaged=not 0 <= first <= PART_NBYTES)
            stored = bytearray(ENVELOPE_NBYTES)
            connection.bulk_into(memoryview(stored), into[:first])
            nbytes, digest = opened(stored, key) or (-1, b"")
            if first != min(nbytes, PART_NBYTES):
                raise _Unread(damaged=True)
            if nbytes > len(into):
                raise _Unread(damaged=False)
            total = _num_parts(nbytes)
            checksum = xxhash.xxh3_128(into[:first])
            for index in range(1, total):
                if asked < total:
                    connection.send([command(b"GET", self._part(key, asked))])
                    asked += 1
                piece = into[index * PART_NBYTES : min((index + 1) * PART_NBYTES, nbytes)]
                came = connection.bulk_nbytes()
                if came != len(piece):  # none: the server has evicted it
                    raise _Unread(damaged=came is not None, lacks_a_part=came is None)
                connection.bulk_into(piece)
                checksum.update(piece)
            if checksum.digest() != digest:
                raise _Unread(damaged=True)
        for _ in range(total, asked):
            connection.skip_bulk(PART_NBYTES)
        return nbytes

    def _write(self, key: bytes, record: memoryview, connection: RespConnection) -> bool:
        connection.send([command(b"EXISTS", self._part(key, 0))])
        if connection.reply() == 1:
            return True
        names = self._parts(key, len(record))
        pieces: list[bytes | memoryview] = []
        for index in reversed(range(len(names))):
            value = [record[index * PART_NBYTES : (index + 1) * PART_NBYTES]]
            if index == 0:
                value.insert(0, memoryview(envelope(key, record)))
            pieces += command_with((b"SET", names[index]), value, self._expiry)
        connection.send(pieces)
        refused = None
        for _ in names:
            try:
                connection.reply()
            except CommandRefused as error:
                refused = error
        if refused is not None:
            log.warning("%s does not keep records: %s", self.name, refused)
            connection.send([command(b"UNLINK", *names)])
            connection.reply()
        return refused is None

    def _part(self, key: bytes, index: int) -> bytes:
        return self._prefix + key.hex().encode() + (b"/%d" % index if index else b"")

    def _parts(self, key: bytes, nbytes: int) -> list[bytes]:
        return [self._part(key, index) for index in range(_num_parts(nbytes))]


def _num_parts(nbytes: int) -> int:
    """Of a record; an empty one has a head, too."""
    return max(1, -(-nbytes // PART_NBYTES))
