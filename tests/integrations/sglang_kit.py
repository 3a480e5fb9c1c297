"""SGLang's fixtures of its prefix tree. Its wheels have them from 0.5.23 on; those of the installed SGLang serve the
classes of an older one, too, which `make engines` puts before it."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any


def find() -> Path | None:
    """The folder that has them, also of another SGLang than the one that is imported."""
    folders = (Path(place) / "sglang/test/kits" for place in sys.path)
    return next((each for each in folders if (each / "unified_radix_cache").exists()), None)


def use() -> None:
    """Have them imported, before anything of them is."""
    import sglang.test.kits as kits
    from sglang.srt.mem_cache import cache_init_params, events

    folder = find()
    assert folder is not None
    if str(folder) in kits.__path__:
        return
    kits.__path__.append(str(folder))
    made: Any = cache_init_params.CacheInitParams
    known = {one.name for one in dataclasses.fields(made)}

    class OfThisVersion(made):  # type: ignore[misc]
        """Without what the fixtures say beside it: nothing that these tests use."""

        def __init__(self, **said: Any) -> None:
            super().__init__(**{name: value for name, value in said.items() if name in known})

    cache_init_params.CacheInitParams = OfThisVersion
    events.KvEventLoraNames = type(None)
