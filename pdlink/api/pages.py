"""Requests that a page of somebody else may have sent, in a browser that reaches this server."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from pdlink.config import is_loopback

if TYPE_CHECKING:
    from collections.abc import Mapping

_SIMPLE_TYPES = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data")
"""That a browser sends to any host without asking first."""


def refused_page(headers: Mapping[str, str], *, loopback: bool, setting: str) -> str:
    """Why a server without keys refuses a request: a page of another site could have sent it. Empty for others.

    headers: finds names in lower case. loopback: the server serves this host alone, so another name in Host is one
    that somebody has pointed here. setting: that gives the server a key.
    """
    origin, host = headers.get("origin"), headers.get("host", "")
    if origin is not None and origin.partition("://")[2] != host:
        return f"Origin is of another site; set {setting}, and send that key"
    if loopback and (origin is not None or "sec-fetch-site" in headers) and not _names_this_host(host):
        return f"Host is no name of this host; use its address, or set {setting}"
    if headers.get("content-type", "").partition(";")[0].strip().lower() in _SIMPLE_TYPES:
        return f"send Content-Type: application/json, or set {setting}"
    return ""


def _names_this_host(host: str) -> bool:
    try:
        return is_loopback(urlsplit(f"//{host}").hostname or "")
    except ValueError:
        return False
