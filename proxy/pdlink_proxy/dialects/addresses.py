"""Addresses of connectors, as settings list them or as they are by default."""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import urlsplit

from pdlink.errors import ConfigError


class HostPort(NamedTuple):
    host: str
    port: int


def host_of(url: str) -> str:
    """The host of a worker's base URL."""
    return urlsplit(url).hostname or ""


def pairs_of(control: tuple[str, ...], form: str) -> tuple[tuple[HostPort, HostPort], ...]:
    """Each entry is two addresses, "tcp://HOST:PORT,tcp://HOST:PORT". form: what they mean, for the error.

    Raises ConfigError.
    """
    found = []
    for text in control:
        parts = [_address(part) for part in text.split(",")]
        if len(parts) != 2 or None in parts:
            raise ConfigError(f"control: got {text!r}; expected {form}; write it so")
        one, two = (part for part in parts if part is not None)
        found.append((one, two))
    return tuple(found)


def _address(text: str) -> HostPort | None:
    try:
        parts = urlsplit(text.strip())
        port = parts.port
    except ValueError:
        return None
    return HostPort(parts.hostname, port) if parts.hostname and port else None
