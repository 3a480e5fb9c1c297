"""PDLinkConnector beside a tier of vLLM's own: decode asks its disk first (MultiConnector), then prefill.

Run with `make test-vllm`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.e2e.conftest import Alone  # noqa: E402
from tests.e2e.engine_servers import place_of, prompt_of, until  # noqa: E402
from tests.e2e.vllm_servers import Pair  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def pair(vllm_folder: Path, alone: Alone) -> Iterator[Pair]:
    place = place_of(vllm_folder, "tier")
    plain = ["--enforce-eager", "--block-size", "128", "--no-enable-prefix-caching"]
    disk = {"shared_storage_path": str(place / "disk")}
    tier = {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": disk}
    pair = Pair.of(place, prefill_flags=plain, decode_flags=plain, tier=tier)
    yield pair
    pair.stop()


@pytest.mark.parametrize("length", [1024, 2000])  # at 513 that connector does not find what it has stored (0.32)
def test_what_the_tier_has_is_not_pushed_again(pair: Pair, alone: Alone, length: int) -> None:
    prompt = prompt_of(length, length)
    before = pair.prefill.metric("vllm:pdlink_transfer_bytes_total")
    assert pair.tokens(prompt) == [alone[tuple(prompt)]]
    until(pair.prefill.holds_nothing, "prefill holds nothing")  # and has told all that it pushed
    pushed = pair.prefill.metric("vllm:pdlink_transfer_bytes_total")
    assert pushed > before
    assert pair.tokens(prompt) == [alone[tuple(prompt)]]
    for server in (pair.prefill, pair.decode):
        until(server.holds_nothing, f"{server.name} holds nothing")
        assert server.metric("vllm:pdlink_transfer_failures_total") == 0
    assert pair.prefill.metric("vllm:pdlink_transfer_bytes_total") == pushed
