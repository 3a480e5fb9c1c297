from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def variable_of_the_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    """`Server` chooses vLLM's model runner by it; servers of later tests choose their own."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
