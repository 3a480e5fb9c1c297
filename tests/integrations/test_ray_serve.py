"""The backend of Ray Serve LLM against Ray's own base class and registry, on a real cluster.

Ray's request models need vLLM; here a model of pydantic has the fields of one that the backend touches. What Ray's
orchestrator does with the two requests is played by its own order of calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel

pytest.importorskip("ray")

from pdlink.api.legs import DecodeParams, PrefillParams  # noqa: E402
from pdlink.errors import ConfigError  # noqa: E402
from pdlink.integrations.vllm_parts.params import parse  # noqa: E402
from pdlink.protocol.auth import ControlAddress  # noqa: E402
from pdlink.serve.keys import keygen  # noqa: E402

base = pytest.importorskip("ray.llm._internal.serve.engines.vllm.kv_transfer.base", exc_type=ImportError)
ours = pytest.importorskip("pdlink.integrations.ray", exc_type=ImportError)

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


class Request(BaseModel):
    request_id: str = "of a client"
    prompt: Any = "The KV cache crosses over"
    max_tokens: int = 32
    stream: bool = True
    stream_options: dict[str, Any] | None = {"include_usage": True}
    n: int = 2
    min_tokens: int = 5
    logprobs: int | None = 3
    seed: int | None = 7
    temperature: float = 0.8
    kv_transfer_params: dict[str, Any] | None = None


def replica(extra: dict[str, Any] | None = None, **engine: Any) -> Any:
    transfer = {"kv_connector": ours.NAME, "kv_role": "kv_both", "kv_connector_extra_config": dict(extra or {})}
    config = SimpleNamespace(engine_kwargs={"kv_transfer_config": transfer, **engine}, experimental_configs={})
    return ours.PDLinkBackend(config)


def set_up(extra: dict[str, Any] | None = None, **engine: Any) -> Any:
    backend = replica({"security": {"insecure": True}, **(extra or {})}, **engine)
    backend.setup()
    return backend


def legs(prefill: Any, decode: Any, request: Request) -> tuple[Any, Any]:
    """As PDOrchestratorMixin._pd_handle_request with both flags set: decode's replica shapes both."""
    peer = prefill.replica_metadata()
    first = decode.prepare_prefill_request(request=request, peer=peer)
    return first, decode.prepare_decode_request(request=request, peer=peer, prefill_response=None)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    import ray

    ray.init("local", num_cpus=1, include_dashboard=False, object_store_memory=80 << 20, log_to_driver=False)
    yield
    ray.shutdown()


def test_it_is_a_backend_that_binds_its_peer_first_and_starts_both_legs_at_once() -> None:
    assert issubclass(ours.PDLinkBackend, base.BaseConnectorBackend)
    backend = replica()  # abstract methods that it lacks would raise here
    assert (backend.requires_peer_binding, backend.concurrent_handoff) == (True, True)


def test_the_factory_of_a_cluster_makes_it_by_the_connectors_name(cluster: None) -> None:
    from ray.llm._internal.serve.engines.vllm.kv_transfer.factory import KVConnectorBackendFactory

    ours.register()
    ours.register()
    made = KVConnectorBackendFactory.create_backend("PDLinkConnector", replica().llm_config)
    assert type(made) is ours.PDLinkBackend


def test_both_legs_have_one_transfer_id_that_vllms_connector_reads(cluster: None) -> None:
    import ray

    prefill, decode = set_up(), set_up()
    first, second = (parse(leg.kv_transfer_params) for leg in legs(prefill, decode, Request()))
    assert isinstance(first, PrefillParams)
    assert isinstance(second, DecodeParams)
    assert first.transfer_id == second.transfer_id
    [address] = second.prefill.addresses
    assert address == prefill.replica_metadata()["pdlink_control"][0]
    extra = prefill.kv_transfer_config["kv_connector_extra_config"]
    port = int(extra["listen"]["address"].rpartition(":")[2])
    assert ControlAddress.parse(address) == ControlAddress(ray.util.get_node_ip_address(), port)


