"""Dialects: the engines a proxy can route to, by the name in `ProxyConfig.dialect`."""

from __future__ import annotations

from .base import Attempt, Dialect, Health, Known, PrefillAddress
from .lmcache import LMCACHE
from .own import PDLINK
from .plain import look as look_at_plain
from .sglang import SGLANG
from .vllm import VLLM
from .vllm_mooncake import VLLM_MOONCAKE
from .vllm_moriio import VLLM_MORIIO, VLLM_MORIIO_WRITE
from .vllm_nixl import VLLM_NIXL, VLLM_NIXL_PUSH

_ALL = (
    PDLINK,
    VLLM,
    VLLM_NIXL,
    VLLM_NIXL_PUSH,
    VLLM_MOONCAKE,
    VLLM_MORIIO,
    VLLM_MORIIO_WRITE,
    LMCACHE,
    SGLANG,
)

DIALECTS: dict[str, Dialect] = {dialect.name: dialect for dialect in _ALL}

__all__ = ["DIALECTS", "Attempt", "Dialect", "Health", "Known", "PrefillAddress", "look_at_plain"]
