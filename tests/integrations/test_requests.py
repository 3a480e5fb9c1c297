"""What the scheduler's half of the vLLM connector decides, played through with plain numbers."""

from __future__ import annotations

import random

import pytest

from pdlink.api.legs import DecodeParams
from pdlink.errors import InvalidRequest
from pdlink.integrations.vllm_parts import params
from pdlink.integrations.vllm_parts.requests import (
    NOTHING,
    Announce,
    ComputedChunk,
    ExpectedRequest,
    OfferedBlocks,
    RequestBook,
    Scheduled,
    StoppedRequest,
)
from pdlink.reasons import ABORTED, Code, Reason

CONTROL = "tcp://127.0.0.1:41000"
PROMPT = list(range(100))
PREFILL = {"transfer_id": "a", "leg": "prefill"}
DECODE = {"transfer_id": "a", "leg": "decode", "prefill": {"name": "p", "control": CONTROL}}
ID = params.transfer_id("a", PROMPT)


def book(*, shares_prefixes: bool = True, sends: bool = True, receives: bool = True, engine: int = 0) -> RequestBook:
    return RequestBook(sends=sends, receives=receives, shares_prefixes=shares_prefixes, engine=engine)


class TestSending:
    def test_a_prompt_is_announced_once_and_sent_chunk_by_chunk(self) -> None:
        requests = book()
        requests.arrived("r", PREFILL, PROMPT)
        requests.arrived("r", PREFILL, PROMPT)
        first = requests.step([Scheduled("r", ((7, 8),), True, 0, 32)])
        assert first.announces == [Announce("r", ID, 100)]
        assert first.chunks == [ComputedChunk("r", ((7, 8),), True, 0, 32, 100)]
        assert requests.step([Scheduled("r", ((9, 3),), False, 32, 64)]).chunks == [
            ComputedChunk("r", ((9, 3),), False, 32, 96, 100)
        ]
        assert requests.step([Scheduled("r", ((),), False, 96, 4)]).chunks == [
            ComputedChunk("r", ((),), False, 96, 100, 100)
        ]
        assert requests.step([Scheduled("r", ((),), False, 100, 1)]) is NOTHING, "generated tokens are not sent"

    def test_a_cached_prefix_is_sent_with_the_first_chunk(self) -> None:
        requests = book()
        requests.arrived("r", PREFILL, PROMPT)
        assert requests.step([Scheduled("r", ((1, 2, 3),), True, 64, 36)]).chunks == [
            ComputedChunk("r", ((1, 2, 3),), True, 0, 100, 100)
        ]

    def test_a_prompt_of_layers_that_do_not_keep_all_is_computed_but_for_its_last_token(self) -> None:
        """Decode goes on from the state before that token; its blocks are those of two groups."""
        requests = RequestBook(sends=True, receives=True, shares_prefixes=True, keeps_all=False)
        assert requests.arrived("r", PREFILL, PROMPT) == 1
        tables = ((7, 8), (9,))
        plan = requests.step([Scheduled("r", tables, True, 0, 99)])
        assert plan.announces == [Announce("r", ID, 99)]
        assert plan.chunks == [ComputedChunk("r", tables, True, 0, 99, 99)]
        assert requests.arrived("one", {**PREFILL, "transfer_id": "b"}, PROMPT[:1]) == 0, "nothing would be left"
        assert requests.arrived("d", {**DECODE, "transfer_id": "c"}, PROMPT) == 0
        assert requests.arrived("alone", None, PROMPT) == 0

    def test_blocks_are_kept_from_the_end_of_the_request_until_nothing_reads_them(self) -> None:
        requests = book()
        requests.arrived("r", PREFILL, PROMPT)
        requests.step([Scheduled("r", ((1,),), True, 0, 100)])
        assert requests.ended("r")
        assert requests.step([]) is NOTHING, "its KV is complete: nobody is told to stop"
        requests.sent({"r"})
        assert not requests._sending

    @pytest.mark.parametrize("computed", [0, 32])
    def test_an_abort_stops_the_transfer_and_keeps_the_blocks(self, computed: int) -> None:
        requests = book()
        requests.arrived("r", PREFILL, PROMPT)
        if computed:
            requests.step([Scheduled("r", ((1,),), True, 0, computed)])
        assert requests.ended("r"), "pushes may be in flight"
        plan = requests.step([])
        assert plan.stops == [StoppedRequest("r", ABORTED)]
        assert bool(plan.announces) == (computed == 0), "the peer that waits for it hears of it, too"

    def test_a_preempted_request_is_withdrawn_and_published_anew(self) -> None:
        requests = book()
        requests.arrived("r", PREFILL, PROMPT)
        requests.step([Scheduled("r", ((1, 2),), True, 0, 64)])
        assert requests.step([], {"r", "stranger"}).withdrawn == ["r"]
        again = requests.step([Scheduled("r", ((5,),), True, 0, 32)])
        assert again.chunks == [ComputedChunk("r", ((5,),), True, 0, 32, 100)]
        assert again.stops == []

    def test_a_preemption_nobody_told_of_ends_the_transfer(self) -> None:
        requests = book()
        requests.arrived("r", PREFILL, PROMPT)
        requests.step([Scheduled("r", ((1, 2),), True, 0, 64)])
        assert requests.step([Scheduled("r", ((5,),), True, 0, 32)]).stops == [
            StoppedRequest("r", Reason(Code.PREEMPTED))
        ]

    def test_of_two_requests_with_one_id_the_second_is_not_sent(self) -> None:
        requests = book()
        requests.arrived("r", PREFILL, PROMPT)
        requests.arrived("s", PREFILL, PROMPT)
        assert len(requests.step([]).announces) == 1
        assert not requests.ended("s")


