"""SGLang's KV pool on CPUs in shared memory: SGLang allocates it before there is a manager."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from pdlink.integrations.shared_allocation import SharedAllocation

if TYPE_CHECKING:
    from collections.abc import Callable

ALLOCATION = SharedAllocation()
"""Has what this process has allocated so far."""

_POOLS = ("MHATokenToKVPool", "MLATokenToKVPool")


def install(backend: str) -> None:
    """For servers whose transfer backend is this one."""

    def around(original: Callable[..., Any], pool: Any) -> Any:
        from sglang.srt.runtime_context import get_disagg

        disagg = get_disagg()
        if disagg.disaggregation_mode == "null" or disagg.disaggregation_transfer_backend != backend:
            return original(pool)
        with ALLOCATION:
            return original(pool)

    for name in _POOLS:
        HookRegistry.register(f"sglang.srt.mem_cache.memory_pool.{name}._create_buffers", around, HookType.AROUND)
