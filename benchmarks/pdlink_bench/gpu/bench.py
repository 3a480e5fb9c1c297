"""`python -m pdlink_bench.gpu.bench --out FILE`: every figure of docs/gpu.md, a short table last.

Each case runs in a process of its own, so that one that fails, hangs or loses its context takes nothing with it, and
the file is written after each.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .figures import BY_ITSELF, CASES, STAGED_MAPPED, UCX, GpuFigure, Run, table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LAST_CHARACTERS = 300


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, metavar="FILE", help="run the cases and write their figures")
    parser.add_argument("--only", nargs="+", choices=list(CASES), metavar="CASE", help="with --out: add these")
    parser.add_argument("--show", type=Path, metavar="FILE", help="print the table of a file and judge it")
    parser.add_argument("--stages", type=Path, metavar="FILE", help="with --show: add how the stages of run.sh ended")
    parser.add_argument("--device", metavar="TEXT", help="with --show: what to call the GPU if no case has said it")
    parser.add_argument("--case", choices=list(CASES), help=argparse.SUPPRESS)
    parser.add_argument("--part", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.case:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # the case ends with its parent
        figures = _cases()[args.case]()
        args.part.write_text(json.dumps({"machine": _machine(), "figures": [asdict(one) for one in figures]}))
        return 0
    if args.show:
        return _show(args.show, args.stages, args.device)
    if args.out is None:
        parser.error("--out or --show is needed")
    return _run_all(args.out, args.only or [case for case in CASES if case not in BY_ITSELF])


def _cases() -> dict[str, Callable[[], list[GpuFigure]]]:
    """Imported here: showing a table needs no torch."""
    from . import kernels, layers, links, serving, tiers

    return {
        "kernels": kernels.run,
        "host": kernels.run_to_host,
        "mapped-cuda": links.run_mapped,
        "layers": layers.run,
        "ucx": partial(links.run, "ucx", UCX),
        "staged-mapped": partial(links.run, "staged-mapped", STAGED_MAPPED),
        "staged-tcp": partial(links.run, "staged-tcp", "two processes, through pinned slots, tcp"),
        "tiers": tiers.run,
        "exposed": links.run_exposed,
        "serving": serving.run,
    }


def _machine() -> dict[str, Any]:
    import torch

    from pdlink.cuda.driver import Device

    from ..measure import machine_facts

    device = Device(0)
    device.open()
    properties = torch.cuda.get_device_properties(0)
    facts = {
        **machine_facts(),
        "device": device.name,
        "driver_cuda": device.driver.version,
        "multiprocessors": properties.multi_processor_count,
        "gpu_memory_nbytes": properties.total_memory,
        "torch": torch.__version__,
    }
    device.close()
    return facts


def _run_all(out: Path, cases: Sequence[str]) -> int:
    """1 if a case failed. What the file has of other cases stays."""
    run = Run.read(out)
    measured = {one.case for one in run.figures}
    run.failures = {
        case: run.failures.get(case, "not run") for case in CASES if case in cases or case not in measured
    }
    run.figures = [one for one in run.figures if one.case not in cases]
    run.write(out)
    for case in cases:
        print(f"-- {case}", flush=True)
        part, failure = _run_case(case)
        if failure:
            print(f"-- {case} FAILED: {failure}", flush=True)
            run.failures[case] = failure
        else:
            del run.failures[case]
            run.machine = part["machine"]
            run.figures += [GpuFigure(**{**one, "case": case}) for one in part["figures"]]
        run.write(out)
    print(table(run.complete()))
    return 1 if any(case in run.failures for case in cases) else 0


def _run_case(case: str) -> tuple[dict[str, Any], str]:
    """What it wrote, and "" or why it wrote nothing."""
    with tempfile.TemporaryDirectory() as folder:
        part = Path(folder) / "part.json"
        command = [sys.executable, "-m", __spec__.name, "--case", case, "--part", str(part)]
        with open(Path(folder) / "errors", "w+", encoding="utf-8", errors="replace") as errors:
            # A group of its own: the other process of a link goes with it.
            process = subprocess.Popen(command, stderr=errors, start_new_session=True)
            try:
                status: int | None = process.wait(CASES[case][0])
            except subprocess.TimeoutExpired:
                status = None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            errors.seek(0)
            said = errors.read()
        sys.stderr.write(said)
        if status is None:
            return {}, f"not done after {CASES[case][0]} s"
        if status != 0:
            last = said.strip().splitlines()[-1:] or ["nothing said"]
            return {}, f"ended with {status}: {last[0][:_LAST_CHARACTERS]}"
        content: dict[str, Any] = json.loads(part.read_text())
        return content, ""


def _show(path: Path, stages: Path | None, device: str | None) -> int:
    """0 if every stage that can be run here went well, and every bar was met."""
    run = Run.read(path)
    if stages is not None and stages.exists():
        rows = [line.split("\t") for line in stages.read_text(encoding="utf-8").splitlines()]
        run.stages = [{"name": name, "outcome": outcome, "seconds": seconds} for name, outcome, seconds in rows]
    if device is not None:
        run.machine.setdefault("device", device)
    if stages is not None or device is not None:
        run.write(path)
    for stage in run.stages:
        print(f"{stage['outcome']:>10}  {stage['name']} ({stage['seconds']} s)")
    figures = run.complete()
    print(table(figures))
    facts = ("device", "driver_cuda", "torch")
    print(", ".join(f"{key} {run.machine[key]}" for key in facts if key in run.machine))
    unmet = [one.name for one in figures if one.verdict not in ("", "met")]
    failed = [one["name"] for one in run.stages if one["outcome"] != "ok" and not one["outcome"].startswith("absent")]
    print(f"bars: {sum(one.verdict == 'met' for one in figures)} met, {len(unmet)} missed or not measured")
    return 1 if unmet or failed else 0


if __name__ == "__main__":
    sys.exit(main())
