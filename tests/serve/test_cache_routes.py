"""Operators see and change what a worker keeps: over HTTP, and with `pdlink cache`."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from aiohttp.test_utils import TestServer

from pdlink.api.keys import KEY_HEADER
from pdlink.cli import main
from pdlink.config import CacheConfig, ModelConfig, TiersConfig, TransportConfig, WorkerConfig
from pdlink.engine.request import SamplingParams
from pdlink.serve.app import build_app
from pdlink.serve.worker import Worker
from pdlink.store.store import Store
from tests.waiting import WAIT_S

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator
    from pathlib import Path

CHUNK = 32
RECORD_NBYTES = 4096 + CHUNK * 2 * 512
KEPT = tuple(range(40, 40 + 3 * CHUNK + 1))
TEXT = "A prompt that is kept. " * 9
KEY = "secret-of-operators"


class Served:
    """A worker with tiers, its HTTP, and a loop of its own."""

    def __init__(self, folder: Path) -> None:
        tiers = TiersConfig(
            chunk_size=CHUNK,
            max_local_cpu_size=64 * RECORD_NBYTES / 2**30,
            max_pinned_size=4 * RECORD_NBYTES / 2**30,
            local_disk=str(folder / "kv"),
            max_local_disk_size=0.01,
        )
        self.worker = Worker(
            WorkerConfig(
                model=ModelConfig(num_layers=1),
                cache=CacheConfig(num_blocks=64),
                transport=TransportConfig(kind="tcp"),
                tiers=tiers,
            ),
            "w",
        )
        self.worker.open()
        self.key_file = folder / "key"
        self.key_file.write_text(KEY)
        self.key_file.chmod(0o600)
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.server = TestServer(build_app(self.worker, KEY))
        self.run(self.server.start_server())
        self.url = str(self.server.make_url("")).rstrip("/")
        assert self.worker.source is not None
        self.source = self.worker.source
        store = self.source.store
        assert isinstance(store, Store)
        self.store = store

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(WAIT_S)

    def compute(self, name: str, prompt: tuple[int, ...]) -> None:
        async def answer() -> None:
            async for _ in self.worker.start(name, prompt, SamplingParams(max_tokens=1), None):
                pass

        self.run(answer())
        copied = threading.Event()
        self.source.copier.put(copied.set)
        assert copied.wait(WAIT_S)
        assert self.store.flush(20)

    def post(self, verb: str, body: object, key: str = KEY) -> tuple[int, Any]:
        async def ask() -> tuple[int, Any]:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            async with (
                aiohttp.ClientSession(headers={KEY_HEADER: key}) as session,
                session.post(f"{self.url}/pdlink/cache/{verb}", data=data) as answer,
            ):
                return answer.status, await answer.json()

        return self.run(ask())  # type: ignore[no-any-return]

    def close(self) -> None:
        self.run(self.server.close())
        self.worker.close()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(WAIT_S)
        self.loop.close()


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(tmp_path_factory.mktemp("cache"))
    yield served
    served.close()


@pytest.fixture
def served(one: Served) -> Served:
    """What KEPT and TEXT are is in memory and on disk; nothing is pinned."""
    one.store.unpin("p")
    one.store.clear()
    assert one.store.flush(20)
    one.compute("a", KEPT)
    one.compute("b", tuple(one.worker.model.tokenizer.encode(TEXT)))
    return one


def test_a_prompt_is_found_by_ids_and_by_text_where_it_lies(served: Served) -> None:
    kept = {"prompt_tokens": len(KEPT), "tokens": 3 * CHUNK}
    assert served.post("lookup", {"prompt": KEPT}) == (200, kept | {"runs": [{"place": "memory", "tokens": 96}]})
    served.store.clear(served.source.keys(KEPT).by_group[0][1:], ["memory"])
    runs = [{"place": "memory", "tokens": 32}, {"place": "disk", "tokens": 64}]
    assert served.post("lookup", {"prompt": KEPT}) == (200, kept | {"runs": runs})
    status, answer = served.post("lookup", {"prompt": TEXT})
    num_tokens = len(served.worker.model.tokenizer.encode(TEXT))
    assert (status, answer["prompt_tokens"], answer["tokens"]) == (200, num_tokens, num_tokens // CHUNK * CHUNK)
    assert served.post("lookup", {"prompt": KEPT, "cache_salt": "other"})[1]["tokens"] == 0


def test_warm_brings_into_memory_and_pin_keeps_it_there_within_the_quota(served: Served) -> None:
    served.store.clear(places=["memory"])
    assert served.post("warm", {"prompt": KEPT}) == (200, {"tokens": 96})
    assert served.post("lookup", {"prompt": KEPT})[1]["runs"] == [{"place": "memory", "tokens": 96}]
    served.store.clear(places=["memory"])
    assert served.post("pin", {"prompt": KEPT, "name": "p"}) == (200, {"tokens": 96, "durable": True})
    assert served.post("pin", {"prompt": TEXT, "name": "p"}) == (200, {"tokens": 32, "durable": True}), (
        "the quota is four records"
    )
    assert served.store.state().pinned_nbytes == 4 * RECORD_NBYTES
    assert served.post("unpin", {"name": "p"}) == (200, {"records": 4})


def test_move_takes_from_one_place_and_clear_forgets(served: Served) -> None:
    moved = served.post("move", {"prompt": KEPT, "source": "disk", "destination": "memory", "keep": False})
    assert moved == (200, {"tokens": 96})
    assert served.store.flush(20)
    served.store.clear(served.source.keys(KEPT).by_group[0], ["memory"])
    assert served.post("lookup", {"prompt": KEPT})[1]["tokens"] == 0
    kept = served.source.keys(list(TEXT.encode())).by_group[0]
    assert served.post("clear", {"prompt": TEXT})[1]["records"] == len(kept)
    assert served.post("clear", {"everything": True}) == (200, {"records": 0, "durable": True})


def test_a_clear_that_cannot_be_noted_says_so(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "full").write_text("no directory")
    monkeypatch.setattr(served.store._cleared, "_paths", [tmp_path / "full" / "cleared"])
    assert served.post("clear", {"prompt": KEPT}) == (200, {"records": 3, "durable": False})
    assert "is found again after a restart" in command(served, capsys, "clear", "--everything", status=1)
    assert served.post("clear", {"everything": True, "places": ["memory"]}) == (200, {"records": 0, "durable": True})


def test_a_lease_says_who_keeps_how_much_for_how_long(served: Served) -> None:
    keys = served.source.keys(KEPT).by_group[0]
    fetch = served.store.fetch(served.store.lookup(keys, 1), served.source.groups[0].shape, "request 7")
    try:
        (lease,) = served.store.state().leases
        assert (lease.holder, lease.request, lease.records) == ("engine", "request 7", 3)
        assert lease.age_s is not None
        assert lease.ends_in_s is not None
        assert 0 <= lease.age_s < 20 < lease.ends_in_s
    finally:
        fetch.close()
    assert served.store.state().leases == []


HOSTILE: dict[str, tuple[str, object]] = {
    "nothing": ("lookup", b""),
    "no JSON": ("lookup", b"{"),
    "a list": ("lookup", []),
    "no prompt": ("lookup", {}),
    "two prompts": ("lookup", {"prompt": [1], "messages": [{"role": "user", "content": "a"}]}),
    "a prompt of another type": ("warm", {"prompt": {"a": 1}}),
    "a negative token": ("lookup", {"prompt": [-1] * 64}),
    "a token of 33 bits": ("lookup", {"prompt": [2**32] * 64}),
    "nested lists": ("lookup", b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "a field that is unknown": ("lookup", {"prompt": [1], "salt": "x"}),
    "a role of another type": ("lookup", {"messages": [{"role": 1}]}),
    "no name": ("pin", {"prompt": [1]}),
    "an empty name": ("unpin", {"name": ""}),
    "a name of half a megabyte": ("unpin", {"name": "n" * 2**19}),
    "no such place": ("move", {"prompt": [1], "source": "moon", "destination": "memory"}),
    "one place": ("move", {"prompt": [1], "source": "memory", "destination": "memory"}),
    "nothing to clear": ("clear", {}),
    "a prompt and everything": ("clear", {"prompt": [1], "everything": True}),
    "no place to clear": ("clear", {"everything": True, "places": ["moon"]}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_cannot_be_meant_is_refused_in_words_and_changes_nothing(name: str, one: Served) -> None:
    before = one.store.state()
    status, answer = one.post(*HOSTILE[name])
    assert 400 <= status < 500
    assert 0 < len(answer["error"]["message"]) <= 2000
    assert one.store.state() == before


def test_who_lacks_the_key_learns_and_changes_nothing(one: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert one.post("clear", {"everything": True}, key="wrong")[0] == 401
    assert main(["cache", "stats", one.url]) == 1
    assert "give --key-file FILE" in capsys.readouterr().err


# --- pdlink cache


def command(served: Served, capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> str:
    action, *rest = words
    assert main(["cache", action, served.url, "--key-file", str(served.key_file), *rest]) == status
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err
    return printed.out if status == 0 else printed.err


def test_the_command_shows_and_does_what_the_routes_do(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = ",".join(map(str, KEPT))
    (tmp_path / "text").write_text(TEXT)
    assert "96 of 97 tokens are kept" in command(served, capsys, "lookup", "--tokens", tokens)
    found = json.loads(command(served, capsys, "lookup", "--file", str(tmp_path / "text"), "--json"))
    assert found["tokens"] > 96
    assert "96 tokens are pinned as p" in command(served, capsys, "pin", "--tokens", tokens, "--name", "p")
    stats = command(served, capsys, "stats")
    assert "memory" in stats
    assert "disk" in stats
    assert "pin " in stats
    assert json.loads(command(served, capsys, "stats", "--json"))["pins"][0]["request"] == "p"
    assert "3 records are not pinned" in command(served, capsys, "unpin", "--name", "p")
    assert "96 tokens are in disk" in command(
        served, capsys, "move", "--tokens", tokens, "--from", "memory", "--to", "disk"
    )
    assert "96 tokens are in memory" in command(served, capsys, "warm", "--tokens", tokens)
    assert command(served, capsys, "top", "--count", "2", "--interval", "0.01").count("places") >= 1
    assert "records were in memory" in command(served, capsys, "clear", "--everything")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("lookup", "--tokens", "a,b"), "expected numbers with commas between"),
        (("lookup", "--file", "/nowhere"), "cannot read /nowhere"),
        (("lookup", "--tokens", "-1"), "prompt"),
        (("move", "--tokens", "1", "--from", "moon", "--to", "disk"), "got 'moon'; expected memory, disk"),
        (("clear",), "everything: got"),
        (("top", "--interval", "0"), "expected more than 0"),
    ],
)
def test_wrong_usage_ends_with_2_and_the_reason(
    words: tuple[str, ...], said: str, one: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in command(one, capsys, *words, status=2)


def test_nobody_there_ends_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "stats", "127.0.0.1:9"]) == 1
    assert "did not answer" in capsys.readouterr().err


def test_several_urls_are_asked_at_once_for_what_standard_input_says(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    both, asked = threading.Barrier(2), list[str]()

    class Rank(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["prompt"])
            both.wait(WAIT_S)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"records": 3}')

        def log_message(self, *_: object) -> None: ...

    with ExitStack() as opened:
        ranks = [opened.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), Rank)) for _ in range(2)]
        for each in ranks:
            opened.callback(each.shutdown)
            threading.Thread(target=each.serve_forever, daemon=True).start()
        urls = [f"127.0.0.1:{each.server_port}" for each in ranks]
        monkeypatch.setattr("sys.stdin", io.StringIO("a prompt"))
        assert main(["cache", "pin", ",".join(urls), "--file", "-", "--name", "p"]) == 0
    assert asked == ["a prompt"] * 2
    printed = capsys.readouterr().out
    assert printed.count("3 records are pinned as p") == 2
    assert all(url in printed for url in urls)


def test_one_url_of_several_that_does_not_answer_ends_with_1_and_the_answers_of_the_others(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    urls = f"{served.url},127.0.0.1:9"
    assert main(["cache", "unpin", urls, "--name", "p", "--json", "--key-file", str(served.key_file)]) == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {served.url: {"records": 0}}
    assert "127.0.0.1:9 did not answer" in printed.err
    assert main(["cache", "top", urls]) == 2
