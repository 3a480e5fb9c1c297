"""What the scheduler's half decides about the store, played through with plain numbers."""

from __future__ import annotations

import itertools
from array import array

import pytest

from pdlink.api.legs import MAX_ADDRESS_CHARS
from pdlink.integrations.vllm_parts.params import Caps, source_of
from pdlink.integrations.vllm_parts.requests import OfferedBlocks, RequestBook, Scheduled, StoppedRequest
from pdlink.integrations.vllm_parts.store_book import (
    BlocksToLoad,
    BlocksToSave,
    BookedPrompt,
    Chosen,
    Keep,
    Look,
    Looked,
    StoreBook,
    StorePlan,
)
from pdlink.reasons import ABORTED

CHUNK = 16
PROMPT = list(range(100, 150))
"""Three whole chunks and a part of a fourth."""
PREFILL = {"transfer_id": "a", "leg": "prefill"}


def books(num_ranks: int = 1) -> tuple[RequestBook, StoreBook]:
    """With one request, `r`, that has arrived."""
    store = StoreBook(CHUNK, num_ranks)
    store.arrived("r", PROMPT, "salt", "", ())
    return RequestBook(sends=True, receives=True, shares_prefixes=True, store=store), store


def found(end: int, *, computed: int = 0) -> tuple[RequestBook, StoreBook]:
    """The same; it was looked up."""
    book, store = books()
    assert book.missing("r", computed) == (None, False)
    book.step([])
    store.looked([Looked("r", 1, end)])
    return book, store


def loading() -> tuple[RequestBook, StoreBook]:
    book, store = found(48)
    assert book.missing("r", 0) == (48, True)
    book.allocated("r", ((3, 4, 5, 6),), 48)
    assert book.step([]).store.loads == [BlocksToLoad("r", ((3, 4, 5, 6),), 0, 48)]
    return book, store


def test_a_prompt_is_looked_up_when_vllm_asks_and_vllm_asks_again_until_there_is_an_answer() -> None:
    book, store = books()
    assert book.missing("r", 0) == (None, False)
    assert book.missing("r", 0) == (None, False)
    plan = book.step([]).store
    assert plan.prompts == [BookedPrompt("r", array("I", PROMPT).tobytes(), "salt")]
    assert plan.looks == [Look("r", 1, 0)]
    assert not book.step([]).short, "it does not wait for blocks"
    assert book.missing("r", 0) == (None, False)
    store.looked([Looked("r", 1, 32), Looked("stranger", 1, 5)])
    assert book.missing("r", 0) == (32, True)
    assert book.missing("r", 24) == (8, True)


def test_a_look_names_the_store_that_may_have_the_prompt() -> None:
    book, store = books()
    store.arrived("s", PROMPT, "", "", (), source="tcp://a:1")
    book.missing("s", 0)
    assert book.step([]).store.looks == [Look("s", 1, 0, source="tcp://a:1")]


@pytest.mark.parametrize("source", [None, 7, ["tcp://a:1"], "x" * (MAX_ADDRESS_CHARS + 1)])
def test_only_an_address_is_a_source(source: object) -> None:
    assert source_of({"source": "tcp://a:1"}) == "tcp://a:1"
    assert source_of({"source": source}) == source_of({}) == ""
    assert not Caps.of({"source": source})[1], "it is served without a transfer"


@pytest.mark.parametrize(("tokens", "computed"), [(15, 0), (1, 0), (50, 48), (48, 44)])
def test_a_prompt_that_the_store_cannot_shorten_is_not_looked_up(tokens: int, computed: int) -> None:
    """vLLM keeps back the last block of a prompt that its own cache has."""
    store = StoreBook(CHUNK, block_tokens=4)
    store.arrived("r", PROMPT[:tokens], "", "", ())
    assert store.missing("r", computed) == 0
    assert store.step([], ()) == StorePlan()


def test_a_prompt_that_is_whole_in_the_store_leaves_its_last_token_to_vllm() -> None:
    store = StoreBook(CHUNK, block_tokens=4)
    store.arrived("r", PROMPT[:48], "", "", ())
    assert store.missing("r", 40) is None
    assert store.step([], ()).looks == [Look("r", 1, 32)]
    store.looked([Looked("r", 1, 47)])
    assert store.missing("r", 40) == 7


