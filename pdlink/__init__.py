"""pdlink moves the KV cache of an LLM from prefill servers to decode servers.

`Node` is the way in, `Cache` keeps KV; `paged_layout` describes a KV cache. What is named here is imported when it is
first used, so that `import pdlink` itself costs nothing. All errors are in `pdlink.errors`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from pdlink import errors as errors
    from pdlink.config import SecurityConfig as SecurityConfig
    from pdlink.config import TransportConfig as TransportConfig
    from pdlink.config.listen import LinkListen as LinkListen
    from pdlink.kv.groups import KVGroups as KVGroups
    from pdlink.kv.layout import KVLayout as KVLayout
    from pdlink.kv.layout import paged_layout as paged_layout
    from pdlink.memory.blocks import BlockPool as BlockPool
    from pdlink.node.node import Incoming as Incoming
    from pdlink.node.node import Node as Node
    from pdlink.node.node import Outgoing as Outgoing
    from pdlink.node.port import EnginePort as EnginePort
    from pdlink.protocol.deadlines import Deadlines as Deadlines
    from pdlink.protocol.handshake import ModelId as ModelId
    from pdlink.serve.keys import load_credentials as load_credentials
    from pdlink.store.cache import Cache as Cache
    from pdlink.store.slots import Retention as Retention

_HOMES = {
    "BlockPool": "pdlink.memory.blocks",
    "Cache": "pdlink.store.cache",
    "Deadlines": "pdlink.protocol.deadlines",
    "EnginePort": "pdlink.node.port",
    "Incoming": "pdlink.node.node",
    "KVGroups": "pdlink.kv.groups",
    "KVLayout": "pdlink.kv.layout",
    "LinkListen": "pdlink.config.listen",
    "ModelId": "pdlink.protocol.handshake",
    "Node": "pdlink.node.node",
    "Outgoing": "pdlink.node.node",
    "Retention": "pdlink.store.slots",
    "SecurityConfig": "pdlink.config",
    "TransportConfig": "pdlink.config",
    "errors": "",
    "load_credentials": "pdlink.serve.keys",
    "paged_layout": "pdlink.kv.layout",
}
"""Public name to the module it is in; empty for a module."""

__all__ = [*_HOMES, "__version__"]  # noqa: PLE0604


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'pdlink' has no attribute {name!r}")
    home = _HOMES[name]
    found = getattr(importlib.import_module(home), name) if home else importlib.import_module(f"pdlink.{name}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
