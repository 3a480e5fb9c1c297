"""Flags of `pdlink chaos` become settings and faults of the workers that it starts."""

from __future__ import annotations

import argparse

import pytest

from pdlink.config import WorkerConfig
from pdlink_bench.chaos.command import FULL_BLOCKS, _faults, _worker, add_arguments
from pdlink_bench.chaos.tamper import LinkFaults


def started(*flags: str) -> tuple[WorkerConfig, LinkFaults]:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args(flags)
    return _worker(args, "decode"), _faults(args)


def test_every_kind_of_fault_is_on_unless_some_are_named() -> None:
    worker, faults = started()
    assert min(faults.drop, faults.duplicate, faults.delay_s, faults.link_nbytes_per_s) > 0
    assert worker.cache.num_blocks == FULL_BLOCKS
    worker, named = started("--faults", "kill,late")
    assert named.delay_s == faults.delay_s
    assert named.drop == named.duplicate == named.link_nbytes_per_s == 0
    assert worker.cache.num_blocks == WorkerConfig().cache.num_blocks


@pytest.mark.parametrize("kinds", [[], ["--faults", "kill"]])
def test_a_number_that_is_given_counts_whatever_kinds_are_named(kinds: list[str]) -> None:
    worker, faults = started(*kinds, "--drop", "0.5", "--link", "3", "--blocks", "7")
    assert (faults.drop, faults.link_nbytes_per_s, worker.cache.num_blocks) == (0.5, 3 * 2**20, 7)
    assert started(*kinds, "--drop", "0")[1].drop == 0
