"""The Valkey tier against a real server with all its moods, and against servers that lie."""

from __future__ import annotations

import shutil
import socket
import subprocess
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest

from pdlink.errors import ConfigError
from pdlink.fleet.ports import free_ports
from pdlink.store.tiers.base import DAMAGED
from pdlink.store.tiers.resp import CommandRefused, RespConnection
from pdlink.store.tiers.valkey import PART_NBYTES, Valkey
from tests.waiting import WAIT_S

from .harness import key, read, record
from .server import RealServer, valkey_server

BIG = 3 * PART_NBYTES + 12345
PASSWORD = "a secret/with:signs"
URL_PASSWORD = "a%20secret%2Fwith%3Asigns"


@pytest.fixture
def namespace(tmp_path: Path) -> str:
    return str(tmp_path)


@pytest.fixture
def tier(namespace: str) -> Iterator[Valkey]:
    tier = Valkey(valkey_server().url, namespace)
    yield tier
    tier.close()


@contextmanager
def server(*options: str) -> Iterator[RealServer]:
    server = RealServer(*options)
    try:
        yield server
    finally:
        server.close()


def names(namespace: str) -> list[bytes]:
    found = valkey_server().ask(b"KEYS", f"pdlink:{namespace}:*".encode())
    assert isinstance(found, list)
    return sorted(name for name in found if isinstance(name, bytes))


def test_a_long_record_lies_in_parts_that_go_with_it(tier: Valkey, namespace: str) -> None:
    tier.put(key(1), record(1, BIG))
    assert len(names(namespace)) == 4
    assert read(tier, key(1), BIG) == record(1, BIG)
    tier.remove(key(1))
    assert names(namespace) == []
    tier.put(key(1), record(1, BIG))
    tier.clear()
    assert names(namespace) == []


@pytest.mark.parametrize("part", [1, 2, 3])
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(None, id="evicted"),
        pytest.param(lambda stored: stored[:-1], id="short"),
        pytest.param(lambda stored: stored + b"x", id="long"),
        pytest.param(lambda stored: stored * 10, id="ten times"),
        pytest.param(lambda stored: stored[:-1] + bytes([stored[-1] ^ 4]), id="one bit"),
    ],
)
def test_a_record_with_a_lost_or_damaged_part_is_a_miss_and_can_be_put_again(
    tier: Valkey, namespace: str, part: int, change: Callable[[bytes], bytes] | None
) -> None:
    tier.put(key(1), record(1, BIG))
    name = names(namespace)[part]
    if change is None:
        valkey_server().ask(b"DEL", name)
    else:
        stored = valkey_server().ask(b"GET", name)
        assert isinstance(stored, bytes)
        valkey_server().ask(b"SET", name, change(stored))
    assert tier.get(key(1), memoryview(bytearray(BIG))) == (None if change is None else DAMAGED)
    assert tier.contains([key(1)]) == [False]
    assert tier.put(key(1), record(1, BIG))
    assert read(tier, key(1), BIG) == record(1, BIG)


def test_parts_without_a_head_are_a_miss_that_costs_no_connection(tier: Valkey, namespace: str) -> None:
    """As a put that is under way leaves them."""
    tier.put(key(1), record(1, BIG))
    valkey_server().ask(b"DEL", names(namespace)[0])
    for _ in range(3):
        assert read(tier, key(1), BIG) is None
    assert tier.put(key(1), record(1, BIG))
    assert read(tier, key(1), BIG) == record(1, BIG)


def test_a_head_that_announces_an_exabyte_is_a_miss_that_costs_no_memory(tier: Valkey, namespace: str) -> None:
    tier.put(key(1), record(1))
    (name,) = names(namespace)
    stored = valkey_server().ask(b"GET", name)
    assert isinstance(stored, bytes)
    lie = stored[:40] + (1 << 60).to_bytes(8, "little") + stored[48:]
    verbs: list[Callable[[], object]] = [lambda: read(tier, key(1)), lambda: tier.remove(key(1))]
    for verb in verbs:
        valkey_server().ask(b"SET", name, lie)
        tracemalloc.start()
        assert verb() is None
        assert tracemalloc.get_traced_memory()[1] < 6 << 20
        tracemalloc.stop()
        assert names(namespace) == []


def test_a_look_up_of_many_keys_answers_for_each(tier: Valkey) -> None:
    there = set(Random(5).sample(range(2000), 40))
    for number in there:
        tier.put(key(number), memoryview(b"x"))
    assert tier.contains([key(number) for number in range(2000)]) == [number in there for number in range(2000)]


