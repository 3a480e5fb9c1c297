"""Flags of `pdlink chaos` become settings of the workers that it starts."""

from __future__ import annotations

import argparse

import pytest

from pdlink.config import WorkerConfig
from pdlink_bench.chaos.command import FULL_BLOCKS, _worker, add_arguments


def settings(*flags: str) -> WorkerConfig:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return _worker(parser.parse_args(flags), "decode")


def test_every_kind_of_fault_is_on_unless_some_are_named() -> None:
    chaos = settings().chaos
    assert min(chaos.drop, chaos.duplicate, chaos.delay_s, chaos.link_nbytes_per_s) > 0
    assert settings().cache.num_blocks == FULL_BLOCKS
    named = settings("--faults", "kill,late")
    assert named.chaos.delay_s == chaos.delay_s
    assert named.chaos.drop == named.chaos.duplicate == named.chaos.link_nbytes_per_s == 0
    assert named.cache.num_blocks == WorkerConfig().cache.num_blocks


@pytest.mark.parametrize("faults", [[], ["--faults", "kill"]])
def test_a_number_that_is_given_counts_whatever_kinds_are_named(faults: list[str]) -> None:
    given = settings(*faults, "--drop", "0.5", "--link", "3", "--blocks", "7")
    assert (given.chaos.drop, given.chaos.link_nbytes_per_s, given.cache.num_blocks) == (0.5, 3 * 2**20, 7)
    assert settings(*faults, "--drop", "0").chaos.drop == 0
