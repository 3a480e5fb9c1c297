"""When vLLM's weights may have been changed in place: its scheduler says so, and each worker looks at what it has.

Every way to change them goes through `EngineCore.collective_rpc`: /update_weights and its like, `reload_weights`,
methods of a worker extension, functions. A trainer that reaches the model by itself resets the prefix cache then.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from typing import TYPE_CHECKING, Any

from pdlink.integrations.loaded_weights import HERE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

log = logging.getLogger(__name__)

_WATCHED = ("collective_rpc", "reset_prefix_cache", "sleep")
_PARTS = ("start_weight_update", "update_weights")
"""Of a change that `finish_weight_update` ends."""


def watch(engine_class: Any, changed: Callable[[str], None]) -> None:
    """engine_class: `vllm.v1.engine.core.EngineCore`. changed(era): other weights are loaded since the last call, or
    may be; era names those of all ranks. In the scheduler's thread."""
    found: list[str] = []
    """By rank, what is loaded."""

    def look(engine: Any, method: str) -> None:
        if "weights" in getattr(engine.model_executor, "sleeping_tags", ()):
            return  # their memory is not there
        before = list(found)
        found[:] = engine.model_executor.collective_rpc(look_here, args=(method,))
        if before and before != found:
            changed(hashlib.blake2b(repr(found).encode(), digest_size=16).hexdigest())

    def watched(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def wrapper(engine: Any, *args: Any, **kwargs: Any) -> Any:
            if not found:
                look(engine, "")
            try:
                return call(engine, *args, **kwargs)
            finally:
                method = args[0] if args else kwargs.get("method")
                look(engine, str(method) if name == "collective_rpc" else "")

        return wrapper

    for name in _WATCHED:
        call = getattr(engine_class, name, None)
        if call is not None:  # else a release that has none
            setattr(engine_class, name, watched(name, getattr(call, "__wrapped__", call)))  # of an earlier connector


def look_here(worker: Any, method: str) -> str:
    """In a worker, after this method: what `LoadedWeights.change` is then. Raises nothing."""
    try:
        if method in _PARTS and hasattr(worker, "finish_weight_update"):
            return HERE.changing()
        return HERE.look(_parameters(worker))
    except Exception as error:  # noqa: BLE001  vLLM's own call has ended well
        log.warning("weights: cannot tell what is loaded, so no other server fits: %r", error)
        return HERE.changing()


def _parameters(worker: Any) -> Iterable[tuple[str, Any]]:
    """All that no other rank may have just as well: vLLM moves experts between ranks where it balances them."""
    moves = bool(getattr(worker.vllm_config.parallel_config, "enable_eplb", False))
    named = worker.model_runner.get_model().named_parameters()
    return ((name, tensor) for name, tensor in named if not (moves and ".experts." in name))
