"""One rank of an SGLang server in a process of its own: SGLang's manager, senders, receivers and bootstrap, no model.

Takes a line of JSON for each thing to do, and answers with one. Run by `test_sglang_transfer.py`.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from typing import Any

import numpy as np
from sglang.srt.disaggregation.base.conn import KVArgs
from sglang.srt.disaggregation.utils import DisaggregationMode, KVClassType, TransferBackend, get_kv_class
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

PAGE, LAYERS, PAGES, TOKEN, ROWS = 4, 3, 4096, 64, 8
AUX = (64, 128)


class Rank:
    def __init__(self, mode: str, port: int, num_layers: int = LAYERS) -> None:
        load_plugins()
        assert get_kv_class(TransferBackend("fake"), KVClassType.SENDER).__name__ == "FakeKVSender"
        server = ServerArgs(
            model_path="dummy",
            device="cpu",
            host="127.0.0.1",
            port=port + 1,
            page_size=PAGE,
            disaggregation_mode=mode,
            disaggregation_transfer_backend="pdlink",
            disaggregation_bootstrap_port=port,
        )
        set_global_server_args_for_scheduler(server)
        ranks = ("tp", "pp", "attn_tp", "attn_cp", "attn_dp", "attn_dcp")
        places = {f"{name}_rank": 0 for name in ranks} | {f"{name}_size": 1 for name in ranks}
        get_parallel().override_permanently(**places, pp_group=None)
        self.kv = [np.zeros((PAGES, PAGE * TOKEN), np.uint8) for _ in range(2 * num_layers)]
        self.aux = [np.zeros((ROWS, width), np.uint8) for width in AUX]
        self._bootstrap = None
        if mode == "prefill":
            self._bootstrap = self._class(KVClassType.BOOTSTRAP_SERVER)("127.0.0.1", port)
            time.sleep(0.5)
        kind = self._class(KVClassType.MANAGER)
        self.manager = kind(self._args(num_layers), DisaggregationMode(mode), server, False)
        self.rooms: dict[int, Any] = {}

    def _args(self, num_layers: int) -> KVArgs:
        args = KVArgs()
        args.engine_rank = args.gpu_id = args.pp_rank = args.system_dp_rank = args.prefill_start_layer = 0
        args.rust_http_port = args.prefill_end_layer = args.kv_layout = None
        args.kv_data_ptrs = [buffer.ctypes.data for buffer in self.kv]
        args.kv_data_lens = [buffer.nbytes for buffer in self.kv]
        args.kv_item_lens = [buffer.shape[1] for buffer in self.kv]
        args.kv_layer_ids = []
        args.kv_cache_dtype_str, args.page_size, args.ib_device = "bfloat16", PAGE, ""
        args.aux_data_ptrs = [buffer.ctypes.data for buffer in self.aux]
        args.aux_data_lens = [buffer.nbytes for buffer in self.aux]
        args.aux_item_lens = list(AUX)
        for name in ("types", "data_ptrs", "data_lens", "item_lens", "layer_ids", "dim_per_tensor"):
            setattr(args, f"state_{name}", [])
        args.is_hybrid_mla_backend = False
        return args

    def _class(self, kind: Any) -> Any:
        from sglang.srt.disaggregation import utils

        return utils.get_kv_class(TransferBackend("pdlink"), kind)

    # --- Both sides

    def poll(self, room: int) -> dict[str, Any]:
        return {"status": int(self.rooms[room].poll())}

    def wait(self, room: int, status: list[int], timeout_s: float = 20.0) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        while (found := int(self.rooms[room].poll())) not in status and time.monotonic() < deadline:
            time.sleep(0.002)
        return {"status": found}

    def abort(self, room: int) -> dict[str, Any]:
        self.rooms[room].abort()
        return {}

    def clear(self, room: int) -> dict[str, Any]:
        self.rooms.pop(room).clear()
        return {}

    def failure(self, room: int) -> dict[str, Any]:
        try:
            self.rooms.pop(room).failure_exception()
        except Exception as error:  # noqa: BLE001  what the scheduler gets
            return {"why": str(error)}
        return {"why": ""}

    def live(self) -> dict[str, Any]:
        deadline = time.monotonic() + 20
        while (transfers := len(self.manager.node.transfers())) and time.monotonic() < deadline:
            time.sleep(0.002)
        return {"transfers": transfers, "rooms": len(self.manager.request_status)}

    # --- Prefill

    def sender(self, room: int) -> dict[str, Any]:
        kind = self._class(KVClassType.SENDER)
        self.rooms[room] = kind(mgr=self.manager, bootstrap_addr="unused", bootstrap_room=room)
        return {}

    def init(self, room: int, num_pages: int, row: int, seed: int) -> dict[str, Any]:
        prefix = self.rooms[room].pop_decode_prefix_len()
        self.rooms[room].init(num_pages, row)
        for buffer in self.aux:
            buffer[row] = seed
        return {"prefix": prefix}

    def send(self, room: int, pages: list[int], seed: int) -> dict[str, Any]:
        for entry, buffer in enumerate(self.kv):
            buffer[pages] = _pattern(pages, entry, seed)
        self.rooms[room].send(np.array(pages, np.int32))
        return {}

    # --- Decode

    def receiver(self, room: int, address: str) -> dict[str, Any]:
        deadline = time.monotonic() + 20
        while not self.manager.try_ensure_parallel_info(address) and time.monotonic() < deadline:
            time.sleep(0.1)
        kind = self._class(KVClassType.RECEIVER)
        self.rooms[room] = kind(self.manager, address, room)
        self.rooms[room].init(0)
        return {"status": int(self.rooms[room].poll())}

    def ask(self, room: int, pages: list[int], row: int, prefix: int = 0) -> dict[str, Any]:
        self.rooms[room].send_metadata(np.array(pages, np.int32), row, None, decode_prefix_len=prefix)
        return {}

    def check(self, pages: list[int], source: list[int], seed: int, row: int) -> dict[str, Any]:
        wrong = sum(
            int((buffer[pages] != _pattern(source, entry, seed)).sum()) for entry, buffer in enumerate(self.kv)
        )
        return {"wrong": wrong, "aux": [int(buffer[row].min()) for buffer in self.aux]}

    def fill(self, pages: list[int], value: int) -> dict[str, Any]:
        for buffer in self.kv:
            buffer[pages] = value
        return {}

    def untouched(self, pages: list[int], value: int) -> dict[str, Any]:
        return {"untouched": all(bool((buffer[pages] == value).all()) for buffer in self.kv)}

    def quiet(self, room: int, timeout_s: float = 20.0) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        while not (safe := self.manager.is_abort_release_safe(room, 1)) and time.monotonic() < deadline:
            time.sleep(0.002)
        return {"quiet": safe}


def _pattern(pages: list[int], entry: int, seed: int) -> Any:
    """Different for every page, entry, token and request."""
    places = np.arange(PAGE * TOKEN) // TOKEN
    return ((np.array(pages)[:, None] * 7 + places * 3 + entry * 11 + seed) % 251).astype(np.uint8)


def main() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr
    rank = None
    for line in sys.stdin:
        call = json.loads(line)
        try:
            verb = call.pop("do")
            if verb == "open":
                rank = Rank(**call)
                answer = {"address": rank.manager.node.address}
            else:
                answer = getattr(rank, verb)(**call)
        except Exception as error:  # noqa: BLE001  the test shows it
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
    sys.stderr.flush()
    import os

    os._exit(0)  # SGLang's threads have no end
