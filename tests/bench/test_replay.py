"""Hit rates of a replay: against hand-made traces, and Belady's against a search through everything."""

from __future__ import annotations

import json
from functools import cache
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdlink.cli import main
from pdlink.errors import ConfigError
from pdlink.store.ingestion import INGESTIONS, make_ingestion
from pdlink.store.policies.base import Key
from pdlink.store.policies.registry import POLICIES, make_policy
from pdlink_bench import replay
from pdlink_bench.replay import ReplayedRequest


def prompts(*texts: str) -> list[ReplayedRequest]:
    """A letter is a block; equal prefixes share theirs."""
    return [
        ReplayedRequest(len(text) * replay.BLOCK_TOKENS, tuple(text[: end + 1].encode() for end in range(len(text))))
        for text in texts
    ]


def test_a_hit_ends_at_the_first_block_that_is_not_there() -> None:
    requests = prompts("abcd", "xyz", "abcd")
    assert replay.hit_rate(requests, make_policy("lru"), 5) == pytest.approx(2 / 11)  # of abcd, "a" and "ab" are left


def test_tokens_of_a_partial_last_block_count_as_many_as_they_are() -> None:
    keys = (b"1", b"2")
    requests = [ReplayedRequest(600, keys), ReplayedRequest(600, keys)]
    assert replay.hit_rate(requests, make_policy("lru"), 9) == pytest.approx(0.5)


@given(texts=st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=7), size=st.integers(1, 3))
def test_belady_is_the_best_that_any_choice_could_reach(texts: list[str], size: int) -> None:
    requests = prompts(*texts)

    @cache
    def most(index: int, resident: frozenset[Key]) -> int:
        if index == len(requests):
            return 0
        request = requests[index]
        hits = request.tokens_of(replay.leading(request.keys, resident))
        everything = resident | set(request.keys)
        kept = combinations(sorted(everything), min(size, len(everything)))
        return hits + max(most(index + 1, frozenset(one)) for one in kept)

    assert replay.best_hit_rate(requests, size) * replay.num_tokens(requests) == pytest.approx(most(0, frozenset()))


def test_no_policy_is_better_than_belady_and_adaptive_is_near_the_best() -> None:
    requests = replay.made_up_trace(seed=1, num_requests=1500)
    sizes = (300, 1000, 4000)
    rates = {name: [replay.hit_rate(requests, make_policy(name), size) for size in sizes] for name in POLICIES}
    for row in rates.values():
        for rate, size in zip(row, sizes, strict=True):
            assert rate <= replay.best_hit_rate(requests, size)
    ratio = replay.adaptive_to_best(rates)
    assert ratio is not None
    assert ratio >= replay.ADAPTIVE_AT_LEAST


def test_each_ingestion_writes_below_what_it_says() -> None:
    requests = prompts("a", "b", "b", "b", "c", "a", "a")
    found = {name: replay.two_tiers(requests, "lru", make_ingestion(name), 2, 10) for name in INGESTIONS}
    written = {name: round(one.written_share * 4) for name, one in found.items()}  # a, b, c and a again come into RAM
    # evicted: a, b; hot: b with its second hit; second sight: b with its first, and a when it comes again
    assert written == {"all": 3, "evicted": 2, "hot": 1, "second_sight": 2}
    assert found["evicted"].hit_rate > found["second_sight"].hit_rate


def test_what_second_sight_remembers_is_bounded() -> None:
    one = INGESTIONS["second_sight"]()
    one._history_keys = 100  # type: ignore[attr-defined]
    for number in range(1000):
        assert not one.on_put(number.to_bytes(32, "little"))
    assert len(one._seen) == 100  # type: ignore[attr-defined]
    assert one.on_put((999).to_bytes(32, "little"))


def test_the_command_replays_a_file_and_keeps_every_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, kept = tmp_path / "trace.jsonl", tmp_path / "kept.json"
    rows = [{"input_length": 1024, "hash_ids": [number % 3, 10 + number % 3]} for number in range(30)]
    trace.write_text("\n".join(map(json.dumps, rows)))
    words = ["--policy", "lru", "adaptive", "--sizes", "4", "--tiers", "2:4", "--json", str(kept)]
    assert main(["bench", "replay", str(trace), *words]) == 0
    assert "30 requests" in capsys.readouterr().out
    found = json.loads(kept.read_text())
    assert found["sizes"] == [4]
    assert found["belady"][0] >= max(found["rates"]["lru"][0], found["rates"]["adaptive"][0])


@pytest.mark.parametrize("line", ["no json", "[1]", '{"input_length": 5}', '{"input_length": 5, "hash_ids": 3}', ""])
def test_a_trace_that_cannot_be_read_is_refused_with_the_line(line: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(line)
    with pytest.raises(ConfigError, match=r"trace\.jsonl.*expected"):
        replay.read_trace(trace)
