"""TTFT beyond the prefill leg of vLLM pairs on one GPU, ours beside NixlConnector's: `pdlink bench serving` with an
8-billion-parameter Llama, made of a config alone, whose random weights vLLM makes where they are used.

`python -m pdlink_bench.gpu.serving FOLDER --rehearse` runs the same with a tiny model on vLLM's build for CPUs.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pdlink.engine.tiny import END_TOKEN_ID, SPECIAL_TOKENS, build_tokenizer

from ..deployments import CPU_ARGS, CPU_ENVIRONMENT
from ..serving import column
from .figures import SERVING, SERVING_TOKENS, GpuFigure

if TYPE_CHECKING:
    from collections.abc import Sequence

NIXL = "two vLLM servers, NixlConnector: TTFT beyond the prefill leg"
GIB = 1 << 30
SERVER_NBYTES = 23 * GIB
"""Of a server of the large model: 15 GiB of weights, 4 of KV, 4 of activations, context and graphs."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    tokens: tuple[int, ...]
    """Lengths of prompts."""
    args: tuple[str, ...] = ()
    """Of a server."""

    def write(self, folder: Path) -> None:
        """What vLLM takes for a model, but for the weights. Its tokens are bytes, so that answers have text."""
        from transformers import LlamaConfig

        LlamaConfig(
            architectures=["LlamaForCausalLM"],
            vocab_size=256 + len(SPECIAL_TOKENS),
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.hidden // self.heads,
            max_position_embeddings=max(8192, 2 * self.tokens[-1]),
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=END_TOKEN_ID,
            dtype="bfloat16",
        ).save_pretrained(folder)
        build_tokenizer().save_pretrained(folder)


WEIGHTLESS = ("--load-format", "dummy", "--no-enable-prefix-caching")
LARGE = ModelShape(
    layers=32, hidden=4096, intermediate=16896, heads=32, kv_heads=8, tokens=(256, 4096, SERVING_TOKENS),
    args=(
        *WEIGHTLESS, "--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(4 * GIB),
        "--max-num-batched-tokens", "16384", "--attention-backend", "TRITON_ATTN",
        "--cudagraph-capture-sizes", "1", "2", "4",
    ),
)  # fmt: skip
"""Llama 3's 8B with a vocabulary of bytes, whose parameters are in the MLPs instead: 7.99 billion. A prompt is one
step, so that both systems overlap what they can."""
TINY = ModelShape(
    layers=2, hidden=256, intermediate=256, heads=4, kv_heads=2, tokens=(64, 256),
    args=(*WEIGHTLESS, *CPU_ARGS, "--gpu-memory-utilization", "0.2"),
)  # fmt: skip


def measure(folder: Path, shape: ModelShape, systems: Sequence[str], *, on_gpu: bool) -> dict[str, list[float]]:
    """Samples of TTFT beyond the prefill leg of the longest prompt, by system, as seconds.

    Raises RuntimeError with what the benchmark has said last.
    """
    model, result = folder / "model", folder / f"{'-'.join(systems)}.json"
    shape.write(model)
    words = ["bench", "serving", "--model", str(model), "--json", str(result), "--log-dir", str(folder / "logs")]
    words += [word for system in systems for word in ("--system", system)]
    words += ["--tokens", *map(str, shape.tokens), "--rounds", "5", "--batch", "4", "--answer-tokens", "8"]
    words += ["--no-rest" if on_gpu else "--rest", *(f"--vllm-arg={word}" for word in shape.args)]
    # The sampler would be compiled at the start.
    environment = {**os.environ, **({"VLLM_USE_FLASHINFER_SAMPLER": "0"} if on_gpu else CPU_ENVIRONMENT)}
    done = subprocess.run([sys.executable, "-m", "pdlink", *words], env=environment, check=False, text=True)
    if not result.exists():
        raise RuntimeError(f"pdlink bench serving {' '.join(systems)} ended with {done.returncode}")
    content = json.loads(result.read_text(encoding="utf-8"))["systems"]
    name = column("over_prefill", shape.tokens[-1])
    for system, one in content.items():
        if one.get("problem"):
            print(f"{system}: {one['problem']}", file=sys.stderr)
    return {system: one["measured"][name]["samples"] for system, one in content.items() if name in one["measured"]}


def figures(samples: dict[str, list[float]], nothing: str) -> list[GpuFigure]:
    """nothing: why a system has no samples."""
    ours, theirs = (samples.get(system) for system in ("pdlink", "nixl"))
    nixl = GpuFigure(NIXL, statistics.median(theirs)) if theirs else GpuFigure(NIXL, None, note=nothing)
    if not ours:
        return [GpuFigure(SERVING, None, note=nothing), nixl]
    seconds = statistics.median(ours)
    ratio = None if nixl.seconds is None else seconds / nixl.seconds
    return [GpuFigure(SERVING, seconds, against="NixlConnector", ratio=ratio, note=nixl.note), nixl]


def run() -> list[GpuFigure]:
    """The case of `make gpu`."""
    import torch

    if importlib.util.find_spec("vllm") is None:
        return figures({}, "vLLM is not here")
    systems = ["pdlink", "nixl"] if importlib.util.find_spec("nixl") else ["pdlink"]
    room = torch.cuda.get_device_properties(0).total_memory // SERVER_NBYTES
    nothing = "NIXL is not here" if len(systems) == 1 else "it failed; see the log"
    folder = Path(tempfile.mkdtemp(prefix="pdlink-serving-"))
    if room >= 2 * len(systems):
        return figures(measure(folder, LARGE, systems, on_gpu=True), nothing)
    samples: dict[str, list[float]] = {}  # a smaller GPU: one after the other, so without turns
    for system in systems:
        samples |= measure(folder, LARGE, [system], on_gpu=True)
    return figures(samples, nothing)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rehearse", action="store_true", required=True)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    for one in figures(measure(args.folder, TINY, ["pdlink"], on_gpu=False), "NIXL is not asked for"):
        print(one)
    return 0


if __name__ == "__main__":
    sys.exit(main())
