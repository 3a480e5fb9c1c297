"""The transfer benchmark end to end on small shapes, and that what it claims to notice is noticed."""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import replace
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest
from rich.progress import Progress

from pdlink.transport.base import Occurrence, Probe
from pdlink.transport.mapped import MappedTransport
from pdlink_bench import harness, transfer
from pdlink_bench.bars import judge
from pdlink_bench.harness import Lane, TextTable, opened
from pdlink_bench.measure import Measured, machine_facts, median_ratio, summarise
from pdlink_bench.report import report
from pdlink_bench.rounds import Case, Contestant, RoundResults, RoundSettings, measure
from pdlink_bench.transfer import TRANSPORTS
from pdlink_bench.workers import WorkerProcess
from pdlink_bench.workload import DEFAULT, Workload, check_and_clear, fill_source
from tests.waiting import WAIT_S

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdlink.memory.buffers import AnyBuffer, HostBuffer
    from pdlink.transport.base import RunList

SMALL = Workload(
    num_layers=3,
    num_heads=2,
    head_dim=12,
    num_tokens=37,
    src_block_tokens=16,
    dst_block_tokens=6,
    src_order="LBPTH",
    dst_order="LPBHT",
)
QUICK = RoundSettings(layer_ms=(0.1,), rounds=2, warm_ups=1, timeout_s=4.0)


class Standing:
    """What a worker needs to be one."""

    def probe(self) -> Probe:
        return Probe("standing", ok=True)

    def pid(self) -> int:
        return os.getpid()

    def close(self) -> None: ...


def main(words: list[str]) -> int:
    """`pdlink bench transfer` with these options."""
    parser = argparse.ArgumentParser()
    transfer.add_arguments(parser)
    return transfer.run(parser.parse_args(words))


class Corrupting(MappedTransport):
    """Changes one bit of one byte of what it was told to copy."""

    def register(self, buffer: AnyBuffer) -> int:
        self.buffer = cast("HostBuffer", buffer)
        return super().register(buffer)

    def submit(self, peer: str, lists: Sequence[RunList], timeout_s: float) -> int:
        last = lists[-1]
        self.buffer.array[last.src_base + int(last.runs[-1, 0])] ^= 0x10
        return super().submit(peer, lists, timeout_s)


class Dying(MappedTransport):
    """Takes its process with it."""

    def submit(self, peer: str, lists: Sequence[RunList], timeout_s: float) -> int:
        os._exit(7)


class Silent(MappedTransport):
    """Never reports a batch, and does not keep the deadline either."""

    def poll(self) -> list[Occurrence]:
        return []


class Unavailable(MappedTransport):
    @classmethod
    def probe(cls) -> Probe:
        return Probe("unavailable", ok=False, reason="needs a device that is not here")


LATENT = Workload(num_layers=2, num_parts=1, num_heads=1, head_dim=36, num_tokens=21, src_block_tokens=4)


@pytest.fixture(scope="module")
def results() -> RoundResults:
    """One run in which one transport works and every other one goes wrong in its own way."""
    contestants = {
        "good": Contestant(MappedTransport, asynchronous=True),
        "blocking": Contestant(MappedTransport, cases=("latent",), asynchronous=False),
        "corrupting": Contestant(Corrupting),
        "dying": Contestant(Dying),
        "silent": Contestant(Silent),
        "unavailable": Contestant(Unavailable),
    }
    return measure({DEFAULT: SMALL, "latent": LATENT}, contestants, QUICK, Progress(disable=True))


@pytest.fixture
def default(results: RoundResults) -> Case:
    return results.cases[DEFAULT]


@pytest.mark.parametrize("case", [DEFAULT, "latent"])
def test_a_good_transport_is_measured_in_every_mode_whatever_the_others_do(results: RoundResults, case: str) -> None:
    good = results.cases[case].transports["good"]
    assert (good.problem, good.lane) == ("", "mapped")
    assert {name: len(samples) for name, samples in good.samples.items()} == {
        "whole": 2,
        "layers": 2,
        "prefill 0.1": 2,
    }
    assert all(seconds > 0 for samples in good.samples.values() for seconds in samples)


def test_a_contestant_takes_part_in_its_cases_only_and_a_blocking_one_in_no_prefill(results: RoundResults) -> None:
    assert "blocking" not in results.cases[DEFAULT].transports
    assert set(results.cases["latent"].transports["blocking"].samples) == {"whole", "layers"}


