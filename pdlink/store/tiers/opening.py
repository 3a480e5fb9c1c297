"""Tiers by the URL or path that settings give."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from pdlink.config.by_path import make_by_path
from pdlink.errors import ConfigError
from pdlink.extras import installing

from .resp_server import SCHEMES
from .shared_dir import SharedDir
from .valkey import Valkey

if TYPE_CHECKING:
    from .base import Tier

ALL = "all"
"""Namespace of tiers that keep the records of all models: their keys tell them apart."""
_TIER = (
    *("name", "medium", "is_server", "verifies", "answers", "problem", "nbytes", "capacity_nbytes"),
    *("contains", "get", "put", "remove", "clear", "close"),
)
_BUCKETS = ("s3", "gs", "az", "abfs")
_EXPECTED = "expected file:///DIRECTORY, redis://HOST and its kin, s3://BUCKET and its kin, or path.to.module:name"


def open_tier(url: str, namespace: str = ALL) -> Tier:
    """A tier that others may share, whatever their models.

    url: file:///DIRECTORY[?max_size=GIB], a directory that nodes mount; a server as in `RespServer`, with
    ttl_s, timeout_s and connections in its query; a bucket as in `object_store.bucket_of`, with timeout_s; or
    path.to.module:name, which is called with the namespace.
    namespace: keeps records apart from those of others that use the same medium.
    Raises ConfigError for anything else, without repeating a URL, which may hold a password.
    """
    try:
        scheme = urlsplit(url).scheme
    except ValueError:
        raise ConfigError(f"tiers.remote_url: got no URL; {_EXPECTED}; correct it") from None
    if scheme == "file":
        parts = urlsplit(url)
        (max_size,), rest = _taken(url, max_size=0.0)
        if rest != parts._replace(query="").geturl() or parts.netloc:
            raise ConfigError(f"tiers.remote_url: got {url!r}; expected file:///DIRECTORY[?max_size=GIB]; correct it")
        return SharedDir(Path(unquote(parts.path)), namespace, int(max_size * 2**30))
    if scheme in SCHEMES:
        (ttl_s, timeout_s, connections), rest = _taken(url, ttl_s=0.0, timeout_s=5.0, connections=18.0)
        if timeout_s == 0 or connections < 1:
            raise ConfigError("tiers.remote_url: got timeout_s or connections of 0; expected more; raise it")
        return Valkey(rest, namespace, ttl_s=ttl_s, timeout_s=timeout_s, num_connections=int(connections))
    if scheme in _BUCKETS:
        try:
            from .object_store import Objects, bucket_of
        except ImportError as error:
            raise ConfigError(
                f"tiers.remote_url: got a bucket, which needs obstore; {installing('store')}"
            ) from error
        (timeout_s,), rest = _taken(url, timeout_s=5.0)
        return Objects(bucket_of(rest, timeout_s), namespace, urlsplit(rest)._replace(query="").geturl())
    if not re.fullmatch(r"[\w.]+:\w+", url):
        got = f"a URL of {scheme!r}" if scheme else "no URL and no path of a module"
        raise ConfigError(f"tiers.remote_url: got {got}; {_EXPECTED}; use one of them")
    tier: Tier = make_by_path("tiers.remote_url", url, _EXPECTED, namespace)
    if missing := [name for name in _TIER if not hasattr(tier, name)]:
        raise ConfigError(
            f"tiers.remote_url: got {url!r}, which has no {', '.join(missing)}; expected what `Tier` has; "
            "add what is missing"
        )
    return tier


def _taken(url: str, **defaults: float) -> tuple[list[float], str]:
    """The numbers that the URL's query gives for these names, and the URL without them."""
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    numbers = []
    for name, default in defaults.items():
        try:
            numbers.append(float(query.pop(name, default)))
        except ValueError:
            numbers.append(-1.0)
        if not 0 <= numbers[-1] < 1e12:
            raise ConfigError(f"tiers.remote_url: got a {name} that is no number; expected 0 or more; correct it")
    return numbers, parts._replace(query=urlencode(query, safe="/")).geturl()
