"""`RespServer`: connections to one Valkey or Redis server, lent for one exchange at a time."""

from __future__ import annotations

import ssl
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

from pdlink.errors import ConfigError

from .resp import CommandRefused, Lying, RespConnection, command

if TYPE_CHECKING:
    from collections.abc import Callable

_T = TypeVar("_T")

SCHEMES = ("redis", "valkey", "rediss", "valkeys", "unix")
PORT = 6379
"""Where a URL names none."""
_TLS_FILES = {"ssl_ca_certs", "ssl_certfile", "ssl_keyfile"}
_REFUSALS = {"ERR", "WRONGPASS", "NOAUTH", "NOPERM"}
"""First words of errors."""


class RespServer:
    """Thread-safe. Connections are made when needed and kept for the next exchange."""

    def __init__(self, url: str, timeout_s: float, num_connections: int) -> None:
        """Connects to nobody yet.

        url: redis or valkey://[[USER]:PASSWORD@]HOST[:PORT][/DB]; rediss or valkeys:// for TLS (query: ssl_ca_certs,
        ssl_certfile, ssl_keyfile); unix://[[USER]:PASSWORD@]/PATH. timeout_s: of an exchange, waiting included.
        Raises ConfigError for any other URL, without repeating it: it may hold a password.
        """
        self._connect, self._greeting = _parsed(url)
        self._timeout_s = timeout_s
        self._free = threading.Semaphore(num_connections)
        self._lock = threading.Lock()
        self._idle: list[RespConnection] = []
        self._busy: set[RespConnection] = set()
        self._closed = False

    def call(self, exchange: Callable[[RespConnection], _T], otherwise: _T) -> _T:
        """What the exchange gives, within the deadline; `otherwise` if the tier is closed, or is closed meanwhile.

        Where the server had closed an idle connection, the exchange is made again over a new one.
        """
        deadline_s = time.monotonic() + self._timeout_s
        if self._closed:
            return otherwise
        if not self._free.acquire(timeout=self._timeout_s):
            raise TimeoutError("every connection is in use")
        try:
            while True:
                connection, is_new = self._take(deadline_s)
                try:
                    result = exchange(connection)
                except BaseException as error:
                    self._give_back(connection, usable=False)
                    if self._closed:
                        return otherwise
                    if is_new or isinstance(error, Lying) or not isinstance(error, ConnectionError):
                        raise
                else:
                    self._give_back(connection, usable=True)
                    return result
        finally:
            self._free.release()

    def _take(self, deadline_s: float) -> tuple[RespConnection, bool]:
        """A connection, greeted, and whether it is new."""
        with self._lock:
            connection = self._idle.pop() if self._idle else None
            if connection is not None:
                self._busy.add(connection)
                connection.until(deadline_s)
                return connection, False
        connection = self._connect(max(0.001, deadline_s - time.monotonic()))
        try:
            connection.send(self._greeting)
            for _ in self._greeting:
                connection.reply()
        except CommandRefused as error:
            connection.close()
            word = str(error).partition(" ")[0]
            said = word if word in _REFUSALS else "an error"  # some servers repeat the password
            raise CommandRefused(f"{said} to user, password or database of tiers.remote_url; correct them") from None
        except BaseException:
            connection.close()
            raise
        with self._lock:
            self._busy.add(connection)
        return connection, True

    def _give_back(self, connection: RespConnection, *, usable: bool) -> None:
        with self._lock:
            self._busy.discard(connection)
            if usable and not self._closed:
                self._idle.append(connection)
                return
        connection.close()

    def close(self) -> None:
        """Exchanges under way end with their `otherwise`. Safe to call twice."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            for connection in self._busy:
                connection.wake()
        for connection in idle:
            connection.close()


def _parsed(url: str) -> tuple[Callable[[float], RespConnection], list[bytes]]:
    """What connects within so many seconds, and the commands that a connection begins with."""
    try:
        parts = urlsplit(url)
        scheme, query = parts.scheme, dict(parse_qsl(parts.query, strict_parsing=bool(parts.query)))
        tls = scheme in ("rediss", "valkeys")
        if scheme not in ("redis", "valkey", "rediss", "valkeys", "unix") or set(query) - (
            _TLS_FILES if tls else set()
        ):
            raise ValueError
        address: tuple[str, int] | str = (
            parts.path if scheme == "unix" else (parts.hostname or "", parts.port or PORT)
        )
        database = 0 if scheme == "unix" else int(parts.path.strip("/") or 0)
        if not address or not address[0] or database < 0:
            raise ValueError
    except ValueError as error:
        raise ConfigError(
            "tiers.remote_url: got a URL that cannot be used; expected redis://[[USER]:PASSWORD@]HOST[:PORT][/DB], "
            f"the same with rediss:// and {', '.join(sorted(_TLS_FILES))}, or unix:///PATH; correct it"
        ) from error
    context = None
    if tls:
        try:
            context = ssl.create_default_context(cafile=query.get("ssl_ca_certs"))
            if "ssl_certfile" in query:
                context.load_cert_chain(query["ssl_certfile"], query.get("ssl_keyfile"))
        except OSError as error:
            raise ConfigError(
                f"tiers.remote_url: got certificates that cannot be read ({error}); correct the paths"
            ) from error
    greeting = []
    if parts.password is not None:
        user = [unquote(parts.username).encode()] if parts.username else []
        greeting.append(command(b"AUTH", *user, unquote(parts.password).encode()))
    if database:
        greeting.append(command(b"SELECT", b"%d" % database))
    return partial(RespConnection, address, tls=context), greeting
