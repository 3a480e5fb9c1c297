"""`PDLinkBackend`: how Ray Serve LLM shapes requests for vLLM servers with pdlink's connector.

Ray's decode replica takes the request, picks a prefill replica, and sends it one leg. With this backend both legs
leave at once, under one transfer id, and decode's names the control address that the prefill replica has published.
KV goes from server to server; Ray carries requests and answers. `register()` makes it known in a cluster. The
interface is that of Ray 2.60 (`ray/llm/_internal/serve/engines/vllm/kv_transfer/base.py`), which calls it internal.
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import ray
from ray.llm._internal.serve.engines.vllm.kv_transfer.base import (
    BaseConnectorBackend,
    clamp_request_to_single_token,
)
from ray.llm._internal.serve.engines.vllm.kv_transfer.factory import KVConnectorBackendFactory

from pdlink.config import is_loopback
from pdlink.errors import ConfigError
from pdlink.fleet.ports import free_ports
from pdlink.integrations.vllm_parts import settings as settings_of
from pdlink.protocol.auth import ControlAddress
from pdlink.serve.keys import load_credentials

if TYPE_CHECKING:
    from collections.abc import Mapping

NAME = "PDLinkConnector"
_ADDRESSES = "pdlink_control"
"""Key of what a prefill replica publishes: control addresses, one for each shard."""
_OF_THE_ANSWER = {
    "n": 1,
    "best_of": None,
    "min_tokens": 0,
    "logprobs": None,
    "top_logprobs": None,
    "echo": False,
    "seed": None,
    "return_token_ids": None,
    "temperature": 0.0,
}
"""Fields of a request that change no KV of its prompt, and what prefill's leg has instead: nobody reads its token."""


class PDLinkBackend(BaseConnectorBackend):  # type: ignore[misc]
    """Of one replica. `kv_connector_extra_config` is that of vLLM's connector (docs/vllm.md)."""

    requires_peer_binding = True
    concurrent_handoff = True
    _control: tuple[str, ...] = ()

    def setup(self) -> None:
        """Fill in address and port of this replica before its engine starts. Raises ConfigError.

        The node's address is what others dial, unless the settings name one. A control port in the settings is that
        of the first replica of a node; without one, free ports are taken.
        """
        if int(self.llm_config.engine_kwargs.get("data_parallel_size") or 1) > 1:
            raise ConfigError(
                "data_parallel_size: expected 1 under Ray Serve, where a replica publishes the address of one "
                "engine; raise num_replicas"
            )
        extra = self.kv_transfer_config.setdefault("kv_connector_extra_config", {})
        engine = self.llm_config.engine_kwargs
        num_stages = int(extra.get("stages") or engine.get("pipeline_parallel_size") or 1)
        num_contexts = int(engine.get("decode_context_parallel_size") or 1)
        num_ranks = int(engine.get("tensor_parallel_size") or 1) // num_contexts
        num_parts = int(extra.get("shards") or num_ranks) * int(extra.get("context_shards") or num_contexts)
        num_shards = num_parts * num_stages
        node = ray.util.get_node_ip_address()
        listen = settings_of.read({"listen": node, **extra}).listen
        first = listen.control_port
        port = first + self._compute_port_offset() if first else free_ports(num_shards)
        extra["listen"] = listen.on_port(port).model_dump()
        settings = settings_of.read(extra)
        host = settings.listen.advertise or settings.listen.control_host
        if is_loopback(host) and not is_loopback(node):
            raise ConfigError(
                f"listen: got {host}, which other nodes cannot reach; leave it out, and the node's ({node}) is taken"
            )
        self._control = tuple(str(_address(settings, host, shard)) for shard in range(num_shards))

    def replica_metadata(self) -> dict[str, Any]:
        return {_ADDRESSES: list(self._control)}

    def prepare_prefill_request(self, *, request: Any, peer: Mapping[str, Any] | None) -> Any:
        """Called before `prepare_decode_request`, with the same object, which carries the transfer id from here."""
        leg = request.model_copy(deep=True)
        clamp_request_to_single_token(leg)
        for name, value in _OF_THE_ANSWER.items():
            if getattr(leg, name, value) != value:
                setattr(leg, name, False if isinstance(getattr(leg, name), bool) and value is None else value)
        # Of each attempt a new one: a client may send its request id twice, and an id that was used is refused.
        request.kv_transfer_params = {"transfer_id": f"ray-{uuid.uuid4().hex}"}
        leg.kv_transfer_params = {
            **request.kv_transfer_params,
            "leg": "prefill",
            "num_prompts": _num_prompts(request),
        }
        return leg

    def prepare_decode_request(
        self, *, request: Any, peer: Mapping[str, Any] | None, prefill_response: Any | None
    ) -> Any:
        addresses = (peer or {}).get(_ADDRESSES)
        if not addresses:
            raise ConfigError(
                f"kv_connector: the prefill replica has published no control address ({NAME} with the backend of "
                "pdlink.integrations.ray on both deployments?)"
            )
        leg = request.model_copy(deep=True)
        prefill = {"control": addresses[0] if len(addresses) == 1 else list(addresses)}
        leg.kv_transfer_params = {**request.kv_transfer_params, "leg": "decode", "prefill": prefill}
        return leg


def register() -> None:
    """Make the backend known to every process of the cluster that this one is connected to; once is enough."""
    if not KVConnectorBackendFactory.is_registered(NAME):
        KVConnectorBackendFactory.register_backend(NAME, "pdlink.integrations.ray:PDLinkBackend")


def _address(settings: settings_of.ConnectorSettings, host: str, shard: int) -> ControlAddress:
    own = settings.of_shard(shard)
    credentials = load_credentials(own.security)
    return ControlAddress(host, own.listen.control_port, credentials.keys.public if credentials is not None else "")


def _num_prompts(request: Any) -> int:
    """Of a completion, which may hold a list of texts or of lists of token ids; a chat has one."""
    prompt = getattr(request, "prompt", None)
    return len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1
