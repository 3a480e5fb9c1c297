"""Real vLLM servers of models with recurrent layers, of unequal size: two ranks prefill for one, and one for two.

Two ranks sum in another order than one, which in bfloat16 changes the tokens of some prompts. So tokens are compared
where one server answers alike with either number of ranks, and beside them the states: what has arrived is, byte for
byte, what prefill's ranks have had, put together along the axes that vLLM divides.

Run with `make test-vllm`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from math import prod
from pathlib import Path

import pytest

pytest.importorskip("vllm")

import torch  # noqa: E402

from tests.e2e.engine_servers import prompt_of, until  # noqa: E402
from tests.e2e.hybrid_models import save_convolution_model, save_recurrent_model  # noqa: E402
from tests.e2e.test_vllm_hybrid import FLAGS, LAST_ALONE  # noqa: E402
from tests.e2e.vllm_servers import Pair, Server  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

KEEPING = {"kv_connector": "KeepingConnector", "kv_connector_module_path": "tests.e2e.kept_states"}
RANKS = {1: [], 2: ["--tensor-parallel-size", "2"]}
LENGTHS = [130, *LAST_ALONE]


@dataclass(frozen=True, eq=False)
class Model:
    save: Callable[[Path], None]
    flags: list[str]
    element: torch.dtype
    """Of a convolution's state, as an integer of its size."""
    rows: int
    widths: list[int]
    """Of the convolution's channels: x; or q, k and v."""
    recurrent: tuple[int, ...]
    """Shape, in float32; none if empty."""
    repeats: bool = True
    """Whether a server's tokens are a reference. Those of LFM2 are not transformers', from the first one on, and
    those of a decode server, with one rank on both sides too, are others after some ten, although its KV and states
    are prefill's (0.32 on CPUs)."""


MODELS = {
    "delta nets": Model(
        partial(save_recurrent_model, head_dim=48),
        [*FLAGS, "--dtype", "bfloat16"],
        torch.int16,
        3,
        [256, 256, 512],
        (4, 128, 128),
    ),
    "short convolutions": Model(save_convolution_model, FLAGS, torch.int32, 2, [256], (), repeats=False),
}


@dataclass
class Unequal:
    model: Model
    pair: Pair
    alone: dict[int, list[list[int]]]
    """By length of the prompt: the answer of one server, where it is the same with one rank and with two."""
    num_prefill: int
    num_decode: int
    dim_first: bool
    """Whether vLLM keeps states of convolutions by channels."""
    kept: Path
    spoil: Path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hybrid-ranks")


@cache
def alone(folder: Path, model: Model) -> dict[int, list[list[int]]]:
    """Saves the model."""
    model.save(folder / "model")
    answers = []
    for ranks, flags in RANKS.items() if model.repeats else ():
        single = Server("alone", folder / "model", folder / f"alone-{ranks}.log", [*model.flags, *flags]).start()
        try:
            single.wait_ready()
            answers.append({length: single.complete(prompt_of(length, length)).tokens for length in LENGTHS})
        finally:
            single.kill()
    one, two = answers or ({}, {})
    return {length: tokens for length, tokens in one.items() if two[length] == tokens}


CASES = [("delta nets", 2, 1, "SD"), ("delta nets", 1, 2, "DS"), ("short convolutions", 2, 1, "SD")]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(map(str, case)))
def unequal(request: pytest.FixtureRequest, folder: Path) -> Iterator[Unequal]:
    name, num_prefill, num_decode, order = request.param
    place, model = folder / name.replace(" ", "-"), MODELS[name]
    place.mkdir(exist_ok=True)
    kept, spoil = place / f"states-{num_prefill}", place / "spoil"
    kept.mkdir()
    spoil.write_text("")
    names = {"PDLINK_TEST_SPOIL": f"{spoil}", "PDLINK_TEST_STATES": f"{kept}", "VLLM_SSM_CONV_STATE_LAYOUT": order}
    answers = alone(place, model)
    pair = Pair.of(
        place,
        prefill_flags=[*model.flags, *RANKS[num_prefill]],
        decode_flags=[*model.flags, *RANKS[num_decode]],
        shards=2,
        verify="all",
        on_failure="fail",
        environment=names,
        prefill_connector=KEEPING,
        decode_connector=KEEPING,
    )
    yield Unequal(model, pair, answers, num_prefill, num_decode, order == "DS", kept, spoil)
    pair.stop()


