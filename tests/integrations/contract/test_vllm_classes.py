"""The connector against vLLM's own classes: everything vLLM calls is there and takes what vLLM passes."""

from __future__ import annotations

import inspect
import pickle
import warnings
from fractions import Fraction
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM and torch warn about each other while they are imported
    pytest.importorskip("vllm.v1.request", exc_type=ImportError)
    pytest.importorskip("pdlink.integrations.vllm")

import torch  # noqa: E402
import vllm  # noqa: E402
import vllm.v1.kv_cache_interface as kv  # noqa: E402
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest  # noqa: E402
from vllm import SamplingParams  # noqa: E402
from vllm.config import KVTransferConfig, ModelConfig, ParallelConfig  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1 import supports_hma  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1  # noqa: E402
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput  # noqa: E402
from vllm.v1.core.single_type_kv_cache_manager import MambaManager, SlidingWindowManager  # noqa: E402
from vllm.v1.engine.async_llm import AsyncLLM  # noqa: E402
from vllm.v1.engine.core import EngineCore  # noqa: E402
from vllm.v1.executor import Executor  # noqa: E402
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec  # noqa: E402
from vllm.v1.request import Request  # noqa: E402
from vllm.v1.worker.gpu_worker import Worker  # noqa: E402

from pdlink.api.openai import CHAT, COMPLETIONS, MESSAGES, RESPONSES  # noqa: E402
from pdlink.errors import ConfigError  # noqa: E402
from pdlink.events import LayerLanded  # noqa: E402
from pdlink.integrations.stats import Counts  # noqa: E402
from pdlink.integrations.vllm import PDLinkConnector, PDLinkMetadata, PDLinkNews, PDLinkStats  # noqa: E402
from pdlink.integrations.vllm_parts import cache_groups, host_copy, versions, weights  # noqa: E402
from pdlink.integrations.vllm_parts.layout import LayerView, UnsupportedCache, describe  # noqa: E402
from pdlink.integrations.vllm_parts.requests import NOTHING, ExpectedRequest, OfferedBlocks, StepPlan  # noqa: E402
from pdlink.integrations.vllm_parts.store_book import BookedPrompt, Look, Looked, StorePlan  # noqa: E402
from pdlink.observe.gauges import LinkState  # noqa: E402
from pdlink_proxy.dialects import DIALECTS  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.engines, pytest.mark.filterwarnings("ignore")]

DATA_PARALLEL_INDEX = "data_parallel_index"
if versions.check(vllm.__version__, accept_newer=True) < (0, 14):  # there engines without experts have a rank, too
    DATA_PARALLEL_INDEX = "data_parallel_rank"
OVERRIDDEN = sorted(
    name
    for name, value in vars(PDLinkConnector).items()
    if callable(getattr(PDLinkConnector, name)) and hasattr(KVConnectorBase_V1, name) and not name.startswith("_")
    if not isinstance(value, property)
)


SERVING = {
    COMPLETIONS: "vllm.entrypoints.openai.completion.serving",
    CHAT: "vllm.entrypoints.openai.chat_completion.serving",
    MESSAGES: "vllm.entrypoints.anthropic.serving",
    RESPONSES: "vllm.entrypoints.openai.responses.serving",
}
"""By path, where vLLM hands its requests to the engine (0.12 to 0.33)."""


def test_this_vllm_is_one_the_connector_knows() -> None:
    assert versions.check(vllm.__version__, accept_newer=False) >= versions.OLDEST


def test_vllm_finds_the_connector_by_its_module() -> None:
    config = SimpleNamespace(kv_connector="PDLinkConnector", kv_connector_module_path="pdlink.integrations.vllm")
    assert KVConnectorFactory.get_connector_class(config) is PDLinkConnector


def test_multi_connector_finds_it_by_its_name() -> None:
    assert KVConnectorFactory.get_connector_class_by_name("PDLinkConnector") is PDLinkConnector


