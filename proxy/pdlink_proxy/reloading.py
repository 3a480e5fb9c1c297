"""What of new settings a running proxy takes. No I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pdlink.config import ProxyConfig

LIVE = frozenset(
    (
        *("api_keys", "api_key_file", "rate_limit", "rate_limits", "shares"),
        *("queue_size", "queue_timeout_s", "no_worker_timeout_s", "prefill_queue_tokens", "drain_s"),
        *("retries", "recover_streams", "on_no_prefill"),
        *("first_byte_timeout_s", "idle_timeout_s", "request_timeout_s", "kv_header_grace_s", "decision_share"),
        *("prefill", "decode", "both", "control", "data_parallel", "cells", "kv_events", "stores"),
    )
)
"""Settings that are read for each request, or whose change is told to what was made of them."""
WORKERS = frozenset(("prefill", "decode", "both", "control", "data_parallel", "cells", "kv_events", "stores"))
_NOT_COMPARED = frozenset(("listen",))  # port 0 has become a number


class Taken(NamedTuple):
    config: ProxyConfig
    changed: frozenset[str]
    ignored: frozenset[str]
    """Changed settings that a running proxy cannot take."""


def taken(old: ProxyConfig, new: ProxyConfig) -> Taken:
    """The old settings with those of the new ones that a running proxy can take."""
    names = type(old).model_fields.keys() - _NOT_COMPARED
    differ = frozenset(name for name in names if getattr(old, name) != getattr(new, name))
    changed = differ & LIVE
    return Taken(old.model_copy(update={name: getattr(new, name) for name in changed}), changed, differ - LIVE)