def test_tokens_are_those_of_one_server(unequal: Unequal) -> None:
    if not unequal.model.repeats:
        pytest.skip("one server's tokens are no reference")
    assert len(unequal.alone) > len(LENGTHS) // 2
    for length, tokens in unequal.alone.items():
        received = unequal.pair.transferred()
        assert unequal.pair.tokens(prompt_of(length, length)) == tokens, length
        assert unequal.pair.transferred() - received == length - 1


@pytest.mark.parametrize("length", [47, 777, 1500])
def test_states_arrive_as_the_ranks_of_prefill_had_them(unequal: Unequal, length: int) -> None:
    """47: in the first block; 1500: in the second."""
    unequal.pair.tokens(prompt_of(length, length))
    sent, come = whole(unequal, "prefill", length - 1), whole(unequal, "decode", length - 1)
    assert sent.keys() == come.keys()
    assert len(sent) == 2, "layers with a state"
    for name, tensors in sent.items():
        for ours, theirs in zip(tensors, come[name], strict=True):
            assert torch.equal(ours, theirs), name
            assert ours.count_nonzero() > ours.numel() // 2, name


def test_tokens_depend_on_the_states(unequal: Unequal) -> None:
    prompts = [prompt_of(301 + 11 * index, 7000 + index) for index in range(3)]
    unequal.spoil.write_text("1")
    spoiled = [unequal.pair.tokens(prompt) for prompt in prompts]
    unequal.spoil.write_text("0")
    spoiled_too = [unequal.pair.tokens(prompt) for prompt in prompts]
    unequal.spoil.write_text("")
    right = [unequal.pair.tokens(prompt) for prompt in prompts]
    assert right != spoiled
    assert right != spoiled_too


def test_many_at_once_are_all_transferred_and_nothing_stays_held(unequal: Unequal) -> None:
    pair, lengths = unequal.pair, [50 + 170 * count for count in range(8)]
    received = pair.transferred()
    with ThreadPoolExecutor(len(lengths)) as threads:
        asked = [threads.submit(pair.tokens, prompt_of(length, length + 500)) for length in lengths]
        assert all(len(answer.result()[0]) == 12 for answer in asked)
    assert pair.transferred() - received == sum(length - 1 for length in lengths)
    assert pair.decode.metric("vllm:pdlink_transfer_failures_total") == 0
    for server in (pair.prefill, pair.decode):
        until(server.holds_nothing, f"{server.name} holds nothing")


def whole(unequal: Unequal, side: str, num_tokens: int) -> dict[str, list[torch.Tensor]]:
    """By layer: the parts of the convolution, and the recurrent state, of all of this side's ranks together."""
    num_ranks = unequal.num_prefill if side == "prefill" else unequal.num_decode
    found = [torch.load(unequal.kept / f"{side}-{rank}-{num_tokens}.pt") for rank in range(num_ranks)]
    ranks = [{name: tensors_of(unequal, raw, num_ranks) for name, raw in each.items()} for each in found]
    return {
        name: [torch.cat(parts) for parts in zip(*(each[name] for each in ranks), strict=True)] for name in ranks[0]
    }


def tensors_of(unequal: Unequal, raw: torch.Tensor, num_ranks: int) -> list[torch.Tensor]:
    """Parts of the convolution, and recurrent state, of one rank, heads or channels first."""
    model = unequal.model
    widths = [width // num_ranks for width in model.widths]
    nbytes = model.rows * sum(widths) * model.element.itemsize
    flat = raw[:nbytes].clone().view(model.element)
    found = [*torch.split(flat.view(-1, model.rows) if unequal.dim_first else flat.view(model.rows, -1).T, widths)]
    if model.recurrent:
        heads, *inner = model.recurrent
        begin, nbytes = nbytes, heads // num_ranks * prod(inner) * 4
        found.append(raw[begin : begin + nbytes].clone().view(torch.float32).view(-1, *inner))
    return found
