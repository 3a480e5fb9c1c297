"""A real Prometheus scrapes real vLLM servers behind the proxy: every panel of the dashboard has data of theirs.

Run with `make test-vllm`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("vllm")

from pdlink.api.openai import COMPLETIONS  # noqa: E402
from tests.e2e.deployment import request  # noqa: E402
from tests.e2e.prometheus_server import panels_of, scraped, traffic, with_prometheus  # noqa: E402
from tests.e2e.proxied_vllm import proxied  # noqa: E402
from tests.waiting import until  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.vllm, pytest.mark.e2e, pytest.mark.timeout(600), with_prometheus]

OF_OUR_ENGINE = ("Endpoint could not run",)


def test_every_panel_has_data_and_every_rule_is_evaluated(tmp_path: Path) -> None:
    tiers = {
        "chunk_size": 64,
        "max_local_cpu_size": 0.1,
        "local_disk": str(tmp_path / "disk-{name}"),
        "max_local_disk_size": 0.2,
    }
    with (
        proxied(tmp_path, "pdlink", "--no-enable-prefix-caching", tiers=tiers) as pair,
        scraped(tmp_path, pair.url("proxy"), [pair.url("prefill"), pair.url("decode")]) as prometheus,
    ):

        def ask_twice(number: int) -> None:
            prompt = [(number // 2 * 31 + at * 7) % 200 + 20 for at in range(600)]
            answer = pair.ask("proxy", COMPLETIONS, {"prompt": prompt, "max_tokens": 8, "ignore_eos": True})
            assert answer.status == 200
            assert pair.events("proxy", COMPLETIONS, {"prompt": prompt[:300], "max_tokens": 4})

        def state() -> Any:
            return request(pair.url("proxy") + "/pdlink/state").body

        def rates() -> Any:
            return state()["rates"]

        with traffic(ask_twice):
            prometheus.wait_for_panels(panels_of(*OF_OUR_ENGINE))
            prometheus.wait_for_rules()
            until(lambda: bool(rates()["kv_bytes_per_s"].get("mapped")), "KV moved between two looks at the workers")
            until(lambda: rates()["tokens_per_s"] > 0, "tokens came between two looks at the workers")
            shown = state()
        assert prometheus.values("sum(up)") == [3.0]
        assert (shown["engine"], [each["lane"] for each in shown["pairs"]]) == ("vLLM", ["mapped"])
        assert all(each["requests"] and each["held"] is not None for each in shown["workers"])
        assert shown["totals"]["store_chunks"]["memory"] > 0
        assert prometheus.values('count(ALERTS{alertstate="firing"})') == []
