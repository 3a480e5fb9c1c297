"""`pdlink timeline`: what it fetches, and what it says when there is nothing to fetch."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from pdlink.cli import main
from tests.private import write_private

TRACE = b"a trace"
WORDS = "3 requests, 4 transfers, 2 workers, 99 events; without decode-1"
KEY = "s3cret"


class Server(ThreadingHTTPServer):
    """Answers what `answers` has for a path: status, body, and the key it asks for."""

    answers: dict[str, tuple[int, bytes]]
    key = ""


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        server: Any = self.server
        status, body = server.answers.get(self.path, (404, b"{}"))
        if server.key and self.path != "/health" and self.headers["X-Pdlink-Key"] != server.key:
            status, body = 401, b"{}"
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if status == 200 and self.path.startswith("/pdlink/timeline") and body == TRACE:
            self.send_header("X-Pdlink-Timeline", WORDS)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server(("127.0.0.1", 0), Handler)
    found.answers = {"/pdlink/timeline": (200, TRACE), "/pdlink/timeline?request=a%2Fb": (200, TRACE)}
    thread = threading.Thread(target=found.serve_forever, args=(0.01,))
    thread.start()
    yield found
    found.shutdown()
    thread.join()
    found.server_close()


def where(server: Server) -> str:
    return f"127.0.0.1:{server.server_address[1]}"


def test_a_url_needs_no_scheme_and_what_came_is_said(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.pftrace"
    assert main(["timeline", where(server), "-o", str(file)]) == 0
    assert file.read_bytes() == TRACE
    assert capsys.readouterr().out == f"{file}: {WORDS}; open it at ui.perfetto.dev\n"
    assert main(["timeline", where(server), "-o", str(file), "--request", "a/b"]) == 0


def test_a_worker_with_a_key_says_which_flag_is_missing(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.key = KEY
    right, wrong = write_private(tmp_path / "right", KEY), write_private(tmp_path / "wrong", "other")
    assert main(["timeline", where(server)]) == 1
    assert "give --key-file FILE" in capsys.readouterr().err
    assert main(["timeline", where(server), "--key-file", wrong]) == 1
    assert (
        "the key is not one of the proxy's api_keys, or a worker's security.http_key_file" in capsys.readouterr().err
    )
    assert main(["timeline", where(server), "--key-file", right, "-o", str(tmp_path / "a.json")]) == 0


@pytest.mark.parametrize("words", [["top", "--once"], ["explain", "r"]])
def test_commands_that_ask_a_proxy_tell_a_wrong_key_from_none(
    server: Server, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.key, at = KEY, [where(server)] if words[0] == "top" else ["--proxy", where(server)]
    assert main([*words, *at]) == 1
    assert "give --key-file FILE with one of its api_keys" in capsys.readouterr().err
    assert main([*words, *at, "--key-file", write_private(tmp_path / "wrong", "other")]) == 1
    assert "the key in --key-file is not one of its api_keys" in capsys.readouterr().err


def test_a_request_that_is_not_known_is_said_as_the_proxy_says_it(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    server.answers = {"/pdlink/timeline?request=x": (404, b'{"error": {"message": "request: got \'x\'"}}')}
    assert main(["timeline", where(server), "--request", "x"]) == 1
    assert capsys.readouterr().err == f"pdlink: http://{where(server)}: request: got 'x'\n"


@pytest.mark.parametrize("status", [404, 500])
def test_a_server_of_another_kind_is_asked_about(
    server: Server, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    server.answers = {"/pdlink/timeline": (status, b"<html>")}
    assert main(["timeline", where(server)]) == 1
    assert f"answered {status} when asked for a timeline; is it a pdlink proxy or worker?" in capsys.readouterr().err


@pytest.mark.parametrize("body", [b"", b"hello", b"\xff"])
def test_an_answer_that_is_no_timeline_is_said_to_be_none(
    server: Server, tmp_path: Path, body: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    server.answers = {"/pdlink/timeline": (200, body)}
    assert main(["timeline", where(server), "-o", str(tmp_path / "a.json")]) == 1
    assert "something that is no timeline" in capsys.readouterr().err
    assert not (tmp_path / "a.json").exists()


def test_a_file_that_cannot_be_written_is_one_line(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["timeline", where(server), "-o", "/nonexistent/x.json"]) == 2
    err = capsys.readouterr().err
    assert err == "pdlink: --output: cannot write /nonexistent/x.json: No such file or directory\n"


def test_nobody_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["timeline", "127.0.0.1:9"]) == 1
    assert capsys.readouterr().err == "pdlink: http://127.0.0.1:9 did not answer: Connection refused\n"


@pytest.mark.parametrize("url", ["ftp://a", "http://:1", "http://a:b", "http://[::1"])
def test_a_url_that_is_none_is_one_line(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["timeline", url]) == 1
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    assert err.startswith(f"pdlink: {url}")
