"""The ledger: what workers and the kernel say is held."""

from __future__ import annotations

import mmap
import os
import socket
import tempfile

import pytest

from pdlink_bench.chaos import ledger
from pdlink_bench.chaos.ledger import HeldResources, held, left_behind, parse_metrics, process, segments

METRICS = """\
# HELP pdlink_blocks Blocks of the KV pool
pdlink_blocks{state="free"} 40.0
pdlink_live_transfers{side="sender",state="waiting"} 1.0
pdlink_live_transfers{side="sender",state="early"} 2.0
pdlink_live_transfers{side="receiver",state="draining"} 1.0
pdlink_quarantined_blocks 7.0
pdlink_sessions{state="closing"} 1.0
pdlink_sessions{state="live"} 2.0
pdlink_transfer_bytes_total{transport="tcp"} 1.5e+06
pdlink_fallbacks_total{kind="recompute",reason="peer_lost"} 4.0
pdlink_transfers_total{side="sender",state="done"} 3.0
"""
HEALTH = {"num_blocks": 64, "free_blocks": 54, "running": 1, "waiting": 2}


def test_what_is_held_is_added_up_from_health_and_metrics() -> None:
    found = held(HEALTH, parse_metrics(METRICS))
    assert found == HeldResources(
        blocks=10,
        requests=3,
        sender_transfers=3,
        receiver_transfers=1,
        quarantined_blocks=7,
        closing_peers=1,
        live_peers=2,
        moved_nbytes=1_500_000,
        fallbacks=4,
    )
    assert not found.idle
    assert found.leaked == 10


def test_a_worker_is_idle_with_sessions_and_nothing_else() -> None:
    assert HeldResources(live_peers=3).idle
    assert not HeldResources(quarantined_blocks=1).idle
    assert not HeldResources(closing_peers=1).idle
    assert not HeldResources(unreadable="does not answer").idle


@pytest.mark.usefixtures("steady_descriptors")
def test_descriptors_are_counted_by_kind_and_http_connections_are_not() -> None:
    before = process(os.getpid(), set())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)), listener.accept()[0]:
            assert process(os.getpid(), set()).num_fds == before.num_fds + 3
            assert process(os.getpid(), {port}).num_fds == before.num_fds + 1, "the listener stays"
    assert before.threads >= 1
    assert before.rss_mib > 1


def test_a_process_that_has_gone_holds_nothing() -> None:
    assert process(2**22 + 1, set()).num_fds == 0


def test_a_segment_is_left_behind_when_nobody_has_it_mapped() -> None:
    with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="pdlink-test-") as file:
        file.write(b"x" * mmap.PAGESIZE)
        file.flush()
        assert file.name in segments()
        with mmap.mmap(file.fileno(), mmap.PAGESIZE):
            assert file.name not in segments()
    assert file.name not in segments()


async def test_a_segment_that_another_program_opens_a_moment_later_is_not_left_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tests and browsers beside the run make some; the verdict was that the run had left them."""
    looks = iter([{"old", "ours", "of another program"}, {"old", "ours"}])
    monkeypatch.setattr(ledger, "segments", lambda: next(looks))
    assert await left_behind({"old"}, 0.0) == {"ours"}
