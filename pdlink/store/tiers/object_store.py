"""`Objects`: a bucket of S3, Google Cloud Storage or Azure, by the library obstore (extra `objects`).

One object per record, with its envelope before it. How long objects stay, the bucket's lifecycle rules say; one for
multipart uploads that were broken off belongs to them.
"""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlsplit

import obstore
import obstore.exceptions
import obstore.store
import xxhash

from pdlink.errors import ConfigError

from .base import DAMAGED
from .envelope import NBYTES as ENVELOPE_NBYTES
from .envelope import envelope, key_of, opened

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from obstore.store import ObjectStore

_PART_NBYTES = 8 << 20
"""Of an upload, of which several travel at once, and least length of what a download gives at a time."""
_CLIENT_SETTINGS = frozenset(("allow_http", "allow_invalid_certificates", "proxy_url", "user_agent"))
"""Of obstore's connections; it panics where it finds one among a bucket's settings."""
_NUM_ASKERS = 32
"""A bucket answers after 10 ms and more, however many ask."""


class Objects:
    """Objects NAMESPACE/KEY below the bucket's prefix."""

    name = "objects"
    is_server = True
    verifies = True
    answers = True
    problem = ""
    nbytes = 0
    capacity_nbytes = 0

    def __init__(self, bucket: ObjectStore, namespace: str, where: str = "") -> None:
        """bucket: `bucket_of`, or another store of obstore's. where: its name for the next process, no secrets."""
        self.medium = f"objects {where} {namespace}"
        self._bucket, self._namespace = bucket, namespace
        self._askers = ThreadPoolExecutor(_NUM_ASKERS, "pdlink-objects")
        self._closed = False

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        if self._closed:
            return [False] * len(keys)
        return list(self._askers.map(self._is_there, keys))

    def get(self, key: bytes, into: memoryview) -> int | None:
        with self._answering():
            if self._closed:
                return None
            try:
                found = obstore.get(self._bucket, self._path(key))
            except FileNotFoundError:
                return None
            nbytes: int = found.meta["size"] - ENVELOPE_NBYTES
            if nbytes > len(into):
                return None
            stored, at, checksum = b"", 0, xxhash.xxh3_128()
            for piece in found.stream(min_chunk_size=_PART_NBYTES):
                missing = ENVELOPE_NBYTES - len(stored)
                part = memoryview(piece)[missing:]
                stored += bytes(piece[:missing])
                if at + len(part) > max(0, nbytes):
                    break
                into[at : at + len(part)] = part
                checksum.update(part)
                at += len(part)
        if at != nbytes or opened(stored, key) != (nbytes, checksum.digest()):
            self.remove(key)
            return DAMAGED
        return nbytes

    def put(self, key: bytes, record: memoryview) -> bool:
        with self._answering():
            if self._closed:
                return False
            if not self._is_there(key):
                head = envelope(key, record)
                whole = bytes(head + record) if len(record) < _PART_NBYTES else iter((head, record))
                obstore.put(self._bucket, self._path(key), whole, chunk_size=_PART_NBYTES)
            return True

    def remove(self, key: bytes) -> None:
        with self._answering(), contextlib.suppress(FileNotFoundError):
            if not self._closed:
                obstore.delete(self._bucket, self._path(key))

    def clear(self) -> None:
        with self._answering():
            if not self._closed:
                for found in obstore.list(self._bucket, f"{self._namespace}/"):
                    obstore.delete(self._bucket, [meta["path"] for meta in found])

    def keys_ending(self, ending: bytes) -> list[bytes]:
        """As `ListingTier.keys_ending`."""
        with self._answering():
            pages = [] if self._closed else obstore.list(self._bucket, f"{self._namespace}/")
            names = [meta["path"].rpartition("/")[2] for found in pages for meta in found]
        return [key for name in names if (key := key_of(name)) is not None and key.endswith(ending)]

    def close(self) -> None:
        self._closed = True
        self._askers.shutdown(wait=False)

    def _is_there(self, key: bytes) -> bool:
        with self._answering():
            try:
                obstore.head(self._bucket, self._path(key))
            except FileNotFoundError:
                return False
            return True

    def _path(self, key: bytes) -> str:
        return f"{self._namespace}/{key.hex()}"

    @contextlib.contextmanager
    def _answering(self) -> Iterator[None]:
        """What obstore raises is an OSError."""
        try:
            yield
        except obstore.exceptions.BaseError as error:
            raise OSError(f"object store: {str(error)[:300]}") from error


def bucket_of(url: str, timeout_s: float) -> ObjectStore:
    """Connects to nobody yet.

    url: s3://BUCKET[/PREFIX], gs, az or abfs alike. Its query holds obstore's settings (endpoint, region); what it
    lacks, credentials above all, is looked for where the provider's own tools do. timeout_s: of all attempts at a
    request. Raises ConfigError if obstore does not take the URL.
    """
    parts = urlsplit(url)
    config = dict(parse_qsl(parts.query))
    client = {"timeout": f"{timeout_s}s", "connect_timeout": f"{timeout_s}s"}
    for name in _CLIENT_SETTINGS & config.keys():
        client[name] = config.pop(name)
    if config.get("endpoint", "").startswith("http:"):
        client["allow_http"] = "true"
    retry = {"max_retries": 2, "retry_timeout": timedelta(seconds=timeout_s)}
    try:
        return obstore.store.from_url(
            parts._replace(query="").geturl(), config=config, client_options=client, retry_config=retry
        )
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # Rust's, no Exception
            raise
        raise ConfigError(
            "tiers.remote_url: got a bucket that cannot be used; expected what obstore takes; correct it"
        ) from error
