"""The program that docs/library.md shows: on one host, and with its processes on hosts of their own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pdlink.memory.host import host_id
from tests.two_hosts import two_hosts
from tests.waiting import WAIT_S

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "examples" / "two_processes.py"
PAYLOAD_NBYTES = 4 * 2 * 100 * 8 * 64 * 4


def test_readme_shows_the_program_as_it_is() -> None:
    assert f"```python\n{PROGRAM.read_text()}```" in (ROOT / "docs/library.md").read_text()


@contextmanager
def running(before: list[str], *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The program with these arguments, behind the command that puts it into its place."""
    command = [*before, sys.executable, str(PROGRAM), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT) as process:
        try:
            yield process
        finally:
            process.kill()


def run_both(prefill: tuple[list[str], str], decode: tuple[list[str], str]) -> None:
    """(what puts the program into its place, its address) of both."""
    with running(prefill[0], "prefill", prefill[1], "0") as sender:
        assert sender.stdout is not None
        line = sender.stdout.readline()
        assert line.startswith("prefill listens on tcp://"), line + sender.stdout.read()
        with running(decode[0], "decode", decode[1], line.split()[-1]) as receiver:
            told, _ = receiver.communicate(timeout=WAIT_S)
            assert (receiver.returncode, told) == (0, "100 tokens are here; the first token of the answer is 42\n")
        rest, _ = sender.communicate(timeout=WAIT_S)
        assert (sender.returncode, rest) == (0, "")


def test_program_moves_kv_between_two_processes() -> None:
    run_both(([], "127.0.0.1"), ([], "127.0.0.1"))


def test_program_moves_kv_between_two_hosts() -> None:
    """No memory is shared and no address is loopback, so every byte has to cross the cable."""
    with two_hosts("10.231.7.1", "10.231.7.2") as (prefill, decode):
        here = subprocess.run(
            [*decode.inside, sys.executable, "-c", "from pdlink.memory.host import host_id; print(host_id())"],
            check=True,
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            cwd=ROOT,
        )
        assert here.stdout.strip() != host_id()
        run_both((prefill.inside, prefill.address), (decode.inside, decode.address))
        assert decode.received_nbytes() > PAYLOAD_NBYTES
