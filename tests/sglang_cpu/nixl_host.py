"""SGLang's NIXL backend on a machine without a GPU: it calls all KV memory of a GPU.

A plugin of SGLang's (`sglang.srt.plugins`), found beside this file; does nothing without nixl.
"""

from __future__ import annotations

import importlib
from typing import Any


def install() -> None:
    try:
        nixl_agent: Any = importlib.import_module("nixl._api").nixl_agent
    except ImportError:
        return

    def of_the_host(name: str, place: int) -> None:
        shipped = getattr(nixl_agent, name)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            """place: of the kind of memory among the arguments."""
            given = list(args)
            if len(given) > place and given[place] == "VRAM":
                given[place] = "DRAM"
            if kwargs.get("mem_type") == "VRAM":
                kwargs["mem_type"] = "DRAM"
            return shipped(self, *given, **kwargs)

        setattr(nixl_agent, name, call)

    for name, place in (("register_memory", 1), ("get_reg_descs", 1), ("get_xfer_descs", 1), ("prep_xfer_dlist", 2)):
        of_the_host(name, place)