def test_all_ranks_must_have_what_is_loaded() -> None:
    book, store = books(num_ranks=2)
    book.missing("r", 0)
    store.looked([Looked("r", 1, 48)])
    assert book.missing("r", 0) == (None, False)
    store.looked([Looked("r", 1, 16)])
    assert book.missing("r", 0) == (16, True)


@pytest.mark.parametrize("ends", list(itertools.permutations([48, 16, 32])))
def test_the_least_that_any_rank_has_is_loaded_in_any_order_of_answers(ends: tuple[int, ...]) -> None:
    book, store = books(num_ranks=3)
    book.missing("r", 0)
    for end in ends:
        store.looked([Looked("r", 1, end)])
    assert book.missing("r", 0) == (16, True)


def test_a_request_is_parked_once_and_what_the_load_did_not_bring_is_computed() -> None:
    book, _ = loading()
    book.received(["r"])
    assert book.missing("r", 0) == (0, False), "a failed load is not tried again"
    book.allocated("r", ((3, 4, 5, 6),), 0)
    assert book.step([Scheduled("r", ((3, 4, 5, 6),), True, 47, 3)]).store.saves == [
        BlocksToSave("r", ((3, 4, 5, 6),), True, 47, 48, stops=False)
    ]


def test_what_vllm_has_itself_is_neither_fetched_nor_loaded() -> None:
    book, _ = found(48, computed=24)
    assert book.missing("r", 24) == (24, True)
    book.allocated("r", ((1, 2, 3, 4),), 24)
    assert book.step([]).store.loads == [BlocksToLoad("r", ((1, 2, 3, 4),), 24, 48)]


def test_a_prompt_whose_beginning_vllm_has_evicted_meanwhile_is_looked_up_again() -> None:
    book, store = found(48, computed=24)
    assert book.missing("r", 0) == (None, False)
    assert book.step([]).store.looks == [Look("r", 2, 0)]
    store.looked([Looked("r", 1, 48)])
    assert book.missing("r", 0) == (None, False), "the answer to an older question"
    store.looked([Looked("r", 2, 48)])
    assert book.missing("r", 0) == (48, True)


def test_what_waited_too_long_for_blocks_is_looked_up_again() -> None:
    book, store = found(48)
    store.looked([Looked("r", 1, None)])
    assert book.missing("r", 0) == (None, False)
    assert book.step([]).store.looks == [Look("r", 2, 0)]


def test_what_was_found_and_is_not_loaded_is_let_go() -> None:
    book, _ = found(48)
    book.allocated("r", ((1,),), 0)
    assert book.step([]).store.drops == ["r"]
    assert book.missing("r", 0) == (0, False)


def test_computed_chunks_are_kept_and_generated_tokens_are_not() -> None:
    book, _ = found(0)
    book.allocated("r", ((1, 2),), 0)
    parts = [
        Scheduled("r", ((7, 8),), True, 0, 20),
        Scheduled("r", ((9,),), False, 20, 20),
        Scheduled("r", ((),), False, 40, 10),
        Scheduled("r", ((2,),), False, 50, 1),
    ]
    assert [book.step([part]).store.saves for part in parts] == [
        [BlocksToSave("r", ((7, 8),), True, 0, 20)],
        [BlocksToSave("r", ((9,),), False, 20, 40)],
        [BlocksToSave("r", ((),), False, 40, 48, stops=False)],
        [],
    ]


def test_blocks_of_a_request_are_kept_after_its_end_if_some_of_it_was_saved() -> None:
    book, _ = found(0)
    assert not book.ended("r")
    book, _ = found(0)
    book.step([Scheduled("r", ((1,),), True, 0, 16)])
    assert book.ended("r")


