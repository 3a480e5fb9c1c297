"""The report of `make gpu`: a row for every bar, whatever was measured, and nothing lost by a case that fails."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from pdlink_bench.gpu import bench, layers, serving
from pdlink_bench.gpu.figures import BARS, BY_ITSELF, CASES, MAPPED, SERVING, UCX, GpuFigure, Run, table

ROOT = Path(__file__).parents[2]


def figure(run: Run, name: str) -> GpuFigure:
    return next(one for one in run.complete() if one.name == name)


def test_every_bar_has_a_row_although_nothing_was_measured() -> None:
    run = Run(failures=dict.fromkeys(CASES, "not run"))
    shown = table(run.complete())
    for bar in BARS:
        (row,) = [line for line in shown.splitlines() if line.startswith(bar.figure)]
        assert f"{bar.ratio:g}" in row
        assert "not measured" in row
        assert "not run" in row
    assert {bar.case for bar in BARS} <= CASES.keys()


def test_a_ratio_is_judged_by_its_bar() -> None:
    assert GpuFigure("NHD to HND", 1.0, ratio=0.75).verdict == "met"
    assert GpuFigure("NHD to HND", 1.0, ratio=0.749).verdict == "MISSED"
    assert GpuFigure("exposed transfer time", 1.0, ratio=2 / 32).verdict == "met"
    assert GpuFigure("exposed transfer time", 1.0, ratio=0.063).verdict == "MISSED"
    assert GpuFigure("something else", 1.0, ratio=0.1).verdict == ""


def test_two_processes_are_compared_across_cases() -> None:
    run = Run(figures=[GpuFigure(MAPPED, 0.001, 268.0), GpuFigure(UCX, 0.0015)])
    one = figure(run, "mapped-cuda against UCX")
    assert one.ratio == pytest.approx(1.5)
    assert one.verdict == "MISSED"


def test_what_is_not_present_is_said_in_the_row_of_its_bar() -> None:
    run = Run(figures=[GpuFigure(MAPPED, 0.001), GpuFigure(UCX, None, note="not present: no UCX")])
    one = figure(run, "mapped-cuda against UCX")
    assert (one.verdict, one.note) == ("not measured", "not present: no UCX")


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    run = Run({"device": "some GPU"}, [], [GpuFigure("NHD to HND", 0.5, 3.0, "copy", 0.8)], {"ucx": "hung"})
    run.write(path)
    again = Run.read(path)
    assert again == run
    content = json.loads(path.read_text())
    assert content["machine"]["device"] == "some GPU"
    assert {one["name"] for one in content["figures"]} >= {bar.figure for bar in BARS}
    assert Run.read(tmp_path / "none") == Run()


def test_a_case_that_fails_is_told_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_case(case: str) -> tuple[dict[str, object], str]:
        if case == "kernels":
            return {}, "ended with -11: nothing said"
        return {"machine": {"device": "some GPU"}, "figures": [{"name": case, "seconds": 1.0}]}, ""

    monkeypatch.setattr(bench, "_run_case", run_case)
    path = tmp_path / "gpu.json"
    assert bench.main(["--out", str(path)]) == 1
    run = Run.read(path)
    good = [case for case in CASES if case not in ("kernels", *BY_ITSELF)]
    assert [one.name for one in run.figures] == good
    assert run.failures == {"kernels": "ended with -11: nothing said", **dict.fromkeys(BY_ITSELF, "not run")}
    stages = tmp_path / "stages"
    stages.write_text("build\tok\t30\nmemcheck\tnot run: out of time\t0\n")
    assert bench.main(["--show", str(path), "--stages", str(stages)]) == 1
    said = capsys.readouterr().out
    assert "not run: out of time  memcheck" in said
    assert "ended with -11" in said
    assert Run.read(path).stages[1]["outcome"] == "not run: out of time"


def test_a_case_that_is_measured_again_takes_the_place_of_its_figures_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stages of one visit and single stages of the next one add to the file of the card."""
    seconds = iter(range(1, 100))

    def run_case(case: str) -> tuple[dict[str, object], str]:
        return {"machine": {}, "figures": [{"name": case, "seconds": next(seconds)}]}, ""

    monkeypatch.setattr(bench, "_run_case", run_case)
    path = tmp_path / "gpu.json"
    for only in ("host", "serving", "host"):
        bench.main(["--out", str(path), "--only", only])
    run = Run.read(path)
    assert [(one.name, one.seconds) for one in run.figures] == [("serving", 2), ("host", 3)]
    assert run.failures == dict.fromkeys(CASES.keys() - {"serving", "host"}, "not run")


