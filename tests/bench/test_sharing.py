"""`pdlink bench sharing` plays the same traces with every order, and looks at every byte."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

import pytest

from pdlink.config import SharingConfig
from pdlink_bench import sharing
from pdlink_bench.traffic import BLOCK_TOKENS, Decode, Prefill, Shape, trace
from pdlink_bench.transfer import TRANSPORTS

if TYPE_CHECKING:
    from pathlib import Path

TINY = Shape(num_layers=2, num_heads=1, head_dim=8, max_tokens=128)


def options(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    sharing.add_arguments(parser)
    return parser.parse_args(given)


def test_every_order_plays_every_transfer_and_the_figures_are_kept(tmp_path: Path) -> None:
    file, picture = tmp_path / "sharing.json", tmp_path / "sharing.png"
    given = ["--transport", "tcp", "--layers", "2", "--heads", "1", "--max-tokens", "128", "--transfers", "12"]
    assert sharing.run(options(*given, "--rounds", "1", "--json", str(file), "--plot", str(picture))) == 0
    result = json.loads(file.read_text())["transports"]["tcp"]
    assert {order: [len(seconds) for seconds in rounds] for order, rounds in result["ready_s"].items()} == {
        order: [12] for order in sharing.ORDERS
    }
    assert all(seconds > 0 for rounds in result["ready_s"].values() for some in rounds for seconds in some)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_trace_is_the_same_for_every_order_and_asks_for_its_share_of_the_link() -> None:
    first, second = (trace(name, 3, 500, 16384, 100_000) for name in "ab")
    assert [(arrival.at_s, arrival.num_tokens) for arrival in first] == [
        (arrival.at_s, arrival.num_tokens) for arrival in second
    ]
    total = sum(arrival.num_tokens for arrival in first)
    assert total / first[-1].at_s == pytest.approx(100_000, rel=0.2)


def test_a_trace_has_lengths_of_every_size() -> None:
    lengths = [arrival.num_tokens for arrival in trace("t", 1, 1000, 4096, 1000)]
    assert min(lengths) >= BLOCK_TOKENS
    assert max(lengths) == 4096
    assert sorted(lengths)[len(lengths) // 2] < 1500


def test_a_byte_that_was_not_sent_is_found() -> None:
    prefill = Prefill("prefill", TINY, TRANSPORTS["mapped"], SharingConfig())
    decode = Decode("decode", TINY, TRANSPORTS["mapped"])
    try:
        prefill.publish([("a", 20), ("b", 100)])
        assert decode.stream(prefill.address(), [("a", 20), ("b", 100)], 20.0) > 0
        assert decode.pool_LPBTE.any()
        assert decode.check_and_clear() == ""
        assert not decode.pool_LPBTE.any()
        decode.pool_LPBTE[1, 0, 3, 2, 1] = 7
        assert decode.check_and_clear() == "layer 1 part 0 holds bytes that were not sent"
    finally:
        decode.close()
        prefill.close()