def test_a_preempted_request_is_withdrawn_and_loaded_again() -> None:
    book, _ = found(0)
    book.step([Scheduled("r", ((1, 2),), True, 0, 32)])
    assert book.step([], {"r", "stranger"}).store.withdrawn == ["r"]
    assert book.missing("r", 0) == (None, False)
    plan = book.step([]).store
    assert (plan.prompts, plan.looks) == ([], [Look("r", 2, 0)])
    assert book.ended("r"), "its first blocks are to be reported once, too"


def test_a_request_that_was_preempted_without_a_word_is_withdrawn_before_it_is_kept_anew() -> None:
    book, _ = found(0)
    book.step([Scheduled("r", ((1, 2),), True, 0, 32)])
    plan = book.step([Scheduled("r", ((5,),), True, 0, 16)]).store
    assert plan.withdrawn == ["r"]
    assert plan.saves == [BlocksToSave("r", ((5,),), True, 0, 16)]


def test_a_request_that_ends_while_it_loads_is_reported_by_the_load_alone() -> None:
    """Two reports of one request end vLLM's engine (0.32: its blocks are freed by the first one)."""
    book, store = books()
    book.arrived("r", PREFILL, PROMPT)
    book.missing("r", 0)
    book.step([])
    store.looked([Looked("r", 1, 48)])
    book.allocated("r", ((1, 2, 3, 4),), book.missing("r", 0)[0] or 0)
    book.step([])
    assert not book.ended("r")
    plan = book.step([])
    assert plan.store.parked == ["r"]
    assert plan.stops == [StoppedRequest("r", ABORTED)], "the server that waits for it hears of it"
    assert not book._sending


def test_a_prompt_that_is_loaded_here_is_sent_from_its_first_token_on() -> None:
    book, store = books()
    book.arrived("r", PREFILL, PROMPT)
    book.missing("r", 0)
    book.step([])
    store.looked([Looked("r", 1, 32)])
    book.missing("r", 0)
    book.allocated("r", ((1, 2, 3, 4),), 32)
    book.step([])
    book.received(["r"])
    (chunk,) = book.step([Scheduled("r", ((1, 2, 3, 4),), True, 32, 18)]).chunks
    assert (chunk.start, chunk.end) == (0, 50)


def decode_leg(*, keeps_answers: bool = False) -> tuple[RequestBook, StoreBook]:
    """With one request, `d`, whose prompt another server computes, and that vLLM has asked for once."""
    store = StoreBook(CHUNK, keeps_answers=keeps_answers)
    book = RequestBook(sends=True, receives=True, shares_prefixes=True, store=store)
    there = {"control": "tcp://127.0.0.1:1"}
    book.arrived("d", {"transfer_id": "a", "leg": "decode", "prefill": there}, PROMPT)
    store.arrived("d", PROMPT, "", "", (), receives=book.comes_from_elsewhere("d"))
    assert book.missing("d", 0) == (None, False)
    assert book.step([]).store.looks == [Look("d", 1, 0, receives=True)]
    return book, store


def test_decode_loads_what_its_store_has_and_offers_for_the_rest_then() -> None:
    book, store = decode_leg()
    store.looked([Looked("d", 1, 32)])
    assert book.missing("d", 0) == (49, True), "vLLM waits for both"
    assert book.allocated("d", ((3, 4, 5, 6),), 49) == 32
    plan = book.step([])
    assert plan.store.loads == [BlocksToLoad("d", ((3, 4, 5, 6),), 0, 32, receives=True)]
    assert plan.offers == [OfferedBlocks("d", ((3, 4, 5, 6),), 0, 49, after_load=True)]
    assert book.path("d") == ""
    book.received(["d"])
    assert book.path("d") == "transferred"
    assert book.missing("d", 49) == (0, False)


@pytest.mark.parametrize("end", [0, 16])
def test_decode_offers_for_all_that_neither_vllm_nor_its_store_has(end: int) -> None:
    """vLLM has found 24 tokens meanwhile: nothing of the store's is of use."""
    book, store = decode_leg()
    store.looked([Looked("d", 1, end)])
    assert book.missing("d", 24) == (25, True)
    assert book.allocated("d", ((3, 4, 5, 6),), 25) == 0
    plan = book.step([])
    assert (plan.store.loads, plan.store.drops) == ([], ["d"])
    assert plan.offers == [OfferedBlocks("d", ((3, 4, 5, 6),), 24, 49)]


