from __future__ import annotations

import msgspec
import pytest

from pdlink.errors import HandshakeRefused
from pdlink.kv.layout import KVLayout, paged_layout
from pdlink.protocol.handshake import common_transports, compare
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


@pytest.mark.parametrize(
    ("factor", "other"),
    [
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
    ],
)
def test_one_differing_factor_is_refused_by_name_on_both_sides(factor: str, other: Identity) -> None:
    """vllm#29503, vllm#54926: no or half a check; KV of two versions or layer sets was mixed."""
    for local, remote in ((BASE, other), (other, BASE)):
        with pytest.raises(HandshakeRefused) as refusal:
            compare(local, remote)
        assert refusal.value.factor == factor
        assert refusal.value.local != refusal.value.remote


def test_block_size_and_axis_order_may_differ() -> None:
    compare(BASE, msgspec.structs.replace(BASE, layout=layout(block_tokens=64, order="BLPHT"), host="other"))


ANYWHERE, HERE = False, True


def test_transports_that_both_have_come_in_the_dialers_order() -> None:
    available = {"ucx": ANYWHERE, "mapped": HERE, "other": ANYWHERE}
    assert common_transports(["mapped", "tcp", "ucx", "mapped"], available, same_host=True) == ["mapped", "ucx"]


def test_transport_of_one_host_is_no_choice_between_two() -> None:
    available = {"ucx": ANYWHERE, "mapped": HERE, "mapped-cuda": HERE}
    assert common_transports(["mapped-cuda", "mapped", "ucx"], available, same_host=False) == ["ucx"]


def test_no_common_transport_is_refused_with_both_lists() -> None:
    with pytest.raises(HandshakeRefused, match=r"transport differs: local mapped \(different hosts\), remote mapped"):
        common_transports(["mapped"], {"mapped": HERE}, same_host=False)
