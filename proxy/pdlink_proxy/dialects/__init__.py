"""Dialects: the engines a proxy can route to, by the name in `ProxyConfig.dialect`."""

from __future__ import annotations

from .base import Attempt, Dialect, Health, Known, PrefillAddress
from .own import PDLINK
from .vllm import VLLM, VLLM_NIXL

DIALECTS: dict[str, Dialect] = {dialect.name: dialect for dialect in (PDLINK, VLLM, VLLM_NIXL)}

__all__ = ["DIALECTS", "Attempt", "Dialect", "Health", "Known", "PrefillAddress"]
