"""A prefill, decode or both-role worker: model, cache, engine, endpoint and transports, wired together.

`Worker` is everything but HTTP. It has two threads, the engine's and the endpoint's. The HTTP side calls `start` from
an asyncio loop and reads the answer's tokens from a `Stream` of that loop.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from pdlink.api import kv_path
from pdlink.api.legs import DecodeParams
from pdlink.engine.engine import Engine
from pdlink.engine.forward import PagedCache
from pdlink.engine.models import load_model
from pdlink.engine.request import GenerationRequest
from pdlink.errors import ConfigError, Draining, EngineFailure, InvalidRequest, PdlinkError, TransferFailed
from pdlink.events import FallbackUsed, RequestEnded, emit
from pdlink.kv.groups import KVGroups
from pdlink.memory.available import available_nbytes
from pdlink.memory.blocks import BlockPool
from pdlink.node.node import Node, end_process
from pdlink.node.port import EnginePort
from pdlink.peers.opening import make_link, tiers_of
from pdlink.protocol.deadlines import Deadlines
from pdlink.protocol.handshake import ModelId
from pdlink.serve.kv_events import open_publisher, tell_blocks, tell_records
from pdlink.serve.stream import DecodeLeg, PrefillLeg, Stream
from pdlink.serve.tiers import Tiered
from pdlink.store.opening import SourceGroup, open_source
from pdlink.store.slots import USUAL
from pdlink.store.store import Store

if TYPE_CHECKING:
    from pdlink.api.legs import AnyParams
    from pdlink.config import WorkerConfig
    from pdlink.engine.forward import LoadedModel
    from pdlink.engine.request import SamplingParams, TokenOutput
    from pdlink.protocol.auth import AllowList, Credentials
    from pdlink.serve.tiers import KeptTurn
    from pdlink.store.slots import Retention
    from pdlink.store.source import Source

log = logging.getLogger(__name__)

_BLOCK_OVERHEAD_NBYTES = 64
"""What a block costs beside its KV: two list entries and an int of the pool (measured: 56 bytes)."""


def _num_blocks(config: WorkerConfig, model: LoadedModel) -> int:
    """As configured; on a GPU perhaps as many as fit into a share of its memory.

    Raises ConfigError for more than there is host memory for, and for too few. To try would be too late: memory that
    is not there is found when pages are touched, and then the kernel kills.
    """
    fraction = config.cache.memory_fraction
    itemsize: int = getattr(torch, model.dtype).itemsize
    token_nbytes = model.num_layers * 2 * model.num_kv_heads * model.head_dim * itemsize
    if fraction is None:
        wanted = config.cache.num_blocks
        on_host = config.cache.block_tokens * token_nbytes if model.device.type == "cpu" else 0
        block_nbytes, available = on_host + _BLOCK_OVERHEAD_NBYTES, available_nbytes()
        if wanted * block_nbytes > available:
            raise ConfigError(
                f"cache.num_blocks: {wanted} blocks of {config.cache.block_tokens} tokens take "
                f"{wanted * block_nbytes / 1e9:.1f} GB, and {available / 1e9:.1f} GB of memory are available; "
                f"at most {available // block_nbytes} fit"
            )
        return wanted
    total_nbytes: int = torch.cuda.get_device_properties(model.device).total_memory
    num_blocks = int(total_nbytes * fraction) // (token_nbytes * config.cache.block_tokens)
    if num_blocks < 2:
        raise ConfigError(f"cache.memory_fraction: {fraction} of {total_nbytes} bytes holds {num_blocks} KV blocks")
    return num_blocks


class Worker:
    """One worker. `open` acquires, `drain` and `close` end; also the engine's listener."""

    load_model = staticmethod(load_model)
    """A laboratory puts one in its place whose model sleeps, or is slow."""
    make_node = staticmethod(Node)
    """A laboratory puts one in its place whose links have faults."""

    def __init__(self, config: WorkerConfig, name: str, credentials: Credentials | None = None) -> None:
        """credentials: what the settings in `config.security` name, read; None where they name none."""
        self.config, self.name = config, name
        self._credentials = credentials
        self._running: dict[str, Stream] = {}
        self._lock = threading.Lock()
        """Guards `_running`: added to by the asyncio loop, taken from by the engine's thread."""
        self._fewer = threading.Condition(self._lock)
        """A request has ended."""
        self.draining = False
        self.role = config.role

    def open(self) -> None:
        """Load the model, allocate and register the cache, bind the control port, start both threads.

        Raises ConfigError, TransportUnavailable, OSError (no memory). Takes the time the model takes to load.
        """
        config = self.config
        torch.set_num_threads(config.engine.threads)
        self.model = self.load_model(config.model, config.engine.device)
        num_blocks = _num_blocks(config, self.model)
        self.pool = BlockPool(num_blocks)
        self.cache = PagedCache(
            self.model,
            num_blocks=num_blocks,
            block_tokens=config.cache.block_tokens,
            order=config.cache.order,
        )
        insecure, deadlines = config.security.insecure, Deadlines.of(config.timeouts)
        self.peers = make_link(
            config.tiers,
            config.listen.link,
            config.transport,
            self.name,
            self._credentials,
            insecure=insecure,
            deadlines=deadlines,
        )
        self.source: Source | None = None
        """None where nothing is kept."""
        self.source = open_source(
            config.tiers,
            self.name,
            [SourceGroup(self.cache.layout, f"{self.model.revision} {self.model.content}")],
            [self.cache.buffer],
            self.pool,
            model=self.model.name,
            released=lambda: self.engine.wake(),
            peers=tiers_of(self.peers, config.tiers),
        )
        if self.peers is not None and self.source is not None and isinstance(self.source.store, Store):
            self.peers.open(self.source.store)
        self.node = self.make_node(
            self.name,
            KVGroups((self.cache.layout,)),
            [self.cache.buffer],
            listen=config.listen.link,
            model=ModelId(self.model.name, self.model.revision, self.model.content),
            pool=self.pool,
            transport=config.transport,
            deadlines=deadlines,
            credentials=self._credentials,
            insecure=config.security.insecure,
            on_death=end_process,
        )
        self.port = EnginePort(self.node)
        self.kv_events = open_publisher(config.kv_events, self.name, self.node.report().epoch)
        """None where nobody is told what is kept here."""
        if self.kv_events is not None:
            tell_blocks(self.kv_events, self.pool, config.cache.block_tokens, on_gpu=self.model.device.type == "cuda")
            if self.source is not None:
                tell_records(self.kv_events, self.source.store, self.source.chunk_tokens)
        self.tiers = Tiered(self.port, self.source, lambda: self.engine, load_if_faster=config.tiers.load_if_faster)
        self.engine = Engine(
            self.model,
            self.pool,
            self.cache,
            config.engine,
            self,
            self.tiers,
            share_prefixes=config.cache.share_prefixes,
            on_complete=self.tiers.complete if config.tiers.save_decode_cache else None,
            origin=self.source.groups[0].origin if self.source is not None else None,
            chunk_tokens=self.source.chunk_tokens if self.source is not None else None,
        )
        self.node.short_of_blocks = lambda: self.engine.num_waiting > 0
        self._thread = threading.Thread(target=self._run_engine, name=f"pdlink-engine-{self.name}", daemon=True)
        self._thread.start()

    # -- requests, from the asyncio loop -----------------------------------------------------------------------------

    def start(
        self,
        request_id: str,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        params: AnyParams | None,
        *,
        num_answered: int = 0,
        salt: str = "",
        retention: Retention | None = USUAL,
        turn: KeptTurn | None = None,
        source: str = "",
    ) -> Stream:
        """Begin a request, alone or as one leg of a transfer; its tokens come through the stream.

        num_answered: last tokens of the prompt that are the answer's first ones (`GenerationRequest`).
        retention: of its KV in the tiers; None keeps none there. turn: of an agent's session, which keeps it there.
        source: address of a store that may have KV of the prompt; empty for none.

        Raises what the engine's `submit` raises, InvalidRequest for a leg this role does not serve or a transfer id
        used before, TransferFailed if the other leg has failed already and the setting is to fail.
        """
        held = params is not None and params.leg == "prefill"
        stream = Stream(request_id, len(prompt), self.config.timeouts.request_s, held=held)
        with self._lock:
            if self.draining:  # with the lock: what is let in here is drained
                raise Draining("this worker takes no new requests now; send the request to another one")
            if request_id in self._running:
                raise InvalidRequest(f"request id {request_id!r} is in use")
            self._running[request_id] = stream  # the engine's thread may speak of it before `submit` returns
        try:
            leg = self._leg(stream, params) if params is not None else None
            is_prefill = isinstance(leg, PrefillLeg)
            looks = self.tiers.begin(request_id, prompt, salt, retention, turn, source)
            chain = self.engine.submit(
                GenerationRequest(
                    request_id,
                    prompt,
                    replace(sampling, max_tokens=1) if is_prefill else sampling,
                    external_tokens=len(prompt) if isinstance(leg, DecodeLeg) else 0,
                    awaits_lookup=looks,
                    goes_on=is_prefill and sampling.max_tokens > 1,
                    num_answered=num_answered,
                    salt=salt,
                )
            )
        except PdlinkError as error:
            self.tiers.ended(request_id)
            self.port.ended(request_id, error.reason)
            with self._lock:
                del self._running[request_id]
            raise
        if looks:
            self.tiers.look(request_id, chain, receives=isinstance(leg, DecodeLeg))
        if leg is not None:
            leg.submitted()
        return stream

    def _leg(self, stream: Stream, params: AnyParams) -> PrefillLeg | DecodeLeg | None:
        """The request's part in its transfer; None if that has failed already and the prompt is computed here."""
        if self.role not in (params.leg, "both"):
            raise InvalidRequest(f"this worker has role {self.role!r}, the request is a {params.leg} leg")
        if not isinstance(params, DecodeParams):
            stream.leg = PrefillLeg(stream, params.transfer_id, self.engine, self.port)
            return stream.leg
        recompute = self.config.on_transfer_failure == "recompute"
        try:
            control = params.prefill.control
            source = control if isinstance(control, str) else control[0]  # the handshake refuses several shards
            return DecodeLeg(stream, params.transfer_id, source, self.engine, self.port, recompute=recompute)
        except TransferFailed as error:
            if not recompute:
                raise
            emit(FallbackUsed(kind="recompute", reason=error.reason.code))
            stream.kv_path = kv_path.recomputed(error.reason.label)
            return None

    def abort(self, stream: Stream) -> None:
        """Nobody wants the answer any more. Safe in every state."""
        self.engine.abort(stream.request_id)
        if stream.leg is not None:
            stream.leg.left()

    # -- EngineListener, in the engine's thread ----------------------------------------------------------------------

    def output(self, output: TokenOutput) -> None:
        with self._lock:
            stream = self._running.get(output.request_id)
        if stream is None:
            return
        if stream.first_token_s is None:
            stream.first_token_s = time.monotonic()
            self.port.finished(output.request_id, output.token_id)
            self.tiers.answering(output.request_id)
        stream.num_tokens += 1
        stream.finish_reason = output.finish_reason or ""
        stream.put(output)

    def ended(self, request_id: str, error: PdlinkError | None) -> None:
        # Before the id may be used again.
        self.tiers.ended(request_id, forget=isinstance(error, EngineFailure))
        with self._lock:
            stream = self._running.pop(request_id, None)
            self._fewer.notify_all()
        if stream is None:
            return
        if error is not None:
            error = stream.failure or error
        self.port.ended(request_id, error.reason if error else None)
        stream.put(error)
        emit(
            RequestEnded(
                request_id=request_id,
                role=self.role,
                outcome=error.code if error else stream.finish_reason,
                prompt_tokens=stream.num_prompt_tokens,
                completion_tokens=stream.num_tokens,
                started_s=stream.started_s,
                first_token_s=stream.first_token_s,
            )
        )

    # -- life --------------------------------------------------------------------------------------------------------

    def _run_engine(self) -> None:
        try:
            self.engine.run()
        except Exception:
            log.exception("the engine has died")
        finally:
            if not self.draining:
                end_process()

    @property
    def engine_is_dead(self) -> bool:
        return not self._thread.is_alive() and not self.draining

    def drain(self, timeout_s: float) -> None:
        """Take no new requests; return when the running ones and their transfers have ended, or after `timeout_s`."""
        self.draining = True
        deadline_s = time.monotonic() + timeout_s
        while (self.num_requests or any(self.node.report().sending.values())) and time.monotonic() < deadline_s:
            with self._lock:
                self._fewer.wait(0.05)

    def allow(self, allowed: AllowList) -> None:
        """Replace the allow-list of the credentials; sessions whose key is not on it end."""
        self.node.allow(allowed)
        if self.peers is not None:
            self.peers.allow(allowed)

    @property
    def num_requests(self) -> int:
        with self._lock:
            return len(self._running)

    def close(self) -> None:
        """Abort what still runs, end every session and both threads, and give all memory back."""
        self.draining = True
        with self._lock:
            remaining = list(self._running)
        for request_id in remaining:
            self.engine.abort(request_id)
        self.engine.stop()
        self._thread.join(5.0)
        self.node.close()
        if self.peers is not None:
            self.peers.close()
        self.tiers.close()
        if self.kv_events is not None:
            self.kv_events.close()
        self.cache.close()
