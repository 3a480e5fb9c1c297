"""Two processes that share one GPU: KV of 2,048 tokens pushed layer by layer, and how much of it prefill hides.

The owner is a second process that holds a pool and does nothing. The writer submits a batch per layer, the way the
endpoint does, and a push has ended when the last batch is reported. "Prefill" is the matrix products and attention of
a 32-layer model of random weights, run in order with the writes into the pool; each layer is submitted behind
an event, for which the GPU waits, as a node does.
"""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import select
import statistics
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from pdlink.cuda import ops
from pdlink.cuda.buffers import DeviceBuffer
from pdlink.cuda.driver import CudaUnavailable, Device
from pdlink.errors import PdlinkError
from pdlink.kv.groups import KVGroups
from pdlink.kv.layout import KVLayout, paged_layout
from pdlink.kv.plan import bind, template
from pdlink.memory.borrowed import borrow
from pdlink.transport.base import BatchDone, BatchStatus
from pdlink.transport.mapped import MappedTransport
from pdlink.transport.mapped_cuda import MappedCudaTransport
from pdlink.transport.staged import StagedMapped, StagedTcp
from pdlink.transport.tcp import TcpTransport
from pdlink.transport.ucx import UcxTransport

from ..carried import Carried
from .figures import (
    BY_LAYER,
    MAPPED,
    OTHER_LAYOUT,
    SLOWER,
    STAGED_MAPPED,
    WHOLE,
    GpuFigure,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

    from pdlink.cuda.buffers import BorrowedDeviceBuffer
    from pdlink.transport.base import Transport

LAYERS, TOKENS, BLOCK_TOKENS, HEADS, HEAD_DIM = 32, 2048, 16, 8, 128
POOL_BLOCKS = 2 * TOKENS // BLOCK_TOKENS
HEAD_NBYTES = HEAD_DIM * 2
PAGE_NBYTES = BLOCK_TOKENS * HEADS * HEAD_NBYTES
PART_NBYTES = POOL_BLOCKS * PAGE_NBYTES
POOL_NBYTES = LAYERS * 2 * PART_NBYTES
PUSH_NBYTES = LAYERS * 2 * TOKENS * HEADS * HEAD_DIM * 2
PATIENCE_S = 60.0
ORDERS = "LPBTH", "LPBHT"
"""Of the writer, and of the two that the owner can be written to in."""
ROUNDS, PREFILLS = 15, 60
HIDDEN, QUERY_HEADS, INTERMEDIATE, WEIGHT_SETS = 4096, 32, 14336, 4

TRANSPORTS: dict[str, Callable[[], Transport]] = {
    "mapped-cuda": MappedCudaTransport,
    "staged-mapped": lambda: Carried(StagedMapped(MappedTransport())),
    "staged-tcp": lambda: Carried(StagedTcp(TcpTransport())),
    "ucx": lambda: UcxTransport("cuda_ipc,cuda_copy,tcp"),
}


EXPANDABLE = "mapped-cuda, expandable_segments"
"""The owner's pool is a tensor in torch's virtual memory: many chunks, each with a handle of its own."""
TRANSPORTS[EXPANDABLE] = MappedCudaTransport


def _layout(order: str) -> KVLayout:
    return paged_layout(
        dtype="bfloat16",
        itemsize=2,
        num_layers=LAYERS,
        num_blocks=POOL_BLOCKS,
        block_tokens=BLOCK_TOKENS,
        num_heads=HEADS,
        head_dim=HEAD_DIM,
        order=order,
    )


def _owned(transport_name: str, device: Device) -> DeviceBuffer | BorrowedDeviceBuffer:
    if transport_name != EXPANDABLE:
        return DeviceBuffer(device, POOL_NBYTES)
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    tensor = torch.empty(POOL_NBYTES, dtype=torch.uint8, device="cuda:0")
    pool = cast("BorrowedDeviceBuffer", borrow(tensor, "pool"))
    if pool.virtual_range() is None:
        raise CudaUnavailable("torch made no virtual memory of a pool under expandable_segments")
    return pool


def own_pool(transport_name: str, pipe: Connection) -> None:
    """The other process: a pool, an invitation, and digests of what has landed."""
    device = Device(0)
    device.open()
    try:
        pool = _owned(transport_name, device)
    except PdlinkError as error:
        pipe.send(f"at the owner's: {error}")
        return
    view = torch.as_tensor(pool, device="cuda:0")
    view.zero_()
    torch.cuda.synchronize()
    transport = TRANSPORTS[transport_name]()
    try:
        transport.open()
        transport.register(pool)
        transport.guard(KVGroups(tuple(_layout(order) for order in ORDERS)))
        pipe.send(transport.invite("writer"))
        transport.open_blocks("writer", [range(POOL_BLOCKS), range(POOL_BLOCKS)])
    except PdlinkError as error:
        pipe.send(f"at the owner's: {error}")
    while pipe.poll(PATIENCE_S):
        question = pipe.recv()
        if question is None:
            break
        pipe.send(hashlib.sha256(view.cpu().numpy().tobytes()).hexdigest())
    transport.close()
    pool.close()


class GpuLink:
    """The writer's side, and the owner's process."""

    def __init__(self, transport_name: str) -> None:
        """Raises PdlinkError if the transport cannot work here."""
        self.device = Device(0)
        self.device.open()
        self.pool = DeviceBuffer(self.device, POOL_NBYTES)
        self.view = torch.as_tensor(self.pool, device="cuda:0")
        self.view.view(torch.int16).random_()
        torch.cuda.synchronize()
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._owner = context.Process(target=own_pool, args=(transport_name, theirs), daemon=True)
        self._owner.start()
        self.transport = TRANSPORTS[transport_name]()
        random = np.random.default_rng(0)
        self.src, self.dst = (
            random.permutation(POOL_BLOCKS)[: TOKENS // BLOCK_TOKENS].astype(np.int64) for _ in range(2)
        )
        layouts = [_layout(order) for order in ORDERS]
        templates = [template(layouts[0], there, group) for group, there in enumerate(layouts)]
        self._plans = [bind(one, self.src, self.dst, 0, TOKENS) for one in templates]
        """Between equal layouts, and to one with heads before tokens."""
        self._events = [torch.cuda.Event(blocking=True) for _ in range(LAYERS)]  # type: ignore[no-untyped-call]
        self.open_batches: set[int] = set()
        try:
            self.transport.open()
            self.transport.register(self.pool)
            if not self._pipe.poll(PATIENCE_S):
                raise TimeoutError("the owner does not answer")
            try:
                invitation = self._pipe.recv()
            except EOFError:
                raise ConnectionError("the owner's process has ended; its traceback is above") from None
            if isinstance(invitation, str):
                raise ConnectionError(invitation)
            self.transport.connect("owner", invitation)
        except BaseException:
            self.close()
            raise

    def submit(self, first: int, num_layers: int = 1, *, other_layout: bool = False) -> None:
        """These layers, in one batch."""
        layers, plan = range(first, first + num_layers), self._plans[other_layout]
        self.open_batches.add(self.transport.submit_plan("owner", plan, layers, PATIENCE_S))

    def submit_behind(self, layer: int) -> None:
        """This layer, behind what is launched on the current stream."""
        event, stream = self._events[layer], torch.cuda.current_stream()
        event.record(stream)
        after = [(int(event.cuda_event), int(stream.cuda_stream))]
        layers = range(layer, layer + 1)
        self.open_batches.add(self.transport.submit_plan("owner", self._plans[0], layers, PATIENCE_S, after))

    def wait(self) -> None:
        """Until every batch is reported. Raises RuntimeError for one that failed."""
        deadline = time.monotonic() + PATIENCE_S
        while self.open_batches:
            if not select.select([self.transport.fileno()], [], [], deadline - time.monotonic())[0]:
                raise TimeoutError("batches are missing")
            for one in self.transport.poll():
                if not isinstance(one, BatchDone) or one.status is not BatchStatus.OK:
                    raise RuntimeError(f"the push failed: {one}")
                self.open_batches.discard(one.ticket)

    def landed(self) -> bool:
        """Whether the owner holds exactly what was pushed."""
        expected = torch.zeros_like(self.view).view(LAYERS * 2, POOL_BLOCKS, PAGE_NBYTES)
        source = self.view.view(LAYERS * 2, POOL_BLOCKS, PAGE_NBYTES)
        expected[:, torch.from_numpy(self.dst).cuda()] = source[:, torch.from_numpy(self.src).cuda()]
        self._pipe.send("digest")
        if not self._pipe.poll(PATIENCE_S):
            raise TimeoutError("the owner does not answer")
        return bool(self._pipe.recv() == hashlib.sha256(expected.cpu().numpy().tobytes()).hexdigest())

    def close(self) -> None:
        self.transport.close()
        with contextlib.suppress(BrokenPipeError):  # it has failed, and said so
            self._pipe.send(None)
        self._owner.join(PATIENCE_S)
        self._owner.kill()
        self.pool.close()


def push_s(link: GpuLink, *, other_layout: bool = False) -> float:
    """Seconds from the first submission to the last report; the median of the rounds."""

    def push() -> None:
        for layer in range(LAYERS):
            link.submit(layer, other_layout=other_layout)
        link.wait()

    return _median_s(push)


def _median_s(work: Callable[[], object]) -> float:
    """Of the rounds, without the first two."""
    times = []
    for _ in range(ROUNDS + 2):
        start = time.monotonic()
        work()
        times.append(time.monotonic() - start)
    return statistics.median(times[2:])


def _copies_s(link: GpuLink) -> float:
    """As many bytes by torch's device-to-device copies, one for each layer."""
    source = link.view.view(LAYERS, -1)[:, : PUSH_NBYTES // LAYERS]
    there = torch.empty(source.shape, dtype=source.dtype, device="cuda")

    def copy() -> None:
        for layer in range(LAYERS):
            there[layer].copy_(source[layer])
        torch.cuda.synchronize()

    return _median_s(copy)


def _copy_to_host_s(link: GpuLink) -> float:
    """As many bytes in one copy to pinned memory."""
    there = torch.empty(PUSH_NBYTES, dtype=torch.uint8, pin_memory=True)

    def copy() -> None:
        there.copy_(link.view[:PUSH_NBYTES], non_blocking=True)
        torch.cuda.synchronize()

    return _median_s(copy)


class ForwardPass:
    """One forward pass over TOKENS tokens of a model as large as an 8-billion-parameter one, weights repeated."""

    def __init__(self, link: GpuLink) -> None:
        def weight(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16).mul_(rows**-0.5)

        kv = HEADS * HEAD_DIM
        shapes = {"q": HIDDEN, "k": kv, "v": kv, "o": HIDDEN, "gate": INTERMEDIATE, "up": INTERMEDIATE}
        self._weights = [
            {
                **{name: weight(HIDDEN, columns) for name, columns in shapes.items()},
                "down": weight(INTERMEDIATE, HIDDEN),
            }
            for _ in range(WEIGHT_SETS)
        ]
        pages = link.view.view(torch.bfloat16).view(LAYERS * 2, POOL_BLOCKS, BLOCK_TOKENS, HEADS, HEAD_DIM)
        self._planes = list(pages)
        slots = torch.from_numpy(link.src)[:, None] * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS)
        self._slots = slots.flatten().cuda()
        self._input = torch.randn(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16)

    def run_s(self, written: Callable[[int], Any] | None, finish: Callable[[], Any]) -> tuple[float, float]:
        """Seconds from the first launch to the end of everything, and how many of them come after the prefill."""
        torch.cuda.synchronize()
        start = time.monotonic()
        x = self._input
        for layer in range(LAYERS):
            w = self._weights[layer % WEIGHT_SETS]
            normed = rms_norm(x, (HIDDEN,))
            q = (normed @ w["q"]).view(1, TOKENS, QUERY_HEADS, HEAD_DIM).transpose(1, 2)
            kv = torch.stack([normed @ w["k"], normed @ w["v"]]).view(2, TOKENS, HEADS, HEAD_DIM)
            rows = [part[:, None] for part in kv]
            ops.reshape(rows, self._planes[2 * layer : 2 * layer + 2], None, self._slots)
            if written is not None:
                written(layer)
            k, v = (part[None].transpose(1, 2) for part in kv)
            seen = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = x + seen.transpose(1, 2).reshape(TOKENS, HIDDEN) @ w["o"]
            normed = rms_norm(x, (HIDDEN,))
            x = x + (silu(normed @ w["gate"]) * (normed @ w["up"])) @ w["down"]
        computed = torch.cuda.Event(blocking=False)  # type: ignore[no-untyped-call]
        computed.record()
        computed.synchronize()
        computed_s = time.monotonic()
        finish()
        end_s = time.monotonic()
        return end_s - start, end_s - computed_s


def run_mapped() -> list[GpuFigure]:
    """The lane between GPUs beside copies of the same bytes, in one process."""
    figures = run("mapped-cuda", MAPPED)
    if figures[0].seconds is None:
        return figures
    link = GpuLink("mapped-cuda")
    try:
        copies_s, by_layer_s = _copies_s(link), push_s(link)

        def whole() -> None:
            link.submit(0, LAYERS)
            link.wait()

        whole_s, other_s = _median_s(whole), push_s(link, other_layout=True)
    finally:
        link.close()
    copies, speed = "32 device-to-device copies", PUSH_NBYTES / 1e9
    return [
        *figures,
        GpuFigure(copies, copies_s, speed / copies_s),
        GpuFigure(WHOLE, whole_s, speed / whole_s, copies, copies_s / whole_s),
        GpuFigure(BY_LAYER, by_layer_s, speed / by_layer_s, copies, copies_s / by_layer_s),
        GpuFigure(OTHER_LAYOUT, other_s, speed / other_s, "equal layouts", by_layer_s / other_s),
    ]


def run(transport_name: str, title: str) -> list[GpuFigure]:
    """A push over one transport, checked at the owner's. A transport that cannot work here says why."""
    try:
        link = GpuLink(transport_name)
    except (PdlinkError, ConnectionError) as error:
        return [GpuFigure(title, None, note=f"{type(error).__name__}: {error}")]
    try:
        seconds = push_s(link)
        if not link.landed():
            raise RuntimeError(f"{transport_name}: the owner holds other bytes than were pushed")
        figure = GpuFigure(title, seconds, PUSH_NBYTES / seconds / 1e9, note=f"lane {link.transport.lane('owner')}")
        if title == STAGED_MAPPED:
            figure = replace(figure, against="one copy to the host", ratio=_copy_to_host_s(link) / seconds)
        return [figure]
    finally:
        link.close()


def run_exposed() -> list[GpuFigure]:
    """How much longer a prefill takes when it is pushed meanwhile, as a share of the push alone."""
    link = GpuLink("mapped-cuda")
    try:
        transfer_s = push_s(link)
        prefill = ForwardPass(link)
        with_s, without_s, tails = [], [], []
        for _ in range(2):
            prefill.run_s(link.submit_behind, link.wait)
        for turn in range(PREFILLS):
            for pushed in (
                turn % 2 == 0,
                turn % 2 == 1,
            ):  # in turns: the second one starts with the GPU clocks of the first
                if pushed:
                    seconds, tail_s = prefill.run_s(link.submit_behind, link.wait)
                    with_s.append(seconds)
                    tails.append(tail_s)
                else:
                    without_s.append(prefill.run_s(None, lambda: None)[0])
    finally:
        link.close()
    differences = np.subtract(with_s, without_s)
    seconds = float(np.median(differences))
    spread = np.percentile(differences, (25, 75)) * 1e3
    prefill_s = statistics.median(without_s)
    note = (
        f"{transfer_s * 1e3:.2f} ms of transfer, prefill {prefill_s * 1e3:.1f} ms, "
        f"difference {spread[0]:.3f} to {spread[1]:.3f} ms (quartiles)"
    )
    tail_s = statistics.median(tails)
    return [
        GpuFigure("exposed transfer time", seconds, ratio=seconds / transfer_s, note=note),
        GpuFigure(SLOWER, seconds, against="the prefill", ratio=seconds / prefill_s, note=note),
        GpuFigure("last report after the last kernel", tail_s, ratio=tail_s / transfer_s, against="the transfer"),
    ]
