"""Dialects: the engines a proxy can route to, by the name in `ProxyConfig.dialect`."""

from __future__ import annotations

from .base import Dialect, KnownHealth, TransferTerms
from .own import PDLINK
from .plain import look as look_at_plain
from .sglang import SGLANG
from .vllm import VLLM
from .vllm_nixl import VLLM_NIXL

DIALECTS: dict[str, Dialect] = {dialect.name: dialect for dialect in (PDLINK, VLLM, VLLM_NIXL, SGLANG)}

__all__ = ["DIALECTS", "TransferTerms", "Dialect", "KnownHealth", "look_at_plain"]
