"""`pdlink bench curves` against a server that answers like one: a file comes of it that `pdlink plan` reads."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from pdlink.cli import main
from pdlink.plan.curves import Curves, read_curves
from pdlink_bench.fitting import errors, fit_decode, fit_prefill


class Server(BaseHTTPRequestHandler):
    asked: list[dict[str, Any]] = []
    tokens = 0
    """Of each streamed answer; 0 for as many as are asked for."""
    cached: int | None = None
    """Tokens of each prompt that it says it had."""
    moving_s = 0.5
    """Of a probe, as a proxy."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        worker = {"state": "ok", "label": "one"}
        self.wfile.write(json.dumps({"prefill": [worker], "decode": [worker]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/pdlink/probe":
            self.send_response(200)
            self.end_headers()
            probe = {"nbytes": 1000 * body["num_tokens"], "moving_s": Server.moving_s, "lane": "tcp", "kv": "pull"}
            self.wfile.write(json.dumps(probe).encode())
            return
        Server.asked.append(body)
        self.send_response(200)
        self.end_headers()
        if not body["stream"]:
            answer: dict[str, Any] = {"choices": [{"text": "a"}]}
            if Server.cached is not None:
                answer["usage"] = {"prompt_tokens_details": {"cached_tokens": Server.cached}}
            self.wfile.write(json.dumps(answer).encode())
            return
        for _ in range(Server.tokens or body["max_tokens"]):
            self.wfile.write(b'data: {"choices": [{"text": "a"}]}\n\n')
            self.wfile.flush()
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def url() -> Iterator[str]:
    Server.asked, Server.tokens, Server.cached, Server.moving_s = [], 0, None, 0.5
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


SHORT = ["--tokens", "16", "32", "64", "--batch", "1", "3", "--rounds", "1", "--steps", "8"]


def test_a_server_is_measured_and_the_file_is_read_by_plan(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "curves.json"
    words = ["bench", "curves", url, "--model", "m", "--curves", str(path), *SHORT]
    assert main(words) == 0
    curves = read_curves(path)
    assert curves.source.startswith("pdlink bench curves of m")
    lengths = [len(body["prompt"]) for body in Server.asked if not body["stream"] and body["max_tokens"] == 1]
    assert {16, 32, 64, 128} <= set(lengths)
    assert sum(body["stream"] for body in Server.asked) == 2 * (1 + 3)
    said = capsys.readouterr().out
    assert "error of the fit" in said
    assert "link: not measured" in said
    plan = ["plan", "--prompt", "50:100", "--answer", "50:20", "--requests", "50", "--workers", "2"]
    assert main([*plan, "--curves", str(path)]) in (0, 1)


def test_a_server_whose_answers_are_too_short_is_an_error(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    Server.tokens = 2
    assert main(["bench", "curves", url, *SHORT]) == 1
    assert "set --steps to more" in capsys.readouterr().out


def test_one_length_of_prompts_says_nothing_of_a_token(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "curves", url, "--tokens", "16"]) == 2
    assert "two lengths at least" in capsys.readouterr().err


def test_a_pair_of_a_proxy_measures_the_link_and_a_tokens_kv(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "curves.json"
    assert main(["bench", "curves", url, "--curves", str(path), "--proxy", url, *SHORT]) == 0
    curves = read_curves(path)
    assert (curves.kv_nbytes_per_token, curves.link_nbytes_per_s) == (1000, 64 * 1000 / 0.5)
    assert "over tcp" in capsys.readouterr().out
    Server.moving_s = 0
    assert main(["bench", "curves", url, "--proxy", url, *SHORT]) == 1
    assert "moved no KV from one to one" in capsys.readouterr().out


def test_a_beginning_that_was_not_cached_counts_as_computed(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.json"
    for cached, said, expected in (
        (None, "the server does not say", {(16, 16), (32, 32), (64, 64)}),
        (0, "cached: 3 of 3 beginnings were not", {(32, 0), (64, 0), (128, 0)}),
        (16, "cached: 2 of 3 beginnings were not", {(16, 16), (48, 16), (112, 16)}),
    ):
        Server.cached = cached
        assert main(["bench", "curves", url, "--json", str(path), *SHORT]) == 0
        assert said in " ".join(capsys.readouterr().out.split())
        behind = {(new, held) for new, held, _ in json.loads(path.read_text())["prefill"]}
        assert expected <= behind


def test_a_fit_finds_the_curves_that_times_were_made_by() -> None:
    curves = Curves()
    prefill = [(m, h, curves.prefill_s(m, h)) for m in (16, 100, 500, 2000) for h in (0, 1000)]
    decode = [(b, b * c, curves.decode_step_s(b, b * c)) for b in (1, 4, 16) for c in (100, 2000)]
    found = fit_prefill(prefill) | fit_decode(decode)
    assert found == {name: pytest.approx(getattr(curves, name)) for name in found}
    assert errors([1.1, 1.0], [1.0, 1.0]) == pytest.approx((0.05, 0.1))


def test_a_fit_has_no_negative_cost() -> None:
    found = fit_decode([(1, 100, 0.010), (4, 400, 0.009), (16, 100 * 16, 0.008), (16, 3200, 0.009)])
    assert min(found.values()) >= 0
    assert found["step_s"] == pytest.approx(0.009, rel=0.1)
