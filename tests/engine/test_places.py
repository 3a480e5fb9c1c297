"""Where a model is, asked before transformers is."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from pdlink.config import ModelConfig
from pdlink.engine import places
from pdlink.engine.places import find_model
from pdlink.errors import ConfigError


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """A hub that has the model org/there and nothing else; the cache is empty."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(200 if self.path == "/org/there/resolve/main/config.json" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.file_download.HF_HUB_CACHE", str(tmp_path / "cache"), raising=False)
    yield str(tmp_path / "cache")
    server.shutdown()
    thread.join()
    server.server_close()


def cache(folder: str, name: str) -> None:
    """As the hub's library keeps a model it has fetched."""
    place = Path(folder) / f"models--{name.replace('/', '--')}"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text("c0ffee")
    (place / "snapshots" / "c0ffee").mkdir(parents=True)
    (place / "snapshots" / "c0ffee" / "config.json").write_text("{}")


def test_a_directory_with_a_model_is_taken(tmp_path: Path) -> None:
    assert find_model(ModelConfig()) is False
    (tmp_path / "config.json").write_text("{}")
    assert find_model(ModelConfig(path=str(tmp_path))) is False


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/nonexistent", "model.path: no such directory: /nonexistent"),
        ("./no/such", "model.path: no such directory: ./no/such"),
        ("a/b/c", "model.path: no such directory: a/b/c"),
        ("~/model", "model.path: no such directory: ~/model; ~ is not expanded here"),
        ("Makefile", "model.path: Makefile is a file; name the directory that holds the model"),
        ("docs", "model.path: docs has no config.json; it must hold a transformers model"),
    ],
)
def test_a_model_that_is_not_there_is_one_line(path: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        find_model(ModelConfig(path=path))
    assert str(error.value) == message


def test_a_model_of_the_hub_is_asked_for_once(hub: str) -> None:
    assert find_model(ModelConfig(path="org/there")) is False
    with pytest.raises(ConfigError, match=r"'org/none' is no directory here, and not .*answers 404 for it; it is mi"):
        find_model(ModelConfig(path="org/none"))


@pytest.mark.usefixtures("hub")
def test_without_a_network_a_model_that_is_not_cached_is_one_line_at_once(
    hub: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers tried for 15 s and more, and logged each try twice."""
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"^model\.path: 'org/there' [^\n]* cannot be reached: Connection refused$"):
        find_model(ModelConfig(path="org/there"))
    cache(hub, "org/there")
    assert find_model(ModelConfig(path="org/there")) is True
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert find_model(ModelConfig(path="org/there")) is True
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE keeps it"):
        find_model(ModelConfig(path="org/none"))


def test_a_wait_for_the_hub_has_an_end() -> None:
    assert places._TIMEOUT_S <= 10
