"""SGLang servers of `pdlink up` and of benchmarks: their command lines. (Start and end: `server.py`.)"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pdlink.config.listen import HostPort
from pdlink.fleet.ports import free_ports
from pdlink.fleet.server import ServerPlan, devices_of, find_program

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdlink.config import SglangServersConfig


def find_executable(configured: str | None) -> str:
    """The `sglang` command. Raises EngineMissing."""
    return find_program("sglang", "SGLang", configured)


def plan(
    config: SglangServersConfig, num_prefill: int, num_decode: int, *, executable: str, model: str
) -> list[ServerPlan]:
    """The servers of a deployment. Ports of 0 are chosen here; the servers bind them later. Raises ConfigError."""
    found = []
    for role, count in (("prefill", num_prefill), ("decode", num_decode)):
        is_prefill = role == "prefill"
        ranks = config.prefill_ranks if is_prefill else config.decode_ranks
        first_port = config.prefill_port if is_prefill else config.decode_port
        devices = config.prefill_devices if is_prefill else config.decode_devices
        places = devices_of(f"sglang.{role}_devices", devices, count, role)
        for index in range(count):
            port = first_port + index if first_port else free_ports(1)
            bootstrap = config.bootstrap_port + index if config.bootstrap_port else free_ports(1)
            more = config.prefill_args if is_prefill else config.decode_args
            own = {"PDLINK_LISTEN": config.host} if config.backend == "pdlink" else {}
            found.append(
                ServerPlan(
                    f"{role}-{index}",
                    role,
                    f"http://{HostPort(config.host, port)}",
                    (),
                    (
                        *(executable, "serve", "--model-path", model, "--served-model-name", config.model_name),
                        *("--host", config.host, "--port", str(port)),
                        *(("--tp-size", str(ranks)) if ranks > 1 else ()),
                        *("--enable-metrics", *config.args, *more),
                        *("--disaggregation-mode", role, "--disaggregation-transfer-backend", config.backend),
                        *(("--disaggregation-bootstrap-port", str(bootstrap)) if is_prefill else ()),
                    ),
                    own | config.environment | places[index],
                    ready_path="/v1/models",  # the first /health is a warm-up of up to 20 s
                )
            )
    return found


def proxy_settings(plans: Sequence[ServerPlan]) -> dict[str, Any]:
    """Bootstrap ports are not among them: the proxy asks each server for its own."""
    urls = {role: [plan.url for plan in plans if plan.role == role] for role in ("prefill", "decode")}
    return {"dialect": "sglang", **urls}