@pytest.mark.parametrize("case", [DEFAULT, "latent"])
def test_ceilings_copy_the_same_bytes_in_the_same_run(results: RoundResults, case: str) -> None:
    ceiling = results.cases[case].ceiling
    assert ceiling.problem == ""
    assert {name: len(samples) for name, samples in ceiling.samples.items()} == {"memcpy": 2, "nt": 2}


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("corrupting", "wrong bytes (push_whole): layer 2 part 1: 1 bytes differ"),
        ("dying", "dying sender ended with exit code 7"),
        ("silent", "silent sender: DeadlineExceeded"),
    ],
)
def test_a_failing_transport_is_named_and_has_no_figures(results: RoundResults, name: str, problem: str) -> None:
    for case in results.cases.values():
        measured = case.transports[name]
        assert measured.failed
        assert measured.problem.startswith(problem)
        assert measured.summary("whole") is None


def test_a_transport_that_cannot_work_here_is_skipped_with_its_own_reason(default: Case) -> None:
    measured = default.transports["unavailable"]
    assert (measured.failed, measured.problem) == (False, "needs a device that is not here")


def test_every_sample_and_ratio_is_kept_and_a_failure_has_its_row(results: RoundResults, default: Case) -> None:
    found = report(results)
    case = found.kept["cases"][DEFAULT]
    assert case["transports"] is default.transports
    assert case["ratios"]["dying"] == {"of_memcpy": None, "of_nt": None, "exposed at 0.1 ms": None}
    assert case["ratios"]["good"]["of_nt"] == default.ceiling.share("nt", default.transports["good"], "whole")
    assert case["workload"]["nbytes"] == 3 * 2 * 37 * 2 * 12 * 2
    assert found.kept["cases"]["latent"]["workload"]["nbytes"] == 2 * 21 * 36 * 2
    assert set(found.problems) == {"corrupting", "dying", "silent", "unavailable"}
    rows = {row[0]: row[1] for row in found.shown[2].rows if row} if isinstance(found.shown[2], TextTable) else {}
    assert (rows["good"], rows["dying"], rows["unavailable"]) == ("mapped", "failed", "unavailable")