def test_nothing_that_vllm_requires_is_missing() -> None:
    assert not getattr(PDLinkConnector, "__abstractmethods__", None)
    hybrid = versions.check(vllm.__version__, accept_newer=True) >= versions.HYBRID
    assert supports_hma(PDLinkConnector) == hybrid, "without it vLLM keeps one block table for all layers"


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_every_method_takes_what_vllm_passes(name: str) -> None:
    theirs = inspect.signature(getattr(KVConnectorBase_V1, name)).parameters
    ours = inspect.signature(getattr(PDLinkConnector, name)).parameters
    renamed = {"preempted_req_ids": "kv_connector_metadata"}  # since 0.19; passed by position
    assert list(ours) == [renamed.get(one, one) for one in theirs]
    assert [parameter.kind for parameter in ours.values()] == [parameter.kind for parameter in theirs.values()]


def test_only_layerwise_servers_need_piecewise_graphs() -> None:
    assert PDLinkConnector.requires_piecewise_for_cudagraph({})
    assert not PDLinkConnector.requires_piecewise_for_cudagraph({"layerwise": False})
    with pytest.raises(ConfigError, match="layer_wise"):
        PDLinkConnector.requires_piecewise_for_cudagraph({"layer_wise": False})


def test_a_plan_survives_the_way_to_the_workers() -> None:
    plan = StepPlan(
        expects=[ExpectedRequest("r", "t", 3, ("tcp://127.0.0.1:1",))], offers=[OfferedBlocks("r", ((1, 2),), 0, 2)]
    )
    plan.store = StorePlan(prompts=[BookedPrompt("r", b"1234")], looks=[Look("r", 1, 0)])
    assert pickle.loads(pickle.dumps(PDLinkMetadata(plan))).plan == plan
    assert pickle.loads(pickle.dumps(PDLinkMetadata(NOTHING))).plan == NOTHING


def test_what_ranks_tell_the_scheduler_is_told_together() -> None:
    one = PDLinkNews({"a": "aborted"}, [Looked("r", 1, 256)], {"s": 512, "t": 0})
    told = one.aggregate(PDLinkNews({}, [Looked("r", 1, 512)], {"s": 256, "u": 128}))
    assert pickle.loads(pickle.dumps(told)) == PDLinkNews(
        {"a": "aborted"}, [Looked("r", 1, 256), Looked("r", 1, 512)], {"s": 256, "t": 0, "u": 128}
    )


def state(quarantined_blocks: int) -> LinkState:
    return LinkState({}, {}, quarantined_blocks, {}, {}, 0, 0, (), (), 0.0)


def test_statistics_of_ranks_add_up() -> None:
    one = {"pdlink_transfer_bytes_total|tcp": 10.0, "pdlink_push_seconds": [0.001]}
    other = {"pdlink_transfer_bytes_total|tcp": 5.0, "pdlink_push_seconds": [0.003], "pdlink_x_total": 1.0}
    total = PDLinkStats(data=one).aggregate(PDLinkStats(data=other))
    assert total.reduce() == {"transfer_bytes[tcp]": 15, "push_mean_ms": 2.0, "x": 1}
    assert one["pdlink_push_seconds"] == [0.001], "it is another rank's"
    assert not total.is_empty()
    assert PDLinkConnector.build_kv_connector_stats().is_empty()


def test_news_of_ranks_travel_with_their_statistics_where_vllm_has_no_other_way() -> None:
    """Up to 0.19; MultiConnector has statistics by connector."""
    one, other = PDLinkStats(data={}), PDLinkStats(data={"pdlink_x_total": 1.0})
    other.news = PDLinkNews({"a": "aborted"}, [Looked("r", 1, 256)], {})
    total = pickle.loads(pickle.dumps(one)).aggregate(pickle.loads(pickle.dumps(other)))
    several = SimpleNamespace(data={"NixlConnector": PDLinkStats(data={}), "PDLinkConnector": total})
    assert PDLinkStats.news_in(total) == PDLinkStats.news_in(several) == other.news
    assert PDLinkStats.news_in(None) is None
    assert PDLinkStats.news_in(one.aggregate(PDLinkStats(data={}))) is None


