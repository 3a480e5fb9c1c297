"""The verdict: when it is ok, and that it says everything it knows."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from pdlink.cli import main
from pdlink.config import WorkerConfig
from pdlink_bench.chaos import command, report
from pdlink_bench.chaos.judge import ClientEnd, ClientReply, ExchangeTally, Expected, KnownRequest
from pdlink_bench.chaos.ledger import HeldResources

CASE = KnownRequest("/v1/completions", {}, Expected("abc", "length", (1, 3)))
RIGHT = ClientReply(end=ClientEnd.COMPLETE, status=200, text="abc", finish_reason="length", usage=(1, 3), ended_s=1.0)
WRONG = ClientReply(end=ClientEnd.COMPLETE, status=200, text="abX", finish_reason="length", usage=(1, 3), ended_s=1.0)
CUT = ClientReply(end=ClientEnd.BROKEN, detail="reset", started_s=1.0, ended_s=2.0)


def verdict_of(*replies: ClientReply, absences: list[tuple[float, float]] | None = None) -> report.RunVerdict:
    tally = ExchangeTally()
    for reply in replies:
        tally.add(CASE, reply)
    verdict = report.RunVerdict("pdlink chaos", seed=7, seconds=60)
    verdict.take(tally, absences or [])
    return verdict


def printed(verdict: report.RunVerdict) -> str:
    out = io.StringIO()
    Console(file=out, width=160).print(report.final(verdict))
    return out.getvalue()


def test_right_answers_only_are_ok() -> None:
    verdict = verdict_of(RIGHT, RIGHT)
    assert verdict.ok
    assert "verdict: ok" in printed(verdict)
    assert "seed 7" in printed(verdict)


@pytest.mark.parametrize("replies", [(RIGHT, WRONG), (RIGHT, CUT), (CUT,), ()], ids=str)
def test_anything_that_must_not_be_fails_the_verdict_and_is_named(replies: tuple[ClientReply, ...]) -> None:
    verdict = verdict_of(*replies)
    assert not verdict.ok
    assert "verdict: FAILED" in printed(verdict)
    for problem in verdict.problems:
        assert problem.split(":")[0] in printed(verdict)


def test_more_wrong_answers_than_are_kept_are_still_counted() -> None:
    verdict = verdict_of(RIGHT, *[WRONG] * 60)
    assert verdict.outcomes["wrong"] == 60
    assert "and 10 more wrong or unsettled requests" in verdict.problems


def test_a_cut_while_the_proxy_was_away_is_ok() -> None:
    assert verdict_of(RIGHT, CUT, absences=[(0.5, 1.5)]).ok


def test_the_json_holds_the_command_the_seed_and_the_verdict() -> None:
    value = json.loads(json.dumps(verdict_of(RIGHT, WRONG).json()))
    assert (value["verdict"], value["seed"], value["command"]) == ("failed", 7, "pdlink chaos")
    assert value["outcomes"]["wrong"] == 1


def test_the_live_table_shows_every_process() -> None:
    out = io.StringIO()
    held = {
        "decode-0": HeldResources(blocks=5, quarantined_blocks=2),
        "decode-1": HeldResources(unreadable="does not answer"),
    }
    states = {"decode-0": "up", "decode-1": "up", "proxy": "away"}
    Console(file=out, width=120).print(report.live("title", states, held, ExchangeTally(), 3, "faults: kill"))
    text = out.getvalue()
    assert all(label in text for label in states)
    assert "3 running" in text


@pytest.mark.parametrize(
    "flags",
    [
        ["--faults", "kill,nap"],
        ["--seconds", "0"],
        ["--every", "-1"],
        ["--set", "no_equals"],
        ["--set", "cache.num_blocks=["],
        ["--url", "http://127.0.0.1:1", "--set", "cache.num_blocks=5"],
        ["--url", "http://127.0.0.1:1", "--drop", "0.1"],
    ],
    ids=str,
)
def test_flags_that_make_no_sense_are_refused_before_anything_starts(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chaos", *flags]) == 2
    assert "pdlink: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "num_blocks", "ucx_tls"),
    [
        ([], command.FULL_BLOCKS, "auto"),
        (["--faults", "kill"], 1024, "auto"),
        (["--blocks", "7", "--ucx-tls", "tcp"], 7, "tcp"),
        (["--set", "cache.num_blocks=9"], 9, "auto"),
    ],
)
def test_flags_reach_the_workers_it_starts(
    flags: list[str], num_blocks: int, ucx_tls: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[WorkerConfig] = []

    async def run_local(_: object, prefill: WorkerConfig, decode: WorkerConfig, *more: object) -> report.RunVerdict:
        started.extend([prefill, decode])
        return report.RunVerdict("command", 0, 1.0)

    monkeypatch.setattr(command, "run_local", run_local)
    assert main(["chaos", *flags]) == 0
    assert [worker.role for worker in started] == ["prefill", "decode"]
    assert {(worker.cache.num_blocks, worker.transport.ucx.tls) for worker in started} == {(num_blocks, ucx_tls)}


def test_a_url_without_a_proxy_is_said_to_be_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", "--url", "http://127.0.0.1:1", "--seconds", "1"]) == 1
    assert "does not describe a pdlink proxy" in capsys.readouterr().err


def test_help_of_the_command_names_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["chaos", "--help"])
    text = capsys.readouterr().out
    assert all(flag in text for flag in ("--seed", "--url", "--every", "--drop", "--blocks"))
