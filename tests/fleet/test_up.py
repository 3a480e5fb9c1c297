"""`pdlink up` before, while and after it has children, without a model."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pdlink.cli import main
from pdlink.config import ProxyConfig, UpConfig
from pdlink.config.log import LogConfig
from pdlink.errors import ConfigError
from pdlink.fleet import keeping, up
from pdlink.fleet.child import Child, ChildFailed, start, stop
from pdlink.fleet.keeping import await_all
from pdlink.fleet.post import Post
from pdlink.serve import process
from pdlink.serve.process import bind


@contextlib.contextmanager
def taken() -> Any:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield listening.getsockname()[1]


@pytest.mark.parametrize("setting", ["proxy.listen", "prefill.listen", "decode.listen.control"])
def test_a_port_in_use_is_found_before_any_process_is_started(
    setting: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(up, "start", lambda *_: pytest.fail("a process was started"))
    monkeypatch.setattr("signal.signal", lambda *_: None)
    with taken() as port:
        ports = {"proxy.listen": "127.0.0.1:0", setting: f"127.0.0.1:{port}"}
        assert main(["up", *(word for key, value in ports.items() for word in ("--set", f"{key}={value}"))]) == 2
    err = capsys.readouterr().err
    assert f"pdlink: {setting}: cannot bind 127.0.0.1:{port}: Address already in use; port 0 takes a free port" in err


def test_what_up_prints_says_which_model_answers_and_where_to_look() -> None:
    facts: list[dict[str, Any]] = [
        {"url": "http://h:1", "model": "m", "transports": ["tcp"], "control": "tcp://h:3"},
        {"url": "http://h:2"},
    ]
    posts: Any = [
        SimpleNamespace(label=label, url=fact["url"], facts=fact)
        for label, fact in zip(("p", "proxy"), facts, strict=True)
    ]
    text = up._picture(UpConfig(), posts[:1], posts[1:], 1.0)
    assert "ready in 1.0 s: model m, KV over tcp\n" in text
    assert "http://h:1                  control tcp://h:3\n" in text
    assert "knows a few sentences about pdlink" in text
    assert "http://h:2/pdlink/ " in text
    assert "top http://h:2 " in text
    assert "a few sentences" not in up._picture(UpConfig(model="some/model"), posts[:1], posts[1:], 1.0)


@pytest.mark.parametrize("model", ["/nonexistent", "configs/up.yaml", "configs"])
def test_a_model_that_is_not_there_is_told_once_and_before_any_process_is_started(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(up, "start", lambda *_: pytest.fail("a process was started"))
    monkeypatch.setattr("signal.signal", lambda *_: None)
    assert main(["up", "--listen", "127.0.0.1:0", "--model", model]) == 2
    err = capsys.readouterr().err
    assert err.count("model.path: ") == 1
    assert model in err


def test_a_port_past_the_last_one_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^prefill\.port: cannot bind 127\.0\.0\.1:65536: ports end at 65535"):
        bind("127.0.0.1", 65536, "prefill.port")


def test_a_held_port_is_free_for_its_child_and_for_nobody_who_listens() -> None:
    """So that a worker that is away finds its port again, whatever else starts on this machine meanwhile."""
    with contextlib.ExitStack() as held:
        port = up._hold(held, "127.0.0.1", 0, "port")
        for _ in range(2):  # two lives of the child
            with bind("127.0.0.1", port) as child:
                child.listen()
                socket.create_connection(("127.0.0.1", port), 5).close()
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", port))


class Talking:
    """A child of this process, and its end of the link."""

    def __init__(self, label: str = "decode-0", script: str = "sleep 60") -> None:
        ours, self.end = socket.socketpair()
        self.child = Child(label, "decode", {}, subprocess.Popen(["sh", "-c", f"exec {script}"]), ours, {})

    def post(self) -> Post:
        """Of this child."""
        child = self.child
        return Post(child.label, child.role, lambda: child)

    def says(self, **message: Any) -> None:
        self.end.sendall(json.dumps(message).encode() + b"\n")

    def __enter__(self) -> Talking:
        return self

    def __exit__(self, *_: object) -> None:
        self.child.kill()
        self.child.close()
        self.end.close()


def test_a_child_tells_what_it_does_until_it_is_ready() -> None:
    with Talking() as talking:
        assert not talking.child.look()
        talking.end.sendall(b'{"doing": "load')
        assert not talking.child.look()
        talking.end.sendall(b'ing"}\n{"doing": "more"}\n{"url"')
        assert not talking.child.look()
        assert talking.child.doing == "more"
        talking.end.sendall(b': "http://a"}\n')
        assert talking.child.look()
        assert talking.child.facts["url"] == "http://a"


@pytest.mark.parametrize(
    ("script", "how"), [("sh -c 'exit 3'", "ended with status 3"), ("sh -c 'kill -9 $$'", "was killed by SIGKILL")]
)
def test_a_child_that_ends_before_it_is_ready_says_how(script: str, how: str) -> None:
    with Talking(script=script) as talking:
        talking.end.close()
        with pytest.raises(ChildFailed, match=rf"^decode-0 ended before it was ready: it {how}$"):
            talking.child.wait_ready(10)


def test_the_reason_of_a_child_that_cannot_start_is_its_parents_to_tell() -> None:
    with Talking() as talking:
        talking.says(failed="model.path: no such directory: /m", warnings=[])
        with pytest.raises(ChildFailed, match=r"^decode-0: model\.path: no such directory: /m$"):
            talking.child.wait_ready(10)


def test_the_same_warning_of_several_children_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with Talking("decode-0") as one, Talking("decode-1") as other:
        one.says(url="http://a", warnings=["transport ucx cannot be used: no UCX", "own"])
        other.says(url="http://b", warnings=["transport ucx cannot be used: no UCX"])
        await_all([one.post(), other.post()], 10)
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        "decode-0, decode-1: transport ucx cannot be used: no UCX",
        "decode-0: own",
    ]


def test_one_child_that_fails_ends_the_wait_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was not looked at before those in front of it were ready."""
    with Talking("prefill-0") as silent, Talking("decode-0") as other:
        other.says(failed="reason")
        with pytest.raises(ChildFailed, match="decode-0: reason"):
            await_all([silent.post(), other.post()], 600)


