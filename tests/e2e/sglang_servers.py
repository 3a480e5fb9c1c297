"""Real SGLang servers for the tests, on CPUs, and pdlink's proxy before a pair of them."""

from __future__ import annotations

import sys
import urllib.request
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from pdlink.config import ProxyConfig
from pdlink.engine import tiny
from pdlink.fleet.child import Child, start, stop
from pdlink.fleet.ports import free_ports
from pdlink.observe.timeline import Dump, KeptTransfer
from tests.e2e.engine_servers import MODEL, Answer, EngineServer, body_of, post, save_model, until

ROOT = Path(__file__).parents[2]
FLAGS = [
    *("--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native", "--grammar-backend", "none"),
    *("--sampling-backend", "pytorch", "--max-total-tokens", "16384", "--page-size", "16"),
    *("--disable-overlap-schedule", "--skip-server-warmup", "--context-length", "8192", "--host", "127.0.0.1"),
    *("--chunked-prefill-size", "256", "--served-model-name", MODEL, "--watchdog-timeout", "600"),
]
ADMIN_KEY = "the-tests"
LEG_S = 240.0


def save_checkpoint(path: Path) -> None:
    """The model of `save_model`, with a tokenizer, without which SGLang's servers do not start."""
    save_model(path)
    tiny.build_tokenizer().save_pretrained(path)


