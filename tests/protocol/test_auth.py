"""What is decided about names and keys: pure, without a socket or a file."""

from __future__ import annotations

import pytest
import zmq

from pdlink.errors import ConfigError, InvalidRequest, PeerNotAllowed
from pdlink.protocol.auth import (
    AllowList,
    ControlAddress,
    Credentials,
    KeyPair,
    allow_line,
    check_dial,
    is_key,
    is_name,
    is_worker_name,
    name_problem,
    parse_allow_list,
    parse_key_file,
    write_key_file,
)


def make(name: str) -> KeyPair:
    public, secret = (key.decode() for key in zmq.curve_keypair())
    return KeyPair(name, public, secret)


PREFILL, DECODE, STRANGER = make("prefill-1"), make("decode-1"), make("stranger")
KNOWN = Credentials(DECODE, AllowList({PREFILL.public: "prefill-1"}))


def named(value: object) -> str:
    """The same in every run, where keys are not: processes that share the tests must agree on their names."""
    return str(value).replace(PREFILL.public, "KEY")


def test_keys_of_zeromq_are_keys() -> None:
    for _ in range(50):
        keys = make("x")
        assert is_key(keys.public)
        assert is_key(keys.secret)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x" * 39,
        "x" * 41,
        "x" * 39 + " ",
        "x" * 39 + '"',
        "x" * 39 + "\u00e9",
        "#" * 40,  # digits of base 85, but five of them are more than 32 bits
    ],
)
def test_what_is_no_key_is_refused(text: str) -> None:
    assert not is_key(text)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../a", "a b", "#a", "-a", "a\n", "x" * 65, "n\u00f6"])
def test_name_cannot_leave_its_directory_or_its_line(name: str) -> None:
    assert not is_name(name)


def test_key_file_is_read_back_as_it_was_written() -> None:
    assert parse_key_file(write_key_file(PREFILL), "f") == PREFILL


def test_secret_key_is_in_no_representation_and_in_no_error() -> None:
    text = write_key_file(PREFILL)
    assert PREFILL.secret not in repr(PREFILL) + repr(KNOWN)
    for broken in (
        text.replace("name prefill-1", "name a/b"),
        text.replace("secret ", "secret x"),
        text.replace("secret ", "secre "),
        text + f"secret {PREFILL.secret}\n",
        text.replace("public", "#public"),
    ):
        with pytest.raises(ConfigError) as error:
            parse_key_file(broken, "f.key")
        assert str(error.value).startswith("f.key")
        assert PREFILL.secret not in str(error.value)


def test_allow_list_gives_each_key_one_name() -> None:
    text = f"# fleet\n\n{allow_line(PREFILL)}\n  {allow_line(DECODE)}  \n{allow_line(PREFILL)}\n"
    allowed = parse_allow_list(text, "f")
    assert len(allowed) == 2
    assert allowed[PREFILL.public] == "prefill-1"
    assert STRANGER.public not in allowed
    assert "" not in allowed


def test_name_may_have_two_keys_while_one_replaces_the_other() -> None:
    new = make("prefill-1")
    allowed = parse_allow_list(f"{allow_line(PREFILL)}\n{allow_line(new)}", "f")
    assert allowed[PREFILL.public] == allowed[new.public] == "prefill-1"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (PREFILL.public, 1),
        (f"# x\nprefill-1 {PREFILL.public} more", 2),
        ("prefill-1 tooshort", 1),
        (f"a/b {PREFILL.public}", 1),
        (f"a {PREFILL.public}\nb {PREFILL.public}", 2),
    ],
    ids=named,
)
def test_allow_list_that_is_none_is_refused_with_the_line(text: str, line: int) -> None:
    with pytest.raises(ConfigError, match=rf"^list:{line}: "):
        parse_allow_list(text, "list")


