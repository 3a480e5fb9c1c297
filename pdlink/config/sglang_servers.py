"""SGLang servers of `pdlink up`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pdlink.config.section import Port, Seconds, Section


class SglangServersConfig(Section):
    """SGLang servers started by `pdlink up --engine sglang`. Their transfer backend reads `environment`."""

    executable: str | None = None
    """The `sglang` command. None takes the one beside this Python, the first on PATH, or what `make sglang` installed
    here. Where it is in another environment, pdlink must be installed there too."""
    model: str | None = None
    """Local directory or hub id. None writes a small Llama to disk and serves that."""
    model_name: str = "pdlink-tiny"
    """Name clients use in `model`."""
    backend: Literal["pdlink", "nixl"] = "pdlink"
    """--disaggregation-transfer-backend: what moves the KV; SGLang's NIXL backend, to compare."""
    args: tuple[str, ...] = ()
    """More arguments of every server: ["--dtype", "bfloat16", "--page-size", "64"]."""
    prefill_args: tuple[str, ...] = ()
    """More arguments of every prefill server, behind `args`."""
    decode_args: tuple[str, ...] = ()
    """The same for decode servers."""
    environment: dict[str, str] = {}
    """More environment of every server, PDLINK_TRANSPORT__KIND for example."""
    prefill_devices: tuple[str, ...] = ()
    """CUDA_VISIBLE_DEVICES of each prefill server in turn: ["0", "1"], or ["0,1"] for one with two ranks."""
    decode_devices: tuple[str, ...] = ()
    """The same for decode servers."""
    prefill_ranks: int = Field(default=1, ge=1)
    """--tp-size of each prefill server."""
    decode_ranks: int = Field(default=1, ge=1)
    """The same of each decode server."""
    host: str = "127.0.0.1"
    """Address that servers and their transfer backends listen on."""
    prefill_port: Port = 30000
    """HTTP port of the first prefill server; the next ones count up. 0 takes free ones."""
    decode_port: Port = 30100
    """The same for decode servers."""
    bootstrap_port: Port = 8998
    """Where the first prefill server tells decode servers of its ranks; the next ones count up. 0 takes free ones."""
    start_timeout_s: Seconds = 600.0
    """Longest wait for a server; loading a large model takes most of it."""
    log_dir: str | None = None
    """Where each server's output goes, NAME.log. None takes a directory that is removed at the end."""
