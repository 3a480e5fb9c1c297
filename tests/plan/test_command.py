"""`pdlink plan` as people type it."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from pdlink.cli import main
from pdlink.plan.hits import cached_tokens
from pdlink.plan.traffic import read_trace

FEW = ["--requests", "400"]
CHAT = ["plan", "--prompt", "50:1000,99:8000", "--answer", "50:100,99:400", *FEW]


def said(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert main([*CHAT, *words]) in (0, 1)
    return capsys.readouterr().out.splitlines()


def test_the_split_comes_first_with_its_rate_and_what_limits_it(capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(capsys, "--workers", "8", "--rate", "20")
    assert "of 8 workers:" in lines[0]
    assert "the bottleneck is" in lines[0]
    assert any(line.startswith("For the 20.0 requests/s") for line in lines)
    assert any("*" in line for line in lines)


def test_a_link_slower_than_prefill_is_the_first_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "--workers", "4", "--link", "1.25")[0].startswith("P/D loses here: the link takes")
    assert not said(capsys, "--workers", "4", "--link", "25")[0].startswith("P/D loses")


def test_a_promise_that_nobody_can_keep_says_why_and_exits_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*CHAT, "--workers", "4", "--ttft", "0.02"]) == 1
    assert "of the prompts take longer to compute even without a queue" in capsys.readouterr().out
    assert main([*CHAT, "--workers", "4", "--per-token", "0.001"]) == 1
    assert "a decode step of one sequence takes" in capsys.readouterr().out


def test_json_has_the_splits_and_goes_alone_to_standard_output(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*CHAT, "--workers", "6", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    nums = [split["num_prefill"] for split in found["splits"]]
    assert nums == sorted(nums)
    assert set(nums) <= {1, 2, 3, 4, 5}
    assert len(nums) >= 3
    assert found["best"]["per_s"] == max(split["per_s"] for split in found["splits"])
    assert found["policies"] == "cost,least_loaded"
    assert found["curves"]["schema_version"] == 1


@pytest.mark.parametrize(
    "words",
    [
        ["plan"],
        ["plan", "none.jsonl"],
        [*CHAT, "--curves", "none.json"],
        [*CHAT, "--cache-tokens", "1000"],
        ["plan", "none.jsonl", "--prompt", "50:10", "--answer", "50:10"],
    ],
)
def test_what_cannot_be_planned_ends_with_2_and_a_sentence(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("pdlink: ")
    assert "expected" in error or "name a file" in error


def test_prompts_that_begin_alike_are_found_in_a_cache_that_is_large_enough(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    row = '{"timestamp": %d, "input_length": 1200, "output_length": 9, "hash_ids": [1, 2, %d]}\n'
    path.write_text(row % (0, 3) + row % (1, 4) + row % (2, 3))
    traffic = read_trace(path)
    assert cached_tokens(traffic, 10_000).tolist() == [0, 1024, 1199]
    assert cached_tokens(traffic, 1536).tolist() == [0, 1024, 1024]


class Proxy(BaseHTTPRequestHandler):
    """Answers 50 requests between two looks at its metrics."""

    looks = 0

    def do_GET(self) -> None:
        if self.path == "/metrics":
            num = 50 * Proxy.looks
            Proxy.looks += 1
            body = (
                f'pdlink_proxy_requests_total{{outcome="ok"}} {num}\n'
                f'pdlink_proxy_requests_total{{outcome="failed"}} {9 * num}\n'
                f'pdlink_proxy_time_to_first_token_seconds_sum{{first_leg="prefill"}} {num * 0.08}\n'
                f'pdlink_proxy_time_to_first_token_seconds_count{{first_leg="prefill"}} {num}\n'
            )
        else:
            body = json.dumps({"prefill": [{"state": "ok"}] * 3, "decode": [{"state": "ok"}, {"state": "draining"}]})
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None: ...


def test_a_live_fleet_gives_rate_and_workers_and_its_times_stand_beside_the_prediction(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Proxy.looks = 0
    with HTTPServer(("127.0.0.1", 0), Proxy) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        lines = said(capsys, "--live", f"127.0.0.1:{server.server_port}", "--live-s", "0.5")
        server.shutdown()
        thread.join()
    assert "of 4 workers:" in lines[0]
    assert any(line.startswith("Now: 3P1D at 100.0 requests/s") for line in lines)
    assert any(line.startswith("Mean time to first token: 80.0 ms at the proxy") for line in lines)
