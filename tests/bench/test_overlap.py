"""The overlap benchmark: a shaped link between two processes, or the reason why there is none."""

from __future__ import annotations

import argparse
import ctypes
import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pdlink_bench import overlap, shaped
from pdlink_bench.overlap import Lane, Point
from pdlink_bench.workload import Workload


def why_not() -> str:
    """Whether this machine permits such a link: tried in a process of its own."""
    try:
        shaped.check_tools()
    except shaped.LinkUnavailable as error:
        return str(error)
    script = (
        "import os, sys\nfrom pdlink_bench.shaped import LinkUnavailable, _Namespaced\nend = _Namespaced()\n"
        "try:\n    end.enter()\n"
        "    end.command('ip link add pdlink0 type veth peer name pdlink1'.split())\n    end.shape(1e9)\n"
        "except LinkUnavailable as error:\n    sys.exit(str(error))\n"
    )
    path = os.pathsep.join(filter(None, sys.path))
    tried = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
        env={**os.environ, "PYTHONPATH": path},
    )
    return tried.stderr.strip().splitlines()[-1] if tried.returncode else ""


def options(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    overlap.add_arguments(parser)
    return parser.parse_args(given)


def interfaces() -> set[str]:
    return set(os.listdir("/sys/class/net"))


def test_a_link_of_known_speed_is_measured_and_leaves_nothing_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if reason := why_not():
        pytest.skip(reason)
    before = interfaces()
    target, picture = tmp_path / "overlap.json", tmp_path / "overlap.png"
    small = [
        "--transport",
        "tcp",
        "--layers",
        "4",
        "--tokens",
        "16",
        "--layer-ms",
        "2",
        "--speeds",
        "1",
        "0.5",
        "--rounds",
        "2",
    ]
    status = overlap.run(options(*small, "--json", str(target), "--plot", str(picture)))
    kept = json.loads(target.read_text())["transports"]["tcp"]
    assert kept["problem"] == ""
    assert status == (0 if kept["met"] else 1)
    assert [(point["speed"], len(point["exposed_s"])) for point in kept["points"]] == [(1.0, 2), (0.5, 2)]
    # 256 KiB through half of the speed of compute cannot take less than what the bucket lets pass, less one burst.
    slow = kept["points"][1]
    least_s = (4 * 16 * 4096 - 2 * shaped.MIN_BURST_NBYTES) * 8 / slow["bits_per_s"]
    assert min(slow["whole_s"]) >= least_s
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "link as fast as compute" in capsys.readouterr().out
    assert interfaces() == before


def test_a_missing_permission_is_said_and_not_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Refusing:
        """A libc of somebody who may not."""

        def unshare(self, _: int) -> int:
            ctypes.set_errno(errno.EPERM)
            return -1

        mount = unshare

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: Refusing())
    with pytest.raises(shaped.LinkUnavailable, match="CAP_SYS_ADMIN"):
        shaped._Namespaced().enter()

    def refuse(lanes: list[Lane], *_: object) -> None:
        for lane in lanes:
            lane.measured.problem = (
                "tcp sender: LinkUnavailable: a network namespace needs CAP_SYS_ADMIN (root): unshare"
            )

    monkeypatch.setattr(overlap, "check_tools", lambda: None)
    monkeypatch.setattr(overlap, "measure", refuse)
    assert overlap.run(options()) == 2
    assert "CAP_SYS_ADMIN" in capsys.readouterr().err


def test_missing_tools_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert overlap.run(options()) == 2
    assert "iproute2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("compute_s", "least_s"),
    [(0.1, 0.025), (0.2, 0.025), (0.8, 0.025), (0.05, 0.075)],
)
def test_the_least_is_one_layer_and_what_the_link_did_not_keep_up_with(compute_s: float, least_s: float) -> None:
    point = Point(1.0, whole_s=[0.1], exposed_s=[0.05])
    assert point.theory_s(compute_s, 4) == [pytest.approx(least_s)]
    assert point.layers(4).median == pytest.approx(2.0)


def test_the_bar_is_about_a_link_as_fast_as_compute() -> None:
    lane = Lane("tcp", Workload(num_layers=4))
    lane.points = [Point(0.5, whole_s=[1.0], exposed_s=[0.9]), Point(1.0, whole_s=[1.0], exposed_s=[0.3])]
    assert overlap.met(lane)
    lane.points[1].exposed_s = [0.4]
    assert not overlap.met(lane)
