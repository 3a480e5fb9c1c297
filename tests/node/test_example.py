"""The program that docs/library.md shows: on one host, and with its processes on hosts of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from pdlink.memory.host import host_id

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "examples" / "two_processes.py"
PAYLOAD_NBYTES = 4 * 2 * 100 * 8 * 64 * 4
WAIT_S = 40.0


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


@pytest.fixture
def hosts() -> Iterator[tuple[Callable[[str], list[str]], Callable[[str], int]]]:
    """Two network namespaces with a cable between them: what puts a program into one (with processes of its own, so
    that it shares no memory with the other), and the bytes that have come in there."""
    names = [f"pdlink-{role}-{os.getpid()}" for role in ("p", "d")]

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=20)

    if os.geteuid() != 0:
        pytest.skip("network namespaces take root")
    with ExitStack() as stack:
        try:
            for name in names:
                ip("netns", "add", name)
                stack.callback(ip, "netns", "del", name)
            ip("link", "add", "pdl0", "netns", names[0], "type", "veth", "peer", "name", "pdl0", "netns", names[1])
            for number, name in enumerate(names, 1):
                ip("-n", name, "addr", "add", f"10.231.7.{number}/24", "dev", "pdl0")
                for device in ("lo", "pdl0"):
                    ip("-n", name, "link", "set", device, "up")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network namespaces here: {getattr(error, 'stderr', '') or error}")

        def inside(role: str) -> list[str]:
            name = names[0] if role == "prefill" else names[1]
            return ["ip", "netns", "exec", name, "unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]

        def received_nbytes(role: str) -> int:
            counter = "/sys/class/net/pdl0/statistics/rx_bytes"
            told = subprocess.run(
                [*inside(role)[:4], "cat", counter], check=True, capture_output=True, text=True, timeout=20
            )
            return int(told.stdout)

        yield inside, received_nbytes


def test_program_moves_kv_between_two_hosts(
    hosts: tuple[Callable[[str], list[str]], Callable[[str], int]],
) -> None:
    """No memory is shared and no address is loopback, so every byte has to cross the cable."""
    inside, received_nbytes = hosts
    here = subprocess.run(
        [*inside("decode"), sys.executable, "-c", "from pdlink.memory.host import host_id; print(host_id())"],
        check=True,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        cwd=ROOT,
    )
    assert here.stdout.strip() != host_id()
    run_both((inside("prefill"), "10.231.7.1"), (inside("decode"), "10.231.7.2"))
    assert received_nbytes("decode") > PAYLOAD_NBYTES
