from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="package")
def _one_thread() -> None:
    """Two OpenMP threads that share their cores with anybody wait for each other: 0.5 s became 20 s (measured)."""
    torch.set_num_threads(1)
