"""`pdlink bench warm` on a small scale, and what it does not let pass."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdlink.cli import main
from pdlink_bench import warm
from pdlink_bench.http_load import WrongAnswer

WORDS = [
    "--tokens",
    "1024",
    "--turns",
    "1",
    "--rounds",
    "1",
    "--answer-tokens",
    "4",
    "--layers",
    "1",
    "--restarts",
    "1",
]


@pytest.mark.slow
@pytest.mark.e2e
def test_each_prompt_comes_from_where_its_row_says_and_nothing_is_left_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm, "MOST", {})  # a prompt this short proves nothing about time
    kept, directory = tmp_path / "kept.json", tmp_path / "disk"
    directory.mkdir()
    main(["bench", "warm", "--directory", str(directory), "--json", str(kept), *WORDS])
    found = json.loads(kept.read_text())
    restarted = [warm.DISK_FIRST, warm.DISK_TENTH, warm.PEER_FIRST, warm.PEER_TENTH]
    restarted += [warm.STORE_FIRST, warm.STORE_TENTH]
    rows = [warm.COLD, warm.MEMORY, warm.PEER, warm.DISK, warm.TURN, *restarted]
    assert {name: len(one["samples"]) for name, one in found["measured"]["measured"].items()} == dict.fromkeys(
        rows, 1
    )
    loaded = {name: one["loaded"] for name, (one,) in found["sources"].items()}
    assert loaded == {
        warm.COLD: 0,
        **dict.fromkeys((warm.MEMORY, warm.PEER, warm.DISK, *restarted), 1023),
        warm.TURN: 1024,
    }
    assert set(found["floor_s"]) == {warm.MEMORY, warm.PEER, warm.DISK, *restarted}
    assert list(directory.iterdir()) == []


@pytest.mark.parametrize(
    ("what", "places"), [(warm.COLD, {"memory": 256}), (warm.DISK, {"memory": 256}), (warm.MEMORY, {})]
)
def test_a_prompt_that_came_from_elsewhere_than_its_row_says_ends_the_run(what: str, places: dict[str, int]) -> None:
    with pytest.raises(WrongAnswer, match="from elsewhere"):
        warm._check(what, [{"loaded": sum(places.values()), "places": places}], 0)


def test_a_prompt_of_which_only_a_part_was_loaded_ends_the_run() -> None:
    sourced = {"loaded": 256, "places": {"disk": 256}}
    warm._check(warm.DISK, [sourced], 256)
    with pytest.raises(WrongAnswer, match="loaded 256 of 512 tokens"):
        warm._check(warm.DISK, [sourced], 512)
