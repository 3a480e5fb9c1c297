"""What may stand in `kv_connector_extra_config`, and which vLLM is accepted."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from pdlink.config import ProxyConfig, TiersConfig, TimeoutConfig
from pdlink.errors import ConfigError
from pdlink.integrations.vllm_parts import cache_groups, versions
from pdlink.integrations.vllm_parts.layout import COLUMNS, PACKED, ROWS, UnsupportedCache
from pdlink.integrations.vllm_parts.settings import read


def test_every_shard_listens_on_a_port_and_with_a_key_of_its_own() -> None:
    settings = read(
        {"listen": "127.0.0.1:41000", "security": {"key_file": "/x/{shard}.key", "allow_file": "/x/allow"}}
    )
    assert [settings.of_shard(shard).listen.control_port for shard in range(3)] == [41000, 41001, 41002]
    assert settings.of_shard(2).security.key_file == "/x/2.key"
    assert read({}).of_shard(5).listen.control_port == 0


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"control_prot": 1}, "control_prot"),
        ({"transport": {"kind": "pigeon"}}, "transport.kind"),
        ({"listen": "192.0.2.1"}, "keys"),
        ({"listen": {"advertise": "192.0.2.1"}}, "keys"),
        ({"timeouts": {"peer_s": 200}}, "request_s"),
        ({"tiers": {"local_disk": "/kv"}}, "max_local_disk_size"),
        ({"tiers": {"local_disk": "/kv/{name}", "max_local_disk_size": 1}}, "another name at every start; set name"),
    ],
)
def test_a_wrong_setting_is_named(extra: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read(extra)


def test_vllm_is_given_longer_to_answer_than_a_worker_and_may_be_given_less() -> None:
    plain, timeouts = TimeoutConfig(), read({}).timeouts
    assert timeouts.peer_s > plain.peer_s
    assert timeouts.request_s < ProxyConfig().request_timeout_s
    assert read({"timeouts": {"peer_s": 2}}).timeouts.peer_s == 2


@pytest.mark.parametrize("version", ["0.12.0", "0.32.0+cpu", "0.33.1.dev3+gabc"])
def test_known_versions_are_accepted(version: str) -> None:
    assert versions.check(version, accept_newer=False) >= versions.OLDEST


def test_blocks_on_the_host_beside_the_gpus_are_refused_by_name() -> None:
    """HiSparse's, which MultiConnector brings: no other server lets a promise wait (0.33)."""
    config, cache = SimpleNamespace(parallel_config=SimpleNamespace()), caches()
    cache.hisparse_host_num_blocks = 8
    with pytest.raises(UnsupportedCache, match=r"hisparse_host_num_blocks: got 8.*take HiSparseConnector out"):
        versions.check_config(config, cache, (0, 33), tiers=None)


def test_a_model_runner_that_calls_no_connector_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config, cache = SimpleNamespace(parallel_config=SimpleNamespace()), caches()
    for runner_v2 in (False, True):
        envs = SimpleNamespace(VLLM_USE_V2_MODEL_RUNNER=runner_v2)
        monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(envs=envs))
        versions.check_config(config, cache, (0, 15), tiers=None)
        if not runner_v2:
            versions.check_config(config, cache, (0, 14), tiers=None)
    with pytest.raises(UnsupportedCache, match="VLLM_USE_V2_MODEL_RUNNER: got 1 with vLLM 0.14"):
        versions.check_config(config, cache, (0, 14), tiers=None)


@pytest.mark.parametrize("version", ["0.11.2", "0.9.1", "0.34.0", "1.0", "dev"])
def test_other_versions_are_refused_with_the_range(version: str) -> None:
    with pytest.raises(versions.UnsupportedVllm):
        versions.check(version, accept_newer=False)


def test_the_tier_has_a_range_of_its_own() -> None:
    with pytest.raises(versions.UnsupportedVllm, match=r"PDLinkTier works with vLLM 0\.32 to .* this is 0\.31\.0"):
        versions.check("0.31.0", accept_newer=False, oldest=versions.TIER)


def test_a_newer_version_can_be_accepted_and_says_what_was_not_tried(caplog: pytest.LogCaptureFixture) -> None:
    assert versions.check("0.34.0", accept_newer=True) == (0, 34)
    for version in ("0.33.1", "0.34.0"):
        versions.warn_untried(version)
    (said,) = [record.getMessage() for record in caplog.records]
    assert "0.34.0: not tried: the contract with its classes, servers, GPUs; expected 0.12 to 0.33" in said
    with pytest.raises(versions.UnsupportedVllm, match="0.12 to 0.33"):
        versions.check("0.11.2", accept_newer=True)


