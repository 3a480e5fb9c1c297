"""vLLM servers of `pdlink up`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from pdlink.config.proxy import MAX_ENGINES
from pdlink.config.section import Port, Seconds, Section


class VllmConfig(Section):
    """vLLM servers started by `pdlink up --engine vllm`."""

    executable: str | None = None
    """The `vllm` command. None takes the one beside this Python, the first on PATH, or what `make vllm` installed
    here. Where it is in another environment, pdlink must be installed there too."""
    model: str | None = None
    """Local directory or hub id. None writes a small Llama to disk and serves that."""
    model_name: str = "pdlink-tiny"
    """Name clients use in `model`."""
    connector: Literal["pdlink", "nixl", "nixl-push"] = "pdlink"
    """What moves the KV: PDLinkConnector, or NixlConnector or NixlPushConnector of vLLM, to compare."""
    args: tuple[str, ...] = ()
    """More arguments of `vllm serve`, of every server: ["--dtype", "bfloat16", "--block-size", "128"]."""
    prefill_args: tuple[str, ...] = ()
    """More arguments of every prefill server, behind `args`."""
    decode_args: tuple[str, ...] = ()
    """The same for decode servers."""
    environment: dict[str, str] = {}
    """More environment of every server, VLLM_CPU_KVCACHE_SPACE for example."""
    prefill_devices: tuple[str, ...] = ()
    """CUDA_VISIBLE_DEVICES of each prefill server in turn: ["0", "1"], or ["0,1"] for one with two ranks."""
    decode_devices: tuple[str, ...] = ()
    """The same for decode servers."""
    connector_config: dict[str, Any] = {}
    """`kv_connector_extra_config` of every server; its name and the port of its `listen` are made here."""
    transfer_config: dict[str, Any] = {}
    """More fields of --kv-transfer-config, as `kv_buffer_device: cpu` for NixlConnector on CPUs."""
    on_transfer_failure: Literal["recompute", "fail"] = "recompute"
    """What decode does when the KV does not arrive (`kv_load_failure_policy`)."""
    prefill_ranks: int = Field(default=1, ge=1)
    """--tensor-parallel-size of each prefill server."""
    prefill_engines: int = Field(default=1, ge=1, le=MAX_ENGINES)
    """--data-parallel-size of each prefill server: engines behind its port, of which the proxy chooses."""
    decode_ranks: int = Field(default=1, ge=1)
    """The same of each decode server."""
    host: str = "127.0.0.1"
    """Address that servers and their connectors listen on."""
    prefill_port: Port = 8100
    """HTTP port of the first prefill server; the next ones count up. 0 takes free ones."""
    decode_port: Port = 8200
    """The same for decode servers."""
    control_port: Port = 8500
    """First of the ports that prefill servers listen on for decode servers, one for each rank of each engine."""
    start_timeout_s: Seconds = 600.0
    """Longest wait for a server; loading a large model and compiling take most of it."""
    log_dir: str | None = None
    """Where each server's output goes, NAME.log. None takes a directory that is removed at the end."""
