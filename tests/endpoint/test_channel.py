"""What libzmq and the kernel refuse a channel costs one connection, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from pdlink.endpoint.channel import Channel
from pdlink.errors import ConfigError, TransportFailure
from tests.attacks.processes import Holdings
from tests.waiting import until


@pytest.fixture
def channel() -> Iterator[Channel]:
    channel = Channel("test")
    yield channel
    channel.close()


def no_descriptor(*_: object) -> Any:
    raise zmq.ZMQError(errno.EMFILE)


def descriptors() -> int:
    gc.collect()
    return Holdings.of(os.getpid()).descriptors


@pytest.mark.parametrize("which", ["socket", "monitor", "connect"])
def test_a_dial_without_a_descriptor_is_a_typed_failure_and_leaves_nothing(
    channel: Channel, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = channel.bind("127.0.0.1", 0)
    address = f"tcp://127.0.0.1:{port}"
    before = descriptors()
    with monkeypatch.context() as patched:
        match which:
            case "socket":
                patched.setattr(channel, "_socket", no_descriptor)
            case "monitor":
                patched.setattr(zmq.Socket, "monitor", no_descriptor)
            case "connect":
                patched.setattr(zmq.Socket, "connect", no_descriptor)
        for _ in range(20):
            with pytest.raises(TransportFailure, match="ulimit -n"):
                channel.dial(address)
    until(lambda: descriptors() <= before, "nothing is left of the twenty")
    channel.drop(channel.dial(address))


def test_a_bind_without_a_descriptor_is_a_typed_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    channel = Channel("test")
    monkeypatch.setattr(channel, "_socket", no_descriptor)
    with pytest.raises(ConfigError, match="Too many open files"):
        channel.bind("127.0.0.1", 0)
    channel.close()


def test_a_monitor_that_is_readable_without_news_is_no_end_of_a_connection(
    channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It raised StopIteration, which ended the endpoint's loop."""
    with contextlib.closing(Channel("listener")) as listener:
        port = listener.bind("127.0.0.1", 0)
        channel.bind("127.0.0.1", 0)
        route = channel.dial(f"tcp://127.0.0.1:{port}")
        monitor = channel._dealers[route].monitor
        with monkeypatch.context() as patched:
            patched.setattr(channel._poller, "poll", lambda _: ({monitor}, set()))
            arrived, _ = channel.poll(0.0)
            assert list(arrived) == []
        assert channel.send(route, b"still there")
        until(lambda: bool(list(listener.poll(0.01)[0])), "the frame arrives")
