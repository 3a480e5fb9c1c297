"""The store that the section `tiers` of settings describes: as a source of an engine's KV, or by itself."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, cast
from urllib.parse import quote

from pdlink.config import state_directory
from pdlink.errors import ConfigError
from pdlink.kv import hashing
from pdlink.memory.numa import node_of, nodes
from pdlink.store.cleared import places_of
from pdlink.store.client import RemoteStore
from pdlink.store.eviction import Adaptive
from pdlink.store.gpu_pages import GpuPages
from pdlink.store.groups import RecordGroup
from pdlink.store.interface import MEMORY
from pdlink.store.source import Source
from pdlink.store.store import Store
from pdlink.store.tiers.disk import Disk
from pdlink.store.tiers.opening import ALL, open_tier
from pdlink.store.tiers.striped import Striped

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdlink.config import TiersConfig
    from pdlink.cuda.buffers import DeviceMemory
    from pdlink.kv.layout import KVLayout
    from pdlink.memory.buffers import AnyBuffer
    from pdlink.store.interface import AnyStore
    from pdlink.store.source import BlockHolds
    from pdlink.store.tiers.base import Tier

_GIB = 1 << 30


class SourceGroup(NamedTuple):
    """One group of an engine's layers; see `RecordGroup`."""

    layout: KVLayout
    revision: str
    orders: Sequence[str] = ("PTH",)
    heads: range | None = None
    num_heads: int | None = None


def open_source(
    config: TiersConfig,
    name: str,
    layers: Sequence[SourceGroup],
    buffers: Sequence[AnyBuffer],
    pool: BlockHolds,
    *,
    model: str,
    released: Callable[[], None] = lambda: None,
    peers: Sequence[Tier] = (),
    hashed_by: Literal["pdlink", "sglang"] = "pdlink",
) -> Source | None:
    """None where the settings want no store. Close the source, then its store.

    name: of the worker. layers: in groups that share the store. The rest: see `Source`.
    peers: tiers that are stores of other nodes.
    Raises ConfigError, OSError if there is not enough memory, and for buffers of a GPU what `GpuPages` raises.
    """
    nbytes = int(config.max_local_cpu_size * _GIB)
    if nbytes == 0:
        return None
    groups = [RecordGroup(**group._asdict(), model=model, chunk_tokens=config.chunk_size) for group in layers]
    largest_nbytes = max(group.shape.nbytes for group in groups)
    if config.store is None and largest_nbytes > nbytes:
        raise ConfigError(
            f"tiers.chunk_size: got {config.chunk_size} tokens, {largest_nbytes} bytes of this model; expected "
            f"at most {nbytes} bytes; lower it, or raise tiers.max_local_cpu_size"
        )
    namespaces = [hashing.namespace(group.origin) for group in groups]
    if len(set(namespaces)) < len(groups):
        raise ConfigError(
            "tiers: got two groups of layers whose records cannot be told apart; expected distinct ones"
        )
    store: AnyStore
    with ExitStack() as opened:
        gpu = GpuPages(cast("Sequence[DeviceMemory]", buffers)) if buffers[0].kind == "cuda" else None
        if gpu is not None:
            opened.callback(gpu.close)
        if config.store is None:
            node = node_of(cast("DeviceMemory", buffers[0]).device.pci_address) if gpu is not None else None
            namespace = namespaces[0].hex()[:32]
            store = make_store(config, name, namespace, peers, numa_node=node, record_nbytes=largest_nbytes)
        else:
            store = RemoteStore(config.store, name=name, timeout_s=config.store_timeout_s)
        source = Source(
            store,
            groups,
            buffers,
            pool,
            own_places=_own_places(config),
            released=released,
            gpu=gpu,
            hashed_by=hashed_by,
        )
        store.open()
        opened.pop_all()
    return source


def _own_places(config: TiersConfig) -> list[str]:
    """Of the store of one engine: where nobody else keeps anything."""
    if config.store is not None:
        return []
    return [MEMORY, Disk.name] if config.disks else [MEMORY]


def make_store(
    config: TiersConfig,
    name: str,
    namespace: str = ALL,
    peers: Sequence[Tier] = (),
    *,
    numa_node: int | None = None,
    record_nbytes: int = 0,
) -> Store:
    """A store in this process, not yet open.

    name: stands for {name} in `local_disk`. namespace: whose records the disk keeps together.
    peers: tiers that are stores of other nodes. numa_node: for its memory, where the settings name none.
    record_nbytes: of the largest records, if that is known.
    Raises ConfigError.
    """
    if config.numa_node is not None:
        numa_node, known = config.numa_node, nodes()
        if known and numa_node not in known:
            raise ConfigError(
                f"tiers.numa_node: got {numa_node}; expected {', '.join(map(str, known))}, the nodes of this "
                "machine; correct it, or leave it out"
            )
    nbytes = int(config.max_local_cpu_size * _GIB)
    with ExitStack() as opened:
        store = Store(
            nbytes,
            Adaptive(),
            _tiers(config, name, namespace, peers, record_nbytes, opened),
            ingestion=config.ingestion,
            pin_quota_nbytes=nbytes // 4 if config.max_pinned_size is None else int(config.max_pinned_size * _GIB),
            session_quota_nbytes=None if config.session_quota is None else int(config.session_quota * _GIB),
            codec=config.codec,
            cleared=places_of(next(iter(_directories(config, name)), None), state_directory(config.state_dir)),
            standing=None if (disk := disk_directory(config, name, namespace)) is None else disk / "standing",
            verify=config.verify,
            ttl_s=float("inf") if config.ttl_s is None else config.ttl_s,
            tenant_quota_nbytes=int((config.quota_per_salt or 0) * _GIB),
            reserve_nbytes=int(config.reserve_local_cpu_size * _GIB),
            numa_node=numa_node,
            lends=bool(config.peers) or config.peer_port is not None,
        )
        opened.pop_all()
    return store


def disk_directory(config: TiersConfig, name: str, namespace: str = ALL) -> Path | None:
    """Of the records that `make_store` keeps on a disk, the first one of several; None without one."""
    directory = next(iter(_directories(config, name)), None)
    return directory / namespace if directory is not None else None


def _directories(config: TiersConfig, name: str) -> list[Path]:
    return [Path(path.replace("{name}", quote(name, safe=""))) for path in config.disks]


def _tiers(
    config: TiersConfig, name: str, namespace: str, peers: Sequence[Tier], record_nbytes: int, opened: ExitStack
) -> list[Tier]:
    """Those below memory, in the order in which they are asked. opened: closes what is opened here."""
    tiers: list[Tier] = []
    directories = _directories(config, name)
    if directories and config.max_local_disk_size is not None:
        tiers.append(Striped(directories, namespace, int(config.max_local_disk_size * _GIB), record_nbytes))
        opened.callback(tiers[0].close)
    tiers += peers
    for url in (config.remote_url,) if isinstance(config.remote_url, str) else config.remote_url or ():
        tiers.append(open_tier(url))
        opened.callback(tiers[-1].close)
    return tiers
