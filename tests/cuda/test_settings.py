"""What the settings say about GPUs, and what a worker says where there is none."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
import torch

from pdlink.config import TransportConfig, WorkerConfig, load
from pdlink.cuda.buffers import DeviceBuffer
from pdlink.cuda.driver import Device
from pdlink.engine.models import load_model
from pdlink.errors import ConfigError, TransportUnavailable
from pdlink.serve.check import check
from pdlink.transport.base import Probe
from pdlink.transport.choice import open_transports
from pdlink.transport.mapped_cuda import MappedCudaTransport
from tests.cuda.fake import IMAGE, Fake

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
    with closing(DeviceBuffer(device, 4096)) as buffer:
        with pytest.raises(TransportUnavailable, match="mapped-cuda: .*no CUDA driver.*ucx: .*no CUDA driver"):
            open_transports(TransportConfig(), [buffer])
        with pytest.raises(TransportUnavailable, match="tcp, KV in cuda memory: staged-tcp: .*no CUDA driver"):
            open_transports(TransportConfig(kind="tcp"), [buffer])


def test_a_lane_can_be_demanded_by_name() -> None:
    config = settings(engine__device="cuda", transport__kind="mapped", transport__require="mapped-cuda")
    assert (config.transport.kind, config.transport.require) == ("mapped", "mapped-cuda")


def test_a_probe_loads_the_kernels_and_exports_memory(double: Fake) -> None:
    probe = MappedCudaTransport(library=double.path, image=IMAGE).probe()
    assert (probe.transport, probe.ok, probe.facts) == (
        "mapped-cuda",
        True,
        {"device": "test double", "driver": "13.0"},
    )


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ("cuDevicePrimaryCtxRetain", "cuda_failure: cuDevicePrimaryCtxRetain failed with CUDA_ERROR_NO_DEVICE"),
        ("cuModuleLoadData", "cuda_failure: cuModuleLoadData failed with CUDA_ERROR_NO_DEVICE"),
        ("cuIpcGetMemHandle", "cuda_failure: cuIpcGetMemHandle failed with CUDA_ERROR_NO_DEVICE"),
    ],
)
def test_a_probe_says_what_is_missing(call: str, reason: str, double: Fake) -> None:
    double.fail(call, 100)
    probe = MappedCudaTransport(library=double.path, image=IMAGE).probe()
    assert not probe.ok
    assert probe.reason.startswith(reason)


def test_a_probe_names_what_is_not_there(double: Fake) -> None:
    for transport, what in (
        (MappedCudaTransport(library="no-such-library.so"), "no CUDA driver"),
        (MappedCudaTransport(7, library=double.path), "there is no CUDA device 7"),
        (MappedCudaTransport(library=double.path, image=b""), "pdlink was built without nvcc"),
    ):
        assert transport.probe().reason.startswith(f"cuda_unavailable: {what}")


def probes_of(config: WorkerConfig, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    status = check(config)
    return status, " ".join(capsys.readouterr().out.split())


@without_gpu
def test_check_lists_the_transports_of_device_memory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They count only where the KV is on a GPU."""
    monkeypatch.setenv("COLUMNS", "200")
    status, said = probes_of(settings(), capsys)
    assert status == 0
    assert "mapped-cuda │ no │ host │ cuda │ pool │" in said
    reason = "mapped-cuda, staged-mapped, staged-ucx, staged-tcp: cuda_unavailable: no CUDA driver"
    assert reason in said, "said once"
    on_gpu = settings(engine__device="cuda", transport__kind="mapped")
    status, said = probes_of(on_gpu, capsys)
    assert status == 1
    assert "transport.kind = mapped, engine.device = cuda: not usable here mapped-cuda: cuda_unavailable" in said


def test_check_with_a_gpu_takes_its_transport_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = Probe("mapped-cuda", ok=True, facts={"device": "some GPU"})
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(MappedCudaTransport, "probe", lambda _: good)
    status, said = probes_of(settings(engine__device="cuda:1", transport__kind="mapped"), capsys)
    assert status == 0
    assert "engine.device = cuda:1: usable, mapped-cuda comes first" in said
