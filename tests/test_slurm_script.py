"""deploy/slurm/pdlink.sbatch without Slurm, around a stand-in of `pdlink` that is ready and ends on SIGTERM."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.e2e.deployment import until

SCRIPT = Path(__file__).parents[1] / "deploy/slurm/pdlink.sbatch"

STAND_IN = """#!/bin/bash
echo "$@" > "$ARGUMENTS"
echo "$5 ready on http://10.0.0.1:8100, control tcp://10.0.0.1:1, KV over tcp"
trap 'echo draining; exit 0' TERM
while :; do sleep 0.05; done
"""


@contextmanager
def job(folder: Path, *words: str, index: str = "3") -> Iterator[subprocess.Popen[bytes]]:
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    (programs / "pdlink").write_text(STAND_IN)
    (programs / "pdlink").chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "ARGUMENTS": str(folder / "arguments"),
        "SLURM_JOB_ID": "17",
        "SLURM_ARRAY_TASK_ID": index,
        "NODE_ADDRESS": "echo 10.0.0.1",
    }
    process = subprocess.Popen(["bash", str(SCRIPT), *words], env=environment, stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(20)


def test_a_worker_is_listed_while_it_runs_under_the_name_of_its_key(tmp_path: Path) -> None:
    listed = tmp_path / "workers/decode-3.json"
    with job(tmp_path, "decode", str(tmp_path), "--model", "m") as process:
        until(listed.exists, "it is listed")
        assert json.loads(listed.read_text()) == {"role": "decode", "url": "http://10.0.0.1:8100"}
        given = (tmp_path / "arguments").read_text().split()
        assert given[:5] == ["decode", "--listen", "10.0.0.1", "--name", "decode-3"]
        assert f"security.key_file={tmp_path}/keys/decode-3.key" in given
        assert given[-2:] == ["--model", "m"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    assert not listed.exists()


def test_a_job_that_ends_late_leaves_the_file_of_its_successor(tmp_path: Path) -> None:
    listed = tmp_path / "workers/prefill-3.json"
    with job(tmp_path, "prefill", str(tmp_path)):
        until(listed.exists, "it is listed")
        listed.write_text('{"role": "prefill", "url": "http://10.0.0.2:8100"}\n')
    assert "10.0.0.2" in listed.read_text()


def test_the_proxy_reads_the_directory_and_is_not_listed_in_it(tmp_path: Path) -> None:
    with job(tmp_path, "proxy", str(tmp_path)):
        until((tmp_path / "proxy.json").exists, "its address is known")
        assert f'discover=["file:{tmp_path}/workers"]' in (tmp_path / "arguments").read_text()
        assert list((tmp_path / "workers").iterdir()) == []


def test_a_job_without_a_directory_is_told_how(tmp_path: Path) -> None:
    with job(tmp_path, "decode") as process:
        assert process.wait(20) == 2
