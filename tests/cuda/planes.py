"""Random planes of random strides, and the slow reshape that the kernels are compared with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

INTEGER_OF = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Layout:
    """How planes lie in one storage; `order` names plane, block, token, head and element, outermost first."""

    order: tuple[int, ...]
    padding: tuple[int, ...]
    """Elements left free after each axis of `order`; the innermost has none."""
    start: int
    shuffled: bool
    """The planes are not evenly spaced, so that a kernel needs a table."""
    num_blocks: int
    block_tokens: int

    @property
    def num_slots(self) -> int:
        return self.num_blocks * self.block_tokens

    def make(
        self, num_planes: int, heads: int, head_dim: int, dtype: torch.dtype, device: str = "cpu"
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The storage, of random bytes, and its planes."""
        sizes = (num_planes + self.shuffled, self.num_blocks, self.block_tokens, heads, head_dim)
        strides = [0] * 5
        step = 1
        for axis, padding in zip(reversed(self.order), reversed(self.padding), strict=True):
            strides[axis] = step
            step = step * sizes[axis] + padding
        nbytes = (step + self.start) * dtype.itemsize
        storage = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=device)
        view = torch.as_strided(storage.view(INTEGER_OF[dtype.itemsize]), sizes, strides, self.start)
        planes = list(view.view(dtype).unbind(0))
        return storage, planes[:1] + planes[2:] if self.shuffled else planes


@st.composite
def layouts(draw: st.DrawFn, fine: bool) -> Layout:
    """fine: paddings and starts of any number of elements, else of 16 of them, so that wide accesses can happen."""
    grain = 1 if fine else 16
    order = (*draw(st.permutations(range(4))), 4)
    paddings = tuple(grain * draw(st.sampled_from([0, 0, 1, 3])) for _ in range(4))
    return Layout(
        order=order,
        padding=(*paddings, 0),
        start=grain * draw(st.integers(0, 3)),
        shuffled=draw(st.booleans()),
        num_blocks=draw(st.integers(1, 5)),
        block_tokens=draw(st.sampled_from([1, 2, 3, 16])),
    )


def slow_reshape(
    src: list[torch.Tensor], dst: list[torch.Tensor], src_slots: list[int], dst_slots: list[int]
) -> None:
    """Token by token, in plain torch."""
    for a, b in zip(src, dst, strict=True):
        for i, j in zip(src_slots, dst_slots, strict=True):
            if i != -1 and j != -1:
                b[j // b.shape[1], j % b.shape[1]] = a[i // a.shape[1], i % a.shape[1]]
