"""Ranks of an SGLang server in a process of their own: SGLang's managers, senders, receivers, bootstrap; no model.

Takes a line of JSON for each thing to do, and answers with one. A rank that is opened is the one that is meant from
then on, until `use` names another one. Run by `test_sglang_transfer.py` and `test_sglang_ranks.py`.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from types import SimpleNamespace
from typing import Any

import numpy as np
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.disaggregation.base.conn import KVArgs, StateType
from sglang.srt.disaggregation.common.conn import CommonKVReceiver
from sglang.srt.disaggregation.utils import DisaggregationMode, KVClassType, TransferBackend, get_kv_class
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from tests.nursery import WHOLE_END
from tests.waiting import WAIT_S

PAGE, LAYERS, PAGES, HEADS, HEAD, ROWS = 4, 4, 1024, 2, 32, 8
"""HEAD: bytes of one token of a head."""
AUX = (64, 128)
STATES = {"mamba": (48, 48, 20), "swa": (PAGE * 16,) * 2, "dsa_tail": (16,)}
"""Bytes of a place in each tensor."""
PLACES = 64


class Rank:
    def __init__(
        self,
        mode: str,
        port: int,
        tp: tuple[int, int] = (0, 1),
        pp: tuple[int, int] = (0, 1),
        latent: bool = False,
        states: tuple[str, ...] = (),
    ) -> None:
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
        model = SimpleNamespace(get_total_num_kv_heads=lambda: HEADS, num_hidden_layers=LAYERS)
        assert callable(ModelConfig.from_server_args)
        ModelConfig.from_server_args = staticmethod(lambda _: model)
        set_global_server_args_for_scheduler(server)
        ranks = ("tp", "pp", "attn_tp", "attn_cp", "attn_dp", "attn_dcp")
        places = {f"{name}_rank": 0 for name in ranks} | {f"{name}_size": 1 for name in ranks}
        places |= {"tp_rank": tp[0], "attn_tp_rank": tp[0], "tp_size": tp[1], "attn_tp_size": tp[1]}
        places |= {"pp_rank": pp[0], "pp_size": pp[1], "moe_tp_rank": tp[0], "moe_tp_size": tp[1]}
        get_parallel().override_permanently(**places, pp_group=_Group)
        stage = LAYERS // pp[1]
        first = tp[0] * HEADS // tp[1]
        self.heads = range(1) if latent else range(first, first + max(1, HEADS // tp[1]))
        self.layers = range(pp[0] * stage, (pp[0] + 1) * stage)
        self.entries = [(layer, part) for part in range(1 if latent else 2) for layer in self.layers]
        self.kv = [np.zeros((PAGES, PAGE, len(self.heads), HEAD), np.uint8) for _ in self.entries]
        self.states = [[np.zeros((PLACES, nbytes), np.uint8) for nbytes in STATES[name]] for name in states]
        self.state_types = [StateType(name) for name in states]
        self.mode, self.tp, self.pp = mode, tp, pp
        self.aux = [np.zeros((ROWS, width), np.uint8) for width in AUX]
        self._bootstrap = None
        if mode == "prefill" and tp[0] == pp[0] == 0:
            self._bootstrap = self._class(KVClassType.BOOTSTRAP_SERVER)("127.0.0.1", port)
            time.sleep(0.5)
        kind = self._class(KVClassType.MANAGER)
        self.manager = kind(self._args(), DisaggregationMode(mode), server, latent)
        self.rooms: dict[int, Any] = {}

    def _args(self) -> KVArgs:
        args = KVArgs()
        args.gpu_id = args.system_dp_rank = 0
        args.engine_rank, args.pp_rank = self.tp[0], self.pp[0]
        if self.mode == "prefill":
            args.prefill_start_layer = self.layers[0]
        args.rust_http_port = args.prefill_end_layer = args.kv_layout = None
        args.kv_data_ptrs = [buffer.ctypes.data for buffer in self.kv]
        args.kv_data_lens = [buffer.nbytes for buffer in self.kv]
        args.kv_item_lens = [buffer[0].nbytes for buffer in self.kv]
        args.kv_layer_ids = []
        args.kv_cache_dtype_str, args.page_size, args.ib_device = "bfloat16", PAGE, ""
        args.aux_data_ptrs = [buffer.ctypes.data for buffer in self.aux]
        args.aux_data_lens = [buffer.nbytes for buffer in self.aux]
        args.aux_item_lens = list(AUX)
        args.state_types = self.state_types
        args.state_data_ptrs = [[one.ctypes.data for one in tensors] for tensors in self.states]
        args.state_data_lens = [[one.nbytes for one in tensors] for tensors in self.states]
        args.state_item_lens = [[one.shape[1] for one in tensors] for tensors in self.states]
        args.state_layer_ids, args.state_dim_per_tensor = [], []
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
        return {"transfers": transfers, "rooms": len(list(self.manager.request_status))}

    def teardown(self) -> dict[str, Any]:
        """As SGLang does before a server takes the other role."""
        self.manager.teardown()
        CommonKVReceiver.close_all_sockets()
        threads = [one for one in (self.manager._listener, self.manager._heartbeat) if one is not None]
        for thread in threads:
            thread.join(WAIT_S)
        alive = [thread.name for thread in threads if thread.is_alive()]
        return {"alive": alive, "switches": self.manager.supports_role_switch}

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

    def send(self, room: int, pages: list[int], seed: int, places: list[list[int]] | None = None) -> dict[str, Any]:
        for entry, buffer in zip(self.entries, self.kv, strict=True):
            buffer[pages] = _pattern(pages, entry, self.heads, seed)
        for number, where in enumerate(places or ()):
            for tensor, kept in enumerate(self.states[number]):
                kept[where] = _state(len(where), number, tensor, seed, kept.shape[1])
        states = None if places is None else [np.array(one, np.int32) for one in places]
        self.rooms[room].send(np.array(pages, np.int32), states)
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

    def ask(
        self, room: int, pages: list[int], row: int, prefix: int = 0, places: list[list[int]] | None = None
    ) -> dict[str, Any]:
        states = None if places is None else [np.array(one, np.int32) for one in places]
        self.rooms[room].send_metadata(np.array(pages, np.int32), row, states, decode_prefix_len=prefix)
        return {}

    def check(
        self, pages: list[int], source: list[int], seed: int, row: int, places: list[list[int]] | None = None
    ) -> dict[str, Any]:
        wrong = sum(
            int((buffer[pages] != _pattern(source, entry, self.heads, seed)).sum())
            for entry, buffer in zip(self.entries, self.kv, strict=True)
        )
        for number, where in enumerate(places or ()):
            for tensor, kept in enumerate(self.states[number]):
                wrong += int((kept[where] != _state(len(where), number, tensor, seed, kept.shape[1])).sum())
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


class _Group:
    """What SGLang asks of the pipeline's ranks when they start; here they are in one process, and start in order."""

    said: Any = None

    @classmethod
    def broadcast_object(cls, value: Any, src: int) -> Any:
        cls.said = cls.said if value is None else value
        return cls.said


