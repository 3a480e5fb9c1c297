"""Which content of an adapter (LoRA) vLLM computes with: what it has loaded, not what its files say now.

The scheduler's half names a request's adapter by the content of its files, which may have been replaced since vLLM
loaded them. So the half in the worker, where vLLM loads, has the last word: KV is sent, received, kept and loaded
only where the adapter that was loaded has that content.
"""

from __future__ import annotations

import functools
import secrets
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable


class Adapter(NamedTuple):
    """Of a request, as its scheduler saw it arrive."""

    number: int
    """vLLM's `lora_int_id`."""
    content: str
    """Digest of its files then."""


class LoadedAdapters:
    """Of one worker process. For vLLM's thread."""

    def __init__(self, content_of: Callable[[str], str]) -> None:
        """content_of: of the files at a path, as the scheduler's half digests them."""
        self._content_of = content_of
        self._contents: dict[int, str] = {}
        self._manager: Callable[[], Any] = lambda: None
        """Of vLLM, which may have dropped an adapter since."""

    def watch(self, manager_class: Any) -> None:
        """Digest what vLLM loads from now on. manager_class: `vllm.lora.worker_manager.WorkerLoRAManager`."""
        load = manager_class._load_adapter
        load = getattr(load, "__wrapped__", load)  # of an earlier connector in this process

        @functools.wraps(load)
        def watched(manager: Any, request: Any) -> Any:
            before = self._content_of(request.lora_path)
            loaded = load(manager, request)
            self._manager = weakref.ref(manager)
            # Replaced while vLLM read them: a content that no request names, until they are loaded once more.
            same = before == self._content_of(request.lora_path)
            self._contents[int(request.lora_int_id)] = before if same else secrets.token_hex(16)
            return loaded

        manager_class._load_adapter = watched

    def has(self, adapter: Adapter | None) -> bool | None:
        """Whether vLLM computes with this content. None: the adapter is not loaded yet, or not any more."""
        if adapter is None:
            return True
        manager = self._manager()
        if manager is None or adapter.number not in manager.list_adapters():
            self._contents.pop(adapter.number, None)
        content = self._contents.get(adapter.number)
        return None if content is None else content == adapter.content
