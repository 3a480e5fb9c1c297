"""PDLinkConnector under vLLM's own Scheduler, block pool and runners' order of calls."""

from __future__ import annotations

import inspect
import itertools
import threading
import warnings
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import msgspec
import numpy as np
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM and torch warn about each other while they are imported
    pytest.importorskip("vllm.v1.request", exc_type=ImportError)

from vllm.config import KVTransferConfig  # noqa: E402
from vllm.v1.engine.core import EngineCore  # noqa: E402
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin  # noqa: E402

from pdlink.integrations.vllm import PDLinkConnector, PDLinkMetadata  # noqa: E402
from pdlink.integrations.vllm_parts import rank, versions  # noqa: E402
from pdlink.integrations.vllm_parts.memory import regions  # noqa: E402
from pdlink.integrations.vllm_parts.requests import NOTHING, StepPlan  # noqa: E402
from pdlink.integrations.vllm_parts.steps import Steps  # noqa: E402
from pdlink.peers.link import PeerLink  # noqa: E402
from pdlink_proxy.dialects import DIALECTS  # noqa: E402
from pdlink_proxy.kv_index import KVIndex  # noqa: E402
from tests.integrations.contract import vllm_server  # noqa: E402
from tests.integrations.contract.vllm_server import HAS_V2, Server, servers, tokens_of  # noqa: E402
from tests.proxy.test_kv_index import apply, tokens_in  # noqa: E402
from tests.store.process import process  # noqa: E402
from tests.waiting import WAIT_S, until  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.engines, pytest.mark.filterwarnings("ignore")]

PROMPT = list(range(1, 101))
RUNNERS = ["v1", "v2"] if HAS_V2 else ["v1"]
each_order = pytest.mark.parametrize(
    "how",
    [{"runner": runner, **more} for more in ({}, {"asynchronous": True}) for runner in RUNNERS],
    ids=[f"{runner.upper()}{more}" for more in ("", " async") for runner in RUNNERS],
)


def legs(prefill: Server, attempt: str = "a") -> tuple[dict[str, Any], dict[str, Any]]:
    sends = {"leg": "prefill", "transfer_id": attempt, "num_prompts": 1}
    return sends, {"leg": "decode", "transfer_id": attempt, "prefill": {"control": prefill.address}}


def transfers(prefill: Server, decode: Server) -> None:
    """A prompt moves from one to the other, and is answered as computed."""
    sends, receives = legs(prefill)
    prefill.request("p", PROMPT, sends, max_tokens=1)
    decode.request("d", PROMPT, receives)
    decode.until_idle(prefill)
    assert decode.outputs["d"] == tokens_of(PROMPT, 3)
    assert decode.said["d"]["pdlink_kv"] == "transferred"


@each_order
def test_a_request_alone_is_served(tmp_path: Path, how: dict[str, Any]) -> None:
    with servers(tmp_path, how) as (server,):
        server.request("r", PROMPT)
        server.until_idle()
        assert server.outputs["r"] == tokens_of(PROMPT, 3)


@each_order
def test_a_prompt_is_pushed_while_it_is_computed(tmp_path: Path, how: dict[str, Any]) -> None:
    with servers(tmp_path, how, how) as (prefill, decode):
        transfers(prefill, decode)
        assert decode.computed["d"] == 1 + 2, "the last token of the prompt, and two of the answer"
        assert prefill.computed["p"] == 100


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_layer_of_micro_batches_is_ready_when_the_step_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runner: str
) -> None:
    """Its hook runs for the first of them before the others have computed it."""
    config = vllm_server._config

    def in_two(*given: Any, **more: Any) -> Any:
        found = config(*given, **more)
        found.parallel_config.enable_dbo = True
        return found

    monkeypatch.setattr(vllm_server, "_config", in_two)
    said: list[str] = []
    monkeypatch.setattr(Steps, "layer_saved", lambda _, name: said.append(name))
    with servers(tmp_path, {"runner": runner}, {"runner": runner}) as (prefill, decode):
        transfers(prefill, decode)
    assert not said