def test_what_a_rank_counts_is_on_the_servers_metrics_under_vllms_prefix() -> None:
    counts = Counts()
    counts(
        LayerLanded(
            at_s=1.5,
            transfer_id="t",
            layer=0,
            start=0,
            end=4,
            nbytes=100,
            transport="tcp",
            submitted_s=1.25,
            asked_s=1.0,
        )  # fmt: skip
    )
    registry = CollectorRegistry()
    kinds = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    config = SimpleNamespace(kv_transfer_config=None)
    metrics = PDLinkConnector.build_prom_metrics(config, kinds, ["model_name", "engine"], {0: ["m", "0"]})
    carried = pickle.loads(pickle.dumps(counts.take()))
    for _ in range(2):
        metrics.observe(carried, 0)
    text = generate_latest(registry).decode()
    at = 'engine="0",model_name="m"'
    for line in (
        f'vllm:pdlink_transfer_bytes_total{{{at},transport="tcp"}} 200.0',
        f'vllm:pdlink_push_busy_seconds_total{{{at},transport="tcp"}} 0.5',
        f"vllm:pdlink_push_seconds_sum{{{at}}} 0.5",
        f"vllm:pdlink_push_wait_seconds_count{{{at}}} 2.0",
        f'vllm:pdlink_transfer_failures_total{{{at},reason="peer_lost",side="receiver"}} 0.0',
    ):
        assert f"\n{line}\n" in text


def test_gauges_of_ranks_and_of_several_steps_add_up_on_the_servers_metrics() -> None:
    ranks = [Counts() for _ in range(2)]
    quarantined = [3, 4]
    for index, rank in enumerate(ranks):
        rank.look = lambda link, _, index=index: link.set(state(quarantined[index]))
    registry = CollectorRegistry()
    kinds = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    config = SimpleNamespace(kv_transfer_config=None)
    metrics = PDLinkConnector.build_prom_metrics(config, kinds, ["model_name", "engine"], {0: ["m", "0"]})

    def shown() -> str:
        total = PDLinkStats(data=ranks[0].take()).aggregate(PDLinkStats(data=ranks[1].take()))
        metrics.observe(pickle.loads(pickle.dumps(total.data)), 0)
        (line,) = [
            line
            for line in generate_latest(registry).decode().splitlines()
            if line.startswith("vllm:pdlink_quarantined_blocks{")
        ]
        return line.split()[-1]

    assert shown() == "7.0"
    quarantined[:] = [3, 0]
    assert [shown(), shown()] == ["3.0", "3.0"]
    assert "vllm:pdlink_endpoint_longest_absence_seconds" not in generate_latest(registry).decode()


def test_the_fields_of_vllm_that_are_read_exist() -> None:
    for kind, names in (
        (NewRequestData, ("req_id", "block_ids", "num_computed_tokens")),
        (CachedRequestData, ("req_ids", "new_block_ids", "resumed_req_ids", "num_computed_tokens")),
        (
            SchedulerOutput,
            ("scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens", "preempted_req_ids"),
        ),
        (ModelConfig, ("enable_sleep_mode",)),
        (
            ParallelConfig,
            (
                "data_parallel_external_lb",
                DATA_PARALLEL_INDEX,
                *("data_parallel_hybrid_lb", "data_parallel_rank_local"),
            ),
        ),
    ):
        assert set(names) <= set(kind.__dataclass_fields__), kind
    source = inspect.getsource(Request.__init__)
    for name in (
        "kv_transfer_params",
        "prompt_token_ids",
        "lora_request",
        "cache_salt",
        "mm_features",
        "prompt_embeds",
        "num_prompt_tokens",
        "priority",
        "skip_reading_prefix_cache",
    ):
        assert f"self.{name}" in source, name


@pytest.mark.parametrize(("path", "module"), SERVING.items())
def test_the_header_that_names_an_engine_chooses_it_on_the_paths_that_the_proxy_takes_for_such(
    path: str, module: str
) -> None:
    """On others, which some versions take, decode serves requests alone where several engines are behind one port."""
    source = inspect.getsource(pytest.importorskip(module, exc_type=ImportError))
    takes = (
        "_get_data_parallel_rank(raw_request)" in source or "create_chat_completion(chat_req, raw_request)" in source
    )
    assert takes or path not in DIALECTS["vllm"].engine_paths


