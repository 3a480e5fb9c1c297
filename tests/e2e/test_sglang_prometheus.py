"""A real Prometheus scrapes real SGLang servers behind the proxy: every panel of the dashboard has data of theirs.

Run with `make test-sglang`.
"""

from __future__ import annotations

import importlib.util
import json
from typing import TYPE_CHECKING

import pytest

if importlib.util.find_spec("sglang") is None:
    pytest.skip("needs SGLang", allow_module_level=True)

from tests.e2e.engine_servers import prompt_of  # noqa: E402
from tests.e2e.prometheus_server import panels_of, scraped, traffic, with_prometheus  # noqa: E402
from tests.e2e.sglang_servers import SglangPair, save_checkpoint  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.sglang, pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900), with_prometheus]

OF_OTHER_ENGINES = ("Recomputed, by reason", "Endpoint could not run")
PAGE = 64


def test_every_panel_has_data_and_every_rule_is_evaluated(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "model")
    backend = {"backend_name": "pdlink", "module_path": "pdlink.integrations.sglang", "class_name": "PDLinkHiCache"}
    tiers = {"max_local_cpu_size": 0.1, "local_disk": str(tmp_path / "disk"), "max_local_disk_size": 0.2}
    kept = [
        *(
            "--enable-hierarchical-cache",
            "--hicache-mem-layout",
            "page_first_direct",
            "--hicache-io-backend",
            "direct",
        ),
        *("--hicache-storage-backend", "dynamic", "--hicache-write-policy", "write_through"),
        *("--hicache-storage-backend-extra-config", json.dumps({**backend, "interface_v1": 1, "tiers": tiers})),
    ]

    def ask_twice(number: int) -> None:
        assert pair.complete(prompt_of(600, number // 2)).status == 200

    pair = SglangPair.of(tmp_path, ["--page-size", str(PAGE), "--enable-metrics"], prefill=kept)
    try:
        with scraped(tmp_path, pair.url, [server.url for server in pair.servers]) as prometheus:
            with traffic(ask_twice):
                prometheus.wait_for_panels(panels_of(*OF_OTHER_ENGINES))
                prometheus.wait_for_rules()
            assert prometheus.values("sum(up)") == [3.0]
            assert prometheus.values('count(ALERTS{alertstate="firing"})') == []
    finally:
        pair.stop()
