"""Words of others are shown as they are: brackets are no markup, control characters do not reach the terminal."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from pdlink.observe import cache_command, explain, top
from pdlink.observe.plain import plain
from pdlink_bench.chaos import report
from pdlink_bench.chaos.judge import ExchangeTally
from pdlink_bench.chaos.ledger import HeldResources

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import RenderableType

HOSTILE = "[/x]:smile:\x1b[2J\x9b\r[bold]"
SHOWN = "[/x]:smile:\N{REPLACEMENT CHARACTER}[2J\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}[bold]"


def _explain() -> RenderableType:
    legs = {"prefill": HOSTILE, "prefill_load": 1.0, "decode": HOSTILE, "decode_load": None}
    said = dict.fromkeys(("request_id", "verdict", "reason", "why"), HOSTILE)
    decision = {**said, **legs, "tokens": 7, "at_s": 5.0, "waited_s": 0.1, "cached_tokens": 2}
    times = {"queued_s": 0.1, "prefill_s": 0.2, "ttft_s": 0.3, "total_s": 0.4, "legs": [], "kv": HOSTILE}
    times |= {"prompt_tokens": HOSTILE, "estimated": True}
    moved: dict[str, Any] = {
        **dict.fromkeys(("transfer_id", "peer", "lane", "state", "reason"), HOSTILE),
        "side": "sender",
    }
    moved |= {"nbytes": 1, "layers": 8, "moving_s": 0.1, "exposed_s": 0.1}
    sources = [{"worker": HOSTILE, "error": HOSTILE}]
    return explain.table_of(explain.Explained([decision], sources, times, 0.5, [moved]))


def _cache_stats() -> list[RenderableType]:
    place = {"name": HOSTILE, "nbytes": 1, "capacity_nbytes": 2, "records": 3, "answers": True}
    pin = {"holder": HOSTILE, "request": HOSTILE, "records": 1, "nbytes": 1, "age_s": None, "ends_in_s": None}
    sizes = {"pinned_nbytes": 1, "pin_quota_nbytes": 2, "writing": 0, "frozen": False}
    scope = dict.fromkeys(("scope", "model", "chunk_tokens", "revision"), HOSTILE) | {"record_nbytes": [1]}
    session = {"name": HOSTILE, "records": 1, "asked": 2, "nbytes": 1, "waits": True, "ends_in_s": 1.0}
    shown = {"pins": [pin], "leases": [pin], "sessions": [session], "scopes": [scope], "sessions_nbytes": 1}
    state = {"places": [place], **shown, **sizes}
    return cache_command._tables(state)


def _verdict() -> RenderableType:
    said = {"errors": {HOSTILE: 1}, "faults": {HOSTILE: 1}, "held": {HOSTILE: HOSTILE}, "problems": [HOSTILE]}
    return report.final(report.RunVerdict("pdlink chaos", seed=7, seconds=1, **said))  # type: ignore[arg-type]


def _top() -> RenderableType:
    figures = {"ttft_p50_ms": None, "ttft_p95_ms": None, "per_token_p50_ms": None, "exposed_share": None}
    worker = {"label": HOSTILE, "state": HOSTILE, "in_flight": HOSTILE, "reason": HOSTILE}
    pair = dict.fromkeys(("prefill", "decode", "state", "lane", "reason"), HOSTILE) | {"gb_per_s": None}
    transfer = dict.fromkeys(("transfer_id", "worker", "peer", "lane", "layers"), HOSTILE)
    request: dict[str, Any] = dict.fromkeys(
        ("request_id", "outcome", "kv", "prompt_tokens", "prefill", "decode"), HOSTILE
    ) | {"estimated": True}
    return top.picture(
        {
            "verdict": {"level": "bad", "text": HOSTILE},
            "findings": [{"level": "bad", "about": HOSTILE, "text": HOSTILE}] * 2,
            "summary": figures,
            "running": HOSTILE,
            "queued": HOSTILE,
            "workers": [worker | {"requests": None, "held": None}],
            "pairs": [pair, pair | {"state": "refused"}, pair | {"lane": ""}],
            "live": [transfer | {"nbytes": 1, "age_s": 1}],
            "requests": [request | dict.fromkeys(("queued_s", "ttft_s", "total_s"))],
        },
        600,
    )


def printed(*shown: RenderableType) -> str:
    out = io.StringIO()
    Console(file=out, width=600, highlight=False).print(*shown)
    return out.getvalue()


@pytest.mark.parametrize(
    ("shown", "times"),
    [
        (lambda: [_explain()], 5),
        (_cache_stats, 6),
        (lambda: [cache_command._rates({HOSTILE: 1.0})], 1),
        (
            lambda: [
                report.live("", {HOSTILE: HOSTILE}, {HOSTILE: HeldResources(blocks=1)}, ExchangeTally(), 1, HOSTILE)
            ],
            3,
        ),
        (lambda: [_verdict()], 5),
        (lambda: [_top()], 20),
    ],
    ids=["explain", "cache-stats", "cache-rates", "chaos-live", "chaos-verdict", "top"],
)
def test_every_table_shows_words_of_others_as_they_are(shown: Callable[[], list[Any]], times: int) -> None:
    text = printed(*shown())
    assert text.count("[/x]:smile:\N{REPLACEMENT CHARACTER}") >= times
    assert not {"\x1b", "\x9b", "\r"} & set(text)


def test_plain_replaces_control_characters_and_keeps_lines() -> None:
    assert plain(f"a\n{HOSTILE}").plain == f"a\n{SHOWN}"
    assert plain(7).plain == "7"
    assert printed(plain(HOSTILE)) == f"{SHOWN}\n"


def test_the_name_of_a_pin_may_have_brackets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from pdlink.cli import main

    monkeypatch.setattr(cache_command, "ask", lambda *_, **__: (200, b'{"tokens": 3}'))
    assert main(["cache", "pin", "127.0.0.1:1", "--tokens", "1", "--name", "[/x]"]) == 0
    assert capsys.readouterr().out == "3 tokens are pinned as [/x]\n"
