"""The ends of links of one SGLang rank: a node for each kind of peer, opened when the first such peer asks. Knows no
object of SGLang's.

Ranks of equal servers exchange all that they have. Where prefill and decode have other numbers of ranks, a pair of
them shares some KV heads, or some layers; what a model keeps beside its KV is in pools of its own. Each of these is a
layout over the same memory, and a node with the same layout is on the other side.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from pdlink.integrations.loaded_weights import HERE
from pdlink.integrations.sglang_parts.versions import UnsupportedSglang
from pdlink.kv.groups import KVGroups
from pdlink.kv.layout import KVLayout, LayerLayout, Part
from pdlink.node.port import EnginePort

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdlink.memory.buffers import AnyBuffer
    from pdlink.node.node import Node


class Cut(NamedTuple):
    """What of a rank's KV is meant, in numbers of the model."""

    heads: tuple[int, int] | None
    """First KV head and how many; None: all that a rank has."""
    layers: tuple[int, ...]

    @property
    def name(self) -> str:
        """A part of a node's name."""
        heads = f"h{self.heads[0]}-{sum(self.heads)}" if self.heads is not None else "h"
        return f"{heads}.l{self.layers[0]}-{self.layers[-1]}"


@dataclass(frozen=True)
class NodeEnd:
    """A node, and how a rank's layers are counted there."""

    port: EnginePort
    layers: tuple[tuple[int, ...], ...]
    """Of each layer as the rank counts them, the node's."""
    unit: int
    """Tokens of a page, as the node counts them."""
    num_groups: int


