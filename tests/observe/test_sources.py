"""Where the KV of prompts comes from, as metrics and the timeline show it."""

from __future__ import annotations

from pdlink.events import PromptSourced
from pdlink.observe.metrics import WorkerMetrics
from pdlink.observe.timeline import Timeline
from pdlink.observe.trace import Laid, make
from tests.observe.traced import events_of

EVENT = PromptSourced(
    at_s=2.0,
    request_id="r",
    cached=16,
    loaded=240,
    received=0,
    computed=44,
    found=256,
    reason="faster",
    load_s=0.01,
    other_s=0.5,
    began_s=1.5,
    places={"memory": 128, "disk": 64, "peer 127.0.0.1:9": 48},
)


def test_every_token_of_a_prompt_is_counted_under_one_source() -> None:
    metrics = WorkerMetrics(store=True)
    for _ in range(2):
        metrics.counting(EVENT)
    lines = metrics.exposition()[0].decode().splitlines()
    found = (("device", 32), ("host", 256), ("disk", 128), ("peer", 96), ("prefill", 0), ("computed", 88))
    for source, tokens in found:
        assert f'pdlink_prompt_tokens_total{{source="{source}"}} {float(tokens)}' in lines
    assert 'pdlink_store_choices_total{reason="faster"} 2.0' in lines


def test_the_timeline_shows_a_load_with_its_reason_and_both_estimates() -> None:
    timeline = Timeline("prefill-0")
    timeline(EVENT)
    (shown,) = (event for event in events_of(make([Laid(timeline.dump())]).data) if event.track.startswith("prompts"))
    assert (shown.kind, shown.end_s - shown.begin_s) == ("slice", 0.5)
    assert shown.name == "240 loaded (faster)"
    assert (shown.args["load_s"], shown.args["other_s"], shown.args["computed"]) == (0.01, 0.5, 44)


def test_a_prompt_is_found_by_the_id_that_its_caller_gave() -> None:
    timeline = Timeline("prefill-0")
    timeline(EVENT)
    assert timeline.sources("") == [], "nobody named it"
    timeline.named("r", "theirs", "prefill")
    timeline.named("s", "x" * 257, "prefill")
    timeline(EVENT)
    timeline(EVENT)
    told = [(each.leg, each.loaded, each.reason) for each in timeline.sources("theirs")]
    assert told == [("prefill", 240, "faster")] * 2
    assert timeline.sources("other") == []
