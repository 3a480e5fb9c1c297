"""SGLang's own manager of weights, with pdlink's hooks around it. Run with `make test-sglang`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pdlink.integrations.loaded_weights import LoadedWeights
from pdlink.integrations.sglang_parts import weights

pytestmark = [pytest.mark.sglang, pytest.mark.engines, pytest.mark.filterwarnings("ignore")]
registry = pytest.importorskip("sglang.srt.plugins.hook_registry", exc_type=ImportError)


def test_the_hooks_are_where_sglang_changes_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = LoadedWeights()
    monkeypatch.setattr(weights, "HERE", loaded)
    around = registry.HookType.AROUND
    weights.install(lambda name, call: registry.HookRegistry.register(name, call, around))
    registry.HookRegistry.apply_hooks()
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager as Manager

    model = torch.nn.Linear(4, 4)

    def change(*_: object, **__: object) -> tuple[bool, str]:
        model.weight.data.add_(1)
        return True, "changed"

    runner = SimpleNamespace(model=model, weight_updater=SimpleNamespace(update_weights_from_disk=change))
    manager: Any = object.__new__(Manager)
    known: dict[str, Any] = {
        "tp_worker": SimpleNamespace(model_runner=runner, weight_update_runners=lambda: [("target", runner)]),
        "draft_worker": None,
        "metrics_collector": None,
        "flush_cache": lambda **_: True,
        "scheduler": SimpleNamespace(record_weight_version_change=lambda **_: None),
    }
    for name, value in known.items():
        setattr(manager, name, value)
    names: dict[str, Any] = {"model_path": "x", "load_format": None, "weight_version": None, "flush_cache": True}
    asked = SimpleNamespace(**names, recapture_cuda_graph=False, torch_empty_cache=False)
    assert manager.update_weights_from_disk(asked).success
    assert loaded.named("files") != "files"
    for name in (*weights._CHANGES, *weights._BEGINNINGS, weights._GIVES_MEMORY_BACK):
        assert hasattr(getattr(Manager, name), "__wrapped__"), name
