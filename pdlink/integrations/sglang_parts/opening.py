"""The nodes of one SGLang rank, from what SGLang says of its pools."""

from __future__ import annotations

import logging
import os
import socket
from typing import TYPE_CHECKING, Any

from pdlink.integrations.loaded_weights import HERE
from pdlink.integrations.sglang_parts import pool, versions
from pdlink.integrations.sglang_parts.allocation import ALLOCATION
from pdlink.integrations.sglang_parts.ends import Ends, RankShare
from pdlink.integrations.sglang_parts.versions import UnsupportedSglang
from pdlink.node.node import Node
from pdlink.protocol.deadlines import Deadlines
from pdlink.protocol.handshake import ModelId
from pdlink.serve.keys import as_name, load_credentials

if TYPE_CHECKING:
    from pdlink.config import SglangConfig
    from pdlink.kv.groups import KVGroups
    from pdlink.memory.buffers import AnyBuffer

log = logging.getLogger(__name__)

CARRIED_STATES = ("mamba", "swa", "dsa", "swa_ring", "block_scale", "block_scale_swa", "request_row")
"""SGLang's `StateType`s whose places are the same on both sides, one for one."""


def check(args: Any, server_args: Any) -> None:
    """Raises UnsupportedSglang for what is not carried, by name."""
    if server_args.device not in ("cpu", "cuda"):
        raise UnsupportedSglang(
            f"device: got {server_args.device}; expected cpu, cuda; KV of that device is not moved for SGLang yet"
        )
    if getattr(args, "num_draft_entries", 0):
        raise UnsupportedSglang("draft model: got one; expected none; its KV is not transferred yet; leave it out")
    strange = [name for name in names_of(args).split(", ") if name and name not in CARRIED_STATES]
    if strange:
        raise UnsupportedSglang(
            f"KV pool: got states {', '.join(strange)} beside the KV; expected {', '.join(CARRIED_STATES)}; serve "
            "this model without --disaggregation-mode"
        )


def names_of(args: Any) -> str:
    """Of SGLang's kinds of states."""
    return ", ".join(str(getattr(kind, "value", kind)) for kind in args.state_types)


def rank_of(manager: Any, other: tuple[int, int] | None) -> RankShare:
    """This process among the ranks that share the model's heads. The model's config is read where the other server
    has another number of ranks (other), or for a cut (None)."""
    tp = (manager.attn_tp_rank, manager.attn_tp_size)
    if manager.is_mla_backend or (other is not None and other[1] == tp[1]):
        return RankShare(tp, 0)
    return RankShare(tp, int(versions.model_config(manager.server_args).get_total_num_kv_heads()))


def first_layer(args: Any, server_args: Any) -> int:
    """Of this pipeline stage. SGLang says it to prefill alone; decode's stages are cut as its models are."""
    said = getattr(args, "prefill_start_layer", None)
    if said is not None:
        return int(said)
    from sglang.srt.distributed.utils import get_pp_indices
    from sglang.srt.runtime_context import get_parallel

    num_stages = int(get_parallel().pp_size)
    if num_stages == 1:
        return 0
    first, _ = get_pp_indices(versions.model_config(server_args).num_hidden_layers, args.pp_rank, num_stages)
    return int(first)


def open_ends(
    settings: SglangConfig, args: Any, server_args: Any, mode: str, *, latent: bool
) -> tuple[Ends, list[int]]:
    """The ends, of which the one for equal servers is open, and SGLang's numbers of the layers.

    Raises UnsupportedSglang, ConfigError, OSError, CudaUnavailable, CudaFailure.
    """
    on_gpu = server_args.device == "cuda"
    verify = settings.transport.verify
    if on_gpu and verify != "off":
        raise UnsupportedSglang(
            f"PDLINK_TRANSPORT__VERIFY: got {verify}; expected off for KV on a GPU; "
            "checksums are of host memory alone"
        )
    # What `--enable-memory-saver` takes away comes back as other memory at the same addresses.
    stays = not getattr(server_args, "enable_memory_saver", False)
    place = pool.Memory(args, ALLOCATION.buffers, int(args.gpu_id) if on_gpu else None, stays)
    buffers, places = pool.buffers_of(args.kv_data_ptrs, args.kv_data_lens, place)
    sizes = args.kv_data_lens, args.kv_item_lens, pool.numbers_of(args, first_layer(args, server_args), latent=latent)
    groups, layer_ids = pool.layout_of(places, *sizes, args.page_size, args.kv_cache_dtype_str)
    described = [
        pool.state_of(*entry, place)
        for entry in zip(args.state_data_ptrs, args.state_data_lens, args.state_item_lens, strict=True)
    ]
    rank = args.engine_rank
    key_file = settings.security.key_file
    if key_file is not None:
        key_file = key_file.replace("{rank}", str(rank))
    security = settings.security.model_copy(update={"key_file": key_file})
    credentials = load_credentials(security)
    name = (credentials and credentials.owner) or f"sglang-{mode}-{as_name(socket.gethostname(), 32)}-{os.getpid()}"
    revision = f"sglang {versions.precision(server_args)} {getattr(args, 'kv_layout', None)}"
    content = versions.content(server_args)
    model_name = str(server_args.served_model_name or server_args.model_path)

    def node(layout: KVGroups, memory: list[AnyBuffer], suffix: str, meaning: str, port: int) -> Node:
        return Node(
            f"{name}/{rank}{suffix}",
            layout,
            memory,
            listen=settings.listen.on_port(port),
            model=ModelId(model_name, f"{revision} {meaning}", HERE.named(content)),
            transport=settings.transport,
            deadlines=Deadlines.of(settings.timeouts),
            credentials=credentials,
            insecure=settings.security.insecure,
            on_death=lambda: log.error("pdlink: the node has died; requests fail until the server is restarted"),
        )

    def opened(layout: KVGroups, suffix: str, meaning: str) -> Node:
        if suffix.startswith("/s"):
            return node(layout, described[int(suffix[2:])][1], suffix, meaning, 0)
        port = settings.listen.control_port + rank if settings.listen.control_port and not suffix else 0
        return node(layout, buffers, suffix, meaning, port)

    memory = [*buffers, *(buffer for _, more in described for buffer in more)]
    return Ends(groups, layer_ids, [one for one, _ in described], opened, memory, content), layer_ids