def test_every_call_of_a_trainer_goes_where_changes_of_weights_are_looked_for() -> None:
    """`/update_weights` and its like, `reload_weights`, a worker's own methods, functions."""
    for name in weights._WATCHED:
        assert callable(getattr(EngineCore, name)), name
    source = inspect.getsource(AsyncLLM)
    in_parts = hasattr(
        Worker, "finish_weight_update"
    )  # before 0.21 `update_weights` is all of a change, if it is there
    for part in weights._PARTS if in_parts else {"update_weights"}.intersection(vars(Worker)):
        assert f'collective_rpc(\n            "{part}"' in source or f'collective_rpc("{part}")' in source, part
        assert hasattr(Worker, part), part
    assert "sleeping_tags" in inspect.getsource(Executor)


def test_an_engine_knows_its_number_behind_its_port() -> None:
    def engine(**said: Any) -> int:
        config = ParallelConfig()
        for name, value in said.items():
            setattr(config, name, value)
        return versions.engine_of_port(SimpleNamespace(parallel_config=config))

    assert engine() == 0
    third = {DATA_PARALLEL_INDEX: 3}
    assert engine(**third) == 3, "as an engine without experts has it, whose rank is 0"
    assert engine(**third, data_parallel_external_lb=True) == 0
    assert engine(**third, data_parallel_rank_local=1, data_parallel_hybrid_lb=True) == 1


def test_no_cache_of_a_cpu_goes_through_a_mirror_unless_somebody_says_so() -> None:
    """vLLM's default is the platform's device, which is this one; before, cuda."""
    config = SimpleNamespace(kv_transfer_config=KVTransferConfig(kv_connector="PDLinkConnector", kv_role="kv_both"))
    assert versions.buffer_device(config) in ("cpu", "cuda")
    assert not host_copy.is_needed([torch.zeros(1)], versions.buffer_device(config))
    assert "kv_buffer_device" in KVTransferConfig.__dataclass_fields__


needs_hybrid = pytest.mark.skipif(
    versions.check(vllm.__version__, accept_newer=True) < versions.HYBRID, reason="transfers no hybrid models"
)
ATTENTION = {"block_size": 16, "num_kv_heads": 2, "head_size": 8, "dtype": torch.float32}


def kinds_of(*specs: Any) -> list[Any]:
    groups = [KVCacheGroupSpec([f"layer.{index}"], spec) for index, spec in enumerate(specs)]
    cache = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context={}))
    return cache_groups.kinds(config, cache, [f"layer.{index}" for index in range(len(specs))])


@needs_hybrid
def test_every_kind_of_cache_is_known_or_refused_by_its_name() -> None:
    full, window, latent, state = kinds_of(
        kv.FullAttentionSpec(**ATTENTION),
        kv.SlidingWindowSpec(**ATTENTION, sliding_window=40),
        kv.MLAAttentionSpec(**ATTENTION | {"num_kv_heads": 1}),
        kv.MambaSpec(block_size=64, shapes=((3, 256), (4, 8, 8)), dtypes=(torch.bfloat16, torch.float32)),
    )
    assert (full.window, window.window, window.block_tokens, latent.latent) == (0, 40, 16, True)
    assert (state.form, state.block_tokens) == ("state", 64)
    assert state.dtype == "[(3, 256), (4, 8, 8)] ['bfloat16', 'float32']"
    for spec in (
        kv.ChunkedLocalAttentionSpec(**ATTENTION, attention_chunk_size=32),
        kv.CrossAttentionSpec(**ATTENTION),
        kv.EncoderOnlyAttentionSpec(**ATTENTION),
        kv.FullAttentionSpec(**ATTENTION, tokens_per_state=Fraction(1, 4)),
        kv.SlidingWindowMLASpec(**ATTENTION, sliding_window=40, bounded_replay=True),
    ):
        expected = f"{type(spec).__name__}|1/4 tokens to an entry|--no-swa-bounded-replay"
        with pytest.raises(UnsupportedCache, match=expected):
            kinds_of(spec)