@dataclass(eq=False)
class SglangServer(EngineServer):
    """One server."""

    bootstrap_port: int = field(default_factory=lambda: free_ports(1), kw_only=True)

    ready_path: ClassVar[str] = "/v1/models"
    """The first /health is a warm-up of up to 20 s."""
    ready_s: ClassVar[float] = 480.0

    def command(self) -> list[str]:
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(self.model)]
        command += ["--port", str(self.port), *FLAGS, *self.flags]
        if "--disaggregation-mode" in self.flags:
            command += ["--disaggregation-bootstrap-port", str(self.bootstrap_port)]
        return command

    def settings(self) -> dict[str, str]:
        return {
            "SGLANG_USE_CPU_ENGINE": "1",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            # How long prefill waits for a decode server that stands still; SGLang's default of 300 s outlasts a leg.
            "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "60",
            "PYTHONPATH": f"{ROOT / 'tests/sglang_cpu'}:{ROOT}",
            **self.environment,
        }

    def generate(self, prompt: Sequence[int], **fields: Any) -> Answer:
        """By SGLang's own interface, which says how much of the prompt it had: `cached_of`."""
        return post(f"{self.url}/generate", native_body(prompt, **fields), LEG_S)

    def abort(self, rid: str) -> None:
        assert self.call("POST", "/abort_request", {"rid": rid}) == 200

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> int:
        """The status of a call that says nothing else. As an administrator."""
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {ADMIN_KEY}"}
        data = msgspec.json.encode(body) if body is not None else None
        asked = urllib.request.Request(self.url + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(asked, timeout=60) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            self.said = error.read().decode()
            return error.code

    said: str = field(default="", init=False)
    """With the last call that failed."""

    def num_prefill_passes(self) -> int:
        """Forward passes over prompts that its scheduler has logged."""
        return self.output().count("Prefill batch")


def native_body(prompt: Sequence[int], **fields: Any) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    return {"input_ids": list(prompt), "sampling_params": sampling, **fields}


def tokens_of(answer: Answer) -> list[int]:
    """Of one prompt, by either interface."""
    assert answer.status == 200, answer.body
    if "output_ids" in answer.body:
        return list(answer.body["output_ids"])
    (tokens,) = answer.tokens
    return tokens


def cached_of(answer: Answer) -> int:
    """Tokens of the prompt that were not computed for it."""
    assert answer.status == 200, answer.body
    return int(answer.body["meta_info"]["cached_tokens"])


@dataclass
class SglangPair:
    """A server for each role, and pdlink's proxy before them."""

    prefill: SglangServer
    decode: SglangServer
    proxy: Child
    timeline: Path
    """What prefill's transfers are kept in."""

    @classmethod
    def of(
        cls,
        place: Path,
        flags: Sequence[str] = (),
        *,
        environment: Mapping[str, str] | None = None,
        kind: type[SglangServer] = SglangServer,
        **of_role: Sequence[str],
    ) -> SglangPair:
        """Servers of the checkpoint `model` in this folder, all ready. kind: of them.

        of_role: more flags for prefill or decode.
        """
        timeline = place / "timeline-0.json"
        backend = ["--disaggregation-transfer-backend", "pdlink", *flags]
        # SGLang's default keeps retracted requests in memory that only CUDA pins.
        backend += ["--disaggregation-decode-retraction-backup", "cpu_tensor"]
        timed = {"PDLINK_TIMELINE": str(place / "timeline-{rank}.json")}
        servers = [
            kind(
                role,
                place / "model",
                place / f"{role}.log",
                [*backend, "--disaggregation-mode", role, *of_role.get(role, ())],
                environment={**(environment or {}), **(timed if role == "prefill" else {})},
            ).start()
            for role in ("prefill", "decode")
        ]
        children: list[Child] = []
        try:
            prefill, decode = (server.wait_ready() for server in servers)
            config = ProxyConfig(listen="127.0.0.1:0", dialect="sglang", prefill=(prefill.url,), decode=(decode.url,))
            children.append(start("proxy", "proxy", config.model_dump(mode="json")))
            children[0].wait_ready(60)
            pair = cls(prefill, decode, children[0], timeline)
            pair.wait_routed()
        except BaseException:
            stop(children, 20)
            for server in servers:
                server.kill()
            raise
        return pair

    @property
    def url(self) -> str:
        return str(self.proxy.facts["url"])

    @property
    def servers(self) -> tuple[SglangServer, SglangServer]:
        return self.prefill, self.decode

    def wait_routed(self) -> None:
        until(lambda: _is_well(self.url), "the proxy sees its servers", 120)

    def complete(self, prompt: Sequence[int], timeout_s: float = LEG_S) -> Answer:
        """Through the proxy."""
        return post(f"{self.url}/v1/completions", body_of(list(prompt)), timeout_s)

    def tokens(self, prompt: Sequence[int]) -> list[int]:
        return tokens_of(self.complete(prompt))

    def swapped(self) -> SglangPair:
        """The same servers, each in the other's place; the proxy does not know of it."""
        return SglangPair(self.decode, self.prefill, self.proxy, self.timeline)

    def legs(self, prompt: Sequence[int], rid: str = "") -> tuple[Answer, Answer]:
        """Both legs as SGLang's own router posts them: prefill's and decode's answer."""
        room = uuid.uuid4().int >> 65
        where = {"bootstrap_host": "127.0.0.1", "bootstrap_port": self.prefill.bootstrap_port, "bootstrap_room": room}
        with ThreadPoolExecutor(2) as threads:
            legs = [
                threads.submit(server.generate, prompt, **where, rid=rid or f"leg-{room}") for server in self.servers
            ]
            return legs[0].result(), legs[1].result()

    def while_computing(self, prompt: Sequence[int], do: Callable[[], None]) -> Answer:
        """The proxy's answer to a prompt in the middle of which this was done: two of its chunks are computed."""
        before = self.prefill.num_prefill_passes()
        with ThreadPoolExecutor(1) as threads:
            asked = threads.submit(self.complete, prompt)
            until(lambda: self.prefill.num_prefill_passes() >= before + 2, "the prompt is being computed", 120)
            do()
            return asked.result()

    def transfers_of(self, num_tokens: int) -> list[KeptTransfer]:
        """Those of prompts of so many tokens, in whole pages, as prefill has seen them to their ends."""
        if not self.timeline.exists():
            return []
        transfers = msgspec.json.decode(self.timeline.read_bytes(), type=Dump).transfers
        return [one for one in transfers if one.ended and _end_of(one) == num_tokens]

    def stop(self) -> None:
        stop([self.proxy], 20)
        for server in self.servers:
            server.kill()


def _end_of(transfer: KeptTransfer) -> int:
    return max((each.end for each in transfer.written), default=0)


def _is_well(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=10) as answer:
            return int(answer.status) == 200
    except OSError:
        return False
