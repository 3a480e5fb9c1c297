"""Prefill context parallelism as vLLM has it: which ranks there are, that each keeps all KV, and who reports."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("vllm.v1.request", exc_type=ImportError)

import torch  # noqa: E402
import vllm  # noqa: E402
from vllm.config import KVTransferConfig, ParallelConfig  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator  # noqa: E402
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput  # noqa: E402

from pdlink.integrations.vllm import PDLinkConnector  # noqa: E402
from pdlink.integrations.vllm_parts import versions  # noqa: E402
from pdlink.integrations.vllm_parts.layout import UnsupportedCache  # noqa: E402

VERSION = versions.check(vllm.__version__, accept_newer=True)
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(VERSION < versions.HYBRID, reason="refused by name"),
]
CACHE = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=SimpleNamespace(), layer_names=[])])


def config(role: str, **sizes: int) -> Any:
    parallel = ParallelConfig(**sizes)
    return SimpleNamespace(
        parallel_config=parallel, kv_transfer_config=KVTransferConfig(kv_connector="PDLinkConnector", kv_role=role)
    )


def test_every_rank_of_vllm_has_a_place() -> None:
    given = config("kv_producer", prefill_context_parallel_size=3, tensor_parallel_size=2)
    versions.check_config(given, CACHE, VERSION, tiers=None)
    places = []
    for rank in range(given.parallel_config.world_size):
        given.parallel_config.rank = rank
        places.append(versions.place(given))
    assert [(place.copy, place.rank) for place in places] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert {place.num_all for place in places} == {6}


@pytest.mark.parametrize("role", ["kv_consumer", "kv_both"])
def test_a_server_that_receives_is_refused(role: str) -> None:
    given = config(role, prefill_context_parallel_size=2)
    with pytest.raises(UnsupportedCache, match="prefill_context_parallel_size: got 2 for a server that receives KV"):
        versions.check_config(given, CACHE, VERSION, tiers=None)


def test_decode_context_parallel_is_refused() -> None:
    """With it, ranks keep parts."""
    given = config("kv_producer", prefill_context_parallel_size=2, decode_context_parallel_size=2)
    assert not given.parallel_config.pcp_shard_decode_requests
    with pytest.raises(
        UnsupportedCache, match="decode_context_parallel_size: got 2 beside prefill_context_parallel_size: 2"
    ):
        versions.check_config(given, CACHE, VERSION, tiers=None)


def test_every_rank_writes_the_kv_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 computes tokens 0, 1, 6 and 7, rank 1 the others; both write all eight."""
    from vllm.v1.attention.ops import pcp

    computed = [torch.tensor([0.0, 1, 6, 7]).view(4, 1), torch.tensor([2.0, 3, 4, 5]).view(4, 1)]
    slots = torch.tensor([10, 11, 16, 17, 12, 13, 14, 15])
    group = SimpleNamespace(world_size=2, all_gather=lambda _, dim: torch.cat(computed, dim))
    monkeypatch.setattr(pcp, "get_pcp_group", lambda: group)
    for rank in range(2):
        for sharded in (True, False):
            (kv,), written = pcp._gather_prefill_cache_inputs((computed[rank],), slots, 0, sharded)
            cache = torch.full((20,), -1.0)
            cache[written] = kv.flatten()
            assert cache[10:18].tolist() == list(range(8))


def test_vllm_waits_for_a_report_of_every_rank() -> None:
    size = config("kv_producer", prefill_context_parallel_size=2).parallel_config.world_size
    connector = object.__new__(PDLinkConnector)
    aggregator = KVOutputAggregator.from_connector(connector, size)

    def output(*sent: str) -> ModelRunnerOutput:
        empty = ModelRunnerOutput(req_ids=[], req_id_to_index={})
        empty.kv_connector_output = KVConnectorOutput(finished_sending={*sent})
        return empty

    def finished(*outputs: ModelRunnerOutput) -> set[str]:
        together = aggregator.aggregate([*outputs])
        assert together is not None
        assert together.kv_connector_output is not None
        return together.kv_connector_output.finished_sending or set()

    assert finished(output(), output("r")) == set()
    assert finished(output("r"), output()) == {"r"}
