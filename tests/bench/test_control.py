"""`pdlink bench control` measures what it says, between real processes."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from pdlink_bench import control
from pdlink_bench.ends import ReceivingEnd, SendingEnd
from pdlink_bench.transfer import TRANSPORTS
from pdlink_bench.workers import WorkerFailed

SHORT = ("--rounds", "1", "--alone", "5", "--count", "40", "--windows", "4", "--idle-s", "0.2")


def options(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    control.add_arguments(parser)
    return parser.parse_args(given)


def test_everything_is_measured_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, picture = tmp_path / "control.json", tmp_path / "control.png"
    written = ("--json", str(file), "--plot", str(picture))
    assert control.run(options(*SHORT, "--transport", "mapped", *written)) == 0
    assert picture.stat().st_size > 1000
    mapped = json.loads(file.read_text())["transports"]["mapped"]
    samples = {name: len(summary["samples"]) for name, summary in mapped["measured"].items()}
    assert samples == {
        "round trip": 5,
        "offer to ready": 5,
        "in round trips": 1,
        "per second, 4 at once": 1,
        "sender CPU seconds per transfer, 4 at once": 1,
        "receiver CPU seconds per transfer, 4 at once": 1,
        **{f"{end} CPU, idle": 1 for end in ("sender", "receiver")},
    }
    assert mapped["lane"] == "mapped"
    assert "mapped" in capsys.readouterr().out


def test_transport_that_fails_is_reported_and_the_run_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def turn(self: control.ControlLane, keep: bool) -> None:
        raise WorkerFailed("it broke")

    monkeypatch.setattr(control.ControlLane, "turn", turn)
    assert control.run(options(*SHORT, "--transport", "mapped")) == 1
    assert "mapped: it broke" in capsys.readouterr().out


@pytest.mark.parametrize("window", [1, 3, 50])
def test_ends_move_every_transfer_whatever_the_window(window: int) -> None:
    """More, fewer and as many as there are to be had at once."""
    sender, receiver = SendingEnd(2, TRANSPORTS["mapped"]), ReceivingEnd(2, TRANSPORTS["mapped"])
    try:
        address, _ = sender.start(), receiver.start()
        sender.feed("t", 20, window)
        assert receiver.many("t", 20, window, address) > 0
    finally:
        receiver.close()
        sender.close()
