"""What a cluster cannot hold is told with both numbers."""

from __future__ import annotations

import pytest

from pdlink.fleet.placing import NodeRoom, PlacementFailed, check, no_room, to_avoid


def node(name: str, free: float = 0.0, **total: float) -> NodeRoom:
    return NodeRoom(name, dict(total), {"CPU": free})


def test_a_worker_that_fits_an_idle_node_is_not_refused() -> None:
    check("decode-0", "ray.decode_resources", {"CPU": 2.0}, [node("a", CPU=1.0), node("b", CPU=2.0)])


@pytest.mark.parametrize(
    ("nodes", "found"),
    [
        ([node("a", CPU=1.0), node("b", CPU=2.0, GPU=1.0)], "the largest of 2 nodes has 2 CPU, 1 GPU;"),
        ([], "the largest of 0 nodes has 0 CPU, 0 GPU;"),
        (
            [node("a", CPU=8.0), node("b", CPU=1.0, GPU=4.0)],
            "no one of 2 nodes has all of it; the largest of 2 nodes has 8 CPU, 4 GPU;",
        ),
    ],
)
def test_a_worker_that_no_node_can_hold_is_refused_with_the_most_there_is(nodes: list[NodeRoom], found: str) -> None:
    with pytest.raises(PlacementFailed) as error:
        check("decode-0", "ray.decode_resources", {"CPU": 4.0, "GPU": 2.0}, nodes)
    said = str(error.value)
    assert said.startswith("ray.decode_resources: decode-0 needs 4 CPU, 2 GPU; ")
    assert found in said
    assert said.endswith("; ask for less, or start such a node")


def test_a_full_cluster_is_told_with_what_is_free() -> None:
    error = no_room("prefill-1", "ray.prefill_resources", {"CPU": 1.0}, [node("a", 0.5, CPU=1.0)], 30.0)
    assert "after 30 s the 1 nodes have free: 0.5 CPU" in str(error)


def test_a_suspected_node_is_avoided_only_where_another_one_could_do() -> None:
    nodes = [node("a", CPU=1.0), node("b", CPU=1.0)]
    assert to_avoid({"CPU": 1.0}, nodes, frozenset("a")) == {"a"}
    assert to_avoid({"CPU": 1.0}, nodes, frozenset("ab")) == frozenset()
    assert to_avoid({"CPU": 1.0}, nodes[:1], frozenset("a")) == frozenset()
