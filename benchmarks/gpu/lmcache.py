"""The push of `links.py` as LMCache does it: its kernel gathers a layer of pages, a copy takes it across, its kernel
scatters it into the peer's pages.

What is called is LMCache's own: `single_layer_kv_transfer` of its compiled extension (`lmcache.c_ops`, from 0.5.4 on
`lmcache.cuda_ops`), as its layerwise connector calls it (0.5.3, v1/gpu_connector/gpu_connectors.py). Only that module
is loaded, not the package, whose many dependencies have no part in it. Everything around it is as favourable as two
processes allow: both staging buffers hold the whole push, the copy is a plain device-to-device one into memory opened
by CUDA IPC, and the peer hears of it once, not once per layer.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import multiprocessing
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pdlink.cuda.buffers import DeviceBuffer, PeerBuffer
from pdlink.cuda.driver import Device

from .figures import Figure
from .links import (
    BLOCK_TOKENS,
    HEAD_DIM,
    HEADS,
    LAYERS,
    PATIENCE_S,
    POOL_BLOCKS,
    POOL_NBYTES,
    PUSH_NBYTES,
    ROUNDS,
    TOKENS,
)
from .plan import LMCACHE

if TYPE_CHECKING:
    from multiprocessing.connection import Connection


class NotHere(Exception):
    """LMCache's kernels cannot be had; the message says why."""


class Kernels:
    """LMCache's extension module."""

    def __init__(self) -> None:
        """Raises NotHere."""
        spec = importlib.util.find_spec("lmcache")  # does not import it
        if spec is None or not spec.submodule_search_locations:
            raise NotHere("LMCache is not installed, nor carried as a wheel")
        folder = Path(spec.submodule_search_locations[0])
        modules = [_extension(folder, name) for name in ("lmcache_native", "c_ops", "cuda_ops")]
        found = [module for module in modules if module is not None]
        by_name = {name: getattr(module, name) for module in found for name in dir(module)}
        wanted = ("single_layer_kv_transfer", "TransferDirection", "EngineKVFormat")
        missing = [name for name in wanted if name not in by_name]
        if missing:
            raise NotHere(f"LMCache in {folder} has no {', '.join(missing)} for this Python")
        self._transfer, directions, formats = (by_name[name] for name in wanted)
        self._to_pages, self._from_pages = directions.H2D, directions.D2H
        self._format = formats.NL_X_TWO_NB_BS_NH_HS

    def gather(self, row: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> None:
        """row: [K/V, token, head x element]; pages: [K/V, block, token, head, element]."""
        self._transfer(row, pages, slots, self._from_pages, self._format, False)

    def scatter(self, row: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> None:
        self._transfer(row, pages, slots, self._to_pages, self._format, False)


def _extension(folder: Path, name: str) -> Any:
    """A compiled module of the package, without the package; None if this Python has none."""
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = folder / f"{name}{suffix}"
        if path.exists():
            spec = importlib.util.spec_from_file_location(f"lmcache.{name}", path)
            assert spec is not None
            assert spec.loader is not None
            try:
                module = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(module)
            except ImportError as error:
                raise NotHere(f"{path.name} does not fit torch {torch.__version__}: {error}") from None
            return module
    return None


class Pages:
    """One side: a pool of pages, the slots of the push in it, and a staging buffer as large as the push."""

    def __init__(self, seed: int) -> None:
        self.device = Device(0)
        self.device.open()
        self.pool = DeviceBuffer(self.device, POOL_NBYTES)
        self.staging = DeviceBuffer(self.device, PUSH_NBYTES)
        self.bytes = torch.as_tensor(self.pool, device="cuda:0")
        shape = (LAYERS, 2, POOL_BLOCKS, BLOCK_TOKENS, HEADS, HEAD_DIM)
        self.layers = list(self.bytes.view(torch.bfloat16).view(shape))
        self.rows = rows_of(self.staging)
        blocks = np.random.default_rng(seed).permutation(POOL_BLOCKS)[: TOKENS // BLOCK_TOKENS]
        slots = torch.from_numpy(blocks)[:, None] * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS)
        self.slots = slots.flatten().cuda()

    def digest(self) -> str:
        """Of the tokens of the push, in their order."""
        torch.cuda.synchronize()
        tokens = [part.flatten(0, 1)[self.slots] for layer in self.layers for part in layer]
        return hashlib.sha256(torch.stack(tokens).view(torch.uint8).cpu().numpy().tobytes()).hexdigest()

    def close(self) -> None:
        self.staging.close()
        self.pool.close()


def rows_of(buffer: DeviceBuffer | PeerBuffer) -> list[torch.Tensor]:
    """Per layer: [K/V, token, head x element]."""
    view = torch.as_tensor(buffer, device="cuda:0").view(torch.bfloat16)
    return list(view.view(LAYERS, 2, TOKENS, HEADS * HEAD_DIM))


def own_pages(pipe: Connection) -> None:
    """The other process: scatters what has arrived in its staging buffer when it is told."""
    kernels, pages = Kernels(), Pages(seed=1)
    pages.bytes.zero_()
    torch.cuda.synchronize()
    pipe.send(pages.staging.export())
    while pipe.poll(PATIENCE_S):
        question = pipe.recv()
        if question is None:
            break
        if question == "scatter":
            for row, layer in zip(pages.rows, pages.layers, strict=True):
                kernels.scatter(row, layer, pages.slots)
            torch.cuda.synchronize()
            pipe.send("scattered")
        else:
            pipe.send(pages.digest())
    pages.close()


def run() -> list[Figure]:
    try:
        kernels = Kernels()
    except NotHere as error:
        return [Figure(LMCACHE, None, note=f"not present: {error}")]
    pages = Pages(seed=0)
    pages.bytes.view(torch.int16).random_(0, 0x3F80)  # bfloat16 between 0 and 1: no NaN, whatever a kernel does
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    owner = context.Process(target=own_pages, args=(theirs,), daemon=True)
    owner.start()
    theirs.close()
    peer = PeerBuffer(pages.device, _ask(pipe, None))
    across = rows_of(peer)
    copied, scattered = [], []
    for _ in range(ROUNDS + 2):
        start = time.monotonic()
        for layer, here, there in zip(pages.layers, pages.rows, across, strict=True):
            kernels.gather(here, layer, pages.slots)
            there.copy_(here, non_blocking=True)
        torch.cuda.synchronize()
        copied.append(time.monotonic() - start)
        _ask(pipe, "scatter")
        scattered.append(time.monotonic() - start)
    if _ask(pipe, "digest") != pages.digest():
        raise RuntimeError("LMCache: the owner holds other bytes than were pushed")
    pipe.send(None)
    owner.join(PATIENCE_S)
    owner.kill()
    peer.close()
    pages.close()
    copy_s, whole_s = statistics.median(copied[2:]), statistics.median(scattered[2:])
    return [
        Figure(LMCACHE, copy_s, PUSH_NBYTES / copy_s / 1e9, note="into the peer's staging buffer, not its pages"),
        Figure("… and its kernel at the peer's", whole_s, PUSH_NBYTES / whole_s / 1e9, note="into its pages"),
    ]


def _ask(pipe: Connection, question: str | None) -> Any:
    if question is not None:
        pipe.send(question)
    if not pipe.poll(PATIENCE_S):
        raise TimeoutError("the owner does not answer")
    return pipe.recv()