@needs_hybrid
def test_compressed_caches_of_deepseek_v4_are_described_as_vllm_lays_them_out() -> None:
    """Latents of 4 and 128 tokens to an entry and an indexer's keys share lists of blocks; windows hold what is not
    compressed yet. No kernel of these runs on CPUs: the tensors are made as vLLM makes them."""
    latent = {"block_size": 256, "num_kv_heads": 1, "model_version": "deepseek_v4", "alignment": 512}
    compressed = {
        "l.0.attn": kv.MLAAttentionSpec(**latent, head_size=512, dtype=torch.bfloat16, tokens_per_state=4),
        "l.1.attn": kv.MLAAttentionSpec(**latent, head_size=512, dtype=torch.bfloat16, tokens_per_state=128),
        "l.0.indexer": kv.MLAAttentionSpec(**latent, head_size=132, dtype=torch.uint8, tokens_per_state=4),
    }
    window = {"num_kv_heads": 1, "model_version": "deepseek_v4", "alignment": 512, "dtype": torch.float32}
    groups = [
        KVCacheGroupSpec([*compressed], kv.UniformTypeKVCacheSpecs(block_size=256, kv_cache_specs=compressed)),
        KVCacheGroupSpec(
            ["l.0.swa"], kv.SlidingWindowMLASpec(**window, block_size=64, head_size=512, sliding_window=128)
        ),
        KVCacheGroupSpec(
            ["l.0.state"], kv.SlidingWindowMLASpec(**window, block_size=4, head_size=1024, sliding_window=8)
        ),
    ]
    cache = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)
    names = [name for group in groups for name in group.layer_names]
    layers = {"l.0.attn": Unknown(), "l.0.indexer": Indexer(), "l.0.state": Unknown()}
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    specs = compressed | {group.layer_names[0]: group.kv_cache_spec for group in groups[1:]}
    found, blocks = {}, 8
    for kind in cache_groups.kinds(config, cache, names):
        (name,) = kind.names
        shape, strides = _tensor_of(specs[name], blocks)
        view = LayerView(name, shape, strides, 1, 0, 0)
        found[name] = describe([view], kind).layout
    assert {name: (one.block_tokens, one.position_tokens, one.window) for name, one in found.items()} == {
        "l.0.attn": (1, 256, 0),
        "l.1.attn": (2, 128, 0),
        "l.0.indexer": (1, 256, 0),
        "l.0.swa": (64, 1, 128),
        "l.0.state": (1, 4, 8),
    }
    assert cache_groups.by_group(cache, [[1, 2], [3, 4, 5, 6, 7], [7] * 80]) == (
        *[(1, 2)] * 3,
        (3, 4, 5, 6, 7),
        (7,) * 80,
    )
    assert not cache_groups.keeps_all(cache)
    for name, needed in (
        ("l.0.attn", (0, 2)),
        ("l.1.attn", (0, 3)),
        ("l.0.swa", (128, 300)),
        ("l.0.state", (73, 75)),
    ):
        assert found[name].needed(0, 300) == needed
        nbytes = specs[name].unpadded_page_size_bytes
        layout = found[name]
        assert layout.block_tokens * layout.head_nbytes == nbytes, "a block holds all of a page but its padding"


class Unknown:
    """A layer with a backend of its own, as compressors have."""

    @staticmethod
    def get_attn_backend() -> Any:
        return SimpleNamespace(get_name=lambda: "CompressorBackend")


def _tensor_of(spec: Any, num_blocks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides in bytes of the tensor that vLLM makes: [block, head, state, bytes of a state]."""
    width = spec.state_content_size_bytes
    shape = (num_blocks, spec.num_heads, spec.num_states, width)
    return shape, (spec.page_size_bytes, spec.num_states * width, width, 1)


@needs_hybrid
def test_the_ring_of_a_compressor_is_one_block_that_is_pushed_last() -> None:
    """DeepSeek V4.1 and others keep a request's open group of tokens in one block for as long as it runs."""
    spec = kv.CircularBufferSpec(block_size=8, num_kv_heads=1, head_size=64, head_size_v=0, dtype=torch.float32)
    (kind,) = kinds_of(spec)
    shape, strides = _tensor_of(spec, 8)
    layout = describe([LayerView("layer.0", shape, strides, 1, 0, 0)], kind).layout
    assert (layout.state, layout.head_nbytes) == (True, spec.page_size_bytes)
    layout.check("own")
    for num_tokens in (1, 9, 2**20):
        assert layout.blocks_of(*layout.needed(0, num_tokens)) == slice(0, 1)
    config = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["a"], spec)])
    assert not cache_groups.keeps_all(config)


