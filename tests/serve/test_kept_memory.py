"""Memory that the proxy frees and needs again does not come from the system each time."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

CODE = """
import resource
from pdlink.serve.roles import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(100):
        prompts = [bytearray(200_000) for _ in range(8)]
        del prompts
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

usual = faults()
keep_freed_memory()
faults()
print(usual, faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators have rules of their own")
def test_prompts_take_no_page_faults_once_there_were_as_many() -> None:
    said = subprocess.run([sys.executable, "-c", CODE], check=True, capture_output=True, text=True, timeout=99).stdout
    usual, kept = map(int, said.split())
    assert usual > 10_000, "glibc gives nothing back: the test measures nothing"
    assert kept < usual / 100
