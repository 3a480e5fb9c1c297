"""SGLang's weights are changed in place (/update_weights_from_disk and its like): each rank looks at what it has."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from pdlink.integrations.loaded_weights import HERE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

log = logging.getLogger(__name__)

MANAGER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
"""Every change goes through it, in the scheduler's process and thread."""

_CHANGES = ("update_weights_from_disk", "update_weights_from_ipc", "end_weight_update")
_BEGINNINGS = ("begin_weight_update", "update_weights_from_tensor", "update_weights_from_distributed")
"""Of a change that `end_weight_update` ends."""
_GIVES_MEMORY_BACK = "release_memory_occupation"


def install(register: Callable[[str, Callable[..., Any]], None]) -> None:
    """register(name, around): SGLang calls around(original, manager, ...) instead of this function of its own."""
    for name in (*_CHANGES, *_BEGINNINGS, _GIVES_MEMORY_BACK):
        register(f"{MANAGER}.{name}", _around(name))


def _around(name: str) -> Callable[..., Any]:
    def around(original: Callable[..., Any], manager: Any, *args: Any, **kwargs: Any) -> Any:
        _guarded(lambda: HERE.known(_parameters(manager)))
        if name == _GIVES_MEMORY_BACK:
            return original(manager, *args, **kwargs)
        HERE.changing()
        try:
            return original(manager, *args, **kwargs)
        finally:
            if name in _CHANGES:
                _guarded(lambda: HERE.look(_parameters(manager)))

    return around


def _guarded(look: Callable[[], object]) -> None:
    """SGLang's own call goes on."""
    try:
        look()
    except Exception as error:  # noqa: BLE001
        log.warning("weights: cannot tell what is loaded, so no other server fits: %r", error)
        HERE.changing()


def _parameters(manager: Any) -> Iterable[tuple[str, Any]]:
    """Of the model; a draft model changes no KV that travels."""
    named: Iterable[tuple[str, Any]] = manager.tp_worker.model_runner.model.named_parameters()
    return named
