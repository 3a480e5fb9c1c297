"""The connector against vLLM's own classes: everything vLLM calls is there and takes what vLLM passes."""

from __future__ import annotations

import inspect
import pickle
import warnings
from types import SimpleNamespace

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM and torch warn about each other while they are imported
    pytest.importorskip("vllm.v1.request", exc_type=ImportError)
    pytest.importorskip("pdlink.integrations.vllm")

import vllm  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1 import supports_hma  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1  # noqa: E402
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput  # noqa: E402
from vllm.v1.request import Request  # noqa: E402

from pdlink.errors import ConfigError  # noqa: E402
from pdlink.integrations.vllm import PDLinkConnector, PDLinkMetadata, PDLinkStats  # noqa: E402
from pdlink.integrations.vllm_parts import versions  # noqa: E402
from pdlink.integrations.vllm_parts.requests import NOTHING, Expect, Offer, StepPlan  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

OVERRIDDEN = sorted(
    name
    for name, value in vars(PDLinkConnector).items()
    if callable(getattr(PDLinkConnector, name)) and hasattr(KVConnectorBase_V1, name) and not name.startswith("_")
    if not isinstance(value, property)
)


def test_this_vllm_is_one_the_connector_knows() -> None:
    assert versions.check(vllm.__version__, accept_newer=False) >= versions.OLDEST


def test_vllm_finds_the_connector_by_its_module() -> None:
    config = SimpleNamespace(kv_connector="PDLinkConnector", kv_connector_module_path="pdlink.integrations.vllm")
    assert KVConnectorFactory.get_connector_class(config) is PDLinkConnector


def test_multi_connector_finds_it_by_its_name() -> None:
    assert KVConnectorFactory.get_connector_class_by_name("PDLinkConnector") is PDLinkConnector


def test_nothing_that_vllm_requires_is_missing() -> None:
    assert not getattr(PDLinkConnector, "__abstractmethods__", None)
    assert not supports_hma(PDLinkConnector), "vLLM then keeps one block table for all layers"


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_every_method_takes_what_vllm_passes(name: str) -> None:
    theirs = inspect.signature(getattr(KVConnectorBase_V1, name)).parameters
    ours = inspect.signature(getattr(PDLinkConnector, name)).parameters
    assert list(ours) == list(theirs)
    assert [parameter.kind for parameter in ours.values()] == [parameter.kind for parameter in theirs.values()]


def test_only_layerwise_servers_need_piecewise_graphs() -> None:
    assert PDLinkConnector.requires_piecewise_for_cudagraph({})
    assert not PDLinkConnector.requires_piecewise_for_cudagraph({"layerwise": False})
    with pytest.raises(ConfigError, match="layer_wise"):
        PDLinkConnector.requires_piecewise_for_cudagraph({"layer_wise": False})


def test_a_plan_survives_the_way_to_the_workers() -> None:
    plan = StepPlan(expects=[Expect("r", "t", 3, ("tcp://127.0.0.1:1",))], offers=[Offer("r", (1, 2), 0)])
    assert pickle.loads(pickle.dumps(PDLinkMetadata(plan))).plan == plan
    assert pickle.loads(pickle.dumps(PDLinkMetadata(NOTHING))).plan == NOTHING


def test_statistics_of_ranks_add_up() -> None:
    total = PDLinkStats(data={"sent": 1, "bytes": 10}).aggregate(PDLinkStats(data={"bytes": 5, "failed": 1}))
    assert total.reduce() == {"sent": 1, "bytes": 15, "failed": 1}
    assert not total.is_empty()
    assert PDLinkConnector.build_kv_connector_stats().is_empty()


def test_the_fields_of_vllm_that_are_read_exist() -> None:
    for kind, names in (
        (NewRequestData, ("req_id", "block_ids", "num_computed_tokens")),
        (CachedRequestData, ("req_ids", "new_block_ids", "resumed_req_ids", "num_computed_tokens")),
        (
            SchedulerOutput,
            ("scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens", "preempted_req_ids"),
        ),
    ):
        assert set(names) <= set(kind.__dataclass_fields__), kind
    source = inspect.getsource(Request.__init__)
    for name in ("kv_transfer_params", "prompt_token_ids", "lora_request", "cache_salt", "mm_features"):
        assert f"self.{name}" in source, name
