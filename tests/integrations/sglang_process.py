"""Processes with parts of SGLang, for tests."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.waiting import WAIT_S

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[2]
START_S = 280.0
ENVIRONMENT = {
    **os.environ,
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_PLUGINS": "none",
    # Also of the version that `make engines` tries.
    "PYTHONPATH": os.pathsep.join(
        [str(ROOT / "tests/sglang_cpu"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    ),
}


class Engine:
    """A process with parts of SGLang (a module beside this one), told what to do by lines of JSON."""

    def __init__(self, module: str, log: Path, **environment: str) -> None:
        self._log = log.open("wb")
        self.process = subprocess.Popen(
            [sys.executable, ROOT / f"tests/integrations/{module}.py"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**ENVIRONMENT, **environment},
        )

    def send(self, verb: str, **arguments: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": verb, **arguments}).encode() + b"\n")
        self.process.stdin.flush()

    def answer(self, timeout_s: float = START_S) -> Any:
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], timeout_s)[0], "the engine does not answer"
        line = self.process.stdout.readline()
        assert line, f"the engine ended with {self.process.wait(WAIT_S)}: {Path(self._log.name).read_text()[-2000:]}"
        answer = json.loads(line)
        assert "error" not in (answer or {}), f"{answer}: {Path(self._log.name).read_text()[-2000:]}"
        return answer

    def __call__(self, verb: str, **arguments: object) -> Any:
        self.send(verb, **arguments)
        return self.answer()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)

    def close(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        self.process.wait(60)
        self._log.close()


def serve(make: Callable[[], Any]) -> None:
    """In such a process: do what standard input says to what `make` returns, a method for each verb, until it ends.

    What it prints meanwhile goes to its log.
    """
    import torch.distributed
    from sglang.srt.utils.network import get_open_port

    place = f"tcp://127.0.0.1:{get_open_port()}"
    torch.distributed.init_process_group("gloo", init_method=place, rank=0, world_size=1)
    engine = make()
    answers = sys.stdout
    sys.stdout = sys.stderr
    try:
        for line in sys.stdin:
            call = json.loads(line)
            try:
                answer = getattr(engine, call.pop("do"))(**call)
            except Exception as error:  # noqa: BLE001  the test shows it
                answer = {"error": f"{type(error).__name__}: {error}"}
                traceback.print_exc()
            print(json.dumps(answer), file=answers, flush=True)
    finally:
        if hasattr(engine, "doCleanups"):  # SGLang's fixtures are test cases
            engine.doCleanups()
        torch.distributed.destroy_process_group()
