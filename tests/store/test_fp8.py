"""KV packed as fp8: near what was stored, half the bytes, and never given to who wants it exact."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pdlink.errors import ConfigError, InvalidRequest
from pdlink.store import fp8
from pdlink.store.codec import FP8, RAW, Codec, make_codec
from pdlink.store.record import _PREFIX, HEADER_NBYTES, Group, Miss, RecordShape, pack, seal, unseal

from .stubs import WAIT_S, StubTier
from .test_cache import PROMPT, Pages

KEY = bytes(range(32))
GROUPS = (Group("full", (0, 1), 2, 3, 256), Group("latent", (2,), 1, 1, 128))
EXACT = RecordShape("bfloat16", 8, GROUPS)
LOSSY = msgspec.structs.replace(EXACT, lossy=FP8)
TYPES = {"bfloat16": 2, "float16": 2, "float32": 4}


def codec() -> Codec:
    made = make_codec(FP8)
    assert made is not None
    return made


def payload_of(values: torch.Tensor) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return values.contiguous().reshape(-1).view(torch.uint8).numpy().copy()


def record_of(values: torch.Tensor, shape: RecordShape) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    record = np.zeros(shape.nbytes, np.uint8)
    record[HEADER_NBYTES:] = payload_of(values)
    seal(record, KEY, shape)
    return record


def normal(seed: int = 0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(LOSSY.payload_nbytes // 2, generator=draw).to(torch.bfloat16)


@pytest.mark.parametrize("dtype", TYPES)
@given(seed=st.integers(0, 2**32), exponents=st.lists(st.integers(-140, 127), min_size=4, max_size=4))
def test_every_value_comes_back_within_the_bound(dtype: str, seed: int, exponents: list[int]) -> None:
    """Rows of the greatest and the smallest values that the type has, mixed."""
    kind = getattr(torch, dtype)
    draw = torch.Generator().manual_seed(seed)
    scales = torch.tensor([2.0**exponent for exponent in exponents], dtype=torch.float64)
    values = torch.randn(4, 16, generator=draw, dtype=torch.float64) * scales[:, None]
    values[:, 3] = 0
    limit = torch.finfo(kind).max
    given_ = values.clamp(-limit, limit).to(kind)
    payload, row_nbytes = payload_of(given_), 16 * TYPES[dtype]
    stored = fp8.pack(payload, dtype, [(len(payload), row_nbytes)])
    assert stored is not None
    again = np.empty_like(payload)
    assert fp8.unpack_into(again, stored, dtype, [(len(payload), row_nbytes)])
    came = torch.from_numpy(again).view(kind).reshape(4, 16).double()
    exact = given_.double()
    scale = torch.exp2(torch.ceil(torch.log2(exact.abs().amax(dim=1, keepdim=True).clamp(min=2.0**-118) / 448)))
    tiny = torch.finfo(kind).smallest_normal * torch.finfo(kind).eps
    bound = torch.maximum(exact.abs() / 16, scale / 1024 + tiny)
    assert bool(((came - exact).abs() <= bound).all()), (came - exact).abs().sub(bound).max()
    repacked = fp8.pack(again, dtype, [(len(payload), row_nbytes)])
    assert repacked is not None
    last = np.empty_like(payload)
    assert fp8.unpack_into(last, repacked, dtype, [(len(payload), row_nbytes)])
    assert (last == again).all() or min(exponents) < -118, "packed twice it changes no more"


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_a_record_with_values_that_are_no_numbers_is_kept_as_it_is(wrong: float) -> None:
    values = normal()
    values[-1] = wrong
    record = record_of(values, LOSSY)
    stored = pack(record, LOSSY, codec())
    assert (stored == record).all()
    assert unseal(stored.copy(), KEY, LOSSY) is None


def test_a_packed_record_is_half_as_long_and_sealed_anew_when_it_is_read() -> None:
    record = record_of(normal(), LOSSY)
    stored = pack(record, LOSSY, codec())
    assert len(stored) - HEADER_NBYTES <= 0.52 * LOSSY.payload_nbytes
    memory = np.zeros(LOSSY.nbytes, np.uint8)
    memory[: len(stored)] = stored
    assert unseal(memory, KEY, LOSSY, len(stored)) is None
    assert unseal(memory, KEY, LOSSY) is None, "what is in memory now has a checksum of its own"
    assert _PREFIX.unpack(memory[: _PREFIX.size].tobytes())[2] == RAW
    came, exact = (
        torch.from_numpy(one[HEADER_NBYTES:].copy()).view(torch.bfloat16).float() for one in (memory, record)
    )
    assert 0.01 < float((came - exact).norm() / exact.norm()) < 0.04


@given(data=st.data())
def test_a_damaged_packed_record_is_a_miss(data: st.DataObject) -> None:
    stored = pack(record_of(normal(), LOSSY), LOSSY, codec()).copy()
    end = data.draw(st.integers(HEADER_NBYTES, len(stored)))
    if end == len(stored):
        stored[data.draw(st.integers(HEADER_NBYTES, end - 1))] ^= 1 << data.draw(st.integers(0, 7))
    memory = np.zeros(LOSSY.nbytes, np.uint8)
    memory[:end] = stored[:end]
    assert unseal(memory, KEY, LOSSY, end) == Miss("codec")


def test_who_wants_exact_kv_gets_no_packed_record_and_none_is_packed_for_it() -> None:
    record = record_of(normal(), EXACT)
    assert (pack(record, EXACT, codec()) == record).all()
    stored = pack(record_of(normal(), LOSSY), LOSSY, codec())
    forged = record.copy()
    forged[: _PREFIX.size] = stored[: _PREFIX.size]
    memory = np.zeros(EXACT.nbytes, np.uint8)
    memory[: len(stored)] = stored
    assert unseal(memory.copy(), KEY, EXACT, len(stored)) == Miss("other_shape")
    header = list(_PREFIX.unpack(record[: _PREFIX.size].tobytes()))
    header[2] = 3
    memory[:HEADER_NBYTES] = record[:HEADER_NBYTES]
    memory[: _PREFIX.size] = np.frombuffer(_PREFIX.pack(*header), np.uint8)
    assert unseal(memory, KEY, EXACT, len(stored)) == Miss("codec")
    assert EXACT.text != LOSSY.text, "their keys have nothing in common"


def test_a_lossy_cache_and_an_exact_one_find_nothing_of_each_other() -> None:
    tier = StubTier()
    with Pages(tiers=[tier], codec={"stub": FP8}, lossy=FP8) as pages:
        assert pages.stored(PROMPT) > 0
        assert pages.cache.flush(WAIT_S)
        assert pages.cache.lookup(PROMPT).num_tokens > 0
    with Pages(tiers=[tier]) as pages:
        assert pages.cache.lookup(PROMPT).num_tokens == 0
        pages.stored(PROMPT)
        assert pages.cache.flush(WAIT_S)
        with pytest.raises(InvalidRequest, match="method: got 'fp8'.*set lossy"):
            pages.cache.compress(PROMPT, FP8, "stub")
    with Pages(tiers=[tier], codec={"stub": "lz4"}) as pages:
        blocks = pages.table(len(PROMPT) // 16 + 1)
        found = pages.cache.retrieve(PROMPT, blocks)
        assert found > 0
        pages.check(PROMPT, blocks, 0, found)


def test_fp8_is_said_twice_or_refused() -> None:
    with (
        pytest.raises(ConfigError, match="codec: got 'fp8'.*set lossy"),
        Pages(tiers=[StubTier()], codec={"stub": FP8}),
    ):
        pass
    with pytest.raises(ConfigError, match="lossy: got 'int4'"), Pages(lossy="int4"):
        pass