def store(folder: Path, **more: Any) -> dict[str, Any]:
    tiers = {"chunk_size": 16, "max_local_cpu_size": 0.01, "load_if_faster": False, **more}
    return {"name": folder.name, "tiers": tiers}


def forget(server: Server) -> None:
    """What is in vLLM's own prefix cache."""
    assert server.scheduler.reset_prefix_cache()


@each_order
def test_a_prompt_seen_before_is_loaded_from_the_store(tmp_path: Path, how: dict[str, Any]) -> None:
    with servers(tmp_path, how | {"extra": store(tmp_path)}) as (server,):
        server.request("a", PROMPT)
        server.until_idle()
        forget(server)
        server.request("b", PROMPT)
        server.until_idle()
        assert server.outputs["b"] == tokens_of(PROMPT, 3)
        assert server.computed["b"] == 4 + 2, "all but 6 chunks of 16"
        forget(server)
        server.request("c", PROMPT, {"max_load_tokens": 40, "max_offload_tokens": 0})
        server.request("d", PROMPT[::-1], {"max_offload_tokens": 40})
        server.until_idle()
        assert server.computed["c"] == 68 + 2, "2 whole chunks of 40 tokens are loaded"
        assert server.outputs["c"] == tokens_of(PROMPT, 3)
        forget(server)
        server.request("e", PROMPT[::-1])
        server.request("f", PROMPT, {"max_load_tokens": 0})
        server.until_idle()
        assert server.computed["e"] == 100 - 32 + 2, "2 chunks were kept"
        assert server.computed["f"] == 100 + 2


@pytest.mark.parametrize(("asked", "loaded"), [("STORAGE", 96), ("CPU", 0)])
def test_a_request_names_the_tiers_that_it_is_loaded_from(tmp_path: Path, asked: str, loaded: int) -> None:
    extra = store(tmp_path, local_disk=str(tmp_path / "kv"), max_local_disk_size=0.1)
    for name, expected in [("writes", 100), ("reads", 100 - loaded)]:
        with servers(tmp_path, {"extra": extra}) as (server,):
            server.request(name, PROMPT, {"kv_load_tiers": [{"medium": asked}]})
            server.until_idle()
            assert server.outputs[name] == tokens_of(PROMPT, 3)
            assert server.computed[name] == expected + 2


@each_order
def test_a_decode_server_loads_what_it_has_and_receives_the_rest(tmp_path: Path, how: dict[str, Any]) -> None:
    keeps = how | {"extra": store(tmp_path, save_decode_cache=True)}
    with servers(tmp_path, how, keeps) as (prefill, decode):
        decode.request("x", PROMPT[:64])
        decode.until_idle()
        forget(decode)
        sends, receives = legs(prefill)
        prefill.request("p", PROMPT, sends, max_tokens=1)
        decode.request("d", PROMPT, receives)
        decode.until_idle(prefill)
        assert decode.outputs["d"] == tokens_of(PROMPT, 3)
        source = decode.said["d"]["pdlink_source"]
        assert (source["loaded"], source["received"], source["computed"]) == (64, 35, 1)


def lends(server: Server) -> PeerLink:
    link = server.connector._rank._peers
    assert isinstance(link, PeerLink)
    return link


@each_order
def test_a_prefill_server_pulls_what_the_store_of_another_has_and_pushes_it(
    tmp_path: Path, how: dict[str, Any]
) -> None:
    keeps = [how | {"extra": store(tmp_path / name, peer_port=0)} for name in ("first", "second")]
    with servers(tmp_path, *keeps, how) as (first, second, decode):
        first.request("a", PROMPT)
        first.until_idle()
        sends, receives = legs(second)
        second.request("p", PROMPT, sends | {"source": lends(first).address}, max_tokens=1)
        decode.request("d", PROMPT, receives)
        decode.until_idle(second)
        assert decode.outputs["d"] == tokens_of(PROMPT, 3)
        assert second.computed["p"] == 4
        assert second.said["p"]["pdlink_source"]["places"] == {"peer": 96}
        forget(second)
        second.request("b", PROMPT)
        second.until_idle()
        assert (second.outputs["b"], second.computed["b"]) == (tokens_of(PROMPT, 3), 4 + 2)


