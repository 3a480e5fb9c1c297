"""Whether a cluster can hold what is asked of it. Only arithmetic: what nodes there are says the caller."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdlink.errors import LocalError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Resources = dict[str, float]


class PlacementFailed(LocalError):
    """The cluster has no room for a worker; the message has what was asked, what there is, and the remedy."""

    code = "placement_failed"


@dataclass(frozen=True, slots=True)
class NodeRoom:
    """A node that is alive."""

    name: str
    """Ray's id of it."""
    total: Resources
    free: Resources


def fits(need: Mapping[str, float], room: Mapping[str, float]) -> bool:
    return all(room.get(name, 0.0) >= amount for name, amount in need.items())


def check(label: str, setting: str, need: Resources, nodes: Sequence[NodeRoom]) -> None:
    """Raise PlacementFailed if no node could hold this worker even if it were idle."""
    if any(fits(need, node.total) for node in nodes):
        return
    largest = {name: max((node.total.get(name, 0.0) for node in nodes), default=0.0) for name in need}
    short = [name for name, amount in need.items() if largest[name] < amount]
    found = f"the largest of {len(nodes)} nodes has {in_words(largest)}"
    if not short:
        found = f"no one of {len(nodes)} nodes has all of it; {found}"
    raise PlacementFailed(f"{setting}: {label} needs {in_words(need)}; {found}; ask for less, or start such a node")


def no_room(label: str, setting: str, need: Resources, nodes: Sequence[NodeRoom], waited_s: float) -> PlacementFailed:
    """The error for a worker that fits an idle node, and none of these."""
    free = "; ".join(in_words({name: node.free.get(name, 0.0) for name in need}) for node in nodes[:8])
    return PlacementFailed(
        f"{setting}: {label} needs {in_words(need)}; after {waited_s:g} s the {len(nodes)} nodes have free: "
        f"{free}; start fewer workers, end other work, or raise ray.place_timeout_s"
    )


def to_avoid(need: Resources, nodes: Sequence[NodeRoom], suspected: frozenset[str]) -> frozenset[str]:
    """The suspected nodes, if another one could hold this worker; else none, for it has no other place."""
    return suspected if any(node.name not in suspected and fits(need, node.total) for node in nodes) else frozenset()


def in_words(amounts: Mapping[str, float]) -> str:
    """As "1 CPU, 4 GPU"."""
    return ", ".join(f"{amount:g} {name}" for name, amount in amounts.items())