def test_a_request_that_is_sent_again_has_another_transfer_id(cluster: None) -> None:
    prefill, decode = set_up(), set_up()
    seen = {legs(prefill, decode, Request())[0].kv_transfer_params["transfer_id"] for _ in range(3)}
    request = Request()
    for _ in range(2):
        pair = {leg.kv_transfer_params["transfer_id"] for leg in legs(prefill, decode, request)}
        assert len(pair) == 1
        seen |= pair
    assert len(seen) == 5


def test_prefill_makes_one_token_and_decode_what_the_client_asked_for(cluster: None) -> None:
    first, second = legs(set_up(), set_up(), Request())
    assert (first.max_tokens, first.stream, first.stream_options) == (1, False, None)
    assert (first.n, first.min_tokens, first.logprobs, first.seed, first.temperature) == (1, 0, None, None, 0.0)
    assert second.model_dump(exclude={"kv_transfer_params"}) == Request().model_dump(exclude={"kv_transfer_params"})


@pytest.mark.parametrize(
    ("prompt", "count"), [("a", 1), ([1, 2, 3], 1), (["a", "b"], 2), ([[1, 2], [3], [4]], 3), (None, 1)]
)
def test_prefill_is_told_how_many_prompts_there_are(prompt: Any, count: int, cluster: None) -> None:
    first, _ = legs(set_up(), set_up(), Request(prompt=prompt))
    assert first.kv_transfer_params["num_prompts"] == count


def test_what_a_client_puts_into_the_parameters_goes_nowhere(cluster: None) -> None:
    theirs = {"transfer_id": "theirs", "leg": "decode", "prefill": {"control": "tcp://10.6.6.6:1"}}
    for leg in legs(set_up(), set_up(), Request(kv_transfer_params=theirs)):
        assert "theirs" not in str(leg.kv_transfer_params)
        assert "10.6.6.6" not in str(leg.kv_transfer_params)


def test_every_shard_publishes_an_address_with_its_key(cluster: None, tmp_path: Path) -> None:
    lines = [keygen(f"prefill-{shard}", str(tmp_path))[1] for shard in range(2)]
    (tmp_path / "allow").write_text("\n".join(lines))
    security = {"key_file": f"{tmp_path}/prefill-{{shard}}.key", "allow_file": f"{tmp_path}/allow"}
    backend = replica({"security": security}, tensor_parallel_size=2)
    backend.setup()
    addresses = [ControlAddress.parse(text) for text in backend.replica_metadata()["pdlink_control"]]
    assert [each.public_key for each in addresses] == [line.split()[1] for line in lines]
    assert addresses[1].port == addresses[0].port + 1
    _, second = legs(backend, set_up(), Request())
    params = parse(second.kv_transfer_params)
    assert isinstance(params, DecodeParams)
    assert params.prefill.addresses == tuple(map(str, addresses))


@pytest.mark.parametrize(
    ("extra", "engine", "said"),
    [
        ({}, {"data_parallel_size": 2}, "data_parallel_size: expected 1"),
        ({"control_prt": 1}, {}, "control_prt"),
        ({"security": {}}, {}, "this worker has no keys"),
    ],
)
def test_wrong_settings_are_told_before_the_engine_starts(
    extra: dict[str, Any], engine: dict[str, Any], said: str, cluster: None
) -> None:
    backend = replica({"security": {"insecure": True}, **extra}, **engine)
    with pytest.raises(ConfigError, match=said):
        backend.setup()


def test_a_prefill_replica_without_the_backend_is_told(cluster: None) -> None:
    backend, request = set_up(), Request()
    backend.prepare_prefill_request(request=request, peer={})
    with pytest.raises(ConfigError, match="has published no control address"):
        backend.prepare_decode_request(request=request, peer={}, prefill_response=None)