def test_a_start_that_takes_long_says_what_takes_so_long(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(keeping, "_WORD_S", 0.0)
    caplog.set_level(logging.INFO)
    with Talking() as talking:
        talking.says(doing="loading the model m")
        with pytest.raises(ChildFailed, match=r"not ready within 0 s: decode-0 \(loading the model m\)"):
            await_all([talking.post()], 0.3)
    assert "0 s: decode-0 (loading the model m)" in caplog.text


def test_warnings_of_a_start_are_held_back_and_later_ones_are_not(caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = socket.socketpair()
    handler = logging.StreamHandler()
    said: list[str] = []
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    root = logging.getLogger()
    others, root.handlers = root.handlers, [handler]
    try:
        parent = process.Parent(theirs.detach())
        root.warning("early %s", "one")
        root.error("an error")
        parent.ready({"url": "http://a"})
        root.warning("late")
        parent.close()
    finally:
        root.handlers = others
    with ours:
        assert json.loads(ours.recv(65536)) == {"url": "http://a", "warnings": ["early one"]}
    assert said == ["an error", "late"]


@pytest.mark.usefixtures("real_children")
def test_a_real_child_starts_serves_and_comes_back_on_its_port(capfd: pytest.CaptureFixture[str]) -> None:
    """And logs as its settings say, with its name."""
    config = ProxyConfig(
        listen="127.0.0.1:0", decode=("http://127.0.0.1:9",), log=LogConfig(level="info", format="json")
    )
    child = start("proxy", "proxy", config.model_dump(mode="json"))
    try:
        child.wait_ready(60)
        assert any("no prefill workers" in text for text in child.warnings)
        said, deadline_s = "", time.monotonic() + 20
        while "pdlink.proxy" not in said:  # its decode worker is not there
            assert time.monotonic() < deadline_s, said
            said += capfd.readouterr().err
            threading.Event().wait(0.02)
        first = json.loads(said.splitlines()[0])
        assert (first["level"], first["logger"], first["process"]) == ("WARNING", "pdlink.proxy", "proxy")
        assert "decode worker http://127.0.0.1:9" in first["message"]
        url = child.facts["url"]
        child.kill()
        child.again()
        child.wait_ready(60)
        assert child.facts["url"] == url
    finally:
        stop([child], 20)
    assert child.process.returncode == 0


def test_the_proxy_is_stopped_before_the_workers_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that went first made it log that each of them was lost."""
    stopped: list[list[str]] = []

    def post(label: str, role: str, _: Any, **__: Any) -> Any:
        return SimpleNamespace(label=label, role=role, url=f"http://{label}", child=label, away=False)

    def end(*_: object) -> None:
        raise ChildFailed("decode-0 ended")

    monkeypatch.setattr(up, "Post", post)
    monkeypatch.setattr(up, "await_all", lambda *_: None)
    monkeypatch.setattr(up, "_picture", lambda *_: "")
    monkeypatch.setattr(up, "keep", end)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr(up, "stop", lambda labels, _: stopped.append(labels))
    with pytest.raises(ChildFailed):
        up.up(UpConfig.model_validate({"proxy": {"listen": "127.0.0.1:0"}}), lambda _: None)
    assert stopped == [["proxy"], ["prefill-0", "decode-0"], []], "and then the store, of which there is none here"


def test_what_to_type_next_can_be_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    """`make up` puts nothing on the PATH."""
    monkeypatch.setenv("PATH", "/nonexistent")
    assert Path(keeping._command()) == Path(sys.executable).with_name("pdlink")
    monkeypatch.setattr("shutil.which", lambda _: "/usr/bin/pdlink")
    assert keeping._command() == "pdlink"