def test_a_pair_is_compared_with_nixl_of_the_same_run() -> None:
    ours, theirs = serving.figures({"pdlink": [0.03, 0.02, 0.5], "nixl": [0.6, 0.7, 0.5]}, "")
    assert (ours.name, ours.verdict) == (SERVING, "met")
    assert ours.ratio == pytest.approx(0.05)
    assert theirs.seconds == 0.6
    ours, theirs = serving.figures({"pdlink": [0.03]}, "NIXL is not here")
    assert (ours.seconds, ours.verdict, ours.note) == (0.03, "not measured", "NIXL is not here")


def test_a_layer_is_timed_through_nodes() -> None:
    """Over host memory: what `make gpu` does with a GPU's."""
    cpu_s, alone_s = layers.measure(layers.LayerWork(on_gpu=False, layers=3, tokens=512, rounds=2))
    assert 0 < cpu_s < alone_s


def test_a_run_is_good_only_with_every_bar_met(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    best = [GpuFigure(bar.figure, 1.0, ratio=0.0 if bar.at_most else 9.0) for bar in BARS]
    links = [GpuFigure(MAPPED, 1.0), GpuFigure(UCX, 9.0)]
    Run(figures=[*best, *links]).write(path)
    assert bench.main(["--show", str(path)]) == 0
    stages = tmp_path / "stages"
    for outcome, status in (
        ("ok", 0),
        ("absent: vLLM is not here", 0),
        ("FAILED (1)", 1),
        ("not run: out of time", 1),
    ):
        stages.write_text(f"build\tok\t30\nvLLM on the GPU\t{outcome}\t0\n")
        assert bench.main(["--show", str(path), "--stages", str(stages)]) == status, outcome
    stages.unlink()
    Run(figures=[*best, *links]).write(path)
    Run(figures=[*best[1:], *links]).write(path)
    assert bench.main(["--show", str(path)]) == 1


def test_a_case_ends_with_its_own_process(tmp_path: Path) -> None:
    """On a machine without a GPU every case fails, says why, and nothing hangs."""
    part, failure = bench._run_case("kernels")
    if not failure:
        pytest.skip("there is a GPU")
    assert part == {}
    assert failure.startswith("ended with 1: ")


def test_the_plan_is_shown_without_torch_or_a_gpu() -> None:
    """By the script people run; `-S` hides every installed package."""
    done = subprocess.run(
        [sys.executable, "-S", "-m", "pdlink_bench.gpu.figures"],
        env={"PYTHONPATH": str(ROOT / "benchmarks")},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert all(bar.figure in done.stdout for bar in BARS)


def test_the_script_builds_every_native_module_that_the_package_imports() -> None:
    """But the anchors, which are benchmarks' alone; _ucx is built if it can be."""
    modules = set(re.findall(r"pdlink_native\((\w+)", (ROOT / "CMakeLists.txt").read_text())) - {"_anchors"}
    script = (ROOT / "benchmarks" / "gpu" / "run.sh").read_text()
    built = {name for names in re.findall(r"--target ((?:_\w+ )+)\|\|", script) for name in names.split()}
    assert built == modules


def script(tmp_path: Path, commands: str, seconds: int = 600) -> str:
    """What the functions of the script say when they run these commands."""
    text = (ROOT / "benchmarks" / "gpu" / "run.sh").read_text()
    functions = re.findall(r"^(?:note|keep_logs|step)\(\) \{.*?^\}$", text, re.DOTALL | re.MULTILINE)
    assert len(functions) == 3
    files = f"results={tmp_path} work={tmp_path}/work log={tmp_path}/gpu.log outcomes={tmp_path}/stages"
    setting = f"set -u -o pipefail; {files} seconds={seconds} reserved=0"
    whole = "\n".join([setting, *functions, commands])
    done = subprocess.run(["bash", "-c", whole], capture_output=True, text=True, check=False, timeout=60)
    assert not done.stderr
    return done.stdout


def test_logs_of_servers_are_kept_of_a_stage_that_has_failed(tmp_path: Path) -> None:
    """By the functions of the script; what pytest shows of a server that has died is often the last line alone."""
    server = tmp_path / "work/pytest/one run0/pair"
    server.mkdir(parents=True)
    (server / "decode.log").write_text("x" * 300_000 + "the reason")
    script(tmp_path, "step good 60 true; step 'vLLM on it' 60 false")
    [kept] = (tmp_path / "gpu-logs").rglob("*.*")
    assert kept == tmp_path / "gpu-logs/vLLM-on-it/one run0_pair_decode.log"
    assert kept.read_text().endswith("xxx" + "the reason")
    assert kept.stat().st_size == 256 << 10
    assert "vLLM on it\tFAILED (1)" in (tmp_path / "stages").read_text()


def test_a_stage_ends_with_its_command_and_what_that_has_left(tmp_path: Path) -> None:
    """A process that has the output open, and the GPU, may not hold up the stages behind it."""
    said = script(tmp_path, "step first 60 bash -c 'sleep 1234 & echo left $!'; step second 60 echo done")
    assert said.splitlines()[::2] == ["== first (at most 60 s)", "== second (at most 60 s)"]
    left = int(said.splitlines()[1].removeprefix("left "))
    with suppress(OSError):  # it is reaped
        state = Path(f"/proc/{left}/stat").read_text().rpartition(") ")[2][0]
        assert state == "Z", "a killed process that nobody has reaped, under whichever name it was killed"
    assert (tmp_path / "gpu.log").read_text() == said
    assert [line.split("\t")[1] for line in (tmp_path / "stages").read_text().splitlines()] == ["ok", "ok"]


def test_a_stage_leaves_the_others_their_time_but_has_a_minute_itself(tmp_path: Path) -> None:
    steps = "reserved=500; step a 200 true; reserved=570; step b 200 true; seconds=40; step c 200 true; seconds=9"
    said = script(tmp_path, f"{steps}; step d 200 true")
    limits = [int(found) for found in re.findall(r"at most (\d+) s", said)]
    assert 80 <= limits[0] <= 90
    assert limits[1] == 200, "less than a minute would be left else"
    assert 20 <= limits[2] <= 30
    assert "== d: not run: out of time" in said


@pytest.mark.parametrize("kept", ["", "another digest"])
def test_carried_modules_are_taken_if_they_are_of_these_sources(tmp_path: Path, kept: str) -> None:
    """By the functions of the script: what takes a minute of two cores is not done on the machine with the GPU."""
    text = (ROOT / "benchmarks" / "gpu" / "run.sh").read_text()
    functions = re.findall(r"^(?:sources|take_modules)\(\) \{.*?^\}$", text, re.DOTALL | re.MULTILINE)
    (tmp_path / "tree/pdlink").mkdir(parents=True)
    carried = tmp_path / "wheels/modules"
    carried.mkdir(parents=True)
    (carried / "_cuda.abi3.so").write_text("a module")
    setting = f"set -u; cd {ROOT}; tree={tmp_path}/tree wheels={tmp_path}/wheels python=true"
    known = f"echo {kept}" if kept else "sources"
    commands = f"{known} > {carried}/sources; take_modules && echo taken"
    whole = "\n".join([setting, *functions, commands])
    done = subprocess.run(["bash", "-c", whole], capture_output=True, text=True, check=False, timeout=60)
    assert (done.stdout, done.stderr) == (("", "") if kept else ("taken\n", ""))
    assert [path.name for path in (tmp_path / "tree/pdlink").iterdir()] == ([] if kept else ["_cuda.abi3.so"])


def test_the_stages_of_the_script_have_times(tmp_path: Path) -> None:
    text = (ROOT / "benchmarks" / "gpu" / "run.sh").read_text()
    [stages] = re.findall(r"^stages=\((.*)\)$", text, re.MULTILINE)
    for name in ("most", "least"):
        [times] = re.findall(rf"^declare -A {name}=\((.*)\)$", text, re.MULTILINE)
        assert re.findall(r"\[(\S+)\]=\d+", times) == stages.split()


def test_a_file_names_the_gpu_although_no_case_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    assert bench.main(["--show", str(path), "--device", "some GPU"]) == 1
    assert json.loads(path.read_text())["machine"]["device"] == "some GPU"
    Run({"device": "the GPU of a case"}).write(path)
    bench.main(["--show", str(path), "--device", "some GPU"])
    assert json.loads(path.read_text())["machine"]["device"] == "the GPU of a case"
