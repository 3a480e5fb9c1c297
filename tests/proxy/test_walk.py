"""How many Python calls a vLLM request takes on its way through the proxy."""

from __future__ import annotations

import re

from tests.node.test_walk import walked

MOST = {"whole": (65, 15), "stream": (100, 15)}
"""Calls and files. A stream's events are sent one by one here, and pass natively after the first two."""


def test_vllm_request_takes_no_more_calls_and_files_than_it_may() -> None:
    told = re.findall(r"^(\w+): (\d+) calls, \d+ functions, (\d+) files$", walked("proxy"), re.MULTILINE)
    found = {role: (int(calls), int(files)) for role, calls, files in told}
    assert found.keys() == MOST.keys()
    for role, counts in found.items():
        assert all(count <= most for count, most in zip(counts, MOST[role], strict=True)), (role, counts)