def test_store_processes_of_two_servers_pull_from_each_other(tmp_path: Path) -> None:
    with ExitStack() as ends:
        keeps = []
        for name in ("first", "second"):
            (tmp_path / name).mkdir()
            lends = {"max_local_cpu_size": 0.05, "peer_port": 0}
            kept = ends.enter_context(process(tmp_path / name, name=name, tiers=lends))
            uses = {"store": str(kept.path), "chunk_size": 16, "load_if_faster": False, "store_timeout_s": WAIT_S}
            keeps.append({"extra": {"name": name, "tiers": uses}})
        first, second = ends.enter_context(servers(tmp_path, *keeps))
        one, two = (server.connector._rank._store.source.store for server in (first, second))
        until(lambda: one.lends_at and two.lends_at, "both are connected to their stores")
        first.request("a", PROMPT)
        first.until_idle()
        second.request("b", PROMPT, {"source": one.lends_at})
        second.until_idle()
        assert (second.outputs["b"], second.computed["b"]) == (tokens_of(PROMPT, 3), 4 + 2)


@each_order
def test_a_source_that_dies_in_mid_pull_costs_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: dict[str, Any]
) -> None:
    """Two of six records are sent."""
    keeps = [how | {"extra": store(tmp_path / name, peer_port=0)} for name in ("first", "second")]
    with servers(tmp_path, *keeps) as (first, second):
        first.request("a", PROMPT)
        first.until_idle()
        lender, asked, dying = lends(first), itertools.count(), threading.Event()
        send = lender._lend
        monkeypatch.setattr(lender, "_lend", lambda pull: send(pull) if next(asked) < 2 else dying.set())
        second.request("b", PROMPT, {"source": lender.address})
        second.until(dying.is_set)
        lender.close()
        second.until_idle()
        assert second.outputs["b"] == tokens_of(PROMPT, 3)
        assert second.computed["b"] >= 100 - 32 + 2


@each_order
def test_preempted_prompts_are_computed_and_sent_anew(tmp_path: Path, how: dict[str, Any]) -> None:
    """Four prompts of 7 blocks grow while 20 blocks are there."""
    prompts = [[1000 * number + token for token in range(100)] for number in range(4)]
    with servers(tmp_path, how | {"num_blocks": 17}, how) as (prefill, decode):
        for number, prompt in enumerate(prompts):
            sends, receives = legs(prefill, f"a{number}")
            prefill.request(f"p{number}", prompt, sends, max_tokens=1)
            prefill.request(f"x{number}", [7, *prompt], max_tokens=40)
            decode.request(f"d{number}", prompt, receives)
        preempted: set[str] = set()

        def over() -> bool:
            plan = prefill.step()
            if plan is not None:
                preempted.update(plan.preempted_req_ids or ())
            return len(decode.ended) == len(prompts) and not prefill.scheduler.has_requests()

        decode.until(over)
        decode.until_idle(prefill)
        assert preempted
        for number, prompt in enumerate(prompts):
            assert decode.outputs[f"d{number}"] == tokens_of(prompt, 3)
            assert prefill.outputs[f"x{number}"] == tokens_of([7, *prompt], 40)


