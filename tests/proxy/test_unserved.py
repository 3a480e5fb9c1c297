"""What vLLM and SGLang would pass over without a word is refused by name, and what they do is left to them."""

from __future__ import annotations

from typing import Any

import pytest

from pdlink_proxy.dialects import DIALECTS

from .fake_sglang import FakeSglang
from .fake_vllm import FakeVllm
from .fakes import proxy_of

RETENTION = {"priority": 80}


@pytest.mark.parametrize(
    ("dialect", "fields"),
    [
        ("vllm", {"kv_retention": RETENTION}),
        ("vllm", {"skip_reading_prefix_cache": True}),
        ("vllm-nixl", {"kv_retention": RETENTION}),
        ("sglang", {"kv_retention": RETENTION}),
        ("sglang", {"prompt_logprobs": 1}),
        ("sglang", {"skip_reading_prefix_cache": False}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_field_that_the_engine_would_pass_over_is_refused_by_name(
    dialect: str, fields: dict[str, Any], stream: bool
) -> None:
    (name,) = fields
    servers: Any = [FakeSglang("prefill"), FakeSglang("decode")] if dialect == "sglang" else [FakeVllm(), FakeVllm()]
    prefill, decode = [await server.start() for server in servers]
    control: Any = {"control": {prefill.url: ["tcp://127.0.0.1:1"]}} if dialect == "vllm" else {}
    null: Any = {name: None}
    try:
        async with proxy_of([prefill], [decode], dialect=dialect, **control) as proxy:
            async with proxy.post(stream=stream, **fields) as response:
                error = (await response.json())["error"]
                assert (response.status, error["param"]) == (400, name)
                assert error["message"] == f"{name}: {DIALECTS[dialect].unserved[name]}; leave it out"
            assert not decode.received
            async with proxy.post(stream=stream, **null) as response:
                assert response.status == 200
    finally:
        await prefill.stop()
        await decode.stop()


def test_our_own_engine_judges_its_fields_itself() -> None:
    assert not DIALECTS["pdlink"].unserved
    assert "prompt_logprobs" not in DIALECTS["vllm"].unserved