def test_the_command_prints_a_table_and_writes_json_and_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, picture, page = (tmp_path / f"transfer{suffix}" for suffix in (".json", ".png", ".md"))
    options = (
        "--layers 2 --heads 1 --head-dim 8 --tokens 20 --rounds 1 --warm-ups 1 --layer-ms 0.1 --transport mapped"
    )
    outputs = ["--json", str(target), "--plot", str(picture), "--markdown", str(page)]
    assert main([*options.split(), "--transport", "mapped", "--dst-block-tokens", "4", *outputs]) == 0
    printed = capsys.readouterr().out
    assert "mapped" in printed
    assert "ceilings of one core" in printed
    assert "bar" not in printed, "what this project wants to reach is nobody's verdict on this machine"
    assert "| transport | lane | whole GB/s | of memcpy | of NT | layer by layer GB/s |" in page.read_text()
    assert "\n| mapped | mapped | " in page.read_text()
    kept = json.loads(target.read_text())
    assert kept["cases"][DEFAULT]["workload"]["dst_block_tokens"] == 4
    assert len(kept["cases"][DEFAULT]["transports"]["mapped"]["measured"]["whole"]["samples"]) == 1
    assert kept["machine"]["cores"] >= 1
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_all_layouts_are_gone_through_in_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, picture = tmp_path / "layouts.json", tmp_path / "layouts.png"
    options = "--layers 1 --heads 2 --head-dim 8 --tokens 140 --rounds 1 --warm-ups 1 --layouts"
    outputs = ["--json", str(target), "--plot", str(picture)]
    assert main([*options.split(), "--transport", "mapped", *outputs]) == 0
    kept = json.loads(target.read_text())
    assert list(kept["cases"]) == [DEFAULT, "NHD to HND", "blocks 16 to 128", "both", "MLA latent"]
    assert all(case["transports"]["mapped"]["measured"]["whole"]["median"] > 0 for case in kept["cases"].values())
    judged = {bar["what"]: bar["ratio"] for bar in kept["bars"] if bar["ratio"] is not None}
    assert set(judged) == {
        "mapped to non-temporal stores",
        "mapped, NHD to HND, to same layout",
        "mapped, blocks 16 to 128, to same layout",
    }
    assert "MLA latent" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--src-order", "LPBTT"], "permutation of LPBTH"),
        (["--tokens", "100000000"], "needs"),
        (["--plot", "figure.gif"], "ends in .png"),
    ],
)
def test_impossible_options_are_refused_before_anything_starts(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(options) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "options", [["--rounds", "0"], ["--layer-ms", "-1"], ["--transport", "pigeon"], ["--peers", "nixl,pigeon"]]
)
def test_options_out_of_range_are_refused(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(options)
    assert options[0] in capsys.readouterr().err


def test_every_offered_transport_can_be_made() -> None:
    assert sorted(TRANSPORTS) == ["mapped", "tcp", "ucx-shm", "ucx-tcp"]
    assert {name: make().name for name, make in TRANSPORTS.items()} == {
        "mapped": "mapped",
        "tcp": "tcp",
        "ucx-shm": "ucx",
        "ucx-tcp": "ucx",
    }


def test_peers_are_spared_cases_of_very_many_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(_cases: object, contestants: dict[str, Contestant], *_: object) -> None:
        assert contestants["mapped"].cases is None
        assert contestants["nixl-tcp"].cases == [DEFAULT, "blocks 16 to 128", "MLA latent"]
        pytest.exit("seen", returncode=9)

    monkeypatch.setattr(harness, "available_nbytes", lambda: 1 << 60)
    monkeypatch.setattr(transfer, "measure", told)
    with pytest.raises(pytest.exit.Exception, match="seen"):
        main(["--layouts", "--transport", "mapped", "--peers", "nixl"])


def measured(**seconds: float) -> Measured:
    return Measured(samples={name: [value, value] for name, value in seconds.items()})


def test_bars_compare_speeds_and_say_what_is_missing() -> None:
    case = Case(
        SMALL,
        1,
        measured(memcpy=2.0, nt=0.9),
        {
            "mapped": measured(whole=1.0, layers=2.0),
            "nixl-shm": measured(whole=8.0),
            "tcp": measured(whole=2.0),
            "bare-sockets": measured(whole=1.5),
        },
    )
    verdicts = {bar.what: bar for bar in judge(RoundResults(QUICK, {DEFAULT: case}))}
    by_layer = verdicts["mapped by layer to nixl-shm whole"]
    assert (by_layer.ratio, by_layer.met) == (4.0, True)
    assert by_layer.at_best == pytest.approx(8.0 / 0.9)
    assert verdicts["mapped to non-temporal stores"].met
    sockets = verdicts["tcp to bare sockets"]
    assert (sockets.ratio, sockets.met, sockets.at_best) == (0.75, False, 1.0)
    assert verdicts["tcp to ucx-tcp"].ratio is verdicts["mapped, NHD to HND, to same layout"].ratio is None
    assert not verdicts["tcp to ucx-tcp"].met


def destination(workload: Workload) -> tuple[np.ndarray[tuple[int], np.dtype[np.uint8]], Workload]:
    """A destination that holds what a correct transfer leaves: here both sides have the same layout and blocks."""
    same = replace(workload, dst_order=workload.src_order, dst_block_tokens=workload.src_block_tokens)
    array = np.zeros(same.dst.extent(0), dtype=np.uint8)
    source = np.zeros(same.src.extent(0), dtype=np.uint8)
    fill_source(source, same)
    plan = same.plan()
    for layer in range(same.num_layers):
        for run_list in plan.run_lists(layer):
            for src, dst, nbytes in run_list.runs.tolist():
                array[run_list.dst_base + dst :][:nbytes] = source[run_list.src_base + src :][:nbytes]
    return array, same


def test_a_correct_destination_passes_and_is_cleared() -> None:
    array, workload = destination(SMALL)
    assert array.any()
    assert check_and_clear(array, workload) == ""
    assert not array.any()


@pytest.mark.parametrize("seed", range(20))
def test_any_single_wrong_byte_is_found_wherever_it_lies(seed: int) -> None:
    """Inside the sequence, in the unused tail of its last block, or in a block of somebody else."""
    array, workload = destination(SMALL)
    at = int(np.random.default_rng(seed).integers(len(array)))
    array[at] ^= 0x80
    assert check_and_clear(array, workload) != ""
    assert not array.any()


def test_two_swapped_tokens_are_found() -> None:
    """Right bytes in the wrong place: values depend on the position."""
    array, workload = destination(replace(SMALL, src_order="LPBTH"))
    layer = workload.dst.layers[1]
    block = int(workload.dst_blocks[0]) * layer.block_stride + layer.parts[0].offset
    size = workload.dst.num_heads * workload.dst.head_nbytes
    first, second = array[block : block + size].copy(), array[block + size : block + 2 * size].copy()
    array[block : block + size], array[block + size : block + 2 * size] = second, first
    assert check_and_clear(array, workload).startswith("layer 1 part 0")


FOREVER = """
import sys
from rich.progress import Progress
from pdlink_bench import rounds
from pdlink_bench.workload import Workload
from pdlink.transport.mapped import MappedTransport

class Told(Progress):
    def advance(self, *args, **kwargs):
        print("round", flush=True)

if __name__ == "__main__":
    small = Workload(num_layers=1, num_heads=1, head_dim=8, num_tokens=8)
    settings = rounds.RoundSettings(layer_ms=(0.1,), rounds=1_000_000)
    try:
        contestants = {"mapped": rounds.Contestant(MappedTransport)}
        rounds.measure({"default": small}, contestants, settings, Told(disable=True))
    except KeyboardInterrupt:
        sys.exit(130)
"""


@pytest.mark.parametrize("end", ["Ctrl-C", "kill of the parent"])
def test_no_process_outlives_the_run(end: str, tmp_path: Path) -> None:
    script = tmp_path / "forever.py"
    script.write_text(FOREVER)
    path = os.pathsep.join(filter(None, sys.path))
    with subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": path},
    ) as parent:
        try:
            assert parent.stdout is not None
            assert parent.stderr is not None
            assert parent.stdout.readline() == "round\n"
            assert len(members(parent.pid)) >= 4
            if end == "Ctrl-C":
                os.killpg(parent.pid, signal.SIGINT)
                assert parent.wait(WAIT_S) == 130
                assert "Traceback" not in parent.stderr.read()
            else:
                parent.kill()
                parent.wait(WAIT_S)
            deadline_s = time.monotonic() + 20
            while (left := members(parent.pid)) and time.monotonic() < deadline_s:
                time.sleep(0.02)
            assert left == []
        finally:
            for pid in members(parent.pid):
                os.kill(pid, signal.SIGKILL)