@each_order
def test_a_prompt_is_withdrawn_before_others_write_to_its_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: dict[str, Any]
) -> None:
    """Six answers take a block more each while it is computed, in five steps."""
    prompt, withdrawn, withdraw = list(range(1, 301)), set[str](), Steps.withdraw

    def tell(steps: Steps, plan: StepPlan) -> None:
        withdrawn.update(plan.withdrawn)
        withdraw(steps, plan)

    monkeypatch.setattr(Steps, "withdraw", tell)
    with servers(tmp_path, how | {"num_blocks": 28}, how) as (prefill, decode):
        forward, preempted = prefill._forward, set[str]()

        def checked(plan: Any) -> dict[str, list[int]]:
            preempted.update(plan.preempted_req_ids or ())
            assert "p" in withdrawn or "p" not in preempted
            return forward(plan)

        prefill._forward = checked  # type: ignore[method-assign]
        for number in range(6):
            prefill.request(f"x{number}", [1000 * number + token for token in range(12)], max_tokens=40)
        prefill.until(lambda: len(prefill.outputs) == 6)
        sends, receives = legs(prefill)
        prefill.request("p", prompt, sends, max_tokens=1)
        decode.request("d", prompt, receives)
        decode.until_idle(prefill)
        assert "p" in preempted
        assert decode.outputs["d"] == tokens_of(prompt, 3)


@each_order
@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_an_aborted_request_lets_go_of_all_blocks_on_both_sides(
    tmp_path: Path, how: dict[str, Any], steps: int
) -> None:
    with servers(tmp_path, how, how) as (prefill, decode):
        sends, receives = legs(prefill)
        prefill.request("p", PROMPT, sends, max_tokens=1)
        decode.request("d", PROMPT, receives)
        for _ in range(steps):
            decode.step()
            prefill.step()
        decode.abort("d")
        prefill.abort("p")
        decode.until_idle(prefill)
        decode.request("e", PROMPT)
        decode.until_idle()
        assert decode.outputs["e"] == tokens_of(PROMPT, 3)


@each_order
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_kv_that_does_not_come_is_computed_or_fails_its_request(
    tmp_path: Path, how: dict[str, Any], policy: str
) -> None:
    if policy == "fail" and "kv_load_failure_policy" not in KVTransferConfig.__dataclass_fields__:
        pytest.skip("this vLLM computes it")
    with servers(tmp_path, how, how | {"policy": policy}) as (prefill, decode):
        sends, receives = legs(prefill)
        prefill.request("p", PROMPT, sends, max_tokens=1)
        decode.request("d", PROMPT, receives)
        decode.step()
        prefill.abort("p")
        decode.until_idle(prefill)
        if policy == "fail":
            assert decode.ended["d"].lower().endswith("error")
            return
        assert decode.outputs["d"] == tokens_of(PROMPT, 3)
        assert decode.computed["d"] == 100 + 2
        assert decode.said["d"]["pdlink_kv"] == "recomputed;reason=aborted"


@each_order
@pytest.mark.parametrize("between", ["", "a reset", "a lapse"])
def test_a_promise_holds_until_blocks_are_reserved_some_steps_later(
    tmp_path: Path, how: dict[str, Any], between: str
) -> None:
    """vLLM 0.33 reserves blocks late beside a pool of HiSparse's; here the scheduler's half hears of them late."""
    with servers(tmp_path, how | {"extra": store(tmp_path)}) as (server,):
        server.request("a", PROMPT)
        server.until_idle()
        forget(server)
        connector, late = server.scheduler.connector, list[tuple[Any, ...]]()
        told = connector.update_state_after_alloc
        connector.update_state_after_alloc = lambda *given: late.append(given)
        server.request("b", PROMPT)
        server.until(lambda: late)
        for _ in range(3):
            server.step()
        if between == "a reset":
            connector.reset_cache()
        elif between == "a lapse":
            server.connector._rank._store._clock = lambda: 1e9
        for _ in range(3):
            server.step()
        connector.update_state_after_alloc = told
        told(*late[0])
        server.until_idle()
        assert server.outputs["b"] == tokens_of(PROMPT, 3)
        assert server.computed["b"] == (100 if between == "a reset" else 4) + 2


