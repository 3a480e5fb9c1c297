"""vLLM servers of `pdlink up` and of benchmarks: their command lines. (Start and end: `server.py`.)"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pdlink.config.listen import HostPort, LinkListen
from pdlink.fleet.ports import free_ports
from pdlink.fleet.server import ServerPlan, devices_of, find_program

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdlink.config import VllmConfig

CONNECTORS: dict[str, tuple[dict[str, str], str]] = {
    "pdlink": ({"kv_connector": "PDLinkConnector", "kv_connector_module_path": "pdlink.integrations.vllm"}, "vllm"),
    "nixl": ({"kv_connector": "NixlConnector"}, "vllm-nixl"),
    "nixl-push": ({"kv_connector": "NixlPushConnector"}, "vllm-nixl"),
}
"""`VllmConfig.connector` to vLLM's settings for it, and the proxy's dialect."""

_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}


def find_executable(configured: str | None) -> str:
    """The `vllm` command. Raises EngineMissing."""
    return find_program("vllm", "vLLM", configured)


def plan(config: VllmConfig, num_prefill: int, num_decode: int, *, executable: str, model: str) -> list[ServerPlan]:
    """The servers of a deployment. Ports of 0 are chosen here; the servers bind them later."""
    found = []
    for role, count in (("prefill", num_prefill), ("decode", num_decode)):
        ranks = config.prefill_ranks if role == "prefill" else config.decode_ranks
        engines = config.prefill_engines if role == "prefill" else 1
        num_ports = ranks * engines
        devices = config.prefill_devices if role == "prefill" else config.decode_devices
        first_port = config.prefill_port if role == "prefill" else config.decode_port
        places = devices_of(f"vllm.{role}_devices", devices, count, role)
        for index in range(count):
            label = f"{role}-{index}"
            port = first_port + index if first_port else free_ports(1)
            control_port = config.control_port + index * num_ports if config.control_port else free_ports(num_ports)
            transfer = _transfer_config(config, role, label, control_port)
            dialed = role == "prefill" and config.connector == "pdlink"
            host = told_host(transfer["kv_connector_extra_config"].get("listen", config.host))
            more = config.prefill_args if role == "prefill" else config.decode_args
            environment = config.environment | places[index]
            if config.connector != "pdlink":
                environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_ports(num_ports))
            found.append(
                ServerPlan(
                    label,
                    role,
                    f"http://{HostPort(config.host, port)}",
                    tuple(f"tcp://{HostPort(host, control_port + at)}" for at in range(num_ports)) if dialed else (),
                    (
                        *(executable, "serve", model, "--served-model-name", config.model_name),
                        *("--host", config.host, "--port", str(port)),
                        "--disable-uvicorn-access-log",  # the proxy asks /health twice a second
                        *(("--tensor-parallel-size", str(ranks)) if ranks > 1 else ()),
                        *(("--data-parallel-size", str(engines)) if engines > 1 else ()),
                        *(*config.args, *more),
                        *("--kv-transfer-config", json.dumps(transfer)),
                    ),
                    environment,
                )
            )
    return found


def told_host(listen: Any) -> str:
    """Host by which others reach a server whose connector listens so."""
    found = LinkListen.model_validate(listen)
    return found.advertise or found.control_host


def _transfer_config(config: VllmConfig, role: str, label: str, control_port: int) -> dict[str, Any]:
    extra = dict(config.connector_config)
    if config.connector == "pdlink":
        listen = LinkListen.model_validate(extra.get("listen", config.host))
        port = control_port if role == "prefill" else listen.control_port
        extra |= {"listen": listen.on_port(port).model_dump(exclude_none=True), "name": label}
    return {
        **CONNECTORS[config.connector][0],
        "kv_role": _ROLES[role],
        "kv_load_failure_policy": config.on_transfer_failure,
        "kv_connector_extra_config": extra,
        **config.transfer_config,
    }


def proxy_settings(config: VllmConfig, plans: Sequence[ServerPlan]) -> dict[str, Any]:
    several = config.prefill_engines > 1 and config.connector == "pdlink"
    return {
        "dialect": CONNECTORS[config.connector][1],
        "prefill": [plan.url for plan in plans if plan.role == "prefill"],
        "decode": [plan.url for plan in plans if plan.role == "decode"],
        "control": {plan.url: list(plan.control) for plan in plans if plan.control},
        "data_parallel": {plan.url: config.prefill_engines for plan in plans if plan.control and several},
    }
