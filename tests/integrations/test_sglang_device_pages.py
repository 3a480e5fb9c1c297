"""SGLang's KV pool in a store without a pool on the host in between, without SGLang."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pdlink.errors import ConfigError
from pdlink.integrations.sglang_parts.device_pages import DevicePages
from pdlink.integrations.sglang_parts.settings import read_linker
from pdlink.integrations.sglang_parts.versions import UnsupportedSglang
from tests.integrations.test_sglang_parts import LAYERS, PAGE, PAGES, RANKS, pages_of, pool


def device_pool(like: Any = torch.int16) -> Any:
    """[slot, head, element] for each layer."""
    made = [torch.zeros(PAGES * PAGE, 2, 8, dtype=like) for _ in range(2 * LAYERS)]
    return SimpleNamespace(k_buffer=made[:LAYERS], v_buffer=made[LAYERS:])


def device_pages(device: Any) -> DevicePages:
    settings = read_linker({"tiers": {"max_local_cpu_size": 0.01}})
    return DevicePages(settings, RANKS, device, PAGE, model="m", revision="r", num_kv_heads=2)


def test_what_hicache_has_stored_is_loaded_layer_by_layer_and_the_other_way_round() -> None:
    plain = torch.randint(1, 2**15, (2, LAYERS, PAGES * PAGE, 2, 8), dtype=torch.int16)
    device = device_pool()
    hicache, pages = pages_of(pool("layer_first", plain)), device_pages(device)
    own = pages.source.store
    try:
        assert hicache._source is not None
        pages.source.store = pages.records._store = hicache._source.store
        assert hicache.kv.records.set(["a", "b"], [3, 9]) == [True, True]
        assert pages.records.num_known(["a", "b", "c"]) == 2
        assert pages.begin(["a", "c"], [0, 1]) is None, "not all of them are there"
        load = pages.begin(["a", "b"], [5, 0])
        assert load is not None
        assert load.wait()
        for layer in range(LAYERS):
            assert not device.k_buffer[layer].any()
            load.layer(layer)
            for part, buffer in enumerate((device.k_buffer[layer], device.v_buffer[layer])):
                for page, source in ((5, 3), (0, 9)):
                    wanted = plain[part, layer, source * PAGE : (source + 1) * PAGE]
                    assert (buffer[page * PAGE : (page + 1) * PAGE] == wanted).all()
                assert int((buffer != 0).sum()) == 2 * PAGE * 2 * 8, "and no other page was touched"
        assert load.close()
        assert pages.records.set(["d"], [5]) == [True]
        assert hicache.kv.records.get(["d"], [20]) == [True]
        assert (plain[:, :, 20 * PAGE : 21 * PAGE] == plain[:, :, 3 * PAGE : 4 * PAGE]).all()
    finally:
        pages.source.store = own
        pages.close()
        hicache.close()


def test_other_pools_and_settings_are_refused_by_name() -> None:
    latent = SimpleNamespace(kv_buffer=[torch.zeros(PAGES * PAGE, 1, 8)])
    with pytest.raises(UnsupportedSglang, match="no K and V for each layer"):
        device_pages(latent)
    wider = device_pool()
    wider.v_buffer[1] = torch.zeros(PAGES * PAGE, 2, 4, dtype=torch.int16)
    with pytest.raises(UnsupportedSglang, match="of one shape"):
        device_pages(wider)
    with pytest.raises(ConfigError, match=r"linker_extra_config: interface_v1"):
        read_linker({"interface_v1": 1})
