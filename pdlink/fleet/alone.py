"""One server of vLLM or SGLang, set up for other hosts: its command, its environment, and the proxy's part.

`pdlink up` starts a deployment on one host; this is one server of a deployment on several. The engine's own flags
stay the engine's: what is made here is what pdlink needs of it.
"""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING, Any, NamedTuple

from pdlink.config import SglangConfig, load, read_token
from pdlink.config.listen import HostPort, place_of
from pdlink.config.loading import nest
from pdlink.endpoint.token import http_key_of
from pdlink.errors import ConfigError
from pdlink.fleet.vllm import CONNECTORS, told_host
from pdlink.integrations.vllm_parts.settings import read
from pdlink.serve.keys import as_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

HTTP_PORTS = {"prefill": 8100, "decode": 8200, "both": 8000}
CONTROL_ABOVE = 400
"""The control plane's first port is so many above that of HTTP."""
_KV_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer", "both": "kv_both"}
_OTHER = {"prefill": "--decode http://DECODE_HOST:8200", "decode": "--prefill http://PREFILL_HOST:8100"}


class Asked(NamedTuple):
    """What the user wants of one server."""

    role: str
    model: str
    listen: str = "127.0.0.1"
    """HOST[:PORT] where others reach its HTTP."""
    token_file: str | None = None
    settings: Mapping[str, Any] = {}
    """Of the connector or the transfer backend, by dotted key."""
    flags: Sequence[str] = ()
    """The engine's own, handed on as they are."""

    @property
    def http(self) -> HostPort:
        return place_of(self.listen, HTTP_PORTS[self.role])

    @property
    def control(self) -> HostPort:
        return HostPort(self.http.host, self.http.port + CONTROL_ABOVE)

    @property
    def url(self) -> str:
        return f"http://{self.http}"

    def flag(self, *names: str) -> int:
        """The number behind one of these flags of the engine; 1 without it."""
        for index, flag in enumerate(self.flags):
            name, equals, value = flag.partition("=")
            if name in names:
                value = value if equals else next(iter(self.flags[index + 1 :]), "")
                if value.isdecimal():
                    return int(value)
        return 1


class ServerCommand(NamedTuple):
    """What starts a server, and what the proxy must be told of it."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    """Added to ours. Secrets go here: arguments are seen by every user of a host."""
    proxy: str

    @property
    def words(self) -> str:
        """As one types it; the environment first."""
        environment = (f"{name}={shlex.quote(value)}" for name, value in self.environment.items())
        return " ".join([*environment, *map(shlex.quote, self.command)])


def vllm(asked: Asked, executable: str) -> ServerCommand:
    """Raises ConfigError for settings that the connector would refuse."""
    extra: dict[str, Any] = {}
    nest(extra, asked.settings)
    extra.setdefault("name", f"{asked.role}-{as_name(asked.http.host)}-{asked.http.port}")
    extra.setdefault("listen", str(asked.control))
    environment = {}
    if asked.token_file is not None:
        nest(extra, {"security.token_file": asked.token_file})
        environment["VLLM_API_KEY"] = http_key_of(read_token(asked.token_file, "--token"))
    settings = read(extra)
    transfer = {
        **CONNECTORS["pdlink"][0],
        "kv_role": _KV_ROLES[asked.role],
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }
    engines = asked.flag("--data-parallel-size", "-dp")
    ranks = asked.flag("--tensor-parallel-size", "-tp") * asked.flag("--pipeline-parallel-size", "-pp") * engines
    about = [f"--{asked.role} {asked.url}"]
    if asked.role == "prefill":
        last = f"-{asked.control.port + ranks - 1}" if ranks > 1 else ""
        about.append(f"--control {asked.url}=tcp://{asked.control}{last}")
        if engines > 1:
            about.append(_set("data_parallel", {asked.url: engines}))
    if settings.tiers is not None and (port := settings.tiers.peer_port):
        about.append(_set("stores", {asked.url: f"tcp://{HostPort(told_host(settings.listen), port)}"}))
    return ServerCommand(
        (
            *(executable, "serve", asked.model, "--host", asked.http.host, "--port", str(asked.http.port)),
            *("--disable-uvicorn-access-log", *asked.flags),  # the proxy asks /health twice a second
            *("--kv-transfer-config", json.dumps(transfer)),
        ),
        environment,
        _proxy("vllm", asked, about),
    )


def sglang(asked: Asked, executable: str) -> ServerCommand:
    """Raises ConfigError for settings that the transfer backend would refuse."""
    if asked.role == "both":
        raise ConfigError("sglang: got both; expected prefill or decode; start it with plain `sglang serve`")
    settings = {"listen": str(asked.control), **asked.settings}
    if asked.token_file is not None:
        read_token(asked.token_file, "--token")
        settings["security.token_file"] = asked.token_file
    load(SglangConfig, environment={}, flags=settings)
    environment = {
        f"PDLINK_{key.upper().replace('.', '__')}": value if isinstance(value, str) else json.dumps(value)
        for key, value in settings.items()
    }
    return ServerCommand(
        (
            *(executable, "serve", "--model-path", asked.model),
            *("--host", asked.http.host, "--port", str(asked.http.port), "--enable-metrics"),
            *("--disaggregation-mode", asked.role, "--disaggregation-transfer-backend", "pdlink"),
            *asked.flags,
        ),
        environment,
        _proxy("sglang", asked, [f"--{asked.role} {asked.url}"]),
    )


def _set(name: str, value: object) -> str:
    return f"--set {shlex.quote(f'{name}={json.dumps(value)}')}"


def _proxy(dialect: str, asked: Asked, about: Sequence[str]) -> str:
    words = ["pdlink proxy", f"--dialect {dialect}", *about]
    words += [_OTHER[asked.role]] if asked.role in _OTHER else []
    words += [f"--token {shlex.quote(asked.token_file)}"] if asked.token_file is not None else []
    return " ".join(words)