def test_every_part_of_a_record_has_its_time_to_live(namespace: str) -> None:
    tier = Valkey(valkey_server().url, namespace, ttl_s=90.5)
    tier.put(key(1), record(1, BIG))
    for name in names(namespace):
        left_ms = valkey_server().ask(b"PTTL", name)
        assert isinstance(left_ms, int)
        assert 60_000 < left_ms <= 90_500
    tier.close()


def test_a_connection_that_the_server_closed_meanwhile_is_made_again(tier: Valkey) -> None:
    tier.put(key(1), record(1))
    for verb in (lambda: tier.contains([key(1)]), lambda: read(tier, key(1)), lambda: tier.put(key(1), record(1))):
        valkey_server().ask(b"CLIENT", b"KILL", b"TYPE", b"normal")
        assert verb()


def test_a_server_that_is_gone_is_an_os_error_until_it_is_back() -> None:
    with server() as first:
        tier, url = Valkey(first.url, "n", timeout_s=5.0), first.path
        assert tier.put(key(1), record(1))
    with pytest.raises(OSError, match="No such file"):
        read(tier, key(1))
    with server() as second:
        Path(url).parent.mkdir()
        Path(url).symlink_to(second.path)
        assert read(tier, key(1)) is None
        assert tier.put(key(1), record(1))
        tier.close()
    shutil.rmtree(Path(url).parent)


def test_a_full_server_refuses_puts_and_keeps_answering() -> None:
    with server("--maxmemory", "8mb", "--maxmemory-policy", "noeviction") as full:
        tier = Valkey(full.url, "n")
        kept = [number for number in range(12) if tier.put(key(number), record(number, 1 << 20))]
        assert 2 <= len(kept) < 12
        for number in range(12):
            assert read(tier, key(number), 1 << 20) == (record(number, 1 << 20) if number in kept else None)
        tier.close()


def test_a_server_that_evicts_parts_never_gives_a_wrong_record() -> None:
    with server("--maxmemory", "20mb", "--maxmemory-policy", "allkeys-random") as small:
        tier, hits = Valkey(small.url, "n"), 0
        for number in range(30):
            tier.put(key(number), record(number, BIG))
            got = read(tier, key(number), BIG)
            assert got in (None, record(number, BIG))
            hits += got is not None
        found = [read(tier, key(number), BIG) for number in range(30)]
        assert all(got in (None, record(number, BIG)) for number, got in enumerate(found))
        assert hits
        assert None in found
        tier.close()


def test_a_password_opens_the_server_and_shows_in_no_error() -> None:
    with server("--requirepass", PASSWORD) as closed:
        right = closed.url.replace("unix://", f"unix://:{URL_PASSWORD}@")
        tier = Valkey(right, "n")
        assert tier.put(key(1), record(1))
        assert read(tier, key(1)) == record(1)
        tier.close()
        for wrong in (closed.url, closed.url.replace("unix://", "unix://:another%20secret@")):
            with pytest.raises(CommandRefused) as error:
                Valkey(wrong, "n").contains([key(1)])
            assert "secret" not in str(error.value)