class RankShare(NamedTuple):
    """Which part of the model's KV a process has."""

    tp: tuple[int, int]
    """Rank and number of ranks that share the heads."""
    num_heads: int
    """KV heads of the model; 0 where all ranks have the same (a latent)."""

    @property
    def heads(self) -> range:
        """Ranks beyond the number of heads share them."""
        rank, size = self.tp
        return range(first := rank * self.num_heads // size, first + max(1, self.num_heads // size))


def shared_heads(mine: RankShare, theirs: tuple[int, int]) -> tuple[int, int] | None:
    """The heads that go from one rank to another one; None: all of each.

    Raises UnsupportedSglang for ranks that share none.
    """
    if mine.tp[1] == theirs[1] or not mine.num_heads:
        return None
    here, there = mine.heads, RankShare(theirs, mine.num_heads).heads
    both = range(max(here.start, there.start), min(here.stop, there.stop))
    if not both or max(mine.tp[1], theirs[1]) % min(mine.tp[1], theirs[1]):
        raise UnsupportedSglang(
            f"ranks: got rank {mine.tp[0]} of {mine.tp[1]} and rank {theirs[0]} of {theirs[1]} for {mine.num_heads} "
            "KV heads; expected ranks that share heads, of which one number divides the other; "
            "choose another --tp-size"
        )
    return both.start, len(both)


def comes_from_another(theirs: RankShare, mine: tuple[int, int]) -> bool:
    """Whether decode rank `mine` gets the heads of this prefill rank from an earlier one, which has the same.

    A decode rank asks as many neighbouring prefill ranks as there are for each of decode's (SGLang 0.5.23,
    `disaggregation/common/conn.py`). Each byte of its pages is written by one of them.
    """
    rank, size = theirs.tp
    if not theirs.num_heads or mine[1] >= size:
        return False
    first_asked = mine[0] * (size // mine[1])
    return any(RankShare((other, size), theirs.num_heads).heads == theirs.heads for other in range(first_asked, rank))


def cut_of(whole: KVGroups, layer_ids: Sequence[int], cut: Cut, rank: RankShare) -> KVGroups:
    """The layout of a cut over the same memory. A page is [token, head, element] inside.

    Raises UnsupportedSglang for layers that this rank does not have, and for pages that are not made of its heads.
    """
    missing = sorted({*cut.layers} - {*layer_ids})
    if missing:
        raise UnsupportedSglang(f"layers: got {missing}; expected {list(layer_ids)}; start servers of equal stages")
    chosen = [layer_ids.index(layer) for layer in cut.layers]
    return KVGroups(tuple(_heads_of(_layers_of(one, chosen), cut.heads, rank) for one in whole.layouts))


def _layers_of(layout: KVLayout, chosen: Sequence[int]) -> KVLayout:
    return replace(layout, layers=tuple(layout.layers[index] for index in chosen))


def _heads_of(layout: KVLayout, heads: tuple[int, int] | None, rank: RankShare) -> KVLayout:
    if heads is None:
        return layout
    here, (first, count) = rank.heads, heads
    nbytes, rest = divmod(layout.head_nbytes, len(here))
    if rest:
        raise UnsupportedSglang(
            f"KV pool: got tokens of {layout.head_nbytes} bytes for {len(here)} KV heads; expected whole heads; "
            "start both servers with equal --tp-size"
        )
    skipped = (first - here.start) * nbytes

    def moved(layer: LayerLayout) -> LayerLayout:
        parts = tuple(Part(part.region, part.offset + skipped) for part in layer.parts)
        return replace(layer, parts=parts, head_stride=nbytes)

    layers = tuple(moved(layer) for layer in layout.layers)
    return replace(layout, num_heads=count, head_nbytes=nbytes, layers=layers)


class Ends:
    """Opens nodes, each once; thread-safe. All end with `close`."""

    def __init__(
        self,
        whole: KVGroups,
        layer_ids: Sequence[int],
        states: Sequence[KVGroups],
        open_node: Callable[[KVGroups, str, str], Node],
        memory: Sequence[AnyBuffer] = (),
        content: str = "",
    ) -> None:
        """states: of what the model keeps beside its KV. open_node(layout, suffix of its name, what is meant, in
        words equal on both sides): raises what Node does. memory: that the nodes lie over; `close` gives it back.
        content: digest of the model's files."""
        self.memory, self._content = memory, content
        self._whole, self._layer_ids, self._states, self._open_node = whole, tuple(layer_ids), states, open_node
        self._lock = threading.Lock()
        self._opened: dict[Cut | int, NodeEnd] = {}
        self._closed = False
        self._stop_watching = HERE.when_changed(self._weights_changed)
        self.everything = Cut(None, self._layer_ids)
        self.kv(self.everything, None)

    def kv(self, cut: Cut, rank: RankShare | None) -> NodeEnd:
        """rank: of this process; not needed for a cut of all heads. Raises UnsupportedSglang, and what Node does."""
        with self._lock:
            if cut not in self._opened:
                groups = self._whole
                if cut != self.everything:
                    groups = cut_of(self._whole, self._layer_ids, cut, rank or RankShare((0, 1), 0))
                suffix = "" if cut == self.everything else f"/{cut.name}"
                meaning = f"heads {cut.heads} layers {cut.layers}"
                self._opened[cut] = self._end(groups, suffix, meaning, _by_layer(groups, len(cut.layers)))
            return self._opened[cut]

    def state(self, number: int) -> NodeEnd:
        """Of one pool beside the KV. Raises what Node does."""
        with self._lock:
            if number not in self._opened:
                groups = self._states[number]
                # All tensors of a state are written at once.
                layers = (tuple(range(groups.num_layers)),)
                self._opened[number] = self._end(groups, f"/s{number}", f"state {number}", layers)
            return self._opened[number]

    def _end(self, groups: KVGroups, suffix: str, meaning: str, layers: tuple[tuple[int, ...], ...]) -> NodeEnd:
        if self._closed:
            raise UnsupportedSglang("this rank is closed")
        node = self._open_node(groups, suffix, meaning)
        return NodeEnd(EnginePort(node), layers, groups.layouts[0].block_tokens, len(groups.layouts))

    @property
    def own(self) -> NodeEnd:
        """The one for a peer with the same ranks."""
        return self.kv(self.everything, None)

    @property
    def nodes(self) -> list[Node]:
        with self._lock:
            return [end.port.node for end in self._opened.values()]

    def _weights_changed(self) -> None:
        for node in self.nodes:
            node.change_content(HERE.named(self._content))

    def close(self) -> None:
        self._stop_watching()
        nodes = self.nodes
        self._closed = True
        for node in nodes:
            node.close()
        for buffer in self.memory:
            if buffer.borrowed:
                buffer.close()


def _by_layer(groups: KVGroups, num_layers: int) -> tuple[tuple[int, ...], ...]:
    """K and V of other widths are two groups of all layers."""
    return tuple(tuple(range(layer, groups.num_layers, num_layers)) for layer in range(num_layers))
