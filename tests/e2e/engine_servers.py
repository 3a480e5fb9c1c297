"""What tests with real servers of other engines share: checkpoints that are sensitive to their KV, a server as a
process, and a client."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from pdlink.fleet.ports import free_ports

NUM_LAYERS = 8
MODEL = "sensitive"
_VOCABULARY = 512
_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def save_model(path: Path, num_layers: int = NUM_LAYERS) -> None:
    """A Llama whose greedy continuation really depends on every prompt token, as a checkpoint."""
    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=num_layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    _save(LlamaForCausalLM(config), path)


def save_eagle_head(path: Path) -> None:
    """An EAGLE head with random weights for the model of `save_model`: a projection of two inputs, and one layer."""
    save_model(path, num_layers=1)
    layers = load_file(path / "model.safetensors")
    head = {name.removeprefix("model."): weight for name, weight in layers.items() if ".layers." in name}
    del head["layers.0.input_layernorm.weight"]  # the first layer of a head has none
    width = head["layers.0.mlp.gate_proj.weight"].shape[1]
    head["fc.weight"] = torch.randn(width, 2 * width) * width**-0.5
    save_file(head, path / "model.safetensors")


def save_mtp_model(path: Path) -> None:
    """A MiMo, which is a Qwen2, with a multi-token prediction layer of random weights."""
    config = Qwen2Config(
        vocab_size=_VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=NUM_LAYERS + 1,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    _save(Qwen2ForCausalLM(config), path)
    weights = load_file(path / "model.safetensors")
    of_last, of_drafts, width = f"model.layers.{NUM_LAYERS}.", "model.mtp_layers.0.", config.hidden_size
    saved = {name.replace(of_last, of_drafts): weight for name, weight in weights.items()}
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        saved[f"{of_drafts}{name}.weight"] = torch.ones(width)
    saved[f"{of_drafts}input_proj.weight"] = torch.randn(width, 2 * width) * width**-0.5
    save_file(saved, path / "model.safetensors", metadata={"format": "pt"})
    said = json.loads((path / "config.json").read_text())
    said |= {"architectures": ["MiMoForCausalLM"], "num_hidden_layers": NUM_LAYERS, "num_nextn_predict_layers": 1}
    said.pop("layer_types", None)
    (path / "config.json").write_text(json.dumps(said))


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


def plugin_of(place: Path, name: str, code: str) -> None:
    """A plugin of vLLM's, whose `run` servers call that have `place` on their PYTHONPATH."""
    told = place / f"{name}-1.dist-info"
    told.mkdir()
    (place / f"{name}.py").write_text(code)
    (told / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (told / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{name} = {name}:run\n")


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


def until(condition: Any, what: str, timeout_s: float = 90.0) -> None:
    """Wait for something that servers do."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"timed out after {timeout_s} s waiting until {what}"
        threading.Event().wait(0.05)


@dataclass(eq=False)
class EngineServer:
    """One server and everything it started; ends with `kill`."""

    name: str
    model: Path
    log: Path
    flags: list[str]
    environment: dict[str, str] = field(default_factory=dict, kw_only=True)
    """More than `settings` says."""
    port: int = field(default_factory=lambda: free_ports(1), kw_only=True)
    process: subprocess.Popen[bytes] | None = field(default=None, kw_only=True)

    ready_path: ClassVar[str] = "/health"
    """What answers 200 once the server can serve."""
    ready_s: ClassVar[float] = 240.0

    def command(self) -> list[str]:
        raise NotImplementedError

    def settings(self) -> dict[str, str]:
        """Its environment beside ours and `environment`."""
        raise NotImplementedError

    def start(self) -> Self:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command(),
                env=os.environ | self.settings(),
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        return self

    def wait_ready(self) -> Self:
        deadline_s = time.monotonic() + self.ready_s
        while not self.answers():
            assert not self.has_failed(), f"{self.name} has ended: {self.tail()}"
            assert time.monotonic() < deadline_s, f"{self.name} is not ready: {self.tail()}"
            time.sleep(0.25)
        return self

    @contextlib.contextmanager
    def serving(self) -> Iterator[Self]:
        """Started, ready inside and killed afterwards, as one that has failed to start is."""
        try:
            yield self.start().wait_ready()
        finally:
            self.kill()

    def has_failed(self) -> bool:
        """Whether it will never be ready."""
        assert self.process is not None
        return self.process.poll() is not None

    def answers(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + self.ready_path, timeout=5) as answer:
                return int(answer.status) == 200
        except OSError:
            return False

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def tail(self) -> str:
        return self.output()[-3000:]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def complete(self, prompt: Any, **fields: Any) -> Answer:
        return post(f"{self.url}/v1/completions", body_of(prompt, **fields))

    def send_signal(self, number: int) -> None:
        """To all its processes."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):  # it has ended by itself: its output says why
                os.killpg(self.process.pid, number)

    def kill(self) -> None:
        """SIGKILL for the server and all its processes, which ends them without a chance to say so."""
        self.send_signal(signal.SIGKILL)
        if self.process is not None:
            self.process.wait(30)
            self.process = None


def _die_with_parent() -> None:
    """In the child: no server is left behind by tests that are killed. Its engine follows it."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
