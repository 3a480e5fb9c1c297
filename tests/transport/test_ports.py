"""Which ports the data plane opens: nothing beyond this host for a worker that only this host can reach."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

import pytest

from pdlink.config import TransportConfig, WorkerConfig, is_loopback
from pdlink.config.transport import UcxConfig
from pdlink.errors import TransportUnavailable
from pdlink.memory.buffers import Buffer
from pdlink.transport.choice import open_transports
from pdlink.transport.ucx import UcxTransport


def listening() -> set[str]:
    """Local addresses (IPv4) of this process's listening sockets."""
    mine = set()
    for path in Path("/proc/self/fd").iterdir():
        try:
            mine.add(os.readlink(path))
        except OSError:
            continue
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {
        socket.inet_ntoa(struct.pack("=I", int(row[1].split(":")[0], 16)))
        for row in rows
        if row[3] == "0A" and f"socket:[{row[9]}]" in mine
    }


@pytest.mark.parametrize("tls", ["tcp", "auto"])
@pytest.mark.parametrize(("host", "devices"), [("127.0.0.1", "auto"), ("10.9.8.7", "lo")])
def test_worker_for_this_host_listens_on_loopback_only(tls: str, host: str, devices: str) -> None:
    """UCX itself listens on every interface, and what listens there asks nobody for a key."""
    probe = UcxTransport().probe()
    if not probe.ok:
        pytest.skip(probe.reason)
    transport = {"kind": "ucx", "ucx": {"tls": tls, "devices": devices}}
    config = WorkerConfig.model_validate({"listen": host, "transport": transport, "security": {"insecure": True}})
    before = listening()
    buffer = Buffer(1 << 16)
    transports = open_transports(config.transport, [buffer], this_host_only=not config.listen.reachable)
    transports[0].invite("peer")
    now = listening()
    for transport_ in transports:
        transport_.close()
    buffer.close()
    assert "127.0.0.1" in now
    assert all(is_loopback(address) for address in now - before)


def test_devices_that_are_not_there_are_an_error_that_names_them() -> None:
    probe = UcxTransport().probe()
    if not probe.ok:
        pytest.skip(probe.reason)
    config = TransportConfig(kind="ucx", ucx=UcxConfig(tls="tcp", devices="nosuch0"))
    with pytest.raises(TransportUnavailable, match="on 'nosuch0'"):
        open_transports(config, [])
