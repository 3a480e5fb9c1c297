"""SGLang's KV pool in a store without a pool on the host in between, without SGLang."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pdlink.errors import ConfigError
from pdlink.integrations.sglang_parts.device_pages import DevicePages
from pdlink.integrations.sglang_parts.hicache import HostPages, RankScheme
from pdlink.integrations.sglang_parts.settings import read_linker
from pdlink.integrations.sglang_parts.versions import UnsupportedSglang
from tests.integrations.test_sglang_parts import LAYERS, PAGE, PAGES, RANKS, pages_of, pool
from tests.store.process import process
from tests.waiting import until

LATENT = RankScheme((0, 1), (0, 1), (0, 1), True)


def device_pool(like: Any = torch.int16) -> Any:
    """[slot, head, element] for each layer."""
    made = [torch.zeros(PAGES * PAGE, 2, 8, dtype=like) for _ in range(2 * LAYERS)]
    return SimpleNamespace(k_buffer=made[:LAYERS], v_buffer=made[LAYERS:])


def latent_pool() -> Any:
    """[slot, 1, element] for each layer."""
    return SimpleNamespace(kv_buffer=[torch.zeros(PAGES * PAGE, 1, 8, dtype=torch.int16) for _ in range(LAYERS)])


def device_pages(device: Any, ranks: RankScheme = RANKS, admin: Any = None, **tiers: Any) -> DevicePages:
    settings = read_linker({"tiers": tiers or {"max_local_cpu_size": 0.01}, "admin": admin})
    return DevicePages(settings, ranks, device, PAGE, model="m", revision="r", num_kv_heads=2)


@contextmanager
def sharing(hicache: HostPages, pages: DevicePages) -> Iterator[None]:
    """Both use the store of HiCache; closes them."""
    own = pages.source.store
    try:
        assert hicache._source is not None
        pages.source.store = pages.records._store = hicache._source.store
        yield
    finally:
        pages.source.store = own
        pages.close()
        hicache.close()


@pytest.mark.parametrize("form", ["K and V", "a latent"])
def test_what_hicache_has_stored_is_loaded_layer_by_layer_and_the_other_way_round(form: str) -> None:
    latent = form == "a latent"
    shape = (LAYERS, PAGES * PAGE, 1, 8) if latent else (2, LAYERS, PAGES * PAGE, 2, 8)
    plain = torch.randint(1, 2**15, shape, dtype=torch.int16)
    device, ranks = (latent_pool(), LATENT) if latent else (device_pool(), RANKS)
    parts = [(plain, device.kv_buffer)] if latent else [(plain[0], device.k_buffer), (plain[1], device.v_buffer)]
    hicache, pages = pages_of(pool("layer_first", plain), ranks), device_pages(device, ranks)
    with sharing(hicache, pages):
        assert hicache.kv.records.set(["a", "b"], [3, 9]) == [True, True]
        assert pages.records.num_known(["a", "b", "c"]) == 2
        assert pages.begin(["a", "c"], lambda: [0, 1]) is None, "not all of them are there"
        load = pages.begin(["a", "b"], lambda: [5, 0])
        assert load is not None
        came: list[int] = []

        def ready(layer: int) -> None:
            came.append(layer)
            for held, buffers in parts:
                for page, source in ((5, 3), (0, 9)):
                    wanted = held[layer, source * PAGE : (source + 1) * PAGE]
                    assert (buffers[layer][page * PAGE : (page + 1) * PAGE] == wanted).all()
                assert int((buffers[layer] != 0).sum()) == 2 * wanted.numel(), "and no other page was touched"

        pages.batch([load]).run(ready)
        assert came == [*range(LAYERS)]
        assert pages.offer(["d"], pages.pages(torch.arange(5 * PAGE, 6 * PAGE)))() == [True]
        assert hicache.kv.records.get(["d"], [20]) == [True]
        of = plain.narrow(plain.ndim - 3, 20 * PAGE, PAGE), plain.narrow(plain.ndim - 3, 3 * PAGE, PAGE)
        assert (of[0] == of[1]).all()


def test_of_ranks_with_one_latent_the_first_one_stores_for_all(tmp_path: Path) -> None:
    """In stores of their own each one does."""
    second = RankScheme((1, 2), (0, 1), (0, 1), True)
    alone = device_pages(latent_pool(), second)
    try:
        assert alone.offer(["a"], lambda: [1])() == [True]
        assert alone.records.num_known(["a"]) == 1
    finally:
        alone.close()
    with process(tmp_path) as store:
        ranks = [
            device_pages(latent_pool(), one, store=f"ipc://{store.path}")
            for one in (second, second._replace(tp=(0, 2)))
        ]
        try:
            assert ranks[0].offer(["a"], lambda: [1])() == [True]
            assert ranks[0].records.num_known(["a"]) == 0
            assert ranks[1].offer(["a"], lambda: [1])() == [True]
            until(lambda: ranks[0].records.num_known(["a"]) == 1, "nobody answers a commit")
        finally:
            for one in ranks:
                one.close()


def test_other_pools_and_settings_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedSglang, match="no K and V for each layer, nor a latent"):
        device_pages(SimpleNamespace(state=[torch.zeros(1)]))
    wider = device_pool()
    wider.v_buffer[1] = torch.zeros(PAGES * PAGE, 2, 4, dtype=torch.int16)
    with pytest.raises(UnsupportedSglang, match="of one shape"):
        device_pages(wider)
    scaled = device_pool()
    scaled.k_scale_buffer = [torch.zeros(1)]
    with pytest.raises(UnsupportedSglang, match=r"scales beside the KV \(k_scale_buffer\).*--kv-cache-dtype"):
        device_pages(scaled)
    with pytest.raises(UnsupportedSglang, match="on meta and others"):
        device_pages(SimpleNamespace(kv_buffer=[torch.zeros(PAGES * PAGE, 1, 8, device="meta")]))
    with pytest.raises(ConfigError, match=r"linker_extra_config: interface_v1"):
        read_linker({"interface_v1": 1})
