"""What people type, and what they read when it was wrong."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from pdlink import __version__, cli
from pdlink.commands import runs
from pdlink.commands.words import settings_help
from pdlink.config import ProxyConfig, StoreConfig, UpConfig, WorkerConfig, load, parse_assignments
from pdlink.errors import ConfigError
from pdlink.fleet.ports import free_ports
from pdlink.serve import roles
from pdlink.serve.process import Parent, bind
from tests.waiting import WAIT_S


def exits(words: list[str]) -> int:
    try:
        return cli.main(words)
    except SystemExit as end:
        return int(end.code or 0)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["prefil"], "no command 'prefil'; did you mean `pdlink prefill`?"),
        (["serve"], "no command 'serve'; "),
        (["--num-prefill", "2"], "--num-prefill goes after a command: did you mean `pdlink up --prefill`"),
        (["--log-level", "debug", "--once"], "--once goes after a command: did you mean `pdlink top --once`?"),
        (["bench", "transfr"], "no benchmark 'transfr'; did you mean `pdlink bench transfer`?"),
    ],
)
def test_a_word_that_is_no_command_is_answered_with_the_nearest_one(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exits(words) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"pdlink: {text}")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "usage", "hint"),
    [
        (["up", "--num-prefill", "2"], "usage: pdlink up ", "--num-prefill (did you mean --prefill?)"),
        (["up", "--prefil", "2"], "usage: pdlink up ", "--prefil (did you mean --prefill?)"),
        (["proxy", "--lsten=1"], "usage: pdlink proxy ", "--lsten=1 (did you mean --listen?)"),
        (["prefill", "--trans", "tcp"], "usage: pdlink prefill ", "--trans"),
        (["keygen", "a", "b"], "usage: pdlink keygen ", "b"),
    ],
)
def test_an_argument_that_nobody_takes_is_said_with_the_commands_own_usage(
    words: list[str], usage: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Abbreviations among them: --prefil would become another flag as soon as there is a --prefill-x."""
    assert exits(words) == 2
    err = capsys.readouterr().err
    assert err.startswith(usage)
    assert f"unrecognized arguments: {hint}" in err