class TestReceiving:
    def test_decode_asks_for_all_but_the_last_token(self) -> None:
        requests = book()
        requests.arrived("r", DECODE, PROMPT)
        assert requests.step([]).expects == [ExpectedRequest("r", ID, 99, (CONTROL,))]
        assert requests.missing("r", 0) == requests.missing("r", 0) == (99, True)
        requests.allocated("r", ((4, 5, 6, 7),), 99)
        assert requests.step([]).offers == [OfferedBlocks("r", ((4, 5, 6, 7),), 0, 99)]
        requests.received({"r"})
        assert requests.missing("r", 99) == (0, False)
        requests.allocated("r", ((4, 5, 6, 7),), 0)
        assert requests.step([]) is NOTHING

    def test_decode_offers_only_what_it_lacks(self) -> None:
        requests = book()
        requests.arrived("r", DECODE, PROMPT)
        assert requests.missing("r", 64) == (35, True)
        requests.allocated("r", ((4, 5, 6, 7),), 35)
        assert requests.step([]).offers == [OfferedBlocks("r", ((4, 5, 6, 7),), 64, 99)]

    def test_where_nothing_is_missing_the_sender_is_told_so(self) -> None:
        requests = book()
        requests.arrived("r", DECODE, PROMPT)
        assert requests.missing("r", 99) == (0, False)
        requests.allocated("r", ((4, 5, 6, 7),), 0)
        plan = requests.step([])
        assert (plan.offers, plan.stops) == ([], [StoppedRequest("r", Reason(Code.NOT_NEEDED))])
        assert requests.path("r") == "cached"
        assert not requests.ended("r")
        assert requests.step([]) is NOTHING

    def test_a_prompt_of_one_token_is_not_waited_for(self) -> None:
        requests = book()
        requests.arrived("r", DECODE, [5])
        assert requests.missing("r", 0) == (0, False)

    def test_a_preempted_or_failed_request_is_not_asked_for_again(self) -> None:
        requests = book()
        requests.arrived("r", DECODE, PROMPT)
        requests.allocated("r", ((1, 2),), 99)
        requests.received({"r"})
        assert requests.missing("r", 0) == (0, False)

    @pytest.mark.parametrize("offered", [False, True])
    def test_an_abort_before_the_kv_is_here_stops_the_transfer(self, offered: bool) -> None:
        requests = book()
        requests.arrived("r", DECODE, PROMPT)
        if offered:
            requests.allocated("r", ((1, 2),), 99)
        assert not requests.ended("r"), "vLLM keeps a parked request's blocks by itself"
        assert requests.step([]).stops == [StoppedRequest("r", ABORTED)]
        assert not requests._receiving

    def test_samples_of_one_prompt_wait_for_the_first_one(self) -> None:
        requests = book()
        for name in ("0_r", "1_r"):
            requests.arrived(name, DECODE, PROMPT)
        assert len(requests.step([]).expects) == 1
        assert requests.missing("1_r", 0) == (None, False)
        requests.allocated("0_r", ((1, 2),), 99)
        requests.received({"0_r"})
        assert requests.missing("1_r", 64) == (0, False)
        requests.allocated("1_r", ((1, 3),), 0)
        assert requests.step([]).offers == [OfferedBlocks("0_r", ((1, 2),), 0, 99)]

    def test_samples_whose_first_one_is_aborted_compute_the_prompt(self) -> None:
        requests = book()
        for name in ("0_r", "1_r"):
            requests.arrived(name, DECODE, PROMPT)
        requests.ended("0_r")
        assert requests.missing("1_r", 0) == (0, False)

    def test_without_a_prefix_cache_samples_do_not_wait_for_each_other(self) -> None:
        requests = book(shares_prefixes=False)
        for name in ("0_r", "1_r"):
            requests.arrived(name, DECODE, PROMPT)
        assert requests.missing("1_r", 0) == (0, False)

    def test_where_the_kv_came_from_is_known_when_a_request_ends(self) -> None:
        requests = book()
        for name in ("0_r", "1_r"):
            requests.arrived(name, DECODE, PROMPT)
        requests.arrived("lost", {**DECODE, "transfer_id": "b"}, PROMPT)
        for name in ("0_r", "lost"):
            requests.allocated(name, ((1, 2),), 99)
        assert requests.path("0_r") == ""
        requests.received({"0_r", "lost"}, {"lost": "peer_lost"})
        assert requests.path("lost") == "recomputed;reason=peer_lost"
        assert requests.path("0_r") == "transferred"
        requests.ended("0_r")
        assert requests.path("1_r") == "transferred", "the others of its samples outlive the first one"
        assert requests.path("unknown") == ""


