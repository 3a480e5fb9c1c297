"""The gate page itself; what it keeps out is in tests/conformance."""

from __future__ import annotations

import subprocess
import sys


def test_a_gate_that_cannot_be_mapped_leaves_no_descriptor() -> None:
    program = """
import os, resource
from pdlink import _copy
def count(): return len(os.listdir("/proc/self/fd"))
copier = _copy.Copier()
copier.invite("first")
before = count()
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used, resource.RLIM_INFINITY))
for number in range(3):
    try:
        copier.invite(f"peer {number}")
    except OSError as error:
        print(error)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))  # its thread ends
print(count() - before)
"""
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert said.stdout.splitlines() == ["[Errno 12] mmap of gate page: Cannot allocate memory"] * 3 + ["0"]