def test_interrupt_while_one_process_ends_leaves_none_that_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C twice: multiprocessing joins its daemons at exit, and SIGTERM does not end one that is stopped."""
    lane = Lane(*(WorkerProcess(name, Standing) for name in ("first", "second")))
    ends: list[int] = []

    def interrupted(self: object, timeout: float | None = None) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    def run() -> None:
        with opened([lane]):
            for worker in lane.workers:
                ends.append(os.pidfd_open(worker.ask("pid", timeout_s=30.0)))
                worker.suspend()
            monkeypatch.setattr(SpawnProcess, "join", interrupted)
            raise SystemExit("the first one")

    with pytest.raises(KeyboardInterrupt):
        run()
    left = [end for end in ends if not select.select([end], [], [], 20)[0]]
    for end in left:
        signal.pidfd_send_signal(end, signal.SIGKILL)
    assert not left
    for end in ends:
        os.close(end)


def members(group: int) -> list[int]:
    """Living processes of a process group."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            pid, _, rest = stat.read_text().partition(" (")
        except (FileNotFoundError, ProcessLookupError):
            continue
        state, _, pgrp = rest.rpartition(") ")[2].split()[:3]
        if int(pgrp) == group and state not in "ZX":
            found.append(int(pid))
    return found


def test_summary_gives_interpolated_percentiles() -> None:
    summary = summarise([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (summary.p10, summary.median, summary.p90) == (1.4, 3.0, 4.6)
    with pytest.raises(ValueError, match="nothing was measured"):
        summarise([])


def test_a_ratio_compares_the_measurements_of_one_round() -> None:
    assert median_ratio([1.0, 10.0, 3.0], [2.0, 20.0, 3.0]) == 0.5


def test_machine_facts_are_known_on_linux() -> None:
    facts = machine_facts()
    assert facts["cpu"] != "unknown"
    assert int(facts["memory_nbytes"]) > 0