@each_order
def test_a_promise_that_vllm_drops_is_told_as_computed_here(tmp_path: Path, how: dict[str, Any]) -> None:
    with servers(tmp_path, how, how) as (prefill, decode):
        sends, receives = legs(prefill)
        prefill.request("p", PROMPT, sends, max_tokens=1)
        decode.request("d", PROMPT, receives, prompt_logprobs=1)
        decode.until_idle(prefill)
        assert decode.said["d"]["pdlink_kv"] == "recomputed;reason=whole_prompt"
        assert decode.said["d"]["pdlink_source"]["computed"] == 100


def test_a_promise_that_vllm_cuts_is_told_as_computed_here(tmp_path: Path) -> None:
    """As its routed experts make it (0.33)."""
    with servers(tmp_path, {}, {}) as (prefill, decode):
        sends, receives = legs(prefill)
        connector = decode.scheduler.connector
        asked = connector.get_num_new_matched_tokens
        connector.get_num_new_matched_tokens = lambda *given: (0, asked(*given) and False)
        prefill.request("p", PROMPT, sends, max_tokens=1)
        decode.request("d", PROMPT, receives)
        decode.until_idle(prefill)
        assert decode.said["d"]["pdlink_kv"] == "recomputed;reason=whole_prompt"


@each_order
def test_a_step_that_fails_publishes_nothing(tmp_path: Path, how: dict[str, Any]) -> None:
    with servers(tmp_path, how | {"extra": store(tmp_path)}, how) as (prefill, decode):
        sends, receives = legs(prefill)
        prefill.request("p", PROMPT, sends, max_tokens=1)
        decode.request("d", PROMPT, receives)
        decode.step()
        forward = prefill._forward

        def fails(plan: Any) -> Any:
            prefill._forward = forward  # type: ignore[method-assign]
            raise RuntimeError("a kernel has failed")

        prefill._forward = fails  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="kernel"):
            prefill.until(lambda: False)
        with prefill._agent():
            prefill.connector.handle_preemptions(PDLinkMetadata(NOTHING))
            prefill.connector.bind_connector_metadata(PDLinkMetadata(NOTHING))
            prefill.connector.wait_for_save()
        decode.until(lambda: "d" in decode.ended)
        assert decode.outputs["d"] == tokens_of(PROMPT, 3)
        assert decode.said["d"]["pdlink_kv"] == "recomputed;reason=request_failed"


def test_a_stage_that_nobody_tells_of_the_end_of_a_step_sends_what_it_has_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Model runner V1 tells it, with drafts, in the last stage alone; and hooks do not run in full graphs."""
    begin = KVConnectorModelRunnerMixin.maybe_get_kv_connector_output
    if "defer_finalize" not in inspect.signature(begin).parameters:
        pytest.skip("this vLLM tells every stage")
    deferred = partial(begin, defer_finalize=True)
    monkeypatch.setattr(KVConnectorModelRunnerMixin, "maybe_get_kv_connector_output", deferred)
    monkeypatch.setattr(versions, "ends_unsaid", lambda _: True)
    monkeypatch.setattr(PDLinkConnector, "save_kv_layer", lambda *_: None)
    with servers(tmp_path, {"runner": "v1"}, {"runner": "v1"}) as (prefill, decode):
        transfers(prefill, decode)


def test_caches_on_a_device_stay_in_the_pool_that_sleep_discards(tmp_path: Path) -> None:
    with servers(tmp_path, {}) as (server,):
        assert server.connector.get_mem_pool_context() is not None
        server.config.device_config.device_type = "cuda"
        assert server.connector.get_mem_pool_context() is None


def test_memory_that_sleep_takes_away_is_registered_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So nothing is to be done when vLLM tells of sleep and of waking (0.33)."""
    stays, made = list[bool](), vllm_server._config

    def sleeps(*given: Any, **more: Any) -> Any:
        config = made(*given, **more)
        config.model_config.enable_sleep_mode = True
        return config

    def borrowed(*given: Any, **more: Any) -> Any:
        stays.append(more["stays"])
        return regions(*given, **more)

    monkeypatch.setattr(rank, "regions", borrowed)
    for config in (made, sleeps):
        monkeypatch.setattr(vllm_server, "_config", config)
        with servers(tmp_path, {}):
            pass
    assert stays == [True, False]


