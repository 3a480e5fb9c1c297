from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from pdlink.capabilities import Capabilities, MemoryKind, Reach
from pdlink.errors import HandshakeRefused
from pdlink.kv.layout import KVLayout, paged_layout
from pdlink.protocol.handshake import common_transports, compare, differing, fingerprint
from pdlink.protocol.messages import VERSION, Identity


def layout(
    *,
    dtype: str = "float32",
    num_layers: int = 2,
    num_heads: int = 4,
    head_dim: int = 8,
    num_parts: int = 2,
    block_tokens: int = 16,
    order: str = "LPBTH",
) -> KVLayout:
    return paged_layout(
        dtype=dtype,
        itemsize=4,
        num_layers=num_layers,
        num_blocks=8,
        block_tokens=block_tokens,
        num_heads=num_heads,
        head_dim=head_dim,
        order=order,
        num_parts=num_parts,
    )


BASE = Identity(VERSION, "m", "main", 1, layout(), "host")


DIFFERENT = [
    ("version", msgspec.structs.replace(BASE, version=VERSION + 1)),
    ("model", msgspec.structs.replace(BASE, model="n")),
    ("revision", msgspec.structs.replace(BASE, revision="v2")),
    ("content", msgspec.structs.replace(BASE, content="0123abcd")),
    ("num_ranks", msgspec.structs.replace(BASE, num_ranks=2)),
    ("dtype", msgspec.structs.replace(BASE, layout=layout(dtype="bfloat16"))),
    ("num_layers", msgspec.structs.replace(BASE, layout=layout(num_layers=3))),
    ("num_heads", msgspec.structs.replace(BASE, layout=layout(num_heads=2))),
    ("head_nbytes", msgspec.structs.replace(BASE, layout=layout(head_dim=16))),
    ("parts per layer", msgspec.structs.replace(BASE, layout=layout(num_parts=1))),
    ("groups of layers", msgspec.structs.replace(BASE, other_layouts=(layout(),))),
    ("window", msgspec.structs.replace(BASE, layout=replace(layout(), window=64))),
    ("state", msgspec.structs.replace(BASE, layout=replace(layout(), state=True))),
    ("position_tokens", msgspec.structs.replace(BASE, layout=replace(layout(), position_tokens=4))),
]
"""Another identity, and the factor by which it differs."""


@pytest.mark.parametrize(("factor", "other"), DIFFERENT)
def test_one_differing_factor_is_refused_by_name_on_both_sides(factor: str, other: Identity) -> None:
    """vllm#29503, vllm#54926: no or half a check; KV of two versions or layer sets was mixed."""
    for local, remote in ((BASE, other), (other, BASE)):
        with pytest.raises(HandshakeRefused) as refusal:
            compare(local, remote)
        assert refusal.value.factor == factor
        assert refusal.value.local != refusal.value.remote


PARTS = {"version": "version of the wire", "dtype": "dtype (float32 and bfloat16)"}
PARTS |= dict.fromkeys(("model", "revision", "content"), "model, revision or content")


@pytest.mark.parametrize(("factor", "other"), DIFFERENT)
def test_fingerprints_differ_exactly_where_the_handshake_refuses(factor: str, other: Identity) -> None:
    mine, its = fingerprint(BASE), fingerprint(other)
    what = differing(mine, its)
    if factor == "groups of layers":  # each has a dtype
        assert what == "dtype (float32 and float32+float32), layout"
    else:
        assert what == PARTS.get(factor, "layout")
    assert mine == fingerprint(msgspec.structs.replace(BASE, host="elsewhere", pid=7, memory="cuda"))
    assert mine == fingerprint(msgspec.structs.replace(BASE, layout=layout(block_tokens=32, order="LBPTH")))


def test_a_fingerprint_of_another_kind_differs_as_a_whole() -> None:
    assert differing(fingerprint(BASE), "sha256:77") == "fingerprint"


def test_every_group_is_compared() -> None:
    several = [
        msgspec.structs.replace(BASE, other_layouts=(layout(), replace(layout(), window=window)))
        for window in (64, 128)
    ]
    compare(several[0], several[0])
    with pytest.raises(HandshakeRefused, match=r"window differs: local \(0, 0, 64\), remote \(0, 0, 128\)"):
        compare(*several)


def test_a_worker_of_the_version_before_groups_is_refused_by_its_number() -> None:
    """Its identity has no groups after the first, and it reads ours as if there were none: both compare versions."""
    old = {key: value for key, value in msgspec.to_builtins(BASE).items() if key != "other_layouts"} | {"version": 2}
    read = msgspec.convert(old, Identity)
    with pytest.raises(HandshakeRefused, match=f"version differs: local {VERSION}, remote 2"):
        compare(msgspec.structs.replace(BASE, other_layouts=(layout(),)), read)


def test_block_size_and_axis_order_may_differ() -> None:
    other = replace(layout(block_tokens=64, order="BLPHT"), window_step=64)
    compare(BASE, msgspec.structs.replace(BASE, layout=other, host="other"))


def has(name: str, reach: Reach = "network", *memory: MemoryKind) -> Capabilities:
    return Capabilities(name, reach, memory or ("host",), "pool")


def test_transports_that_both_have_come_in_the_dialers_order() -> None:
    ours = [has("ucx"), has("mapped", "host"), has("other")]
    theirs = [has("mapped", "host"), has("tcp"), has("ucx"), has("mapped", "host")]
    assert common_transports(BASE, ours, BASE, theirs) == ["mapped", "ucx"]


@pytest.mark.parametrize(
    ("remote", "common"),
    [
        (BASE, ["a", "b", "c"]),
        (msgspec.structs.replace(BASE, pid=7), ["b", "c"]),
        (msgspec.structs.replace(BASE, host="other"), ["c"]),
    ],
    ids=["one process", "one host", "two hosts"],
)
def test_transport_that_does_not_reach_so_far_is_no_choice(remote: Identity, common: list[str]) -> None:
    both = [has("a", "process"), has("b", "host"), has("c", "network")]
    assert common_transports(BASE, both, remote, both) == common


def test_the_nearer_reach_of_the_two_sides_counts() -> None:
    """UCX that one side holds to this host's lanes."""
    far, near = [has("x"), has("y")], [has("x", "host"), has("y")]
    other = msgspec.structs.replace(BASE, host="other")
    assert common_transports(BASE, far, other, near) == common_transports(BASE, near, other, far) == ["y"]


def test_transport_moves_the_memory_of_both_sides() -> None:
    both = [has("a"), has("b", "host", "cuda"), has("c", "network", "host", "cuda")]
    on_gpu = msgspec.structs.replace(BASE, memory="cuda")
    assert common_transports(BASE, both, BASE, both) == ["a", "c"]
    assert common_transports(BASE, both, on_gpu, both) == ["c"]
    assert common_transports(on_gpu, both, on_gpu, both) == ["b", "c"]


def test_no_common_transport_is_refused_with_what_both_declare() -> None:
    other = msgspec.structs.replace(BASE, host="other", pid=7)
    with pytest.raises(HandshakeRefused) as refusal:
        common_transports(BASE, [has("mapped", "host")], other, [has("mapped")])
    assert refusal.value.factor == "transport"
    assert refusal.value.local == (
        "host memory in process 0 of host host, mapped (reach host, moves host, trusts with pool)"
    )
    assert refusal.value.remote == (
        "host memory in process 7 of host other, mapped (reach network, moves host, trusts with pool)"
    )
    with pytest.raises(HandshakeRefused, match="no transport"):
        common_transports(BASE, [], BASE, [has("mapped")])