def test_a_step_is_read_alike_from_both_model_runners() -> None:
    new = SimpleNamespace(req_id="n", block_ids=([1, 2],), num_computed_tokens=16)
    cached = SimpleNamespace(
        req_ids=["c", "r", "e"],
        new_block_ids=[([5],), ([6, 7],), None],
        resumed_req_ids={"r"},
        num_computed_tokens=[32, 0, 40],
    )
    output = SimpleNamespace(
        num_scheduled_tokens={"n": 4, "c": 8, "r": 32, "e": 1}, scheduled_new_reqs=[new], scheduled_cached_reqs=cached
    )
    one = SimpleNamespace(kv_cache_groups=[None])
    assert versions.scheduled(output, one) == [
        ("n", ((1, 2),), True, 16, 4),
        ("c", ((5,),), False, 32, 8),
        ("r", ((6, 7),), True, 0, 32),
        ("e", ((),), False, 40, 1),
    ]


def backend(name: str) -> object:
    return SimpleNamespace(get_name=lambda: name)


@pytest.mark.parametrize(
    ("layer", "form"),
    [
        (SimpleNamespace(), ROWS),
        (SimpleNamespace(isa="vec"), COLUMNS),
        (SimpleNamespace(isa="vec16"), COLUMNS),
        (SimpleNamespace(isa="amx"), PACKED),
        (SimpleNamespace(impl=SimpleNamespace(isa="vec"), attn_backend=backend("CPU_ATTN")), COLUMNS),  # up to 0.28
        (SimpleNamespace(impl=SimpleNamespace(isa="amx"), attn_backend=backend("CPU_ATTN")), PACKED),
        (SimpleNamespace(impl=SimpleNamespace(), attn_backend=backend("CPU_ATTN")), PACKED),  # a version to come
        (SimpleNamespace(impl=SimpleNamespace(), attn_backend=backend("FLASH_ATTN")), ROWS),
        (SimpleNamespace(get_attn_backend=lambda: backend("TRITON_MLA")), ROWS),
        (SimpleNamespace(get_attn_backend=lambda: backend("DEEPSEEK_V32_INDEXER")), PACKED),
        (SimpleNamespace(attn_backend=backend("ROCM_ATTN")), PACKED),
        (None, ROWS),
    ],
)
def test_the_form_of_a_block_follows_the_attention_kernel(layer: object, form: str) -> None:
    assert cache_groups.cache_form(layer)[0] == form


def test_blocks_that_only_a_kernel_can_read_are_named_after_it() -> None:
    """Or a peer whose kernel packs them otherwise would take them for its own."""
    slots = SimpleNamespace(num_head_slots=8)
    assert cache_groups.cache_form(SimpleNamespace(isa="amx")) == (PACKED, "amx")
    assert cache_groups.cache_form(SimpleNamespace(isa="neon")) == (PACKED, "neon")
    assert cache_groups.cache_form(SimpleNamespace(attn_backend=backend("FLASHINFER")), slots) == (
        PACKED,
        "FLASHINFER",
    )


class SlidingWindowSpec:
    """As vLLM calls it, by which it is known."""

    sliding_window, extra_retained_tokens = 64, 3


FULL, WINDOW = SimpleNamespace(), SlidingWindowSpec()
STATES = SimpleNamespace(shapes=((3, 256),), dtypes=("torch.float32",))


def caches(*specs: object) -> SimpleNamespace:
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs])


def recurrent(mode: str, block_size: int = 512) -> SimpleNamespace:
    return SimpleNamespace(**vars(STATES), mamba_cache_mode=mode, block_size=block_size)


@pytest.mark.parametrize(
    ("specs", "version", "tiers", "context", "message"),
    [
        ((FULL, WINDOW), (0, 31), None, 1, r"2 groups of KV caches, which are transferred from vLLM 0\.32 on"),
        ((WINDOW,), (0, 31), {}, 1, r"windows or recurrent layers from vLLM 0\.32 on; .* --disable-hybrid-kv"),
        ((FULL, WINDOW), (0, 32), {"save_decode_cache": True}, 1, "save_decode_cache: got true"),
        ((FULL, recurrent("none")), (0, 32), {}, 1, "expected servers with --enable-prefix-caching"),
        ((FULL, recurrent("align")), (0, 32), {"chunk_size": 384}, 1, "got 384; expected divisors of 512"),
        ((FULL,), (0, 31), None, 2, r"decode_context_parallel_size: got 2 with vLLM 0\.31; expected 0\.32"),
    ],
)
def test_what_is_not_transferred_or_kept_yet_is_refused_at_start(
    specs: tuple[object, ...],
    version: tuple[int, int],
    tiers: dict[str, Any] | None,
    context: int,
    message: str,
) -> None:
    parallel = SimpleNamespace(decode_context_parallel_size=context)
    kept = None if tiers is None else TiersConfig(**{"max_local_cpu_size": 1.0, **tiers})
    with pytest.raises(UnsupportedCache, match=message):
        versions.check_config(SimpleNamespace(parallel_config=parallel), caches(*specs), version, tiers=kept)


