"""Real vLLM servers for the tests: a checkpoint that is sensitive to its KV, servers, and a client with two legs."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, LlamaConfig, LlamaForCausalLM

from pdlink.serve.ports import free_ports
from pdlink.serve.vllm import CONNECTORS
from pdlink_bench import resting

READY_S = 240.0
"""A server takes 20 s to start on two idle cores."""
NUM_LAYERS = 8
PEER_S = 15.0
MODEL = "sensitive"
_VOCABULARY = 512


def save_model(path: Path) -> None:
    """A Llama whose greedy continuation really depends on every prompt token, as a checkpoint."""
    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    _save(LlamaForCausalLM(config), path)


def save_latent_model(path: Path) -> None:
    """The same with multi-head latent attention, of the one size that vLLM's kernel for CPUs knows: 512 + 64."""
    config = DeepseekV2Config(
        vocab_size=_VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        first_k_dense_replace=4,  # no experts
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    _save(DeepseekV2ForCausalLM(config), path)


def _save(model: Any, path: Path) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed_tokens" in name:
                parameter.normal_(0, 1)
            elif "lm_head" in name:
                parameter.normal_(0, 0.3)
            elif parameter.ndim == 2:
                parameter.normal_(0, (2 / parameter.shape[1]) ** 0.5)
                if any(word in name for word in ("q_proj", "k_proj", "kv_a_proj")):
                    parameter.mul_(1.5)
    model.save_pretrained(path)


def prompt_of(num_tokens: int, seed: int) -> list[int]:
    """Token ids that depend on the seed."""
    state = seed * 7919 + 13
    tokens = []
    for _ in range(num_tokens):
        state = (state * 1103515245 + 12345) % 2**31
        tokens.append(3 + (state >> 16) % (_VOCABULARY - 3))
    return tokens


def place_of(folder: Path, name: str) -> Path:
    """A folder for one pair, with the checkpoint in `folder`."""
    place = folder / name
    place.mkdir()
    (place / "model").symlink_to(folder / "model")
    return place


@dataclass
class Answer:
    status: int
    body: dict[str, Any]

    @property
    def tokens(self) -> list[list[int]]:
        """Of every choice. Fails, with what the server said, if it answered with an error."""
        assert self.status == 200, self.body
        return [choice["token_ids"] for choice in self.body["choices"]]


def post(url: str, body: dict[str, Any], timeout_s: float = 300.0) -> Answer:
    """A completion, whatever its status; status 0 is a connection that broke."""
    asked = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(asked, timeout=timeout_s) as answer:
            return Answer(answer.status, json.loads(answer.read()))
    except urllib.error.HTTPError as error:
        return Answer(error.code, {"text": error.read().decode()})
    except OSError as error:
        return Answer(0, {"text": str(error)})


def body_of(prompt: Any, **fields: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": 12,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **fields,
    }


_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent() -> None:
    """In the child: no server is left behind by tests that are killed. Its engine follows it."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))


OURS = CONNECTORS["pdlink"][0]
"""What vLLM is told to find the connector by."""


@dataclass(eq=False)
class Server:
    """One `vllm serve` and everything it started; ends with `kill`."""

    name: str
    model: Path
    log: Path
    flags: list[str]
    connector: dict[str, Any] | None = None
    """`kv_transfer_config`; it need not name PDLinkConnector."""
    environment: dict[str, str] = field(default_factory=dict)
    port: int = field(default_factory=lambda: free_ports(1))
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> Server:
        command = [str(Path(sys.executable).parent / "vllm"), "serve", str(self.model), "--skip-tokenizer-init"]
        command += ["--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--dtype", "float32", "--max-model-len", "8192", *self.flags]
        # Several servers on two cores: threads that spin with sched_yield kept others from running for 15 s.
        path = [self.environment.get("PYTHONPATH", ""), str(resting.plugin(self.log.parent)), *sys.path]
        if self.connector is not None:
            command += ["--kv-transfer-config", json.dumps(OURS | self.connector)]
        settings = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            **self.environment,
            "PYTHONPATH": os.pathsep.join(place for place in path if place),
        }
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                env=os.environ | settings,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        return self

    def wait_ready(self) -> Server:
        deadline_s = time.monotonic() + READY_S
        while not self.healthy():
            assert self.process is not None
            failed = self.process.poll() is not None or "EngineCore failed to start" in self.tail()
            assert not failed, f"{self.name} has ended: {self.tail()}"
            assert time.monotonic() < deadline_s, f"{self.name} is not ready: {self.tail()}"
            time.sleep(0.25)
        return self

    def healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return int(answer.status) == 200
        except OSError:
            return False

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def complete(self, prompt: Any, **fields: Any) -> Answer:
        return post(f"{self.url}/v1/completions", body_of(prompt, **fields))

    def metric(self, name: str, *having: str) -> float:
        """Sum over all samples of this name, with all this in their labels."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        found = [line for line in lines if line.startswith(name + "{") and all(each in line for each in having)]
        return sum(float(line.rsplit(" ", 1)[1]) for line in found)

    def holds_nothing(self) -> bool:
        """Whether no request runs or waits and no block is held."""
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        return not any(self.metric(f"vllm:{name}") for name in names)

    def kill(self) -> None:
        """SIGKILL for the server and all its processes."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):  # it has ended by itself: its output says why
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(30)
            self.process = None


@dataclass
class Pair:
    """A prefill server and a decode server."""

    prefill: Server
    decode: Server
    control: tuple[str, ...]

    timeline: Path
    """What prefill's timeline is kept in."""

    back: tuple[str, ...] = ()
    """Where the connector of `decode` listens, if it can prefill, too."""

    @classmethod
    def of(
        cls,
        folder: Path,
        *,
        prefill_flags: list[str],
        decode_flags: list[str],
        transport: str | dict[str, Any] = "auto",
        shards: int = 1,
        verify: str = "off",
        on_failure: str = "recompute",
        both: bool = False,
        tier: dict[str, Any] | None = None,
        store: dict[str, Any] | None = None,
        decode_store: dict[str, Any] | None = None,
        environment: dict[str, str] | None = None,
        decode_connector: dict[str, Any] | None = None,
    ) -> Pair:
        """Servers of the checkpoint `model` in this folder, both ready.

        transport: its kind, or more of its settings. both: each can prefill for the other. tier: another connector,
        which decode asks for KV first. store, decode_store: section `tiers` of prefill, and of decode.
        decode_connector: name and module of another connector for decode.
        """
        model, control_port, back_port = folder / "model", free_ports(shards), free_ports(shards) if both else 0
        # Patient with a peer that gets no CPU; a killed one is noticed by its connections.
        timeouts = {"heartbeat_s": 0.5, "peer_s": PEER_S, "connect_s": 15.0, "lease_s": 20.0, "offer_s": 60.0}
        common: dict[str, Any] = {
            "timeouts": timeouts | {"request_s": 240.0},
            "transport": {"verify": verify} | ({"kind": transport} if isinstance(transport, str) else transport),
        }
        if shards > 1:
            common["shards"] = shards

        def connector(role: str, **extra: Any) -> dict[str, Any]:
            return {
                "kv_role": role,
                "kv_load_failure_policy": on_failure,
                "kv_connector_extra_config": common | extra,
            }

        trace = str(folder / "timeline-{rank}.json")
        listens = {"control_port": control_port, "timeline": trace}
        kept, keeps = ({"tiers": tiers} if tiers is not None else {} for tiers in (store, decode_store))
        prefill = connector("kv_both" if both else "kv_producer", name="prefill", **listens, **kept)
        decode = connector("kv_both" if both else "kv_consumer", name="decode", control_port=back_port, **keeps)
        if tier is not None:
            decode = {
                "kv_connector": "MultiConnector",
                "kv_connector_module_path": None,
                "kv_role": decode["kv_role"],
                "kv_load_failure_policy": on_failure,
                "kv_connector_extra_config": {"connectors": [tier, OURS | decode]},
            }
        decode |= decode_connector or {}
        more = environment or {}
        pair = cls(
            Server("prefill", model, folder / "prefill.log", prefill_flags, prefill, more).start(),
            Server("decode", model, folder / "decode.log", decode_flags, decode, more).start(),
            tuple(f"tcp://127.0.0.1:{control_port + shard}" for shard in range(shards)),
            folder / "timeline-0.json",
            tuple(f"tcp://127.0.0.1:{back_port + shard}" for shard in range(shards)) if both else (),
        )
        try:
            pair.prefill.wait_ready()
            pair.decode.wait_ready()
        except BaseException:
            pair.stop()
            raise
        return pair

    def swapped(self) -> Pair:
        """The same servers, each in the other's place."""
        return Pair(self.decode, self.prefill, self.back, self.timeline, self.control)

    def stop(self) -> None:
        self.prefill.kill()
        self.decode.kill()

    def prefill_leg(self, attempt: str, prompt: Any, **fields: Any) -> Answer:
        """As the proxy posts it."""
        alone = {**fields, "max_tokens": 1, "n": 1}
        count = len(prompt) if isinstance(prompt[0], list) else 1
        params = {"transfer_id": attempt, "leg": "prefill", "num_prompts": count}
        return self.prefill.complete(prompt, **alone, kv_transfer_params=params)

    def decode_leg(self, attempt: str, prompt: Any, **fields: Any) -> Answer:
        """As the proxy posts it."""
        there = {"name": self.prefill.name, "control": self.control if len(self.control) > 1 else self.control[0]}
        params = {"transfer_id": attempt, "leg": "decode", "prefill": there}
        return self.decode.complete(prompt, **fields, kv_transfer_params=params)

    def legs(self, prompt: Any, **fields: Any) -> tuple[Answer, Answer]:
        """Both legs at once; (prefill's, decode's) answer."""
        attempt = f"xfer-{uuid.uuid4().hex}"
        with ThreadPoolExecutor(2) as threads:
            prefill = threads.submit(self.prefill_leg, attempt, prompt, **fields)
            decode = threads.submit(self.decode_leg, attempt, prompt, **fields)
            return prefill.result(), decode.result()

    def tokens(self, prompt: Any, **fields: Any) -> list[list[int]]:
        return self.legs(prompt, **fields)[1].tokens

    def transferred(self) -> float:
        """Prompt tokens whose KV has come to decode from prefill so far, by vLLM's own account."""
        return self.decode.metric("vllm:external_prefix_cache_hits_total")

    def landings(self, num_tokens: int, attempt: str) -> tuple[list[float], list[float]]:
        """When chunks of the last prompt of this many tokens were computed, and when layers of it had landed."""
        with ThreadPoolExecutor(1) as threads:
            prompt = prompt_of(num_tokens, num_tokens)
            decode = threads.submit(self.decode_leg, attempt, prompt)
            until(lambda: self.decode.metric("vllm:num_requests_waiting") > 0, "decode has offered its blocks")
            assert self.prefill_leg(attempt, prompt).status == 200
            assert decode.result().status == 200

        def ended() -> list[dict[str, Any]]:
            transfers = json.loads(self.timeline.read_text())["transfers"]
            return [each for each in transfers if each["ended"] and ends_at(each) == num_tokens]

        def ends_at(transfer: dict[str, Any]) -> int:
            return max((each["end"] for each in transfer["written"]), default=0)

        until(lambda: self.timeline.exists() and bool(ended()), "a timeline is kept")
        found = ended()[-1]
        assert found["ended"]["state"] == "DONE"
        return [each["at_s"] for each in found["written"]], [each["submitted_s"] for each in found["landed"]]


def until(condition: Any, what: str, timeout_s: float = 90.0) -> None:
    """Wait for something that servers do."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"timed out after {timeout_s} s waiting until {what}"
        threading.Event().wait(0.05)
