"""Keys: of the proxy's clients, and of the proxy at its workers."""

from __future__ import annotations

import hmac
import ssl
from typing import TYPE_CHECKING

from pdlink.config import read_secrets
from pdlink.errors import ConfigError

if TYPE_CHECKING:
    from pdlink.config import ProxyConfig

WORKER_KEY_HEADER = "X-Pdlink-Key"
"""Carries the secret shared by proxy and workers. Authorization is the client's and passes through."""

_BEARER = "bearer "


def api_keys(config: ProxyConfig) -> tuple[bytes, ...]:
    """The keys of clients; without any, everybody may call. Raises ConfigError for a file without keys."""
    found = config.api_keys
    if config.api_key_file is not None:
        found += read_secrets(config.api_key_file, "api_key_file")
    return tuple(key.encode() for key in found)


def may_enter(keys: tuple[bytes, ...], authorization: str | None) -> bool:
    """Whether this Authorization header has one of the keys. Runs in constant time."""
    if not keys:
        return True
    if authorization is None or authorization[: len(_BEARER)].lower() != _BEARER:
        return False
    sent = authorization[len(_BEARER) :].strip().encode(errors="surrogateescape")
    matches = [hmac.compare_digest(sent, key) for key in keys]  # all of them, also after a match
    return any(matches)


def worker_headers(config: ProxyConfig, *, bearer: bool = False) -> dict[str, str]:
    """Headers of every request to a worker. bearer: send the key as the engine's API key."""
    if config.worker_key_file is None:
        return {}
    secret = read_secrets(config.worker_key_file, "worker_key_file")[0]
    return {"Authorization": f"Bearer {secret}"} if bearer else {WORKER_KEY_HEADER: secret}


def worker_tls(config: ProxyConfig) -> ssl.SSLContext | bool:
    """Verification of https:// workers: against `worker_ca`, or the system's CAs; never off."""
    if config.worker_ca is None:
        return True
    try:
        return ssl.create_default_context(cafile=config.worker_ca)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"worker_ca: cannot use {config.worker_ca}: {error}") from None
