"""Memory of every kind behind a node: its own, or borrowed from numpy, torch, DLPack and the buffer protocol."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import pdlink
from pdlink.errors import InvalidRequest, TransportUnavailable
from pdlink.memory.borrowed import borrow
from pdlink.memory.buffers import Buffer
from pdlink.transport.base import Transport
from pdlink.transport.mapped import MappedTransport
from pdlink.transport.tcp import TcpTransport
from tests.waiting import WAIT_S

from .conftest import DST, SRC, TOKENS, assert_same, compute, fill, groups


class OnlyDlpack:
    """A tensor of another framework."""

    def __init__(self, nbytes: int) -> None:
        self.array = np.zeros((2, nbytes // 2), np.uint8)

    def __dlpack__(self) -> Any:
        return self.array.__dlpack__()


KINDS: dict[str, Callable[[int], Any]] = {
    "shared": lambda nbytes: None,
    "numpy": lambda nbytes: np.zeros(nbytes // 4, np.float32),
    "torch": lambda nbytes: torch.zeros(2, nbytes // 4, dtype=torch.bfloat16),
    "bytearray": bytearray,
    "mmap": lambda nbytes: mmap.mmap(-1, nbytes),
    "dlpack": OnlyDlpack,
    "buffer": Buffer,
}


def node(name: str, block_tokens: int, kind: str, transports: list[Transport]) -> pdlink.Node:
    kv = groups(block_tokens)
    memory = KINDS[kind](kv.extent(0))
    return pdlink.Node(name, kv, None if memory is None else [memory], transports=transports)


def lane_of_transfer(source: str, destination: str, *kinds: Callable[[], Transport]) -> str:
    """Move KV between nodes of such memory; how it travelled."""
    with (
        node("prefill", 4, source, [kind() for kind in kinds]) as prefill,
        node("decode", 8, destination, [kind() for kind in kinds]) as decode,
    ):
        fill(prefill)
        with prefill.send("t", [SRC], TOKENS) as outgoing:
            compute(outgoing)
        incoming = decode.receive("t", prefill.address, [DST], range(TOKENS))
        assert incoming.wait(WAIT_S) == 42
        assert_same(prefill, decode)
        return prefill.report().peers[0]["lane"]


def mapped() -> Transport:
    return MappedTransport(within_process=True)


@pytest.mark.parametrize("kind", KINDS)
def test_kv_comes_from_and_goes_into_memory_of_every_kind(kind: str) -> None:
    assert lane_of_transfer(kind, kind, TcpTransport) == "tcp"


@pytest.mark.parametrize(
    ("source", "destination", "lane"),
    [("shared", "shared", "mapped"), ("numpy", "shared", "mapped"), ("shared", "numpy", "tcp")],
)
def test_borrowed_memory_is_sent_over_mapped_memory_and_received_over_tcp(
    source: str, destination: str, lane: str
) -> None:
    assert lane_of_transfer(source, destination, mapped, TcpTransport) == lane


def test_node_over_mapped_memory_alone_cannot_receive_into_borrowed_memory() -> None:
    with (
        node("decode", 8, "numpy", [mapped()]) as decode,
        pytest.raises(TransportUnavailable, match=r"region 0 is borrowed memory.*receive over tcp or ucx"),
    ):
        decode.receive("t", "tcp://127.0.0.1:1", [DST], range(TOKENS))


def test_borrowed_buffer_is_the_memory_and_no_copy() -> None:
    for make in (KINDS["numpy"], KINDS["torch"], KINDS["bytearray"], KINDS["mmap"], KINDS["dlpack"]):
        source = make(4096)
        buffer = borrow(source, "it")
        assert (buffer.kind, buffer.nbytes, buffer.borrowed) == ("host", 4096, True)
        buffer.array[7] = 99  # type: ignore[attr-defined]
        seen = getattr(source, "array", source)
        flat = seen.view(torch.uint8).flatten() if isinstance(seen, torch.Tensor) else memoryview(seen).cast("B")
        assert flat[7] == 99
        del flat, seen
        buffer.close()


def test_borrowed_memory_lives_as_long_as_its_buffer() -> None:
    buffer = borrow(np.full(4096, 3, np.uint8), "it")
    np.zeros(4096, np.uint8)  # would take the place of one that was freed
    assert (buffer.array == 3).all()  # type: ignore[attr-defined]


READ_ONLY = np.zeros(8, np.uint8)
READ_ONLY.flags.writeable = False


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (np.zeros((8, 8), np.uint8)[:, ::2], "got memory with gaps"),
        (torch.zeros(8, 8)[:, ::2], "got memory with gaps"),
        (memoryview(bytearray(8))[::2], "got memory with gaps"),
        (READ_ONLY, "got read-only memory"),
        (b"12345678", "got read-only memory"),
        (np.zeros(0, np.uint8), "got 0 bytes"),
        ([1, 2, 3], "got list; it must be a torch tensor"),
    ],
)
def test_memory_that_cannot_be_used_is_refused(source: object, words: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"buffers\[2\]: {words}"):
        borrow(source, "buffers[2]")


def test_tensor_of_another_device_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="got a tensor on meta"):
        borrow(torch.zeros(8, device="meta"), "it")


def test_host_and_device_memory_do_not_make_one_cache() -> None:
    from pdlink.config import TransportConfig
    from pdlink.transport.choice import open_transports

    class OnDevice(Buffer):
        kind = "cuda"  # type: ignore[assignment]

    with (
        Buffer(1) as host,
        OnDevice(1) as device,
        pytest.raises(TransportUnavailable, match="got host memory and device memory"),
    ):
        open_transports(TransportConfig(), [host, device])
