"""A disk tier on real file systems that are small, fail or freeze (`mounted.py` says what holds there)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from .mounted import CANNOT_MOUNT

ROOT = Path(__file__).parents[3]
_NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount"]
_MAX_S = 200.0


@cache
def _may(*unshare: str) -> bool:
    return (
        shutil.which("unshare") is not None and not subprocess.run([*unshare, "true"], capture_output=True).returncode
    )


def _played(scenario: str, directory: Path, *unshare: str) -> None:
    command = [*unshare, sys.executable, "-m", "tests.store.tiers.mounted", scenario, str(directory / "mount")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_MAX_S)
    if done.returncode == CANNOT_MOUNT:
        pytest.skip(f"cannot be mounted here: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stdout + done.stderr


needs_fuse = pytest.mark.skipif(
    not os.access("/dev/fuse", os.R_OK | os.W_OK), reason="/dev/fuse is not for this user"
)
needs_namespace = pytest.mark.skipif(not _may(*_NAMESPACE), reason="no user namespaces here")


@needs_namespace
def test_a_small_file_system_keeps_what_fits_and_all_when_it_has_grown(tmp_path: Path) -> None:
    _played("tmpfs", tmp_path, *_NAMESPACE)


@needs_namespace
@needs_fuse
def test_a_frozen_file_system_holds_nobody_up_and_is_used_again(tmp_path: Path) -> None:
    _played("frozen", tmp_path, *_NAMESPACE)


@needs_namespace
@needs_fuse
def test_a_process_that_starts_while_its_disk_is_frozen_goes_on_and_uses_it_later(tmp_path: Path) -> None:
    _played("frozen_start", tmp_path, *_NAMESPACE)


@needs_namespace
@needs_fuse
def test_a_worker_that_starts_while_its_disk_is_frozen_answers_and_says_so(tmp_path: Path) -> None:
    _played("frozen_worker", tmp_path, *_NAMESPACE)


@needs_namespace
@needs_fuse
def test_a_file_system_that_turns_read_only_is_read_and_written_to_when_it_can_be_again(tmp_path: Path) -> None:
    _played("read_only", tmp_path, *_NAMESPACE)


@pytest.mark.skipif(os.getuid() != 0 or not _may("unshare", "--mount"), reason="only root may mount a block device")
@pytest.mark.skipif(shutil.which("mkfs.ext4") is None, reason="no mkfs.ext4")
def test_a_small_block_device_keeps_what_fits_and_one_that_fails_costs_what_is_on_it(tmp_path: Path) -> None:
    _played("loop", tmp_path, "unshare", "--mount")
