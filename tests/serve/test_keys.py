"""Keys on disk, `pdlink keygen`, and that nobody is reachable without a lock by accident."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdlink.cli import main
from pdlink.config import ProxyConfig, SecurityConfig, UpConfig, WorkerConfig, load, read_secrets
from pdlink.errors import ConfigError
from pdlink.protocol.auth import is_worker_name, parse_allow_list
from pdlink.serve.keys import (
    KeyFileExists,
    http_key,
    keygen,
    load_allow_list,
    load_credentials,
    server_tls,
    worker_name,
)
from tests.certificates import make_certificate
from tests.private import write_private


def made(directory: Path, *names: str) -> SecurityConfig:
    """Keys of the first name, which knows all of them."""
    lines = [keygen(name, str(directory))[1] for name in names]
    (directory / "allow").write_text("\n".join(lines))
    return SecurityConfig(key_file=str(directory / f"{names[0]}.key"), allow_file=str(directory / "allow"))


def test_keygen_prints_the_public_line_and_keeps_the_secret(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["keygen", "prefill-1", "-d", str(tmp_path / "new")]) == 0
    out, err = capsys.readouterr()
    path = tmp_path / "new" / "prefill-1.key"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(parse_allow_list(out, "out")) == 1
    assert out.startswith("prefill-1 ")
    secret = path.read_text().split("secret ")[1].strip()
    assert secret not in out + err


def test_key_is_readable_by_its_user_only_whatever_the_umask(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        path, _ = keygen("a", str(tmp_path))
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_keygen_never_overwrites(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, _ = keygen("a", str(tmp_path))
    text = path.read_text()
    assert main(["keygen", "a", "-d", str(tmp_path)]) == 1
    assert "is there already" in capsys.readouterr().err
    (tmp_path / "link.key").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(KeyFileExists):
        keygen("link", str(tmp_path))
    assert path.read_text() == text
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("name", ["../a", "a/b", "", "a b"])
def test_keygen_takes_only_names(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keygen", name, "-d", str(tmp_path)]) == 2
    assert "NAME: " in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_generated_keys_load(tmp_path: Path) -> None:
    credentials = load_credentials(made(tmp_path, "a", "b"))
    assert credentials is not None
    assert credentials.keys.name == "a"
    assert len(credentials.allowed) == 2
    assert load_credentials(SecurityConfig()) is None


def test_key_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    security = made(tmp_path, "a")
    (tmp_path / "a.key").chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        load_credentials(security)


def test_keys_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    security = made(tmp_path, "a", "b")
    public = (tmp_path / "b.key").read_text().split("public ")[1].splitlines()[0]
    text = (tmp_path / "a.key").read_text().splitlines()
    (tmp_path / "a.key").write_text(
        "\n".join(f"public {public}" if line.startswith("public") else line for line in text)
    )
    with pytest.raises(ConfigError, match="do not belong together"):
        load_credentials(security)


@pytest.mark.parametrize("mode", [0o604, 0o602])
def test_no_secret_is_taken_from_a_file_that_every_user_can_read_or_change(tmp_path: Path, mode: int) -> None:
    keys = made(tmp_path, "a")
    cert, tls_key = make_certificate(tmp_path)
    secret = write_private(tmp_path / "http", "s3cret")
    use: dict[str, tuple[str, Callable[[], object]]] = {
        "security.key_file": (str(tmp_path / "a.key"), lambda: load_credentials(keys)),
        "security.http_key_file": (secret, lambda: http_key(SecurityConfig(http_key_file=secret))),
        "tls_key": (tls_key, lambda: server_tls(cert, tls_key)),
        "--key-file": (secret, lambda: read_secrets(secret, "--key-file")),
    }
    for setting, (path, read) in use.items():
        Path(path).chmod(0o600)
        read()
        Path(path).chmod(mode)
        with pytest.raises(ConfigError) as error:
            read()
        assert str(error.value) == f"{setting}: every user of this host can read or change {path}; chmod 600 it"


def test_an_allow_list_that_every_user_can_change_is_refused(tmp_path: Path) -> None:
    made(tmp_path, "a")
    path = tmp_path / "allow"
    path.chmod(0o644)
    load_allow_list(str(path))
    path.chmod(0o666)
    with pytest.raises(ConfigError) as error:
        load_allow_list(str(path))
    assert str(error.value) == f"security.allow_file: every user of this host can change {path}; chmod o-w it"


def test_keygen_makes_its_directory_for_this_user_only_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "new" / "keys"
    assert main(["keygen", "a", "-d", str(directory)]) == 0
    assert directory.stat().st_mode & 0o777 == 0o700
    assert f"{directory} is new; only this user can enter it" in capsys.readouterr().err
    assert main(["keygen", "b", "-d", str(directory)]) == 0
    assert "is new" not in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "# nobody\n", "a b\n"])
def test_allow_list_that_lets_nobody_in_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "allow").write_text(text)
    with pytest.raises(ConfigError, match=r"^security\.allow_file: "):
        load_allow_list(str(tmp_path / "allow"))


def test_files_that_are_not_there_are_named_with_their_setting(tmp_path: Path) -> None:
    security = made(tmp_path, "a")
    for setting in ("key_file", "allow_file"):
        broken = security.model_copy(update={setting: str(tmp_path / "no")})
        with pytest.raises(ConfigError, match=rf"^security\.{setting}: cannot read .*/no: No such file"):
            load_credentials(broken)
    with pytest.raises(ConfigError, match=r"^security\.http_key_file: cannot read "):
        http_key(SecurityConfig(http_key_file=str(tmp_path / "no")))
    with pytest.raises(ConfigError, match="tls_cert, tls_key: cannot use"):
        server_tls(str(tmp_path / "no"), str(tmp_path / "no"))


def test_worker_is_called_what_its_key_says(tmp_path: Path) -> None:
    credentials = load_credentials(made(tmp_path, "a"))
    assert worker_name(WorkerConfig(), credentials, 80) == "a"
    assert worker_name(WorkerConfig(name="a"), credentials, 80) == "a"
    assert worker_name(WorkerConfig(name="a/2"), credentials, 80) == "a/2"
    with pytest.raises(ConfigError, match="name: 'b', but security.key_file is the key of 'a'"):
        worker_name(WorkerConfig(name="b"), credentials, 80)


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("node-7", "decode-node-7-80"),
        ("node-8.rack.example", "decode-node-8-80"),
        ("a b\n.x", "decode-a-b--80"),
        ("", "decode-x-80"),
        ("-", "decode-x-80"),
        ("n" * 64, f"decode-{'n' * 32}-80"),
    ],
)
def test_two_hosts_with_one_configuration_have_two_names(
    host: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: host)
    assert worker_name(WorkerConfig(role="decode"), None, 80) == name
    assert is_worker_name(name)


@pytest.mark.parametrize("name", ["", "a b", "a\n", "a@b", "../x", "a//b"])
def test_name_that_every_peer_would_refuse_stops_the_worker(name: str) -> None:
    with pytest.raises(ConfigError, match="^name: got .* a name is up to 4 parts"):
        worker_name(WorkerConfig(name=name), None, 80)


@pytest.mark.parametrize("setting", ["listen", "listen.http", "listen.control", "listen.data", "listen.advertise"])
@pytest.mark.parametrize("host", ["0.0.0.0", "10.1.2.3", "::", "node-7", "127.0.0.1.evil"])
def test_worker_that_others_can_reach_does_not_start_without_keys(setting: str, host: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(WorkerConfig, environment={}, flags={setting: host})
    text = str(error.value)
    assert text.startswith(f"{setting}: other hosts can reach {host}")
    assert "pdlink keygen" in text
    assert "security.insecure: true" in text
    load(WorkerConfig, environment={}, flags={setting: host, "security.insecure": True})
    load(WorkerConfig, environment={}, flags={setting: host, "security.key_file": "k", "security.allow_file": "a"})


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "::1", "localhost"])
def test_worker_that_only_this_host_can_reach_needs_no_keys(host: str) -> None:
    load(WorkerConfig, environment={}, flags={"listen": host, "listen.advertise": host})


def test_refusal_to_start_reaches_the_terminal_as_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prefill", "--listen", "0.0.0.0"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("pdlink: listen: other hosts can reach 0.0.0.0")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"security.key_file": "k"}, "security.allow_file: missing"),
        ({"security.allow_file": "a"}, "security.key_file: missing"),
        ({"security.tls_cert": "c"}, "security.tls_key: missing"),
        (
            {"security.key_file": "k", "security.allow_file": "a", "security.insecure": True},
            "security.insecure: has no effect",
        ),
        ({"security.insecur": True}, "did you mean 'security.insecure'"),
    ],
)
def test_half_a_lock_is_refused(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(WorkerConfig, environment={}, flags=flags)


def test_half_of_the_proxys_tls_is_refused() -> None:
    with pytest.raises(ConfigError, match="tls_cert: missing"):
        load(ProxyConfig, environment={}, flags={"tls_key": "k"})


def test_refusals_never_show_an_api_key() -> None:
    config = load(ProxyConfig, environment={"PDLINK_API_KEYS": "[sesame]"})
    assert config.api_keys == ("sesame",)
    assert "sesame" not in repr(config)


CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize(
    ("kind", "file"),
    [
        (WorkerConfig, "prefill.yaml"),
        (WorkerConfig, "decode.yaml"),
        (ProxyConfig, "proxy.yaml"),
        (UpConfig, "up.yaml"),
        (WorkerConfig, "secure/prefill.yaml"),
        (WorkerConfig, "secure/decode.yaml"),
        (ProxyConfig, "secure/proxy.yaml"),
    ],
)
def test_example_settings_load(kind: type[WorkerConfig], file: str) -> None:
    load(kind, CONFIGS / file, environment={})
