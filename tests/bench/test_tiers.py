"""`pdlink bench tiers` on a small scale: what it measures is compared, and kept."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest

from pdlink.cli import main
from pdlink.store.tiers.disk import Disk
from pdlink_bench import tier_cold, tier_first, tier_lanes, tier_lookup, tier_valkey, tiers

WORDS = ["--sizes", "64", "--turn", "1", "--rounds", "2", "--entries", "2000", "--restarts", "1"]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small segments, and bars that a busy machine meets, too: how fast something is decides no test."""
    monkeypatch.setattr(tiers, "SEGMENT_NBYTES", 40 << 20)
    monkeypatch.setattr(tiers, "COLD_SIZES", tier_cold.ColdSizes(8 << 20, 24 << 20, 64 << 20))
    monkeypatch.setattr(tier_cold, "BARS", {})
    monkeypatch.setattr(tiers, "FIRST_SIZES", tier_first.FirstSizes(1024, 1))
    monkeypatch.setattr(tier_first, "MOST", {"disk": 1000.0})
    monkeypatch.setattr(tiers, "MOST_LOOKUP_S", 60.0)
    monkeypatch.setattr(tiers, "MOST_RESTART_S", 60.0)
    monkeypatch.setattr(tiers, "MOST_START_S", 60.0)
    monkeypatch.setattr(tier_lookup, "LEAST_HASHED", {("array", 256): 1.0})


def test_every_lane_has_figures_and_nothing_is_left_on_the_disk(tmp_path: Path) -> None:
    kept, directory = tmp_path / "kept.json", tmp_path / "disk"
    directory.mkdir()
    assert main(["bench", "tiers", "--directory", str(directory), "--json", str(kept), *WORDS]) == 0
    found = json.loads(kept.read_text())
    disks = {"bare", "bare, parts", "bare, 4 KiB pages", "disk", "disk, copied", "disk, copied, checked"}
    assert set(found["disk"]["65536"]) == disks
    assert set(found["memory"]["65536"]) == {
        *("memcpy", "non-temporal", "memcpy, runs", "non-temporal, runs", "memory", "peer, mapped", "peer, tcp")
    }
    assert set(found["lookup_cpu_s"]) == {"array", "list"}
    assert all(took_s > 0 for took_s in found["lookup_cpu_s"].values())
    assert [rate[:2] for rate in found["hashed"]] == [["array", 16], ["array", 256], ["list", 16], ["list", 256]]
    assert all(per_s > 0 for rate in found["hashed"] for per_s in rate[2:])
    library_s, process_s, taken_nbytes = found["start"]
    assert 0 < library_s < process_s
    assert taken_nbytes <= 64 << 20, "memory comes when it is needed"
    for place in ("disk", "memory"):
        for name, lane in found[place]["65536"].items():
            measured = ("get", "get CPU") if name.startswith("peer") else ("put", "put CPU", "get", "get CPU")
            assert {name: len(one["samples"]) for name, one in lane["measured"].items()} == dict.fromkeys(measured, 2)
    times = {"store, first", "store, tenth", "burst, first", "load, first", "load, tenth"}
    tokens = {"store, tokens": 16.0, "burst, tokens": 80.0, "load, tokens": 16.0}
    for lane in ("ours", "bare"):
        cold = {name: one["median"] for name, one in found["cold"][lane]["measured"].items()}
        assert cold.keys() == times | tokens.keys()
        assert {name: cold[name] for name in tokens} == tokens
    times = {"first", "in blocks", "blocks", "bare"}
    assert {place: set(one["measured"]) for place, one in found["first"].items()} == {"disk": times}
    assert list(directory.iterdir()) == []


def test_a_burst_of_which_a_part_is_not_on_disk_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_cold, "Disk", lambda path, name, _, **more: Disk(path, name, 12 << 20, **more))
    with pytest.raises(OSError, match="of 5 records of a burst are on disk"):
        tier_cold.OurStart(str(tmp_path), tier_cold.ColdSizes(8 << 20, 24 << 20, 64 << 20)).burst()


def test_a_cold_run_that_loses_records_ends_with_one_and_says_how_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tiers, "COLD_SIZES", tier_cold.ColdSizes(8 << 20, 24 << 20, 6 << 20))
    assert main(["bench", "tiers", "--directory", str(tmp_path), "--places", "cold", *WORDS]) == 1
    assert capsys.readouterr().err == "ours, burst: OSError: 1 of 5 records of a burst are on disk\n"


@pytest.mark.parametrize("num_entries", [1, 9, 2000])
def test_a_restart_is_measured_with_any_number_of_entries(tmp_path: Path, num_entries: int) -> None:
    assert min(tiers.restart_s(tmp_path, num_entries)) > 0


def test_a_store_that_is_not_installed_is_left_out_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--directory", str(tmp_path), "--places", "memory", "--peers", "LMCache LocalCPU", *WORDS]
    assert main(["bench", "tiers", *words]) == 0
    assert "LMCache LocalCPU is left out" in capsys.readouterr().out


def test_a_lane_that_gives_other_bytes_back_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tier_lanes.DiskLane, "get", lambda _: None)
    assert main(["bench", "tiers", "--directory", str(tmp_path), *WORDS]) == 1
    assert "disk: other bytes were read than written" in capsys.readouterr().err


def test_a_server_or_client_that_is_not_installed_is_left_out_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    assert main(["bench", "tiers", "--directory", str(tmp_path), "--places", "valkey", *WORDS]) == 0
    assert "valkey is left out: no valkey-server" in capsys.readouterr().out


def test_a_server_that_make_has_unpacked_beside_python_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    program = tmp_path / "servers/bin/redis-server"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\necho Ready to accept connections\n")
    program.chmod(0o700)
    with closing(tier_valkey.ValkeyServer()) as server:
        assert server.path.endswith("valkey")
