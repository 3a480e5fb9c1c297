"""Real vLLM servers behind the real proxy: one pulls from the store of another what that one has computed.

Run with `make test-vllm`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from pdlink.config import ProxyConfig  # noqa: E402
from pdlink.fleet.child import Child, start, stop  # noqa: E402
from pdlink.fleet.ports import free_ports  # noqa: E402
from tests.e2e.conftest import VLLM_LONG, Alone  # noqa: E402
from tests.e2e.deployment import request  # noqa: E402
from tests.e2e.engine_servers import body_of, place_of, prompt_of, until  # noqa: E402
from tests.e2e.test_vllm_store import server_of  # noqa: E402
from tests.e2e.vllm_servers import COMPUTES, Server  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

CHUNK = 32


def prompt_tokens(server: Server, source: str) -> float:
    return server.metric("vllm:pdlink_prompt_tokens_total", f'source="{source}"')


@dataclass
class Cell:
    """Two prefill servers with a store each, one for decode, and a proxy that knows of what it has sent."""

    place: Path
    prefills: list[Server]
    decode: Server
    ports: dict[str, int] = field(default_factory=dict)
    """Of the connector of each prefill server; its store is asked on the next one."""

    def list_members(self, *, draining: Server | None = None) -> None:
        listed = [
            {
                "url": server.url,
                "control": [f"tcp://127.0.0.1:{self.ports[server.name]}"],
                "store": f"tcp://127.0.0.1:{self.ports[server.name] + 1}",
                "drain": server is draining,
            }
            for server in self.prefills
        ]
        written = self.place / "members.new"
        written.write_text(json.dumps({"prefill": listed, "decode": [self.decode.url]}))
        written.replace(self.place / "members.json")

    def open(self) -> Child:
        self.list_members()
        config = ProxyConfig(listen="127.0.0.1:0", dialect="vllm", discover=(f"file:{self.place / 'members.json'}",))
        self.proxy = start("proxy", "proxy", config.model_dump(mode="json"))
        return self.proxy

    def drain(self, server: Server) -> None:
        self.list_members(draining=server)
        until(lambda: self.states()[server.url] == "draining", f"{server.name} gets no requests")

    def states(self) -> dict[str, str]:
        found = request(f"{self.proxy.facts['url']}/health").body
        return {each["url"]: each["state"] for each in (*found["prefill"], *found["decode"])}

    def ask(self, prompt: list[int]) -> list[int]:
        answer = request(f"{self.proxy.facts['url']}/v1/completions", body_of(prompt), timeout_s=240)
        assert answer.status == 200, answer.body
        found: list[int] = answer.body["choices"][0]["token_ids"]
        return found

    def other(self, server: Server) -> Server:
        return next(each for each in self.prefills if each is not server)

    def computes(self, prompt: list[int]) -> tuple[Server, list[int]]:
        """Which server has computed it and keeps it, and the answer."""
        before = [prompt_tokens(server, "computed") for server in self.prefills]
        tokens = self.ask(prompt)

        def computed() -> list[Server]:
            pairs = zip(self.prefills, before, strict=True)
            return [each for each, count in pairs if prompt_tokens(each, "computed") == count + len(prompt)]

        until(computed, "a server says that it computed the prompt")
        (server,) = computed()
        until(server.holds_nothing, "all of it is kept")
        return server, tokens


@pytest.fixture(scope="module")
def cell(vllm_folder: Path, alone: Alone) -> Iterator[Cell]:
    place = place_of(vllm_folder, "sources")
    with ExitStack() as ends:
        prefills, ports = [], {}
        for name in ("one", "two"):
            port = ports[name] = free_ports(2)
            flags = ["--block-size", str(CHUNK)]
            server = server_of(place, name, flags, "recompute", chunk_size=CHUNK, peer_port=port + 1)
            assert server.connector is not None
            server.connector["kv_role"] = "kv_producer"
            server.connector["kv_connector_extra_config"]["listen"] = f"127.0.0.1:{port}"
            prefills.append(server)
        receives = {"kv_role": "kv_consumer", "kv_load_failure_policy": "recompute"}
        flags = [*COMPUTES, "--block-size", str(CHUNK)]
        decode = Server("decode", place / "model", place / "decode.log", flags, receives)
        for server in (*prefills, decode):
            ends.callback(server.start().kill)
        for server in (*prefills, decode):
            server.wait_ready()
        found = Cell(place, prefills, decode, ports)
        proxy = found.open()
        ends.callback(stop, [proxy], 20)
        proxy.wait_ready(60)
        until(lambda: set(found.states().values()) == {"ok"}, "the proxy knows all of them")
        yield found


def test_a_server_pulls_the_prompt_of_one_that_drains(cell: Cell, alone: Alone) -> None:
    prompt = prompt_of(4096, 4096)
    first, tokens = cell.computes(prompt)
    assert tokens == alone[tuple(prompt)]
    cell.drain(first)
    other = cell.other(first)
    pulled = prompt_tokens(other, "peer")
    assert cell.ask(prompt) == alone[tuple(prompt)]
    until(lambda: prompt_tokens(other, "peer") == pulled + len(prompt) - 1, "it says that it pulled all")
    for server in (*cell.prefills, cell.decode):
        until(server.holds_nothing, f"{server.name} holds nothing")


def test_a_server_killed_while_another_pulls_from_it_costs_no_token(cell: Cell, alone: Alone) -> None:
    prompt = prompt_of(VLLM_LONG, VLLM_LONG)
    first, tokens = cell.computes(prompt)
    assert tokens == alone[tuple(prompt)]
    cell.drain(first)
    other = cell.other(first)
    calls = "vllm:pdlink_tier_seconds_count", 'call="get"'
    got, before = other.metric(*calls), {source: prompt_tokens(other, source) for source in ("peer", "computed")}
    with ThreadPoolExecutor(1) as asking:
        sent = asking.submit(cell.ask, prompt)
        until(lambda: other.metric(*calls) > got, "it pulls")
        first.kill()
        assert sent.result() == alone[tuple(prompt)]

    def told() -> list[float]:
        return [prompt_tokens(other, source) - count for source, count in before.items()]

    until(lambda: sum(told()) == len(prompt), "it says where the prompt came from")
    print(f"{told()[0]:.0f} of {len(prompt)} tokens had come")
    for server in (other, cell.decode):
        until(server.holds_nothing, f"{server.name} holds nothing")
