"""A `Server` with vLLM's OffloadingConnector at both ends and one secondary tier; its worker copies on the CPU.

Run as a program it serves one prompt in a process of its own: FOLDER TIER, the tier as JSON. It prints what came.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from tests.integrations.contract.vllm_server import Server

CPU_NBYTES = 1 << 20
PROMPT = list(range(1, 101))


class CopyingWorker(OffloadingWorker):  # type: ignore[misc]
    """Stands for vLLM's, whose copies are kernels. A job is over when it is given."""

    def __init__(self, spec: Any, caches: Any) -> None:
        self._region = SharedOffloadRegion(
            engine_id=spec.config.engine_id,
            num_chunks=spec.num_chunks,
            rank=0,
            kv_bytes_per_chunk=spec.kv_bytes_per_chunk,
            cpu_page_size=spec.cpu_page_size_per_worker,
        )
        pages = [(one.tensor, one.page_size_bytes) for one in caches.tensors]
        self._pairs = [(tensor, self._region.create_next_worker_view(nbytes)) for tensor, nbytes in pages]
        self._ended: list[Any] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for cache, rows in self._pairs:
            rows[torch.from_numpy(dst_spec.block_ids).long()] = cache[torch.from_numpy(src_spec.block_ids).long()]
        self._ended.append(TransferResult(job_id, True))
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for cache, rows in self._pairs:
            cache[torch.from_numpy(dst_spec.block_ids).long()] = rows[torch.from_numpy(src_spec.block_ids).long()]
        self._ended.append(TransferResult(job_id, True))
        return True

    def get_finished(self) -> list[Any]:
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: set[int]) -> None: ...

    def shutdown(self) -> None:
        self._pairs = []
        self._region.cleanup()


class OffloadingServer(Server):
    def __init__(self, folder: Path, tier: dict[str, Any], **more: Any) -> None:
        """tier: what stands in `secondary_tiers`."""
        folder.mkdir(exist_ok=True)
        TieringOffloadingSpec.get_worker = lambda spec, caches: CopyingWorker(spec, caches)
        tiers = {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": CPU_NBYTES, "secondary_tiers": [tier]}
        super().__init__(folder, tiers, connector="OffloadingConnector", **more)

    @property
    def manager(self) -> Any:
        return self.scheduler.connector.connector_scheduler.manager

    @property
    def tier(self) -> Any:
        return self.manager.secondary_tiers[0]

    def serve(self, name: str, prompt: list[int], params: dict[str, Any] | None = None) -> tuple[list[int], int]:
        """Its answer, and how many tokens of the prompt were computed. Then all is where it is to be kept."""
        self.request(name, prompt, params, max_tokens=1)
        self.until_idle()
        self.until(lambda: not self.manager.has_pending_work() and not self.manager._req_state)
        return self.outputs[name], self.computed[name]

    def forget(self) -> None:
        """What vLLM has in its own blocks and in the rows."""
        assert self.scheduler.reset_prefix_cache(reset_connector=True)
        for _ in range(3):  # it takes nothing from a tier until its workers have heard of that (0.33)
            self.step()


def main() -> None:
    folder, tier = sys.argv[1:]
    server = OffloadingServer(Path(folder), json.loads(tier))
    came = server.serve("r", PROMPT)
    server.close()
    print(json.dumps(came))  # vLLM's own lines come before it


if __name__ == "__main__":
    main()