def test_what_was_found_earlier_is_not_loaded_over_what_vllm_has_by_now() -> None:
    book, store = decode_leg()
    store.looked([Looked("d", 1, 32)])
    assert book.missing("d", 0) == (49, True)
    assert book.missing("d", 48) == (1, True)
    assert book.allocated("d", ((3, 4, 5, 6),), 1) == 0
    assert book.step([]).offers == [OfferedBlocks("d", ((3, 4, 5, 6),), 48, 49)]


def test_decode_keeps_nothing_of_what_it_receives_unless_it_is_told_to() -> None:
    for keeps_answers in (False, True):
        book, store = decode_leg(keeps_answers=keeps_answers)
        store.looked([Looked("d", 1, 0)])
        book.missing("d", 0)
        book.allocated("d", ((3, 4, 5, 6),), 49)
        book.received(["d"])
        parts = [
            Scheduled("d", ((3, 4, 5, 6),), True, 49, 1),
            *(Scheduled("d", ((),), False, at, 1) for at in range(50, 70)),
        ]
        assert not any(book.step([part]).store.saves for part in parts)
        known = [*PROMPT, *range(20)]
        assert book.ended("d", known, ((3, 4, 5, 6, 7),)) == keeps_answers
        whole = BookedPrompt("d", array("I", known[:64]).tobytes())
        assert book.step([]).store.keeps == ([Keep(whole, ((3, 4, 5, 6, 7),), 64)] if keeps_answers else [])


def test_of_an_answer_only_chunks_that_it_completes_are_kept() -> None:
    for num_tokens, kept in ((63, False), (64, True)):
        store = StoreBook(CHUNK, keeps_answers=True)
        store.arrived("r", PROMPT, "salt", "", ())
        assert store.ended("r", list(range(num_tokens)), ((1, 2),)) == kept
        assert [keep.num_tokens for keep in store.step([], ()).keeps] == ([64] if kept else [])


def test_nothing_is_kept_of_an_answer_that_began_before_a_reset() -> None:
    book, store = found(0)
    store._keeps_answers = True
    book.allocated("r", ((1, 2),), 0)
    store.reset("era")
    assert not book.ended("r", list(range(100)), ((1, 2),))
    assert book.step([]).store.keeps == []


def test_the_rank_that_found_the_least_says_why() -> None:
    book, store = books(num_ranks=2)
    book.missing("r", 0)
    store.looked([Looked("r", 1, 48, Chosen("faster")), Looked("r", 1, 16, Chosen("partly_faster"))])
    assert store.chosen("r").reason == "partly_faster"


def test_a_step_says_how_many_tokens_of_prompts_it_computes() -> None:
    book, _ = found(0)
    parts = [
        Scheduled("r", ((1,),), True, 0, 20),
        Scheduled("r", ((),), False, 45, 10),
        Scheduled("stranger", ((),), True, 0, 9),
    ]
    assert book.step(parts).store.num_computed == 25
    assert book.step([Scheduled("r", ((),), False, 50, 1)]).store.num_computed == 0


def test_a_cap_that_cuts_what_was_found_leaves_whole_chunks() -> None:
    """A layer's blocks may be of no use in part."""
    store = StoreBook(CHUNK)
    for cap, computed, loaded in ((40, 0, 32), (15, 0, 0), (20, 14, 18), (48, 0, 48), (100, 0, 48)):
        store.arrived("r", PROMPT, "", "", (), caps=Caps(load=cap))
        assert store.missing("r", computed) is None
        store.looked([Looked("r", 1, 48)])
        assert store.missing("r", computed) == loaded, (cap, computed)


PLACES = ("memory", "disk", "shared_dir", "valkey-2", "peer 10.0.0.7:8110", "a tier of their own")