def _pattern(pages: list[int], entry: tuple[int, int], heads: range, seed: int) -> Any:
    """Different for every page, layer, part, token, head and request."""
    page, token = np.array(pages)[:, None, None, None], np.arange(PAGE)[:, None, None]
    head, (layer, part) = np.array(heads)[:, None], entry
    values = page * 7 + token * 3 + layer * 11 + part * 59 + head * 101 + np.arange(HEAD) + seed
    return (values % 251).astype(np.uint8)


def _state(count: int, number: int, tensor: int, seed: int, width: int) -> Any:
    places = np.arange(count)[:, None]
    return ((places * 13 + np.arange(width) + number * 5 + tensor * 17 + seed) % 251).astype(np.uint8)


def main() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr
    ranks: dict[str, Rank] = {}
    rank = None
    for line in sys.stdin:
        call = json.loads(line)
        try:
            verb = call.pop("do")
            if verb == "open":
                name = call.pop("name", "")
                rank = ranks[name] = Rank(**call)
                answer = {"address": rank.manager.node.address}
            elif verb == "use":
                rank, answer = ranks[call["name"]], {}
            else:
                answer = getattr(rank, verb)(**call)
        except Exception as error:  # noqa: BLE001  the test shows it
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
    sys.stderr.flush()
    if not os.environ.get(WHOLE_END):
        os._exit(0)  # SGLang's threads have no end
