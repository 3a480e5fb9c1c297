"""Real SGLang servers, one of prefill and two of decode, of which one is killed while it streams: by every route, the
client reads the answer of one undisturbed server.

Run with `make test-sglang`.
"""

from __future__ import annotations

import importlib.util
import json
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest

if importlib.util.find_spec("sglang") is None:
    pytest.skip("needs SGLang", allow_module_level=True)

from pdlink.api.sse import payloads  # noqa: E402
from pdlink.config import ProxyConfig  # noqa: E402
from pdlink.fleet.child import start, stop  # noqa: E402
from tests.e2e.engine_servers import MODEL, prompt_of, until  # noqa: E402
from tests.e2e.readers import Reader  # noqa: E402
from tests.e2e.sglang_servers import SglangServer, save_checkpoint  # noqa: E402
from tests.proxy.said import Said  # noqa: E402

pytestmark = [pytest.mark.sglang, pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

NUM_TOKENS = 1200
MANY_EVENTS = 12
"""Of a stream that is in its middle."""
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": prompt_of(70, 3), "max_tokens": NUM_TOKENS, "ignore_eos": True, "logprobs": 1},
    "/v1/chat/completions": {"max_tokens": NUM_TOKENS, "ignore_eos": True},
    "/generate": {"input_ids": [prompt_of(70, 3), prompt_of(50, 4)]},
    "/v1/responses": {"max_output_tokens": NUM_TOKENS},
    "/v1/messages": {"max_tokens": NUM_TOKENS},
}
GO_ON = ("/v1/completions", "/v1/chat/completions")
"""Routes whose streams go on at another server; those of the others end with an error."""


@dataclass
class Fleet:
    prefill: SglangServer
    decodes: dict[str, SglangServer]
    """By label."""
    proxy: str

    def counted(self, kind: str) -> float:
        with urllib.request.urlopen(self.proxy + "/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        name = f'pdlink_proxy_fallbacks_total{{kind="{kind}"}} '
        return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))

    def well(self) -> int:
        try:
            with urllib.request.urlopen(self.proxy + "/health", timeout=30) as answer:
                said = json.load(answer)
        except HTTPError as error:
            said = json.load(error)
        return sum(each["state"] == "ok" for side in ("prefill", "decode") for each in said[side])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sglang-recovery")
    save_checkpoint(path / "model")
    return path


@pytest.fixture(scope="module", params=["plain", "deterministic"])
def fleet(request: pytest.FixtureRequest, folder: Path) -> Iterator[Fleet]:
    flags = ["--disaggregation-transfer-backend", "pdlink", "--disaggregation-decode-retraction-backup", "cpu_tensor"]
    if request.param == "deterministic":
        flags.append("--enable-deterministic-inference")
    with ExitStack() as ends:
        servers = []
        for number, role in enumerate(("prefill", "decode", "decode")):
            log = folder / f"{request.param}-{role}-{number}.log"
            servers.append(SglangServer(role, folder / "model", log, [*flags, "--disaggregation-mode", role]).start())
            ends.callback(servers[-1].kill)
        prefill, *decodes = [server.wait_ready() for server in servers]
        config = ProxyConfig(
            listen="127.0.0.1:0",
            dialect="sglang",
            prefill=(prefill.url,),
            decode=tuple(server.url for server in decodes),
            policy={"prefill": "round_robin", "decode": "round_robin"},
        )
        proxy = start("proxy", "proxy", config.model_dump(mode="json"))
        ends.callback(stop, [proxy], 20)
        proxy.wait_ready(60)
        made = Fleet(prefill, {f"decode-{at}": each for at, each in enumerate(decodes)}, str(proxy.facts["url"]))
        until(lambda: made.well() == 3, "the proxy sees its servers", 120)
        yield made


def long_answer(fleet: Fleet, path: str, *, drawn: bool) -> tuple[dict[str, Any], Said]:
    """A request and its answer, undisturbed: by routes that know no `ignore_eos`, one that ends late."""
    # With top_p: else SGLang's own health check, in the same batch, would change what is drawn.
    sampling = {"temperature": 0.9, "top_p": 0.95} if drawn else {"temperature": 0}
    for number in range(40):
        said = f"tell me {number}"
        fields: dict[str, Any] = dict(sampling)
        if path == "/generate":
            seeded = {**sampling, "sampling_seed": 7} if drawn else sampling
            fields = {"sampling_params": {"max_new_tokens": NUM_TOKENS, "ignore_eos": True, **seeded}}
        elif path == "/v1/responses":
            fields["input"] = said
        elif path != "/v1/completions":
            fields["messages"] = [{"role": "user", "content": said}]
        if drawn and path.endswith("completions"):
            fields["seed"] = 7
        body = {"model": MODEL, **ROUTES[path], **fields}
        reader = Reader(fleet.proxy, path, body)
        answer = reader.said()
        if reader.num_events() > 20 * MANY_EVENTS:
            return body, answer
    raise AssertionError(f"no long answer of {path}")


@pytest.mark.parametrize("drawn", [False, True], ids=["greedy", "drawn"])
def test_completions_and_chats_go_on_at_the_other_server_and_others_end_with_an_error(
    fleet: Fleet, drawn: bool
) -> None:
    """Two of each route, one at each server, when one of the two is killed. It stays away."""
    deterministic = "--enable-deterministic-inference" in fleet.prefill.flags
    if drawn != deterministic:
        pytest.skip("drawn answers are repeated by deterministic servers, and greedy ones by any")

    asked, wanted = {}, {}
    for path in ROUTES:
        asked[path], wanted[path] = long_answer(fleet, path, drawn=drawn)
    before = fleet.counted("recovered")
    readers = [Reader(fleet.proxy, path, asked[path]).placed() for path in ROUTES for _ in range(2)]

    def at_victim() -> list[Reader]:
        return [each for each in readers if each.decode == "decode-0" and each.num_events() >= MANY_EVENTS]

    until(lambda: len(at_victim()) == len(ROUTES), "one of each is in its middle there", 120)
    lost = at_victim()
    fleet.decodes["decode-0"].kill()
    assert all(reader.thread.is_alive() for reader in lost), "one had ended before"
    for reader in readers:
        if reader in lost and reader.path not in GO_ON:
            assert b"decode worker lost" in reader.whole()
            continue
        said = reader.said()
        assert said == wanted[reader.path], (reader.path, reader.decode)
        assert len(said.names) == len(wanted[reader.path].names)
    assert {reader.path for reader in lost} == ROUTES.keys()
    assert fleet.counted("recovered") == before + len(GO_ON)


def test_a_drawn_stream_of_servers_that_repeat_no_draws_ends_with_an_error_that_says_why(fleet: Fleet) -> None:
    """The other server is killed, or one of two if this test runs alone."""
    if "--enable-deterministic-inference" in fleet.prefill.flags:
        pytest.skip("these do")
    sampling = {"temperature": 0.9, "seed": 7, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    body = {"model": MODEL, "prompt": prompt_of(50, 4), **sampling}
    reader = Reader(fleet.proxy, "/v1/completions", body)
    until(lambda: reader.num_events() >= MANY_EVENTS, "it is in its middle", 120)
    victim = fleet.decodes[reader.decode]
    victim.kill()
    *_, error, done = [payload for payload in payloads(reader.whole()) if payload]
    assert done == b"[DONE]"
    told = json.loads(error)["error"]
    assert told["type"] == "stream_error"
    assert "--enable-deterministic-inference" in told["message"]