@pytest.mark.parametrize(
    ("asked", "barred"),
    [
        (None, ()),
        ([{"medium": "STORAGE"}], (4,)),
        ([{"medium": "cpu"}], (1, 2, 3)),
        ([{"locality": "LOCAL"}], (2, 3, 4)),
        ([{"medium": "STORAGE", "locality": "REMOTE"}, {"medium": "CPU"}], (1,)),
        ([{}], ()),
        ([{"medium": None, "locality": "REMOTE"}], (1,)),
    ],
)
def test_a_request_bars_tiers_by_medium_and_locality(asked: object, barred: tuple[int, ...]) -> None:
    """Not memory; nor a tier of which nobody knows where it is."""
    caps, others = Caps.of({"kv_load_tiers": asked})
    assert caps.barred(PLACES) == set(barred)
    assert not others


def test_a_request_that_names_no_tier_loads_nothing() -> None:
    caps, _ = Caps.of({"kv_load_tiers": []})
    assert caps.load == 0


@pytest.mark.parametrize("wrong", ["STORAGE", 1, {"medium": 1}, {"medium": "TAPE"}, {"locality": "NEAR"}])
def test_a_wrong_entry_of_tiers_is_named_and_counts_for_nothing(
    wrong: object, caplog: pytest.LogCaptureFixture
) -> None:
    caps, _ = Caps.of({"kv_load_tiers": [wrong, {"medium": "CPU"}]})
    assert caps.barred(PLACES) == {1, 2, 3}
    (said,) = caplog.messages
    assert "kv_load_tiers" in said
    assert repr(wrong) in said
    assert Caps.of({"kv_load_tiers": wrong})[0] == Caps()


@pytest.mark.parametrize(("keeps_all", "receives"), [(True, False), (False, True), (False, False)])
def test_a_promise_that_vllm_cuts_fails_where_a_part_is_of_no_use(keeps_all: bool, receives: bool) -> None:
    """vLLM waits for the load: it computes then."""
    store = StoreBook(CHUNK, keeps_all=keeps_all)
    store.arrived("r", PROMPT, "", "", (), receives=receives)
    assert store.missing("r", 0) is None
    store.looked([Looked("r", 1, 48)])
    assert store.missing("r", 0) == 48
    assert store.allocated("r", ((3, 4),), 32) == 32
    (load,) = store.step([], ()).loads
    assert (load.end, load.fails) == (32, not keeps_all and not receives)


def test_a_reset_forgets_what_was_found_but_not_loaded() -> None:
    book, store = found(48)
    store.reset("era")
    assert book.missing("r", 0) == (None, False)
    plan = book.step([]).store
    assert plan.reset == "era"
    assert plan.looks == [Look("r", 2, 0)]


def test_nothing_is_kept_of_a_prompt_that_was_loaded_or_computed_before_a_reset() -> None:
    book, store = loading()
    store.reset("era")
    book.received(["r"])
    book.allocated("r", ((3, 4, 5, 6),), 0)
    assert book.step([Scheduled("r", ((3, 4, 5, 6),), True, 48, 2)]).store.saves == []
    book, store = books()
    book.allocated("r", ((3, 4),), 0)
    assert book.step([Scheduled("r", ((3, 4),), True, 0, 32)]).store.saves
    store.reset("era")
    assert book.step([Scheduled("r", ((5,),), False, 32, 16)]).store.saves == []
    book.step([], {"r"})
    assert book.step([Scheduled("r", ((7, 8, 9),), True, 0, 48)]).store.saves == [
        BlocksToSave("r", ((7, 8, 9),), True, 0, 48)
    ]


def test_a_request_that_is_less_urgent_than_the_limit_is_found_and_not_kept() -> None:
    requests = StoreBook(CHUNK)
    requests.arrived("r", list(range(3 * CHUNK)), "", "", (), keeps=False)
    assert requests.missing("r", 0) is None, "what others have kept is looked up"
    requests.looked([Looked("r", 1, 0)])
    requests.allocated("r", ((1, 2, 3),), 0)
    assert requests.step([Scheduled("r", ((1, 2, 3),), True, 0, 3 * CHUNK)], ()).saves == []
    assert requests.ended("r", list(range(3 * CHUNK)), ((1, 2, 3),)) is False