@pytest.mark.parametrize("words", [["version"], ["--version"], ["-V"]])
def test_the_version_is_where_people_look(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert exits(words) == 0
    assert capsys.readouterr().out == f"pdlink {__version__}\n"


@pytest.mark.parametrize(
    ("words", "usage"),
    [(["help"], "usage: pdlink [-h]"), (["help", "keygen"], "usage: pdlink keygen"), (["-h"], "usage: pdlink [-h]")],
)
def test_help_is_a_command_too(words: list[str], usage: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exits(words) == 0
    assert capsys.readouterr().out.startswith(usage)


@pytest.mark.parametrize(
    ("words", "text"), [([], "timeline            the last requests"), (["bench"], "  control ")]
)
def test_no_command_shows_what_there_is(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exits(words) == 2
    out, err = capsys.readouterr()
    assert text in err
    assert out == ""


@pytest.mark.parametrize("words", [["--log-level", "debug", "proxy"], ["proxy", "--log-level", "debug"]])
def test_the_log_level_may_stand_before_and_behind_the_command(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Any] = []
    monkeypatch.setattr("pdlink.logs.set_up", lambda level, *_: found.append(level))
    monkeypatch.setattr(roles, "run_proxy", lambda *_, **_more: None)
    assert cli.main(words) == 0
    assert found == ["debug", "debug"], "at once, and with the settings"


def test_a_role_in_the_settings_that_is_not_the_commands_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file's word was dropped, and `pdlink prefill --config decode.yaml` was a prefill worker."""
    started: list[WorkerConfig] = []
    monkeypatch.setattr(roles, "run_worker", lambda config, *_: started.append(config))
    (tmp_path / "a.yaml").write_text("role: decode\n")
    assert cli.main(["prefill", "--config", str(tmp_path / "a.yaml")]) == 2
    assert capsys.readouterr().err == (
        "pdlink: role: the settings say 'decode'; use `pdlink decode`, or leave `role` out\n"
    )
    assert cli.main(["decode", "--config", str(tmp_path / "a.yaml")]) == 0
    assert [config.role for config in started] == ["decode"]


def test_a_model_that_is_nowhere_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["prefill", "--model", "/nonexistent"]) == 2
    assert capsys.readouterr().err == "pdlink: model.path: no such directory: /nonexistent\n"


def test_what_the_machine_refuses_is_one_line_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*_: object, **_more: object) -> None:
        raise PermissionError(13, "Permission denied", "/some/file")

    monkeypatch.setattr(roles, "run_proxy", run)
    monkeypatch.setattr(runs, "silence_stdout", lambda: None)
    assert cli.main(["proxy"]) == 1
    assert capsys.readouterr().err == "pdlink: [Errno 13] Permission denied: '/some/file'\n"


@contextlib.contextmanager
def proxy_with(stdout: IO[bytes] | int) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A proxy whose standard output is that; its process and URL."""
    port = free_ports(1)
    words = [
        sys.executable,
        "-m",
        "pdlink",
        "proxy",
        "--listen",
        f"127.0.0.1:{port}",
        "--decode",
        "http://127.0.0.1:9",
    ]
    with subprocess.Popen(words, stdout=stdout, stderr=subprocess.PIPE) as process:
        try:
            yield process, f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def until_told(process: subprocess.Popen[bytes]) -> str:
    """Its words until it has said that its output goes nowhere, which it does when it is ready."""
    assert process.stderr is not None
    text = ""
    while "standard output cannot be written" not in text:
        line = process.stderr.readline().decode()
        assert line, f"the process ended: {text}"
        text += line
    return text


def served(url: str) -> None:
    with contextlib.suppress(urllib.error.HTTPError), urllib.request.urlopen(f"{url}/health", timeout=10):
        pass


@pytest.mark.parametrize("full", [True, False], ids=["full disk", "closed pipe"])
def test_a_server_outlives_its_standard_output(full: bool) -> None:
    with contextlib.ExitStack() as held:
        if full:
            stdout: IO[bytes] | int = held.enter_context(open("/dev/full", "wb"))
        else:
            reader, stdout = os.pipe()
            os.close(reader)
            held.callback(os.close, stdout)
        process, url = held.enter_context(proxy_with(stdout))
        until_told(process)
        served(url)
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0


@pytest.mark.parametrize("words", [["version"], ["keygen", "a"]])
def test_a_command_whose_output_is_lost_does_not_succeed(words: list[str], tmp_path: Path) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "pdlink", *words],
            stdout=full, stderr=subprocess.PIPE, text=True, timeout=120, check=False, cwd=tmp_path,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "pdlink: [Errno 28] No space left on device"


def test_what_a_child_cannot_do_is_told_by_its_parent_alone(capsys: pytest.CaptureFixture[str]) -> None:
    ours, theirs = socket.socketpair()
    with ours:
        ours.sendall(b'{"role": "prefill", "model": {"path": "/nonexistent"}}\n')
        assert cli.main(["prefill", "--parent-fd", str(theirs.detach())]) == 2
        assert b'"failed": "model.path: no such directory: /nonexistent"' in ours.recv(65536)
    assert capsys.readouterr().err == ""


def test_a_child_without_a_parent_tells_itself(capsys: pytest.CaptureFixture[str]) -> None:
    ours, theirs = socket.socketpair()
    ours.sendall(b'{"role": "prefill", "model": {"path": "/nonexistent"}}\n')
    parent = Parent(theirs.detach())
    parent.settings()
    ours.close()
    assert not parent.failed("reason", 1)
    parent.close()


@pytest.mark.parametrize("command", ["up", "prefill", "proxy", "store"])
def test_the_settings_that_help_shows_are_settings_of_the_command(command: str) -> None:
    kind: Any = {"up": UpConfig, "prefill": WorkerConfig, "proxy": ProxyConfig, "store": StoreConfig}[command]
    shown = settings_help(command)
    found = re.findall(r"--set (\S+=\S+)", shown)
    assert len(found) == 2
    load(
        kind, environment={}, flags=parse_assignments(found) | ({"tiers.peer_port": 0} if command == "store" else {})
    )
    [(name, value)] = re.findall(r"\((PDLINK_\w+)=(\w+)\)", shown)
    load(kind, environment={name: value})


def test_an_address_of_another_host_is_not_blamed_on_the_port() -> None:
    with pytest.raises(ConfigError, match="this host has no such address"):
        bind("203.0.113.9", 0)


WRONG_WAYS = {
    "a setting that does not exist": (["proxy", "--set", "polcy=cost"], 2, "did you mean 'policy'"),
    "a value that is none of a setting": (["proxy", "--set", "queue_size=many"], 2, "queue_size"),
    "a file of another role": (["prefill", "--config", "{decode}"], 2, "use `pdlink decode`"),
    "a file that is no YAML": (["proxy", "--config", "{broken}"], 2, "{broken}"),
    "a file that is not there": (["proxy", "--config", "/nowhere.yaml"], 2, "/nowhere.yaml"),
    "a port that is taken": (["up", "--listen", "127.0.0.1:{port}"], 2, "Address already in use"),
    "an address of another host": (["proxy", "--listen", "203.0.113.9"], 2, "this host has no such address"),
    "a model that is nowhere": (["up", "--model", "/nowhere"], 2, "no such directory: /nowhere"),
    "a disk without its size": (["store", "--disk", "/tmp/x"], 2, "--disk-size: missing"),
    "vLLM's disk without its size": (["vllm", "both", "M", "--disk", "/tmp/x", "--print"], 2, "--disk-size: missing"),
    "a secret that others can read": (["cache", "stats", "h:1", "--key-file", "{open}"], 2, "{open}"),
    "a secret that is not there": (["explain", "r", "--key-file", "/nowhere"], 2, "/nowhere"),
    "an option that does not exist": (["up", "--prefil", "2"], 2, "did you mean --prefill?"),
    "nobody at a URL, doctor": (["doctor", "127.0.0.1:{free}"], 1, "127.0.0.1:{free}"),
    "nobody at a URL, cache": (["cache", "stats", "127.0.0.1:{free}"], 1, "did not answer"),
    "a plan without traffic": (["plan"], 2, "--prompt"),
    "a trace that is none": (["plan", "{broken}"], 2, "{broken}"),
}


@pytest.mark.parametrize("way", WRONG_WAYS)
def test_a_wrong_way_ends_with_its_status_and_words_and_no_traceback(
    way: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words, status, said = WRONG_WAYS[way]
    files = {"decode": "role: decode\n", "broken": "{[", "open": "secret\n"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o644)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        places = {name: str(tmp_path / name) for name in files}
        places |= {"port": str(taken.getsockname()[1]), "free": str(free_ports(1))}

        def filled(text: str) -> str:
            return re.sub(r"\{(\w+)\}", lambda found: places[found.group(1)], text)

        assert exits(list(map(filled, words))) == status
    told = "".join(capsys.readouterr())
    assert filled(said) in told
    assert "Traceback" not in told