class TestLists:
    """How many prompts an HTTP request has, and so when all of them have come."""

    def complete(self, *prompts: list[int], count: int) -> list[tuple[str, int]]:
        requests = book()
        for number, prompt in enumerate(prompts):
            requests.arrived(f"r{number}", {**PREFILL, "num_prompts": count}, prompt)
        plan = requests.step([])
        assert len(plan.announces) == len({tuple(prompt) for prompt in prompts})
        return plan.complete

    def test_an_attempt_is_complete_with_its_last_prompt(self) -> None:
        assert self.complete(PROMPT, count=1) == [("a", 1)]
        assert self.complete(PROMPT, [1, 2], [3], count=3) == [("a", 3)]
        assert self.complete(PROMPT, [1, 2], count=3) == []

    def test_without_a_count_nothing_is_said(self) -> None:
        assert self.complete(PROMPT, [1, 2], count=0) == []

    def test_a_prompt_that_is_there_twice_counts_twice(self) -> None:
        assert self.complete(PROMPT, [1], PROMPT, count=3) == [("a", 3)]

    def test_lists_that_never_come_whole_are_forgotten(self) -> None:
        requests = book()
        for index in range(2000):
            requests.arrived(f"r{index}", {**PREFILL, "transfer_id": f"a{index}", "num_prompts": 2}, PROMPT)
        assert len(requests._arrivals) == 1000


