"""Memory of a store on a NUMA node: of the settings, else of the GPU whose KV it keeps."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pdlink.config import TiersConfig
from pdlink.errors import ConfigError
from pdlink.memory import buffers, numa
from pdlink.store.arena import STEP_NBYTES
from pdlink.store.opening import make_store
from pdlink.store.record import Group, RecordShape
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

SHAPE = RecordShape("uint8", 16, (Group("latent", (0,), 1, 1, STEP_NBYTES // 64),))  # a quarter of a step


@pytest.fixture
def preferred(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """The nodes that memory was asked of."""
    asked: list[int | None] = []

    @contextlib.contextmanager
    def prefer_node(node: int | None) -> Iterator[None]:
        asked.append(node)
        with numa.prefer_node(node):
            yield

    monkeypatch.setattr(buffers, "prefer_node", prefer_node)
    return asked


@pytest.mark.parametrize("settings", [0, None])
def test_each_step_of_memory_comes_from_the_node_of_the_settings_or_of_the_gpu(
    settings: int | None, preferred: list[int | None]
) -> None:
    config = TiersConfig(max_local_cpu_size=1.0, numa_node=settings)
    store = make_store(config, "worker", numa_node=0 if settings is None else None)
    store.open()
    try:
        keys = [bytes([number]) * 32 for number in range(12)]
        store.commit(store.reserve(keys, SHAPE), SHAPE)
        until(lambda: store.gauges()["committed"] > STEP_NBYTES, "there is more than the first step")
        assert len(preferred) > 1
        assert set(preferred) == {0}
        maps = Path("/proc/self/numa_maps")
        if maps.exists():
            lines = [line for line in maps.read_text().splitlines() if "pdlink-store" in line]
            assert lines
            assert all(" N0=" in line for line in lines if "dirty=" in line)
    finally:
        store.close()


def test_without_a_node_the_kernel_chooses(preferred: list[int | None]) -> None:
    store = make_store(TiersConfig(max_local_cpu_size=0.1), "worker")
    store.open()
    store.close()
    assert set(preferred) == {None}


def test_a_node_that_this_machine_lacks_is_refused_with_those_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdlink.store.opening.nodes", lambda: [0, 1])
    with pytest.raises(ConfigError, match=r"tiers\.numa_node: got 7; expected 0, 1, the nodes of this machine"):
        make_store(TiersConfig(numa_node=7), "worker")


def test_nodes_are_those_of_the_system(tmp_path: Path) -> None:
    for name in ("node0", "node1", "node12", "possible", "has_cpu"):
        (tmp_path / name).mkdir()
    assert numa.nodes(tmp_path) == [0, 1, 12]
    assert numa.nodes(tmp_path / "nowhere") == []