def test_blocks_that_a_step_under_way_writes_are_kept_or_waited_for(tmp_path: Path) -> None:
    """Another server would write them at once."""
    with servers(tmp_path, {"asynchronous": True}) as (server,):
        server.request("a", PROMPT)
        server.step()
        pool = server.scheduler.kv_cache_manager.block_pool
        before = pool.get_num_free_blocks()
        server.abort("a")
        assert (pool.get_num_free_blocks() > before) == versions.frees_early()
        server.until_idle()


def engine_of(server: Server) -> Any:
    """vLLM's, without processes."""
    engine = object.__new__(EngineCore)
    engine.scheduler, engine.model_executor = server.scheduler, MagicMock()
    engine.model_executor.sleeping_tags = ()
    engine.model_executor.collective_rpc.return_value = ["weights"]
    engine.mm_receiver_cache, engine.batch_queue = None, None
    return engine


@pytest.mark.parametrize("clears", [False, True], ids=["sleep", "an operator's reset"])
def test_sleep_keeps_what_the_store_has(tmp_path: Path, clears: bool) -> None:
    with servers(tmp_path, {"extra": store(tmp_path)}) as (server,):
        server.request("a", PROMPT)
        server.until_idle()
        engine = engine_of(server)
        if clears and "reset_connector" not in inspect.signature(engine.reset_prefix_cache).parameters:
            pytest.skip("this vLLM tells no connector of it")
        if clears:
            engine.reset_prefix_cache(reset_connector=True)
        else:
            engine.sleep(1)
            engine.model_executor.is_sleeping = False
            engine.wake_up()
        server.request("b", PROMPT)
        server.until_idle()
        assert server.outputs["b"] == tokens_of(PROMPT, 3)
        assert server.computed["b"] == (100 if clears else 4) + 2


@pytest.mark.parametrize(("role", "needed"), [("kv_producer", True), ("kv_both", False), ("kv_consumer", False)])
def test_only_a_server_that_answers_nobody_gives_up_an_output_for_its_kv(
    tmp_path: Path, role: str, needed: bool
) -> None:
    with servers(tmp_path, {"role": role}) as (server,):
        assert server.connector.requires_kv_delivery == needed
        if hasattr(server.scheduler, "requires_kv_delivery"):
            assert server.scheduler.requires_kv_delivery == needed


def test_the_router_reads_the_events_of_this_block_pool(tmp_path: Path) -> None:
    with servers(tmp_path, {}) as (server,):
        batches = list[bytes]()
        publisher = MagicMock(publish=lambda batch: batches.append(msgspec.msgpack.encode(batch)))
        server.scheduler.kv_event_publisher = publisher
        server.request("a", PROMPT)
        server.until_idle()
        index = KVIndex()
        for batch in batches:
            apply(index, 1, "m", batch)
        assert tokens_in(index, "m", (), np.array(PROMPT, np.uint32)) == {1: 96}


@pytest.mark.parametrize("kind", ["completion.protocol:CompletionStreamResponse"])
def test_the_proxy_takes_our_parameters_out_of_a_streams_last_event(kind: str) -> None:
    module, name = kind.split(":")
    found = pytest.importorskip(f"vllm.entrypoints.openai.{module}", exc_type=ImportError)
    event = getattr(found, name)(model="m", choices=[])
    if not hasattr(event, "kv_transfer_params"):
        pytest.skip("streams carry none in this version")
    event.kv_transfer_params = {"pdlink_kv": "transferred"}
    sent = f"data: {event.model_dump_json()}\n\n".encode()
    rules = DIALECTS["vllm"].rules
    assert rules.merge_events is not None
    merged = rules.merge_events(b"{}", sent)
    assert b"pdlink" in sent
    assert b"pdlink" not in merged
