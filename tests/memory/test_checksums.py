"""The same KV has the same checksum in every layout, and other KV has another."""

from __future__ import annotations

import numpy as np
import pytest

from pdlink import _copy
from pdlink.kv.groups import KVGroups
from pdlink.kv.layout import KVLayout, paged_layout
from pdlink.kv.plan import bind, template
from pdlink.memory import checksums
from pdlink.memory.buffers import Buffer
from pdlink.memory.checksums import Checksums


def layout(order: str, block_tokens: int) -> KVLayout:
    return paged_layout(
        dtype="float32",
        itemsize=4,
        num_layers=3,
        num_blocks=12,
        block_tokens=block_tokens,
        num_heads=2,
        head_dim=4,
        order=order,
    )


@pytest.mark.parametrize(("start", "end"), [(0, 21), (5, 21), (8, 16), (20, 21)])
@pytest.mark.parametrize("order", ["LPBTH", "BLPHT", "HTBPL", "TPLHB"])
def test_equal_kv_in_different_layouts_has_equal_checksums(order: str, start: int, end: int) -> None:
    src, dst = layout("LPBTH", 4), layout(order, 6)
    with Buffer(src.extent(0)) as from_, Buffer(dst.extent(0)) as to:
        from_.array[:] = np.random.default_rng(3).integers(0, 256, from_.nbytes, np.uint8)
        src_blocks, dst_blocks = [3, 1, 7, 11, 0, 5], [9, 2, 4, 6]
        plan = bind(template(src, dst), src_blocks, dst_blocks, 0, 21)
        for layer in range(3):
            for run_list in plan.run_lists(layer):
                runs = run_list.runs + np.array([run_list.src_base, run_list.dst_base, 0])
                _copy.memcpy_runs(to.array, from_.array, runs)
        ours, theirs = Checksums(KVGroups((src,)), [from_]), Checksums(KVGroups((dst,)), [to])
        for layer in range(3):
            value = ours.of(layer, src_blocks[start // 4 :], start, end)
            assert theirs.of(layer, dst_blocks[start // 6 :], start, end) == value
        assert len({ours.of(layer, src_blocks, 0, 21) for layer in range(3)}) == 3


def test_one_changed_byte_changes_the_checksum_of_its_layer_only() -> None:
    kv = layout("LPBTH", 4)
    with Buffer(kv.extent(0)) as buffer:
        sums = Checksums(KVGroups((kv,)), [buffer])
        before = [sums.of(layer, [2, 3], 0, 8) for layer in range(3)]
        place = kv.layers[1]
        buffer.array[place.parts[1].offset + 3 * place.block_stride + 2 * place.token_stride + 5] ^= 1
        after = [sums.of(layer, [2, 3], 0, 8) for layer in range(3)]
        assert [old == new for old, new in zip(before, after, strict=True)] == [True, False, True]


@pytest.mark.parametrize("start", [0, 3, 8])
def test_slices_in_which_a_checksum_is_computed_do_not_show(start: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kv = layout("LPBTH", 4)
    with Buffer(kv.extent(0)) as buffer:
        buffer.array[:] = np.random.default_rng(3).integers(0, 256, buffer.nbytes, np.uint8)
        sums, blocks = Checksums(KVGroups((kv,)), [buffer]), [3, 1, 7, 11, 0, 5]
        whole = sums.of(1, blocks, start, 22)
        monkeypatch.setattr(checksums, "_SLICE_NBYTES", 600)  # two blocks
        assert sums.of(1, blocks, start, 22) == whole
        monkeypatch.setattr(checksums, "_SLICE_NBYTES", 1)
        assert sums.of(1, blocks, start, 22) == whole
