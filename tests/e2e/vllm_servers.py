"""Real vLLM servers for the tests, and a client with two legs."""

from __future__ import annotations

import json
import os
import sys
import urllib.request
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdlink.fleet.ports import free_ports
from pdlink.fleet.vllm import CONNECTORS
from pdlink_bench import resting
from tests.e2e.engine_servers import MODEL, Answer, EngineServer, prompt_of, until

PEER_S = 15.0
COMPUTES = ["--enforce-eager", "--no-enable-prefix-caching", "--max-num-batched-tokens", "512"]
"""Flags of a server that computes what it is not sent, 512 tokens at a time."""
OURS = CONNECTORS["pdlink"][0]
"""What vLLM is told to find the connector by."""


@dataclass(eq=False)
class Server(EngineServer):
    """One `vllm serve`, ready 20 s after its start on two idle cores."""

    connector: dict[str, Any] | None = None
    """`kv_transfer_config`; it need not name PDLinkConnector."""

    def command(self) -> list[str]:
        beside = Path(sys.executable).parent / "vllm"  # not where python and packages have folders of their own
        vllm = [str(beside)] if beside.exists() else [sys.executable, "-m", "vllm.entrypoints.cli.main"]
        command = [*vllm, "serve", str(self.model), "--skip-tokenizer-init"]
        command += ["--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--dtype", "float32", "--max-model-len", "8192", *self.flags]
        if self.connector is not None:
            command += ["--kv-transfer-config", json.dumps(OURS | self.connector)]
        return command

    def settings(self) -> dict[str, str]:
        # Several servers on two cores: threads that spin with sched_yield kept others from running for 15 s.
        path = [self.environment.get("PYTHONPATH", ""), str(resting.plugin(self.log.parent)), *sys.path]
        return {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            **self.environment,
            "PYTHONPATH": os.pathsep.join(place for place in path if place),
        }

    def has_failed(self) -> bool:
        return super().has_failed() or "EngineCore failed to start" in self.tail()

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


@dataclass
class Pair:
    """A prefill server and a decode server."""

    prefill: Server
    decode: Server
    control: tuple[str, ...]
    """Where prefill's connector listens, of each engine in turn."""

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
        stages: int = 1,
        ranks: int = 1,
        engines: int = 1,
        verify: str = "off",
        on_failure: str = "recompute",
        both: bool = False,
        tier: dict[str, Any] | None = None,
        store: dict[str, Any] | None = None,
        decode_store: dict[str, Any] | None = None,
        environment: dict[str, str] | None = None,
        prefill_connector: dict[str, Any] | None = None,
        decode_connector: dict[str, Any] | None = None,
    ) -> Pair:
        """Servers of the checkpoint `model` in this folder, both ready.

        ranks: of each server, where both have as many; else shards and stages. engines: of prefill, data parallel
        behind its port. transport: its kind, or more of its settings. both: each can prefill for the other. tier:
        another connector, which decode asks for KV first. store, decode_store: section `tiers` of prefill, and of
        decode. prefill_connector, decode_connector: name and module of another connector for it.
        """
        model, count = folder / "model", max(ranks, shards * stages)
        control_port, back_port = free_ports(count * engines), free_ports(count) if both else 0
        if engines > 1:
            prefill_flags = [*prefill_flags, "--data-parallel-size", str(engines)]
        # Patient with a peer that gets no CPU; a killed one is noticed by its connections.
        common: dict[str, Any] = {
            "timeouts": {"peer_s": PEER_S, "request_s": 240.0},
            "transport": {"verify": verify} | ({"kind": transport} if isinstance(transport, str) else transport),
        }
        if shards > 1:
            common["shards"] = shards
        if stages > 1:
            common["stages"] = stages

        def connector(role: str, **extra: Any) -> dict[str, Any]:
            return {
                "kv_role": role,
                "kv_load_failure_policy": on_failure,
                "kv_connector_extra_config": common | extra,
            }

        trace = str(folder / "timeline-{rank}.json")
        listens = {"listen": f"127.0.0.1:{control_port}", "timeline": trace}
        kept, keeps = ({"tiers": tiers} if tiers is not None else {} for tiers in (store, decode_store))
        prefill = connector("kv_both" if both else "kv_producer", name="prefill", **listens, **kept)
        decode = connector(
            "kv_both" if both else "kv_consumer", name="decode", listen=f"127.0.0.1:{back_port}", **keeps
        )
        if tier is not None:
            decode = {
                "kv_connector": "MultiConnector",
                "kv_connector_module_path": None,
                "kv_role": decode["kv_role"],
                "kv_load_failure_policy": on_failure,
                "kv_connector_extra_config": {"connectors": [tier, OURS | decode]},
            }
        prefill |= prefill_connector or {}
        decode |= decode_connector or {}
        more = environment or {}
        pair = cls(
            Server("prefill", model, folder / "prefill.log", prefill_flags, prefill, environment=more).start(),
            Server("decode", model, folder / "decode.log", decode_flags, decode, environment=more).start(),
            tuple(f"tcp://127.0.0.1:{control_port + number}" for number in range(count * engines)),
            folder / "timeline-0.json",
            tuple(f"tcp://127.0.0.1:{back_port + shard}" for shard in range(count)) if both else (),
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