def test_a_server_that_repeats_the_password_is_not_quoted() -> None:
    """As Redis 3 does where it asks for no password, and others that know no AUTH."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:

        def refuse() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"-ERR unknown command `AUTH`, with args beginning with: `planted`\r\n")

        refusing = pool.submit(refuse)
        with pytest.raises(CommandRefused, match=r"^ERR to user, password or database") as error:
            Valkey(f"redis://:planted@127.0.0.1:{listener.getsockname()[1]}", "n").contains([key(1)])
        refusing.result()
        assert "planted" not in str(error.value)


def test_a_user_who_may_only_read_reads(tmp_path: Path) -> None:
    rules = tmp_path / "acl"
    rules.write_text(f"user default on >{'root'} ~* &* +@all\nuser reader on >word ~pdlink:* +get +exists +auth\n")
    with server("--aclfile", str(rules)) as closed:
        writer, reader = (
            Valkey(closed.url.replace("unix://", f"unix://{who}@"), "n") for who in ("default:root", "reader:word")
        )
        assert writer.put(key(1), record(1))
        assert read(reader, key(1)) == record(1)
        with pytest.raises(CommandRefused, match="unlink"):
            reader.put(key(2), record(2))
        assert reader.contains([key(1), key(2)]) == [True, False]
        writer.close()
        reader.close()


def test_tcp_and_a_database_by_number() -> None:
    port = free_ports(1)
    with server("--port", str(port)):
        one, other = (Valkey(f"valkey://127.0.0.1:{port}/{number}", "n") for number in (0, 3))
        assert one.put(key(1), record(1, BIG))
        assert read(one, key(1), BIG) == record(1, BIG)
        assert read(other, key(1), BIG) is None
        one.close()
        other.close()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make a certificate with")
def test_tls_is_spoken_with_a_server_whose_certificate_is_known(tmp_path: Path) -> None:
    certificate, private = tmp_path / "cert.pem", tmp_path / "key.pem"
    request = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    extension = ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(private), "-out", str(certificate)]
    subprocess.run(["openssl", *request.split(), *extension], check=True, capture_output=True, timeout=30)
    port = free_ports(1)
    files = [
        "--tls-cert-file",
        str(certificate),
        "--tls-key-file",
        str(private),
        "--tls-ca-cert-file",
        str(certificate),
    ]
    try:
        running = RealServer("--tls-port", str(port), *files, "--tls-auth-clients", "no")
    except AssertionError as error:
        pytest.skip(f"this server speaks no TLS: {str(error)[:200]}")
    try:
        tier = Valkey(f"rediss://localhost:{port}?ssl_ca_certs={certificate}", "n")
        assert tier.put(key(1), record(1, BIG))
        assert read(tier, key(1), BIG) == record(1, BIG)
        tier.close()
        with pytest.raises(OSError, match="certificate verify failed"):
            Valkey(f"rediss://localhost:{port}", "n").contains([key(1)])
    finally:
        running.close()


@pytest.mark.parametrize(
    "url",
    [
        "",
        "localhost:6379",
        "http://host",
        "redis://",
        "unix://",
        "redis://:hunter2@host:port",
        "redis://:hunter2@host:6379/one",
        "redis://:hunter2@host?ssl_ca_certs=x",
        "rediss://:hunter2@host?nonsense=1",
        "rediss://:hunter2@host?ssl_ca_certs=/nowhere",
    ],
)
def test_a_wrong_url_is_a_wrong_setting_and_is_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError, match=r"^tiers\.remote_url: ") as error:
        Valkey(url, "n")
    assert "hunter2" not in str(error.value)


class Liar:
    """Answers whatever it is sent with what `say` does to the connection; then closes it, unless told to hold it."""

    def __init__(self, path: Path, say: Callable[[socket.socket], None]) -> None:
        self.url = f"unix://{path / 'liar'}"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path / "liar"))
        self._listener.listen()
        self._say = say
        self.over, self.asked = threading.Event(), threading.Event()
        self._threads = [threading.Thread(target=self._serve)]
        self._threads[0].start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            connection.settimeout(20)
            self._threads.append(threading.Thread(target=self._talk, args=(connection,)))
            self._threads[-1].start()

    def _talk(self, connection: socket.socket) -> None:
        with connection:
            try:
                if connection.recv(1 << 20):
                    self.asked.set()
                    self._say(connection)
            except OSError:
                pass

    def close(self) -> None:
        self.over.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(WAIT_S)


def _endless(*pieces: bytes) -> Callable[[socket.socket], None]:
    """Send the first piece once, and the others again and again until nobody takes them."""

    def say(connection: socket.socket) -> None:
        connection.sendall(pieces[0])
        while True:
            for piece in pieces[1:]:
                connection.sendall(piece)

    return say


LIES = {
    "nothing": lambda connection: None,
    "garbage": lambda connection: connection.sendall(Random(1).randbytes(100_000)),
    "html": lambda connection: connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n<html>"),
    "an error": lambda connection: connection.sendall(b"-LOADING the dataset\r\n" * 4),
    "a negative length": lambda connection: connection.sendall(b"$-7\r\n"),
    "no number": lambda connection: connection.sendall(b"$12e3\r\n"),
    "a length of a terabyte": lambda connection: connection.sendall(b"$1099511627776\r\n" + bytes(1000)),
    "a length of 400 digits": lambda connection: connection.sendall(b"$" + b"9" * 400 + b"\r\n"),
    "a length that is not kept": lambda connection: connection.sendall(b"$65600\r\n" + bytes(65599)),
    "more than the length": lambda connection: connection.sendall(b"$65600\r\n" + bytes(70000)),
    "an endless line": _endless(b"$", b"1" * 4096),
    "endless records": _endless(b"", b"$65600\r\n" + bytes(65600) + b"\r\n"),
    "endless nulls": _endless(b"", b"$-1\r\n"),
    "endless numbers": _endless(b"", b":1\r\n"),
    "an array of a billion": _endless(b"*1000000000\r\n", b":1\r\n" * 1000),
    "arrays in arrays": _endless(b"", b"*1\r\n" * 1000),
    "a wide array of wide arrays": _endless(b"*60000\r\n", b"*60000\r\n" + b"+x\r\n" * 60000),
    "keys without end": _endless(b"", b"*2\r\n$1\r\n7\r\n*1\r\n$1\r\nx\r\n"),
    "long texts": _endless(b"*60000\r\n", b"$16384\r\n" + bytes(16384) + b"\r\n"),
}


@pytest.mark.parametrize("null", [b"$-1\r\n", b"*-1\r\n"])
def test_a_null_is_no_text_and_what_follows_it_is_heard(tmp_path: Path, null: bytes) -> None:
    server = Liar(tmp_path, lambda connection: connection.sendall(null + b":7\r\n"))
    connection = RespConnection(server.url.removeprefix("unix://"), 10.0)
    try:
        connection.send([b"ASK\r\n"])
        assert connection.reply() is None
        assert connection.reply() == 7
    finally:
        connection.close()
        server.close()


def test_a_server_that_answers_a_clear_with_something_else_has_failed(tmp_path: Path) -> None:
    liar = Liar(tmp_path, lambda connection: connection.sendall(b"+OK\r\n"))
    tier = Valkey(liar.url, "n", timeout_s=5.0)
    try:
        with pytest.raises(OSError, match="no answer to SCAN"):
            tier.clear()
    finally:
        tier.close()
        liar.close()


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("verb", ["get", "put", "contains", "remove", "clear"])
def test_a_lying_server_costs_an_os_error_or_a_miss_and_little_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, lie: str
) -> None:
    monkeypatch.setattr("pdlink.store.tiers.valkey._CLEAR_S", 0.5)
    liar = Liar(tmp_path, LIES[lie])
    tier = Valkey(liar.url, "n", timeout_s=0.5)
    into, sent = memoryview(bytearray(2 * PART_NBYTES)), record(1, 2 * PART_NBYTES)
    calls: dict[str, Callable[[], object]] = {
        "get": lambda: tier.get(key(1), into),
        "put": lambda: tier.put(key(1), sent),
        "contains": lambda: tier.contains([key(number) for number in range(100)]),
        "remove": lambda: tier.remove(key(1)),
        "clear": tier.clear,
    }
    tracemalloc.start()
    try:
        answer = calls[verb]()
    except OSError as error:
        print(repr(error))
    else:
        if verb == "get":
            assert answer in (None, DAMAGED)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        tier.close()
        liar.close()
    assert peak < 6 << 20


def test_a_server_that_drips_is_given_up_at_the_deadline(tmp_path: Path) -> None:
    def drip(connection: socket.socket) -> None:
        connection.sendall(b"$1048640\r\n")
        while not liar.over.wait(0.02):
            connection.sendall(b"x")

    liar = Liar(tmp_path, drip)
    tier = Valkey(liar.url, "n", timeout_s=0.4)
    with pytest.raises(TimeoutError):
        read(tier, key(1), PART_NBYTES)
    liar.close()


def test_closing_the_tier_wakes_a_call_that_waits(tmp_path: Path) -> None:
    liar = Liar(tmp_path, lambda _: [liar.over.wait(4 * WAIT_S)].clear())
    tier, answers = Valkey(liar.url, "n", timeout_s=4 * WAIT_S), []
    waiting = threading.Thread(target=lambda: answers.append(read(tier, key(1))))
    waiting.start()
    assert liar.asked.wait(WAIT_S)
    tier.close()
    waiting.join(WAIT_S)
    assert answers == [None]
    liar.close()


def test_more_threads_than_connections_take_turns(namespace: str) -> None:
    tier = Valkey(valkey_server().url, namespace, num_connections=1)
    tier.put(key(1), record(1, BIG))
    answers = []
    threads = [threading.Thread(target=lambda: answers.append(read(tier, key(1), BIG))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert answers == [record(1, BIG)] * 6
    tier.close()