@pytest.mark.parametrize(("rank", "drafts", "unsaid"), [(0, True, True), (1, True, False), (0, False, False)])
def test_a_stage_before_the_one_that_drafts_ends_its_steps_unsaid(*, rank: int, drafts: bool, unsaid: bool) -> None:
    parallel = SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=2, rank=rank)
    config = SimpleNamespace(parallel_config=parallel, speculative_config=object() if drafts else None)
    assert versions.ends_unsaid(config) is unsaid


def test_tiers_keep_windows_and_states_whose_blocks_end_where_chunks_do() -> None:
    parallel = SimpleNamespace(pipeline_parallel_size=1, decode_context_parallel_size=1)
    for specs in ((FULL, WINDOW), (FULL, recurrent("align")), (FULL, recurrent("all", 256))):
        tiers = TiersConfig(chunk_size=256, max_local_cpu_size=1.0)
        versions.check_config(SimpleNamespace(parallel_config=parallel), caches(*specs), (0, 32), tiers=tiers)


def test_a_cache_that_does_not_keep_all_tokens_is_known_by_its_groups() -> None:
    assert cache_groups.keeps_all(caches(FULL, FULL))
    assert not cache_groups.keeps_all(caches(FULL, WINDOW))
    assert not cache_groups.keeps_all(caches(STATES))
    assert not cache_groups.keeps_all(caches(SimpleNamespace(kv_cache_specs={"a": FULL, "b": WINDOW})))
    assert cache_groups.window_of(WINDOW) == 67, "those kept for a draft model count"


def test_every_group_that_is_transferred_has_a_list_of_blocks() -> None:
    several = caches(FULL, WINDOW, STATES)
    several.transfer_group_ids = (0, 2)
    assert cache_groups.by_group(several, ([1, 2], [3], [4])) == ((1, 2), (4,))
    assert cache_groups.by_group(caches(FULL), ([1, 2],)) == ((1, 2),)
    assert cache_groups.by_group(several, None) == ((), ()), "a step without new blocks"


def test_layers_of_a_group_that_is_not_transferred_are_in_no_other() -> None:
    """Sparse caches of vLLM have such groups. Layers in no group at all share the cache of one in the only group."""
    spec = SimpleNamespace(head_size=8, dtype="float32", block_size=4)
    several = caches(spec, spec)
    for group, name in zip(several.kv_cache_groups, ("a", "b"), strict=True):
        group.layer_names = [name]
    several.transfer_group_ids = (0,)
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context={}))
    assert [kind.names for kind in cache_groups.kinds(config, several, ["a", "b"])] == [("a",)]
    one = caches(spec)
    one.kv_cache_groups[0].layer_names = ["a"]
    assert [kind.names for kind in cache_groups.kinds(config, one, ["a", "shares a"])] == [("a", "shares a")]


@pytest.mark.parametrize(
    ("rank", "ranks", "mine", "heads"), [(0, 1, 4, range(4)), (1, 2, 2, range(2, 4)), (5, 8, 1, range(2, 3))]
)
def test_a_rank_knows_its_heads(rank: int, ranks: int, mine: int, heads: range) -> None:
    parallel = SimpleNamespace(rank=rank, tensor_parallel_size=ranks)
    model = SimpleNamespace(use_mla=False, get_total_num_kv_heads=lambda: 4)
    config = SimpleNamespace(parallel_config=parallel, model_config=model)
    assert versions.heads(config, mine) == (heads, 4)
    model.use_mla = True
    assert versions.heads(config, 1) == (None, None)


def test_the_kv_of_a_prompt_depends_on_lora_salt_and_media() -> None:
    request = SimpleNamespace(
        lora_request=SimpleNamespace(lora_name="l", lora_int_id=1),
        cache_salt="s",
        mm_features=[SimpleNamespace(identifier="i", mm_position=SimpleNamespace(offset=3))],
    )
    assert versions.identity(request).words == ["lora l ", "salt s", "media i"]
    assert versions.identity(SimpleNamespace(lora_request=None, cache_salt=None, mm_features=None)).words == []


def test_scales_that_each_server_makes_for_itself_are_refused() -> None:
    """KV in FP8 would be read by another server's scales: up to vLLM 0.26 they come from its first prompts."""
    config = SimpleNamespace(
        cache_config=SimpleNamespace(calculate_kv_scales=True), parallel_config=SimpleNamespace()
    )
    with pytest.raises(UnsupportedCache, match="calculate_kv_scales: got true"):
        versions.check_config(config, SimpleNamespace(kv_cache_groups=[]), (0, 26), tiers=None)
