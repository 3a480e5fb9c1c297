"""Operators see and change what the connectors keep in an engine's process: the routes and the keys of requests."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from pdlink.cli import main
from pdlink.config.admin import AdminConfig
from pdlink.errors import ConfigError
from pdlink.fleet.ports import free_ports
from pdlink.integrations.loaded_weights import HERE
from pdlink.integrations.sglang_parts.settings import read_linker
from pdlink.integrations.vllm_parts.settings import read
from pdlink.serve.admin import AdminServer
from pdlink.store.scope import sglang_names
from tests.integrations.test_sglang_device_pages import device_pages, device_pool
from tests.integrations.test_sglang_parts import LAYERS, PAGE, PAGES, pages_of, pool
from tests.integrations.test_store_half import PROMPT, TOKENS, found, keep, opened, server, table
from tests.store.stubs import StubTier
from tests.waiting import WAIT_S


class Operator:
    """`pdlink cache` against one URL."""

    def __init__(self, url: str, capsys: pytest.CaptureFixture[str]) -> None:
        self._url, self._capsys = url, capsys

    def said(self, action: str, *words: str, status: int = 0) -> str:
        assert main(["cache", action, self._url, *words]) == status
        printed = self._capsys.readouterr()
        return printed.out if status == 0 else printed.err

    def __call__(self, action: str, tokens: Sequence[int] = (), *words: str) -> Any:
        named = ["--tokens", ",".join(map(str, tokens))] if tokens else []
        return json.loads(self.said(action, *named, *words, "--json"))


@contextmanager
def served(store: Any, config: AdminConfig | None = None) -> Iterator[str]:
    admin = AdminServer("vllm", store, config or AdminConfig())
    try:
        yield admin.url
    finally:
        admin.close()


def test_what_an_operator_warms_by_token_ids_the_next_request_of_vllm_loads(
    capsys: pytest.CaptureFixture[str],
) -> None:
    tier = StubTier()
    with opened(tiers=[tier]) as store, server(store) as made, served(store) as url:
        operator = Operator(url, capsys)
        keep(made, "r", 1)
        assert store.flush(WAIT_S)
        assert operator("lookup", PROMPT)["runs"] == [{"place": "memory", "tokens": 32}]
        store.clear(places=["memory"])
        assert operator("warm", PROMPT) == {"tokens": 32}
        tier.error = OSError("the tier is away")
        assert found(made) == 32
        tier.error = None
        tokens = ",".join(map(str, PROMPT))
        assert "could not note the clear" in operator.said("clear", "--tokens", tokens, status=1)
        assert found(made) == 0
        made.arrive("again")
        assert made.find("again") == 0, "vLLM computes it"
        made.run("again", table(2), cuts=(TOKENS,))
        made.finish("again")
        assert operator("lookup", PROMPT)["tokens"] == 32
        assert "places" in operator.said("top", "--count", "1")
        assert operator("stats")["scopes"][0]["model"] == "m"


def test_a_reset_of_weights_changes_the_keys_of_verbs_as_those_of_requests(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with opened() as store, server(store) as made, served(store) as url:
        operator = Operator(url, capsys)
        keep(made, "r", 1)
        assert operator("lookup", PROMPT)["tokens"] == 32
        made.store.source.rename("era")
        assert operator("lookup", PROMPT)["tokens"] == 0
        assert len(operator("stats")["scopes"]) == 1


def test_pages_of_sglang_are_found_and_forgotten_by_token_ids(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = [*range(500, 500 + 3 * PAGE + 1)]
    names, salted = sglang_names(tokens, PAGE), sglang_names(tokens, PAGE, "s", "adapter")
    port = free_ports(1)
    pages = pages_of(
        pool("layer_first", torch.zeros((2, LAYERS, PAGES * PAGE, 2, 8), dtype=torch.int16)),
        admin=f"127.0.0.1:{port}",
    )
    try:
        operator, records = Operator(f"127.0.0.1:{port}", capsys), pages.kv.records
        assert records.set([*names, *salted[:2]], [0, 1, 2, 3, 4]) == [True] * 5
        assert operator("lookup", tokens)["tokens"] == 3 * PAGE
        assert operator("lookup", tokens, "--salt", "s", "--lora", "adapter")["tokens"] == 2 * PAGE
        assert operator("pin", tokens[: 2 * PAGE], "--name", "p") == {"tokens": 2 * PAGE, "durable": False}
        monkeypatch.setattr(HERE, "change", "")
        HERE._become("other weights")
        assert operator("lookup", tokens)["tokens"] == 0
        assert records.set(names[:1], [5]) == [True]
        assert operator("lookup", tokens)["tokens"] == PAGE
        HERE._become("")
        assert operator("clear", tokens)["records"] == 3
        assert records.known([*names, *salted[:2]]) == [False] * 3 + [True] * 2
    finally:
        pages.close()


def test_the_linker_serves_operators_until_it_is_closed(capsys: pytest.CaptureFixture[str]) -> None:
    port = free_ports(1)
    pages = device_pages(device_pool(), admin={"address": f"127.0.0.1:{port}"})
    operator = Operator(f"127.0.0.1:{port}", capsys)
    assert operator("stats")["scopes"][0]["chunk_tokens"] == PAGE
    with pytest.raises(ConfigError, match="admin: cannot bind"):
        device_pages(device_pool(), admin=f"127.0.0.1:{port}")
    pages.close()
    assert "did not answer" in operator.said("stats", status=1)


def test_who_lacks_the_key_learns_and_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key_file = tmp_path / "key"
    key_file.write_text("secret-of-operators")
    key_file.chmod(0o600)
    with opened() as store, served(store, AdminConfig(key_file=str(key_file))) as url:
        operator = Operator(url, capsys)
        assert "give --key-file FILE" in operator.said("clear", "--everything", status=1)
        assert operator("clear", (), "--everything", "--key-file", str(key_file))["records"] == 0


@pytest.mark.parametrize(
    ("admin", "tiers", "named"),
    [
        ("0.0.0.0:9000", {}, "admin.key_file"),
        ("http://127.0.0.1", {}, "HOST:PORT"),
        ("127.0.0.1:9000", {"store": "ipc:///tmp/x"}, "answers operators"),
        ({"port": 1}, {}, "admin.port"),
    ],
)
def test_a_place_for_operators_that_cannot_be_is_refused_by_name(
    admin: object, tiers: dict[str, Any], named: str
) -> None:
    for settings_of in (read, read_linker):
        with pytest.raises(ConfigError, match=named):
            settings_of({"admin": admin, "tiers": tiers})
    with pytest.raises(ConfigError, match="without tiers"):
        read({"admin": "127.0.0.1:0"})


def test_ranks_listen_on_ports_in_a_row() -> None:
    ports = AdminConfig(address="127.0.0.1:9000")
    assert [ports.of_rank(rank).port for rank in range(3)] == [9000, 9001, 9002]
    assert AdminConfig().of_rank(5).port == 0
