"""One address says where a process is reached; the others follow from it, or are set by themselves."""

from __future__ import annotations

from typing import Any

import pytest

from pdlink.config import ProxyConfig, StoreConfig, WorkerConfig, load, parse_assignments
from pdlink.config.listen import HostPort, LinkListen, ListenConfig, place_of
from pdlink.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("10.0.0.1", ("10.0.0.1", 0)),
        ("node-7:8100", ("node-7", 8100)),
        ("[::1]:8100", ("::1", 8100)),
        ("[fe80::1]", ("fe80::1", 0)),
        ("::1", ("::1", 0)),
        ("0.0.0.0:0", ("0.0.0.0", 0)),
    ],
)
def test_an_address_is_a_host_with_or_without_a_port(text: str, place: tuple[str, int]) -> None:
    assert place_of(text) == place
    assert place_of(str(HostPort(*place))) == place


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("http://h:1", "listen: must be HOST or HOST:PORT, without http:// before it"),
        (":8100", "listen: must be HOST or HOST:PORT"),
        ("h:1/path", "listen: must be HOST or HOST:PORT, without http:// before it"),
        (
            "ipc:///tmp/a.sock",
            "listen: must be HOST or HOST:PORT; the Unix socket of a store is its setting `socket`",
        ),
        ("h:99999", "listen: must have a port from 0 to 65535; 0 takes a free one"),
        ("h:http", "listen: must have a port"),
        ("[::1:80", r"listen: must be \[HOST\]:PORT"),
        (8100, "listen: must be text .*got 8100"),
        ({"data": "h:1"}, "listen.data: must be a host without a port"),
        ({"data": "h:0"}, "listen.data: must be a host without a port"),
        ({"advertise": "[::1]"}, "listen.advertise: must be a host without a port"),
        ({"htp": "h:1"}, "unknown setting 'listen.htp'; did you mean 'listen.http'"),
    ],
)
def test_a_wrong_address_is_refused_by_its_name(value: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load(WorkerConfig, environment={}, flags={"listen": value})


@pytest.mark.parametrize(
    "text", ["[::1]:8100", "[fd00::7]", "2001:1:2:3:4:5:6:7", "fd00::7", "[2001:1:2:3:4:5:6:7]:1"]
)
def test_an_ipv6_address_needs_no_quotes_in_a_flag_and_in_the_environment(text: str) -> None:
    place = place_of(text)
    security = {"security.insecure": True}
    for config in (
        load(WorkerConfig, environment={"PDLINK_LISTEN": text}, flags=security),
        load(WorkerConfig, environment={}, flags=parse_assignments([f"listen={text}"]) | security),
    ):
        assert (config.listen.host, config.listen.port) == place


def test_http_control_and_data_share_the_host_unless_said_otherwise() -> None:
    one = ListenConfig(address="127.0.0.2:8100")
    assert (one.host, one.port, one.control_host, one.control_port) == ("127.0.0.2", 8100, "127.0.0.2", 0)
    apart = ListenConfig(address="127.0.0.2:8100", http="127.0.0.3:1", control="127.0.0.4:2", data="127.0.0.5")
    assert (apart.host, apart.port, apart.control_host, apart.control_port) == ("127.0.0.3", 1, "127.0.0.4", 2)
    moved = apart.on(http=3, control=4)
    assert (moved.host, moved.port, moved.control_port) == ("127.0.0.3", 3, 4)


def test_a_file_and_a_flag_may_say_it_in_either_form() -> None:
    flags = {"listen": "127.0.0.1:1", "listen.control": "127.0.0.1:2"}
    for config in (load(WorkerConfig, environment={}, flags=flags), load(StoreConfig, environment={}, flags=flags)):
        assert (config.listen.port, config.listen.control_port) == (1, 2)
    assert load(ProxyConfig, environment={"PDLINK_LISTEN": "127.0.0.1"}).at == ("127.0.0.1", 8000)


def test_an_engines_server_has_one_port_for_the_control_plane() -> None:
    found = LinkListen.model_validate("10.0.0.1:8500")
    assert (found.control_host, found.control_port) == ("10.0.0.1", 8500)
    assert found.on_port(8501).control_port == 8501
    assert found.reachable == {"listen": "10.0.0.1"}
