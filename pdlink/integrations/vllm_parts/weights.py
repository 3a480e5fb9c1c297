"""When vLLM's weights may have been changed in place: its scheduler says so, and each worker looks at what it has.

Every way to change them goes through `EngineCore.collective_rpc`: /update_weights and its like, `reload_weights`,
methods of a worker extension, functions. A trainer that reaches the model by itself resets the prefix cache then.
Sleep resets it, too, and changes nothing: what tiers hold is of use when the server wakes up.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple

from pdlink.integrations.loaded_weights import HERE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

log = logging.getLogger(__name__)

_WATCHED = ("collective_rpc", "reset_prefix_cache", "sleep")
_SLEEPS = ("sleep", "release_kv_cache_memory")
"""Give the memory of the cache away, which `_reset_caches` empties before."""
_RESETS = "_reset_caches"
_VLLMS = "pdlink_wraps"
"""Attribute of a method of ours: vLLM's."""
_HEARD = "pdlink_heard"
"""Attribute of vLLM's class: who hears of changes."""
_PARTS = ("start_weight_update", "update_weights")
"""Of a change that `finish_weight_update` ends."""


class Sleep:
    """Whether vLLM empties its caches now because their memory goes away."""

    def __init__(self) -> None:
        self._num_begun = 0
        """Calls of `_SLEEPS` that have not ended; with requests under way they end later."""
        self._resets = False

    @property
    def empties(self) -> bool:
        return self._resets and self._num_begun > 0

    def sleeping(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self._num_begun += 1
            ended: Any = None
            try:
                ended = call(*args, **kwargs)
            finally:
                if isinstance(ended, Future):
                    ended.add_done_callback(self._end)
                else:
                    self._end()
            return ended

        return wrapper

    def resetting(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self._resets = True
            try:
                return call(*args, **kwargs)
            finally:
                self._resets = False

        return wrapper

    def _end(self, _: object = None) -> None:
        self._num_begun -= 1


class _Heard(NamedTuple):
    asleep: Sleep
    changed: dict[str, Callable[[str], None]]
    """By what it is."""


def watch(engine_class: Any, changed: Callable[[str], None], of: str = "connector") -> Sleep:
    """engine_class: `vllm.v1.engine.core.EngineCore`. changed(era): other weights are loaded since the last call, or
    may be; era names those of all ranks. In the scheduler's thread.

    of: what hears of it until `unwatch`: a process may have a connector and several tiers. One of a name that hears
    already is of another engine, which takes the place of the former one.
    """
    known: _Heard | None = engine_class.__dict__.get(_HEARD)
    if known is not None and known.changed and of not in known.changed:
        known.changed[of] = changed
        return known.asleep
    asleep, hearing = Sleep(), {of: changed}
    setattr(engine_class, _HEARD, _Heard(asleep, hearing))
    found: list[str] = []
    """By rank, what is loaded."""

    def look(engine: Any, method: str) -> None:
        if "weights" in getattr(engine.model_executor, "sleeping_tags", ()):
            return  # their memory is not there
        before = list(found)
        found[:] = engine.model_executor.collective_rpc(look_here, args=(method,))
        if before and before != found:
            for tell in hearing.values():
                tell(hashlib.blake2b(repr(found).encode(), digest_size=16).hexdigest())

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

    for name in {*_WATCHED, *_SLEEPS, _RESETS}:
        call = getattr(engine_class, name, None)
        if call is None:  # a release that has none
            continue
        call = vllms = getattr(call, _VLLMS, call)  # not that of an earlier connector
        if name in _WATCHED:
            call = watched(name, call)
        if name in _SLEEPS:
            call = asleep.sleeping(call)
        if name == _RESETS:
            call = asleep.resetting(call)
        setattr(call, _VLLMS, vllms)
        setattr(engine_class, name, call)
    return asleep


def unwatch(engine_class: Any, of: str) -> None:
    known: _Heard | None = engine_class.__dict__.get(_HEARD)
    if known is not None:
        known.changed.pop(of, None)


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
