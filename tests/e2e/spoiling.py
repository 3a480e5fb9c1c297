"""A connector that spoils one block of what has arrived, in a group of layers named by a file.

So tests show that the tokens they compare depend on what each group transfers.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pdlink.integrations.vllm import PDLinkConnector


class SpoilingConnector(PDLinkConnector):
    """The file `PDLINK_TEST_SPOIL` names holds the number of a group, or nothing."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        self._tensors = kv_caches
        self._offered: dict[str, Any] = {}

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        plan = connector_metadata.plan
        self._offered |= {load.request_id: load.blocks for load in plan.store.loads}
        self._offered |= {offer.request_id: offer.blocks for offer in plan.offers}

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        group = Path(os.environ["PDLINK_TEST_SPOIL"]).read_text()
        for request_id in results.finished_recving or ():
            tables = self._offered.pop(request_id)
            if group:
                names = self._kv_cache_config.kv_cache_groups[int(group)].layer_names
                block = tables[int(group)][-1]
                for name in names:
                    page = self._tensors[name][block]
                    page.copy_(page.flip(0).roll(7, dims=-1))
        return results