class TestParameters:
    @pytest.mark.parametrize(
        "given",
        [
            None,
            {},
            {"leg": "decode"},
            {"leg": "nonsense", "transfer_id": "a"},
            {"leg": "prefill", "transfer_id": ""},
            {"leg": "prefill", "transfer_id": "x" * 200},
            {"leg": "prefill", "transfer_id": "x\nWARNING forged"},
            {"leg": "prefill", "transfer_id": "x\n"},
            {"leg": "prefill", "transfer_id": "-x"},
            {"leg": "prefill", "transfer_id": "x\u2028y"},
            {"leg": "prefill", "transfer_id": "a", "num_prompts": -1},
            {"leg": "decode", "transfer_id": "a", "prefill": {"control": []}},
            {"do_remote_decode": True},
        ],
    )
    def test_a_request_with_unusable_parameters_is_served_alone(self, given: dict[str, object] | None) -> None:
        requests = book()
        requests.arrived("r", given, PROMPT)
        assert requests.step([Scheduled("r", ((1,),), True, 0, 100)]) is NOTHING
        assert requests.missing("r", 0) == (0, False)
        assert not requests.ended("r")

    @pytest.mark.parametrize("field", ["transfer_id", "leg", "request"])
    def test_nobody_forges_lines_of_the_log(self, caplog: pytest.LogCaptureFixture, field: str) -> None:
        forged = "x\n" * 100 + "WARNING all is lost\x1b[31m\u2028"
        params: dict[str, object] = {**PREFILL, field: forged, "prefill": {"control": forged}}
        book(sends=False).arrived(forged if field == "request" else "r", params, PROMPT)
        (record,) = caplog.records
        assert record.getMessage().isprintable()

    def test_a_leg_that_the_role_does_not_serve_is_no_transfer(self) -> None:
        requests = book(sends=False)
        requests.arrived("r", PREFILL, PROMPT)
        requests.arrived("s", None, PROMPT)
        assert not requests.ended("r")

    def test_a_leg_at_another_engine_than_decode_asks_is_no_transfer_and_says_so(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        requests = book(engine=1)
        requests.arrived("r", {**PREFILL, "data_parallel_rank": 1}, PROMPT)
        for request_id, params_of in (("s", PREFILL), ("t", {**PREFILL, "data_parallel_rank": 2})):
            requests.arrived(request_id, {**params_of, "transfer_id": request_id}, PROMPT)
        plan = requests.step([])
        assert [each.request_id for each in plan.announces] == ["r"]
        first, second = (record.getMessage() for record in caplog.records)
        assert "data_parallel_rank: got 0 at data-parallel engine 1" in first, "a client that names no engine"
        assert "send the leg with the header X-data-parallel-rank: 2" in second

    def test_one_id_names_a_transfer_for_each_prompt(self) -> None:
        ids = {
            params.transfer_id("a", [1, 2]),
            params.transfer_id("a", [2, 1]),
            params.transfer_id("b", [1, 2]),
            params.transfer_id("a", [1, 2], ["lora x"]),
        }
        assert len(ids) == 4
        assert params.transfer_id("a", [1, 2]) == params.transfer_id("a", (1, 2))

    def test_addresses_of_all_ranks_can_be_told(self) -> None:
        leg = params.parse({**DECODE, "prefill": {"control": ["tcp://a:1", "tcp://a:2"]}})
        assert isinstance(leg, DecodeParams)
        assert leg.prefill.addresses == ("tcp://a:1", "tcp://a:2")

    def test_what_is_wrong_is_named(self) -> None:
        with pytest.raises(InvalidRequest, match="transfer_id"):
            params.parse({"leg": "prefill", "transfer_id": 3})


@pytest.mark.parametrize("seed", range(30))
def test_nothing_is_left_of_requests_that_have_ended(seed: int) -> None:
    """Random requests, chunks, preemptions and aborts: each announce meets one end, and the book is empty at last."""
    rng = random.Random(seed)
    requests = book(shares_prefixes=rng.random() < 0.5)
    live: dict[str, int] = {}
    prompts = {f"r{index}": [index] * rng.randint(1, 80) for index in range(12)}
    waiting = list(prompts)
    announced: set[str] = set()
    while live or waiting:
        if waiting and rng.random() < 0.4:
            name = waiting.pop()
            leg: dict[str, object] = {**rng.choice([PREFILL, DECODE]), "transfer_id": name}
            requests.arrived(name, leg, prompts[name])
            live[name] = 0
        parts, preempted = [], set()
        for name, computed in list(live.items()):
            action, size = rng.random(), len(prompts[name])
            if action < 0.1 and computed:
                preempted.add(name)
                live[name] = 0
            elif action < 0.7 and computed < size:
                count, asynchronous = requests.missing(name, computed)
                if count is None:
                    continue
                if asynchronous:
                    requests.allocated(name, ((1, 2, 3),), count)
                    requests.received({name})
                    computed = count
                now = rng.randint(1, size - computed)
                parts.append(Scheduled(name, ((1,),), live[name] == 0, computed, now))
                live[name] = computed + now
            elif action > 0.9 or computed == size:
                if requests.ended(name):
                    requests.sent({name})
                del live[name]
        plan = requests.step(parts, preempted)
        announced |= {announce.request_id for announce in plan.announces}
        assert {chunk.request_id for chunk in plan.chunks} <= announced
        assert all(chunk.start < chunk.end <= chunk.num_tokens for chunk in plan.chunks)
    requests.step([])
    assert not requests._sending
    assert not requests._receiving
    assert requests.step([]) is NOTHING


def test_a_request_that_wants_its_whole_prompt_computed_takes_nothing_from_elsewhere_and_says_so() -> None:
    """vLLM 0.24 to 0.30 answered 128 of 200 positions of prompt_logprobs from memory that nobody had written."""
    requests = book()
    requests.arrived("r", DECODE, PROMPT)
    assert requests.missing("r", 0, computes_all=True) == (0, False)
    assert requests.allocated("r", ((1, 2, 3),), 0) == 0
    assert requests.step([]).stops == [StoppedRequest("r", Reason(Code.NOT_NEEDED))]
    assert requests.path("r") == "recomputed;reason=whole_prompt"
