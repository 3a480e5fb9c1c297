from __future__ import annotations

from importlib.util import find_spec

import pytest

if find_spec("vllm") is not None:
    import torch

    if not hasattr(torch._C._cpu, "_is_avx512_supported"):  # vLLM 0.17 asks an older torch for it
        torch._C._cpu._is_avx512_supported = lambda: False  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def variable_of_the_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    """`Server` chooses vLLM's model runner by it; servers of later tests choose their own."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
