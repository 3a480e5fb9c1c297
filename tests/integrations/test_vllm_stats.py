"""What a rank tells vLLM of its gauges: changes, which add up."""

from __future__ import annotations

from typing import Any

from pdlink.integrations.stats import Counts, add_up, in_short, link_state
from pdlink.node.report import NodeReport

PEER = {"peer": "decode/0", "address": "tcp://a:1", "state": "ready", "transport": "tcp", "lane": "tcp/eth0"}


def report(**more: Any) -> NodeReport:
    said: dict[str, Any] = {"epoch": "e", "fingerprint": "f", "failure": "", "stalled_s": 0.0, "sending": {}}
    said |= {"receiving": {}, "quarantined_blocks": 0, "num_peers": 0, "num_closing": 0, "peers": [], "refused": []}
    said |= {"push_nbytes": {"waiting": 0, "in_flight": 0}, "control_nbytes": {"early": 0, "queued": 0}}
    return NodeReport(**(said | more))


def test_a_gauge_is_told_as_its_change_and_only_then() -> None:
    counts, reports = Counts(), [report(sending={"writing": 2}, num_peers=1, peers=[PEER])]
    counts.look = lambda link, _: link.set(link_state(reports))
    assert counts.take() == {
        "pdlink_live_transfers|sender|writing": 2.0,
        "pdlink_sessions|live": 1.0,
        "pdlink_session_info|decode/0|tcp|tcp/eth0": 1.0,
    }
    assert counts.take() == {}
    live = "pdlink_live_transfers|sender"
    reports[0] = report(sending={"writing": 1, "draining": 1}, num_peers=1, peers=[PEER])
    assert counts.take() == {f"{live}|writing": -1.0, f"{live}|draining": 1.0}
    reports.clear()
    assert counts.take() == {
        f"{live}|writing": -1.0,
        f"{live}|draining": -1.0,
        "pdlink_sessions|live": -1.0,
        "pdlink_session_info|decode/0|tcp|tcp/eth0": -1.0,
    }


def test_shards_of_a_rank_are_told_together() -> None:
    one = report(quarantined_blocks=2, push_nbytes={"waiting": 5, "in_flight": 1}, receiving={"waiting": 1})
    other = report(quarantined_blocks=3, push_nbytes={"waiting": 1, "in_flight": 0}, receiving={"waiting": 2})
    state = link_state([one, other])
    assert (state.quarantined_blocks, state.push_nbytes["waiting"], state.receiving["waiting"]) == (5, 6, 3)


def test_changes_of_gauges_are_no_part_of_the_log_line() -> None:
    total = add_up({"pdlink_sessions|live": 1.0, "pdlink_x_total": 2.0}, {"pdlink_sessions|live": 1.0})
    assert total["pdlink_sessions|live"] == 2.0
    assert in_short(total) == {"x": 2.0}