class Indexer:
    """As `DeepseekV32IndexerCache` names its backend."""

    @staticmethod
    def get_attn_backend() -> Any:
        from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerBackend

        return DeepseekV32IndexerBackend


@needs_hybrid
def test_latents_and_an_indexers_keys_in_one_group_of_vllm_are_two_of_ours() -> None:
    """DeepSeek V3.2, as vLLM puts its layers together."""
    latent = {"block_size": 64, "num_kv_heads": 1}
    specs = {
        f"model.layers.{index}.{name}": kv.MLAAttentionSpec(**latent, head_size=size, dtype=dtype)
        for index in range(2)
        for name, size, dtype in (("attn", 576, torch.bfloat16), ("indexer.k_cache", 132, torch.uint8))
    }
    group = KVCacheGroupSpec(list(specs), kv.UniformTypeKVCacheSpecs(block_size=64, kv_cache_specs=specs))
    cache = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[group])
    layers = {name: Indexer() for name in specs if "indexer" in name}
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    attention, indexer = cache_groups.kinds(config, cache, list(specs))
    assert [kind.form for kind in (attention, indexer)] == ["rows", "packed"]
    assert indexer.dtype == "uint8 DEEPSEEK_V32_INDEXER"
    assert attention.names == ("model.layers.0.attn", "model.layers.1.attn")
    assert cache_groups.by_group(cache, [[3, 1]]) == ((3, 1), (3, 1))
    assert cache_groups.keeps_all(cache)


@needs_hybrid
def test_scales_inside_a_token_travel_with_it_and_others_with_whole_blocks() -> None:
    inline, apart = kinds_of(
        kv.FullAttentionSpec(**ATTENTION, state_content_bytes=2 * 8 * 4 + 8),
        kv.FullAttentionSpec(**ATTENTION, num_head_slots=4, state_content_bytes=36),
    )
    assert (inline.form, apart.form) == ("rows", "packed")
    views = [LayerView("layer.0", (8, 2, 16, 72), (2304, 1152, 72, 1), 1, 0, 0)]
    layout = describe(views, inline).layout
    assert (layout.head_nbytes, len(layout.layers[0].parts)) == (72, 1), "keys, values and both scales"


@needs_hybrid
@pytest.mark.parametrize("extra", [0, 3])
def test_vllm_keeps_what_a_window_and_a_state_send(extra: int) -> None:
    """What its managers have given up by the end of a prompt begins before what is asked for."""
    spec = kv.SlidingWindowSpec(**ATTENTION, sliding_window=40, extra_retained_tokens=extra)
    (kind,) = kinds_of(spec)
    view = LayerView("layer.0", (8, 2, 16, 16), (512, 256, 16, 1), 4, 0, 0)
    window = describe([view], kind).layout
    (states,) = kinds_of(kv.MambaSpec(block_size=16, shapes=((3, 4),), dtypes=(torch.float32,)))
    state = describe([LayerView("layer.0", (8, 1, 1, 48), (64, 48, 48, 1), 1, 0, 0)], states).layout
    manager, mamba = object.__new__(SlidingWindowManager), object.__new__(MambaManager)
    manager.sliding_window, manager.extra_retained_tokens = spec.sliding_window, extra
    for computed in range(1, 400):
        kept = manager.get_num_skipped_tokens(computed) // 16 * 16
        assert window.needed(0, computed)[0] == kept
        assert state.needed(0, computed) == (mamba.get_num_skipped_tokens(computed), computed)


@needs_hybrid
def test_the_last_token_of_a_prompt_can_be_left_to_decode() -> None:
    request = Request("r", [5, 6, 7], SamplingParams(max_tokens=5), None)
    versions.leave_last_token(request)
    assert (request.prompt_token_ids, request.num_prompt_tokens, request.num_tokens) == ([5, 6], 2, 2)
    assert (list(request.all_token_ids), request.max_tokens) == ([5, 6], 1)
