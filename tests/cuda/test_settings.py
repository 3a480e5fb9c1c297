"""What the settings say about GPUs, and what a worker says where there is none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pdlink.config import TransportConfig, WorkerConfig, load
from pdlink.cuda.buffers import DeviceBuffer
from pdlink.cuda.driver import Device
from pdlink.engine.models import load_model
from pdlink.errors import ConfigError, TransportUnavailable
from pdlink.transport.choice_cuda import open_device_transports

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def settings(**flags: Any) -> WorkerConfig:
    return load(WorkerConfig, environment={}, flags={key.replace("__", "."): value for key, value in flags.items()})


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:3"])
def test_devices_are_named_as_torch_names_them(device: str) -> None:
    assert settings(engine__device=device).engine.device == device


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "cuda:1,2", " cuda"])
def test_other_names_are_refused(device: str) -> None:
    with pytest.raises(ConfigError, match=r"engine\.device"):
        settings(engine__device=device)


def test_a_share_of_gpu_memory_needs_a_gpu() -> None:
    with pytest.raises(ConfigError, match=r"cache\.memory_fraction.*engine\.device"):
        settings(cache__memory_fraction=0.4)
    assert settings(cache__memory_fraction=0.4, engine__device="cuda").cache.memory_fraction == 0.4


def test_checksums_of_host_memory_are_refused_for_device_memory() -> None:
    with pytest.raises(ConfigError, match=r"transport\.verify.*must be off"):
        settings(engine__device="cuda", transport__verify="sample")


@without_gpu
def test_a_worker_without_its_gpu_says_so() -> None:
    with pytest.raises(ConfigError, match="engine.device is 'cuda:1'.*no CUDA device"):
        load_model(WorkerConfig().model, "cuda:1")


@without_gpu
def test_each_transport_says_why_it_cannot_move_device_memory(device: Device) -> None:
    with DeviceBuffer(device, 4096) as buffer:
        with pytest.raises(TransportUnavailable, match="mapped: .*no CUDA driver.*ucx: .*no CUDA driver"):
            open_device_transports(TransportConfig(), buffer)
        with pytest.raises(TransportUnavailable, match="tcp: it cannot move device memory"):
            open_device_transports(TransportConfig(kind="tcp"), buffer)
