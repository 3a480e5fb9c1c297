"""`pdlink bench serving` with a program in place of vLLM or SGLang: turns, figures, failures, nothing left behind."""

from __future__ import annotations

import argparse
import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from pdlink_bench import serving
from pdlink_bench.http_load import WrongAnswer, once, stream
from pdlink_bench.measure import Measured
from pdlink_bench.serving import ServingSettings
from tests.proxy.fakes import command


def options(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    serving.add_arguments(parser)
    return parser.parse_args(given)


def few(executable: Path, *more: str) -> argparse.Namespace:
    small = ("--rounds", "2", "--tokens", "9", "5", "--answer-tokens", "3", "--batch", "3", "--parallel", "2")
    engine = executable.name
    servers = ("--engine", engine, f"--{engine}", str(executable), f"--{engine}-arg=--some-flag")
    return options(*servers, "--model", "/m", *small, *more)


@pytest.mark.parametrize(("engine", "other"), [("vllm", "NixlConnector"), ("sglang", "'nixl'")])
def test_systems_take_turns_and_every_sample_is_kept(
    engine: str, other: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    file, picture = tmp_path / "serving.json", tmp_path / "serving.png"
    log_dir = tmp_path / "logs"
    written = ("--json", str(file), "--log-dir", str(log_dir), "--plot", str(picture))
    assert serving.run(few(command(tmp_path, engine), *written)) == 0
    assert picture.stat().st_size > 1000
    result = json.loads(file.read_text())
    assert list(result["systems"]) == ["pdlink", "nixl"]
    for system in result["systems"].values():
        counts = {name: len(summary["samples"]) for name, summary in system["measured"].items()}
        between = {serving.column("between_tokens", length): 2 * (3 - 1) for length in (5, 9)}
        columns = [serving.column(name, length) for name in serving.COLUMNS for length in (5, 9)]
        assert counts == {serving.PER_S: 2, **dict.fromkeys(columns, 2), **between}
        over = system["measured"][serving.column("over_prefill", 9)]["samples"]
        assert engine != "sglang" or min(over) >= 0.25, "what its prefill says that it has waited is none of the leg"
    shown = capsys.readouterr().out
    assert "requests/s" in shown
    logs = {path.relative_to(log_dir): path.read_text() for path in log_dir.rglob("*.log")}
    assert len(logs) == 4
    assert other in logs[Path("nixl/decode-0.log")]
    assert all("--some-flag" in text for text in logs.values())


def test_a_server_that_does_not_start_is_a_failure_with_its_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert serving.run(few(command(tmp_path, fails="RuntimeError: no memory"))) == 1
    assert "no memory" in capsys.readouterr().err


class Standing:
    """A system of which only its name matters."""

    def __init__(self, name: str) -> None:
        self.name = name

    def stop_time(self) -> None: ...


def test_a_system_that_fails_has_no_more_turns_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[str] = []

    def turn(
        deployment: Standing, _prompts: object, _settings: ServingSettings, measured: Measured, *, first: bool
    ) -> None:
        turns.append(deployment.name)
        if deployment.name == "never" or (deployment.name == "once" and not first):
            raise WrongAnswer("no tokens")
        measured.add(serving.PER_S, 1.0)

    monkeypatch.setattr(serving, "_turn", turn)
    systems: list[Any] = [Standing(name) for name in ("always", "once", "never")]
    results = serving.measure(systems, ServingSettings(rounds=3), lambda: None)
    assert sorted(turns) == ["always"] * 3 + ["never"] + ["once"] * 2
    assert [one.samples.get(serving.PER_S) for one in results.values()] == [[1.0] * 3, [1.0], None]
    assert [one.problem.partition(";")[0] for one in results.values()] == [
        "",
        "failed in turn 2: no tokens",
        "failed in turn 1: no tokens",
    ]


# ---- one answer


@contextlib.contextmanager
def answering(status: int, body: bytes, **headers: str) -> Iterator[str]:
    """A server that answers everything alike."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


TOKEN = b'data: {"choices":[{"text":"a"}]}\n\n'


def test_a_stream_gives_its_text_and_the_prefill_legs_time() -> None:
    usage = b'data: {"choices":[],"usage":{}}\n\n'
    body = TOKEN * 3 + usage + b"data: [DONE]\n\n"
    times = {"Server_Timing": "prefill;dur=12.5, total;dur=20.0", "X_Pdlink_Prefill": "p"}
    with answering(200, body, **times) as url:
        streamed = stream(url, {})
    assert (streamed.text, streamed.prefill_s, streamed.disaggregated) == ("aaa", 0.0125, True)
    assert len(streamed.gaps_s) == 2
    with answering(200, body) as url:
        streamed = stream(url, {})
    assert (streamed.prefill_s, streamed.disaggregated) == (streamed.first_s, False)


@pytest.mark.parametrize(
    ("status", "body"),
    [(503, b"busy"), (200, TOKEN), (200, b"data: [DONE]\n\n"), (200, TOKEN + b'data: {"error":{"message":"m"}}\n\n')],
)
def test_what_is_no_whole_answer_is_not_measured(status: int, body: bytes) -> None:
    with answering(status, body) as url, pytest.raises(WrongAnswer):
        stream(url, {})


def test_a_refused_request_is_not_measured() -> None:
    with answering(400, b"no") as url, pytest.raises(WrongAnswer, match="400: no"):
        once(url, {})
