"""`pdlink top`: what a terminal shows of a deployment."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from rich.console import Console

from pdlink.cli import main
from pdlink.observe.top import picture

STATE: dict[str, Any] = {
    "verdict": {"level": "warn", "text": "1 of 2 workers is away, decode-0: [bold]gone"},
    "findings": [],
    "running": 2,
    "queued": 1,
    "summary": {"ttft_p50_ms": 12.3, "ttft_p95_ms": None, "per_token_p50_ms": 7.5, "exposed_share": 0.006, "kv": {}},
    "workers": [
        {
            "label": "prefill-0",
            "state": "ok",
            "in_flight": 1,
            "reason": "",
            "requests": {"running": 1},
            "held": 0.75,
        },
        {
            "label": "decode-0",
            "state": "unreachable",
            "in_flight": 0,
            "reason": "[/]",
            "requests": None,
            "held": None,
        },
    ],
    "pairs": [
        {
            "prefill": "prefill-0",
            "decode": "decode-0",
            "state": "ready",
            "lane": "tcp",
            "gb_per_s": 1.26,
            "reason": "",
        }
    ],
    "live": [
        {
            "transfer_id": "xfer-1",
            "worker": "p",
            "peer": "d",
            "lane": "tcp",
            "layers": "lfw.",
            "nbytes": 2_500_000,
            "age_s": 0.5,
        }
    ],
    "requests": [
        {
            "request_id": "req-1",
            "outcome": "ok",
            "kv": "transferred",
            "prompt_tokens": 7,
            "estimated": True,
            "prefill": "prefill-0",
            "decode": None,
            "queued_s": 0.001,
            "ttft_s": None,
            "total_s": 1.5,
        }
    ],
}


@pytest.fixture
def proxy() -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/pdlink/state" else 404)
            self.end_headers()
            self.wfile.write(json.dumps(STATE).encode())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_states_of_layers_differ_by_glyph_and_words_of_others_are_no_markup() -> None:
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(picture(STATE, 160))
    text = console.export_text()
    for words in (
        "decode-0: [bold]gone",
        "█▓▒░",
        "[/]",
        "≈ 7",
        "tcp 1.3 GB/s",
        "75%",
        "p50 12 ms, p95 –",
        "1.50 s",
        "further token p50 7.5 ms",
    ):
        assert words in text


def test_in_80_columns_every_column_of_requests_can_be_read() -> None:
    long = "req-c0a3dc2daffdfb790545f3d4c5d39494"
    served = {"request_id": long, "decode": "decode-12", "ttft_s": 0.025, "kv": "recomputed;reason=peer_lost"}
    state = {**STATE, "requests": [STATE["requests"][0] | served]}
    shown = {}
    for width in (80, 160):
        console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
        with console.file:
            console.print(picture(state, width))
        shown[width] = console.export_text()
        assert max(len(line.rstrip()) for line in shown[width].splitlines()) <= width
    for words in ("req-c0a3dc2…  ok", "recomputed;", "prefill-0  decode-12        25 ms  1.50 s"):
        assert words in shown[80], shown[80]
    assert long in shown[160]


def test_once_ends_with_1_if_something_is_wrong_and_json_is_what_the_proxy_said(
    proxy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", proxy, "--once"]) == 1
    assert "1 of 2 workers is away" in capsys.readouterr().out
    assert main(["top", proxy, "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == STATE


def test_what_is_no_proxy_is_one_line(proxy: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", f"{proxy}/other", "--once"]) == 1
    assert "is it a pdlink proxy?" in capsys.readouterr().err
