"""A worker opens as many descriptors as it may, not as many as a shell happens to allow at first."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import resource
from pdlink.serve.process import raise_descriptor_limit
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (256, min(hard, 4096)))
assert raise_descriptor_limit() == min(hard, 4096)
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(hard, 4096),) * 2
assert raise_descriptor_limit() == min(hard, 4096)
"""


def test_soft_limit_is_raised_to_the_hard_one() -> None:
    assert subprocess.run([sys.executable, "-c", PROGRAM], check=False, timeout=120).returncode == 0
