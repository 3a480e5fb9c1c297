"""A connector that keeps recurrent states in files: as prompts left them on prefill, as they arrived on decode."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from tests.e2e.spoiling import SpoilingConnector

LAYERS_END = "linear_attn", "short_conv"
"""How the names of layers with states end."""


class KeepingConnector(SpoilingConnector):
    """Files `PDLINK_TEST_STATES`/SIDE-RANK-TOKENS.pt: bytes of the state of each layer, by its name.

    TOKENS of the prompt have come or were computed; by them tests tell requests apart.
    """

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        self._published: dict[str, Any] = {}
        self._complete: list[tuple[int, Any]] = []
        self._expected: dict[str, tuple[int, Any]] = {}

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        plan = connector_metadata.plan
        self._expected |= {offer.request_id: (offer.end, offer.blocks) for offer in plan.offers}
        for chunk in plan.chunks:
            if chunk.first:
                self._published[chunk.request_id] = chunk.blocks
            elif chunk.blocks:
                both = zip(self._published[chunk.request_id], chunk.blocks, strict=True)
                self._published[chunk.request_id] = [(*old, *new) for old, new in both]
            if chunk.end == chunk.num_tokens:
                self._complete.append((chunk.end, self._published.pop(chunk.request_id)))

    def wait_for_save(self) -> None:
        for num_tokens, tables in self._complete:
            self._keep("prefill", num_tokens, tables)
        self._complete = []
        super().wait_for_save()

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        for request_id in results.finished_recving or ():
            self._keep("decode", *self._expected.pop(request_id))
        return results

    def _keep(self, side: str, num_tokens: int, tables: Any) -> None:
        kept = {
            name: self._tensors[name][table[-1]].flatten().clone()
            for group, table in zip(self._kv_cache_config.kv_cache_groups, tables, strict=True)
            for name in group.layer_names
            if name.endswith(LAYERS_END)
        }
        rank = self._vllm_config.parallel_config.rank
        place = Path(os.environ["PDLINK_TEST_STATES"]) / f"{side}-{rank}-{num_tokens}.pt"
        torch.save(kept, place.with_suffix(".part"))
        place.with_suffix(".part").rename(place)
