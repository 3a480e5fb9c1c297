"""Real SGLang pairs whose servers have several ranks or stages: the answers are those of one server of one rank, in
float32. Run with `make test-sglang`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pytest

if importlib.util.find_spec("sglang") is None:
    pytest.skip("needs SGLang", allow_module_level=True)

from tests.e2e.engine_servers import prompt_of  # noqa: E402
from tests.e2e.sglang_servers import SglangPair, SglangServer, save_checkpoint, tokens_of  # noqa: E402

pytestmark = [pytest.mark.sglang, pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

LENGTHS = (64, 300, 1000)

TWO_RANKS = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
"""SGLang gives each rank a NUMA node of its own else."""


class Case(NamedTuple):
    flags: Sequence[str] = ()
    environment: Mapping[str, str] = MappingProxyType({})
    decode: Sequence[str] = ()


CASES = {
    "ranks": Case(["--tp-size", "2"], TWO_RANKS),
    "one rank to two": Case(environment=TWO_RANKS, decode=["--tp-size", "2"]),
    "stages": Case(["--pp-size", "2"], TWO_RANKS),
}


@pytest.mark.parametrize("case", list(CASES))
def test_a_pair_answers_as_one_server(tmp_path: Path, case: str) -> None:
    flags, environment, decode = CASES[case]
    save_checkpoint(tmp_path / "model")
    prompts = [prompt_of(count, count) for count in LENGTHS]
    with SglangServer("alone", tmp_path / "model", tmp_path / "alone.log", []).serving() as alone:
        expected = [tokens_of(alone.complete(prompt)) for prompt in prompts]
    pair = SglangPair.of(tmp_path, flags, environment=environment, decode=decode)
    try:
        assert [pair.tokens(prompt) for prompt in prompts] == expected
    finally:
        pair.stop()
