"""A real Valkey or Redis server for tests, where one is installed."""

from __future__ import annotations

import functools
import shutil
import subprocess
import tempfile

import pytest

from pdlink.store.tiers.resp import Reply, RespConnection, command
from tests.waiting import WAIT_S

PROGRAM = shutil.which("valkey-server") or shutil.which("redis-server")


class RealServer:
    """A process that keeps nothing on disk, reached by a Unix socket and by whatever `options` ask for."""

    def __init__(self, *options: str) -> None:
        if PROGRAM is None:
            pytest.skip("no valkey-server or redis-server; make test unpacks one")
        self._directory = tempfile.TemporaryDirectory(prefix="pdlink-valkey-")
        self.path = f"{self._directory.name}/socket"
        self.url = f"unix://{self.path}"
        arguments = ["--port", "0", "--unixsocket", self.path, "--save", "", "--dir", self._directory.name, *options]
        self._process = subprocess.Popen([PROGRAM, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert self._process.stdout is not None
        lines = []
        for line in self._process.stdout:
            lines.append(line.decode(errors="replace"))
            if "Ready to accept connections" in lines[-1] or "is now ready to accept" in lines[-1]:
                break
        else:
            raise AssertionError("the server did not start: " + "".join(lines))

    def ask(self, *words: bytes) -> Reply:
        """One command, its reply whole."""
        connection = RespConnection(self.path, 10.0)
        try:
            connection.send([command(*words)])
            if words[0] != b"GET":
                return connection.reply()
            nbytes = connection.bulk_nbytes()
            if nbytes is None:
                return None
            value = bytearray(nbytes)
            connection.bulk_into(memoryview(value))
            return bytes(value)
        finally:
            connection.close()

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(WAIT_S)
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._directory.cleanup()


@functools.cache
def valkey_server() -> RealServer:
    """One for all tests of a process; its namespaces keep them apart."""
    return RealServer()
