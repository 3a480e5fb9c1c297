"""What /metrics says of a store, from what a store and its engine do."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from pdlink import paged_layout
from pdlink.events import listen
from pdlink.observe.metrics import WorkerMetrics
from pdlink.store.cache import Cache

if TYPE_CHECKING:
    from pathlib import Path


def values(metrics: WorkerMetrics, name: str) -> dict[str, float]:
    """By the value of the one label."""
    text = metrics.exposition()[0].decode()
    found = re.findall(rf'^pdlink_{name}(?:{{\w+="(\w+)"}})? (\S+)$', text, re.MULTILINE)
    return {label: float(value) for label, value in found if float(value)}


def test_hits_by_place_bytes_and_seconds_of_a_store(tmp_path: Path) -> None:
    layout = paged_layout(
        num_blocks=16, block_tokens=4, num_layers=1, num_heads=1, head_dim=8, dtype="float32", itemsize=4
    )
    metrics = WorkerMetrics(store=True)
    stop = listen(metrics.counting)
    prompt, blocks = list(range(24)), list(range(6))
    try:
        with Cache(layout, nbytes=1 << 20, disk=tmp_path, disk_nbytes=1 << 20, chunk_tokens=8) as cache:
            assert cache.lookup(prompt).num_tokens == 0
            assert cache.store(prompt, blocks) == 24
            assert cache.flush()
            cache.clear(prompt[:8], places=["memory"])
            cache.clear(prompt[:8], places=["disk"])
            cache.store(prompt, blocks)
            assert cache.flush()
            cache.clear(places=["memory"])
            assert cache.retrieve(prompt, blocks) == 24
            assert cache.lookup(prompt).num_tokens == 24
    finally:
        stop()
    chunks = values(metrics, "store_chunks_total")
    assert chunks == {"missed": 3, "disk": 3, "memory": 3}
    records, nbytes = values(metrics, "store_records_total"), values(metrics, "store_record_bytes_total")
    assert records == {"stored": 3 + 1 + 3, "removed": 1 + 3}
    size = nbytes["stored"] / records["stored"]
    assert nbytes["removed"] == size * records["removed"]
    assert values(metrics, "store_lookup_seconds_count") == {"": 3}
    payload_nbytes = 2 * 24 * 8 * 4
    assert values(metrics, "store_copied_bytes_total") == {
        "store": payload_nbytes * 4 / 3,
        "load": payload_nbytes,
    }
    assert values(metrics, "store_copy_seconds_count") == {"store": 2, "load": 1}
    text = metrics.exposition()[0].decode()
    assert 'pdlink_store_lookup_seconds_bucket{le="1e-05"}' in text
    assert 'pdlink_tier_bytes_total{call="get",tier="disk"}' in text
