"""Keys: of the proxy's clients, and of the proxy at its workers."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

from pdlink.api.keys import KEY_HEADER, is_one_of, key_of
from pdlink.config import read_secrets, read_token
from pdlink.endpoint.token import http_key_of
from pdlink.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdlink.config import ProxyConfig

_MAX_HEADER_CHARS = 4096


def api_keys(config: ProxyConfig) -> tuple[bytes, ...]:
    """The keys of clients; without any, everybody may call. Raises ConfigError for a file without keys."""
    found = config.api_keys
    if config.api_key_file is not None:
        found += read_secrets(config.api_key_file, "api_key_file")
    return tuple(key.encode() for key in found)


def admin_keys(config: ProxyConfig) -> tuple[bytes, ...]:
    """The keys of operators. Raises ConfigError for a file without keys."""
    if config.admin_key_file is None:
        return ()
    return tuple(key.encode() for key in read_secrets(config.admin_key_file, "admin_key_file"))


def may_enter(keys: tuple[bytes, ...], headers: Mapping[str, str]) -> bool:
    """Whether Authorization, or x-api-key in its absence, has one of the keys. Runs in constant time."""
    return not keys or is_one_of(key_of(headers), keys)


def worker_headers(config: ProxyConfig, *, bearer: bool = False) -> dict[str, str]:
    """Headers of every request to a worker. bearer: send the key as the engine's API key."""
    if config.token_file is not None:
        secret = http_key_of(read_token(config.token_file, "token_file"))
    elif config.worker_key_file is not None:
        secret = read_secrets(config.worker_key_file, "worker_key_file")[0]
    else:
        return {}
    return {"Authorization": f"Bearer {secret}"} if bearer else {KEY_HEADER: secret}


def worker_tls(config: ProxyConfig) -> ssl.SSLContext | None:
    """Verification of https:// workers: against `worker_ca`, or, None, the system's CAs; never off."""
    if config.worker_ca is None:
        return None
    try:
        return ssl.create_default_context(cafile=config.worker_ca)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"worker_ca: cannot use {config.worker_ca}: {error}") from None


def clean(value: str | None) -> str | None:
    """A client's header value if it may be sent on: printable ASCII of bounded length; else None."""
    if value is None or len(value) > _MAX_HEADER_CHARS or not value.isascii() or not value.isprintable():
        return None
    return value