@pytest.mark.parametrize(
    "address",
    [
        ControlAddress("127.0.0.1", 5),
        ControlAddress("worker-3.pool.example", 65535, PREFILL.public),
        ControlAddress("fe80::1", 8101, DECODE.public),
        ControlAddress("h", 1, "?key=" + "?b#%A" * 7),  # these are digits of a key, too
    ],
)
def test_control_address_survives_its_text(address: ControlAddress) -> None:
    assert ControlAddress.parse(str(address)) == address
    assert address.public_key not in address.endpoint or not address.public_key


@pytest.mark.parametrize(
    "text",
    [
        "",
        "tcp://",
        "tcp://host",
        "tcp://host:",
        "tcp://:5",
        "tcp://host:0",
        "tcp://host:65536",
        "tcp://host:+5",
        "tcp://host:\u0665",
        "tcp://*:5",
        "tcp://eth0;127.0.0.1:5",
        "tcp://a b:5",
        "ipc:///x:5",
        "inproc://zeromq.zap.01:5",
        "http://host:5",
        "tcp://host:5?key=",
        "tcp://host:5?key=short",
        f"tcp://host:5?other={PREFILL.public}",
    ],
    ids=named,
)
def test_what_is_no_control_address_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        ControlAddress.parse(text)


def test_worker_with_keys_dials_only_keys_it_knows() -> None:
    for insecure in (False, True):
        check_dial(ControlAddress("10.0.0.1", 1, PREFILL.public), KNOWN, insecure=insecure)
        for key, what in ((STRANGER.public, "not on this worker's allow-list"), ("", "uses no keys")):
            with pytest.raises(PeerNotAllowed, match=what):
                check_dial(ControlAddress("127.0.0.1", 1, key), KNOWN, insecure=insecure)


@pytest.mark.parametrize("host", ["169.254.169.254", "10.0.0.1", "metadata.internal", "0.0.0.0", "localhost.evil"])
def test_worker_without_keys_dials_loopback_only(host: str) -> None:
    """vllm#45230: an address that comes with a request must not be dialed just because it came."""
    with pytest.raises(PeerNotAllowed, match="loopback addresses only"):
        check_dial(ControlAddress(host, 80), None, insecure=False)
    check_dial(ControlAddress(host, 80), None, insecure=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_worker_without_keys_dials_loopback(host: str) -> None:
    check_dial(ControlAddress(host, 80), None, insecure=False)
    with pytest.raises(PeerNotAllowed, match="this worker has none"):
        check_dial(ControlAddress(host, 80, PREFILL.public), None, insecure=False)


def test_name_belongs_to_its_key() -> None:
    assert name_problem(KNOWN, PREFILL.public, "prefill-1") is None
    assert name_problem(KNOWN, PREFILL.public, "prefill-2") == ("prefill-1", "prefill-2")
    assert name_problem(KNOWN, STRANGER.public, "prefill-1") == ("a key that is not allowed", "prefill-1")
    assert name_problem(None, "", "anybody") is None


def test_processes_that_share_a_key_have_names_below_its_name() -> None:
    assert name_problem(KNOWN, PREFILL.public, "prefill-1/dp1") is None
    assert name_problem(KNOWN, PREFILL.public, "prefill-1/dp1/0") is None
    assert name_problem(KNOWN, PREFILL.public, "prefill-10") == ("prefill-1", "prefill-10")
    assert name_problem(KNOWN, PREFILL.public, "prefill-1x/dp1") == ("prefill-1", "prefill-1x/dp1")
    assert name_problem(KNOWN, PREFILL.public, "other/prefill-1") == ("prefill-1", "other/prefill-1")


@pytest.mark.parametrize("name", ["a", "a/dp1", "a/dp1/0", "f81d4fae-7dec-11d0_dp1/3", "x" * 64 + "/0"])
def test_names_of_workers(name: str) -> None:
    assert is_worker_name(name)


@pytest.mark.parametrize(
    "name", ["", "/", "a/", "/a", "a//b", "a@b", "a#1", "a b", "a\n", "\x1b[2J", "n\u00f6", "x" * 65, "a/b/c/d/e"]
)
def test_what_would_forge_a_line_or_another_name_is_no_name(name: str) -> None:
    assert not is_worker_name(name)
