"""A prefill, decode or both-role worker: model, cache, engine, endpoint and transports, wired together.

`Worker` is everything but HTTP. Two threads run under it, the engine's and the endpoint's; whoever serves requests
calls `start` from an asyncio loop and reads the answer's tokens from a `Stream` of that loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from pdlink.engine.engine import Engine
from pdlink.engine.layer_order import LayerOrder
from pdlink.engine.models import load_model
from pdlink.engine.paged_cache import PagedCache
from pdlink.engine.request import GenerationRequest
from pdlink.errors import ConfigError, DeadlineExceeded, Draining, InvalidRequest, PdlinkError, TransferFailed
from pdlink.events import FallbackUsed, RequestEnded, emit
from pdlink.memory.blocks import BlockPool
from pdlink.memory.buffers import available_nbytes
from pdlink.node.node import Node
from pdlink.serve.legs import DecodeLeg, Leg, PrefillLeg, recomputed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from pdlink.config import WorkerConfig
    from pdlink.engine.models import LoadedModel
    from pdlink.engine.request import SamplingParams, TokenOutput
    from pdlink.kv.sources import TokenRange
    from pdlink.protocol.auth import Credentials
    from pdlink.serve.legs import Item
    from pdlink.serve.openai import TransferParams

log = logging.getLogger(__name__)


_MAX_PEERS_SHOWN = 256
"""Sessions listed in /health."""


class Stream:
    """The tokens of one request, in the asyncio loop that asked for them."""

    def __init__(self, request_id: str, timeout_s: float) -> None:
        self.request_id = request_id
        self.leg: Leg | None = None
        """The part of its request in a transfer."""
        self.fallback: TransferFailed | None = None
        """Why a decode leg has no part in its transfer from the start."""
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Item] = asyncio.Queue()

    @property
    def kv_path(self) -> str:
        """How the KV of a decode leg's prompt came here, for a header; known with its first token. Else empty."""
        if self.fallback is not None:
            return recomputed(self.fallback)
        return self.leg.kv_path if isinstance(self.leg, DecodeLeg) else ""

    def put(self, item: Item) -> None:
        """From any thread: a token, or the end (None, or the error that ended the request)."""
        try:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, item)
        except RuntimeError:  # the loop is closed: nobody reads any more
            log.debug("request %s ended after its reader", self.request_id)

    async def __aiter__(self) -> AsyncIterator[TokenOutput]:
        """Tokens until the request has ended. Raises the error that ended it, DeadlineExceeded after the deadline."""
        deadline_s = self._loop.time() + self._timeout_s
        while True:
            try:
                async with asyncio.timeout_at(deadline_s):
                    item = await self._queue.get()
            except TimeoutError:
                raise DeadlineExceeded(f"the request was not answered within {self._timeout_s} s") from None
            if item is None:
                return
            if isinstance(item, PdlinkError):
                raise item
            yield item


class _Running:
    """A request between HTTP and engine."""

    def __init__(self, stream: Stream, num_prompt_tokens: int) -> None:
        self.stream, self.leg, self.num_prompt_tokens = stream, stream.leg, num_prompt_tokens
        self.started_s = time.monotonic()
        self.first_token_s: float | None = None
        self.num_tokens = 0
        self.finish_reason = ""

    def put(self, item: Item) -> None:
        """For the client."""
        (self.leg if isinstance(self.leg, PrefillLeg) else self.stream).put(item)


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

    def __init__(self, config: WorkerConfig, name: str, credentials: Credentials | None = None) -> None:
        """credentials: what the settings in `config.security` name, read; None where they name none."""
        self.config, self.name = config, name
        self._credentials = credentials
        self._running: dict[str, _Running] = {}
        self._lock = threading.Lock()
        """Guards `_running`: added to by the asyncio loop, taken from by the engine's thread."""
        self._fewer = threading.Condition(self._lock)
        """A request has ended."""
        self._draining = False

    def open(self) -> None:
        """Load the model, allocate and register the cache, bind the control port, start both threads.

        Raises ConfigError, TransportUnavailable, OSError (no memory). Takes the time the model takes to load.
        """
        config = self.config
        torch.set_num_threads(config.engine.threads)
        self.model = load_model(config.model, config.engine.device)
        num_blocks = _num_blocks(config, self.model)
        self.pool = BlockPool(num_blocks)
        self.cache = PagedCache(
            self.model,
            num_blocks=num_blocks,
            block_tokens=config.cache.block_tokens,
            order=config.cache.order,
        )
        self.engine = Engine(
            self.model,
            self.pool,
            self.cache,
            config.engine,
            self,
            block_tokens=config.cache.block_tokens,
            share_prefixes=config.cache.share_prefixes,
            layer_delay_s=config.simulate_layer_s,
            layer_order=LayerOrder(self.cache.buffer.make_event) if self.cache.buffer.kind == "cuda" else None,
        )
        self.node = Node(
            self.name,
            self.cache.layout,
            [self.cache.buffer],
            host=config.control_host,
            port=config.control_port,
            advertise_host=config.advertise_host,
            model=self.model.name,
            revision=self.model.revision,
            content=self.model.content,
            pool=self.pool,
            transport=config.transport,
            timeouts=config.timeouts,
            credentials=self._credentials,
            insecure=config.security.insecure,
            chaos=config.chaos,
            layers_come_written=True,
            short_of_blocks=lambda: self.engine.num_waiting > 0,
            on_death=self._die,
        )
        self.endpoint = self.node.endpoint
        self._thread = threading.Thread(target=self._run_engine, name=f"pdlink-engine-{self.name}", daemon=True)
        self._thread.start()

    # -- requests, from the asyncio loop -----------------------------------------------------------------------------

    def start(
        self,
        request_id: str,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        params: TransferParams | None,
        *,
        salt: str = "",
    ) -> Stream:
        """Begin a request, alone or as one leg of a transfer; its tokens come through the stream.

        Raises what the engine's `submit` raises, InvalidRequest for a leg this role does not serve or a transfer id
        used before, TransferFailed if the other leg has failed already and the setting is to fail.
        """
        if self._draining:
            raise Draining("this worker is shutting down; send the request to another one")
        stream = Stream(request_id, self.config.timeouts.request_s)
        external: tuple[TokenRange, ...] = ()
        goes_on = False
        leg: Leg | None = None
        if params is not None:
            if self.config.role not in (params.leg, "both"):
                raise InvalidRequest(f"this worker has role {self.config.role!r}, the request is a {params.leg} leg")
            if params.leg == "prefill":
                goes_on = sampling.max_tokens > 1
                sampling = replace(sampling, max_tokens=1)
                leg = PrefillLeg(
                    request_id,
                    params.transfer_id,
                    len(prompt),
                    put=stream.put,
                    engine=self.engine,
                    node=self.node,
                )
            else:
                try:
                    leg = self._decode_leg(request_id, params, len(prompt))
                    external = leg.external
                except TransferFailed as error:
                    if self.config.on_transfer_failure == "fail":
                        raise
                    emit(FallbackUsed(kind="recompute", reason=str(error)))
                    stream.fallback = error
        stream.leg = leg
        request = GenerationRequest(request_id, prompt, sampling, external=external, goes_on=goes_on, salt=salt)
        try:
            self._submit(request, _Running(stream, len(prompt)))
        except PdlinkError as error:
            if leg is not None:
                leg.ended(error)
            raise
        if isinstance(leg, DecodeLeg):
            leg.submitted()
        return stream

    def _submit(self, request: GenerationRequest, running: _Running) -> None:
        """Hand the request to the engine, whose thread may tell of it at once. Raises what `Engine.submit` raises."""
        request_id = request.request_id
        with self._lock:
            if request_id in self._running:
                raise InvalidRequest(f"request id {request_id!r} is in use")
            self._running[request_id] = running
        try:
            self.engine.submit(request)
        except PdlinkError:
            with self._lock:
                del self._running[request_id]
            raise

    def _decode_leg(self, request_id: str, params: TransferParams, num_prompt_tokens: int) -> DecodeLeg:
        """Raises TransferFailed if prefill has failed already, PeerNotAllowed for an address that no request may make
        this worker dial."""
        if params.prefill is None:
            raise InvalidRequest("kv_transfer_params.prefill is missing on a decode leg")
        return DecodeLeg(
            request_id,
            params.transfer_id,
            num_prompt_tokens,
            params.prefill.control,
            recompute=self.config.on_transfer_failure == "recompute",
            engine=self.engine,
            node=self.node,
        )

    def abort(self, stream: Stream) -> None:
        """Nobody wants the answer any more. Safe in every state."""
        self.engine.abort(stream.request_id)
        if isinstance(stream.leg, PrefillLeg):
            stream.leg.left()

    def stop_transfer(self, transfer_id: str, reason: str) -> None:
        """The proxy says that the other leg of this transfer has failed."""
        self.endpoint.receiver.cancel(transfer_id, f"prefill_failed: {reason}")
        self.endpoint.sender.cancel(transfer_id, reason)

    # -- EngineListener, in the engine's thread ----------------------------------------------------------------------

    def admitted(self, request_id: str, block_table: Sequence[int], num_cached_tokens: int) -> None:
        leg = self._leg(request_id)
        if leg is not None:
            leg.admitted(block_table, num_cached_tokens)

    def prefilling(self, on: bool) -> None:
        self.node.prefilling(on)

    def layer_needed(self, request_id: str, layer: int, timeout_s: float) -> bool:
        leg = self._leg(request_id)
        return isinstance(leg, DecodeLeg) and leg.layer_needed(layer, timeout_s)

    def layer_written(self, layer: int, spans: Sequence[tuple[str, int, int]]) -> None:
        for request_id, start, end in spans:
            leg = self._leg(request_id)
            if leg is not None:
                leg.layer_written(layer, start, end)

    def output(self, output: TokenOutput) -> None:
        with self._lock:
            running = self._running.get(output.request_id)
        if running is None:
            return
        if running.first_token_s is None:
            running.first_token_s = time.monotonic()
        running.num_tokens += 1
        running.finish_reason = output.finish_reason or ""
        if running.leg is not None:
            running.leg.output(output)
        running.put(output)

    def ended(self, request_id: str, error: PdlinkError | None) -> None:
        with self._lock:
            running = self._running.pop(request_id, None)
            self._fewer.notify_all()
        if running is None:
            return
        leg = running.leg
        if isinstance(leg, PrefillLeg) and leg.failure is not None and error is not None:
            error = leg.failure
        if leg is not None:
            leg.ended(error)
        running.put(error)
        emit(
            RequestEnded(
                request_id=request_id,
                role=self.config.role,
                outcome=error.code if error else running.finish_reason,
                prompt_tokens=running.num_prompt_tokens,
                completion_tokens=running.num_tokens,
                started_s=running.started_s,
                first_token_s=running.first_token_s,
            )
        )

    def _leg(self, request_id: str) -> Leg | None:
        with self._lock:
            running = self._running.get(request_id)
        return running.leg if running else None

    # -- reports and life --------------------------------------------------------------------------------------------

    def _run_engine(self) -> None:
        try:
            self.engine.run()
        finally:
            if not self._draining:
                self._die()

    def _die(self) -> None:
        """A thread this worker cannot be without has ended: end the process, so that whoever runs it starts it again.

        As a zombie it would keep blocks, and requests that wait for KV, until their deadlines.
        """
        os.kill(os.getpid(), signal.SIGTERM)

    def problem(self) -> str:
        """Why this worker cannot serve; empty while it can."""
        endpoint = self.endpoint
        if endpoint.failure:
            return endpoint.failure
        if not self._thread.is_alive() and not self._draining:
            return "the engine's thread has died"
        stalled_s = time.monotonic() - endpoint.ticked_s
        if stalled_s > 10 * self.config.timeouts.peer_s:
            return f"the endpoint's loop has not gone round for {stalled_s:.0f} s"
        return ""

    def health(self) -> tuple[bool, dict[str, object]]:
        """Whether new requests are welcome, and the body of /health. Depends on nothing but this process."""
        endpoint = self.endpoint
        problem = self.problem()
        status = "failed" if problem else "draining" if self._draining else "ok"
        return status == "ok", {
            "status": status,
            "reason": problem,
            "name": self.name,
            "epoch": endpoint.epoch,
            "role": self.config.role,
            "model": self.model.name,
            "control": endpoint.address,
            "running": self.engine.num_running + self.engine.num_awaiting_kv,
            "waiting": self.engine.num_waiting,
            "free_blocks": self.pool.num_free,
            "num_blocks": self.pool.num_blocks,
            "block_tokens": self.config.cache.block_tokens,
            "peers": [
                {
                    "peer": peer.name,
                    "address": peer.address,
                    "state": peer.state.value,
                    "transport": peer.transport.name if peer.transport else "",
                    "lane": peer.lane,
                }
                for peer in endpoint.peers()[:_MAX_PEERS_SHOWN]
            ],
            "refused": [
                {
                    "peer": refused.peer,
                    "address": refused.address,
                    "factor": refused.factor,
                    "local": refused.local,
                    "remote": refused.remote,
                    "count": refused.count,
                    "retry_s": round(refused.retry_s, 3),
                }
                for refused in endpoint.refused()
            ],
        }

    def drain(self, timeout_s: float) -> None:
        """Take no new requests; return when the running ones and their transfers have ended, or after `timeout_s`."""
        self._draining = True
        deadline_s = time.monotonic() + timeout_s
        while (self.num_requests or any(self.endpoint.sender.states().values())) and time.monotonic() < deadline_s:
            with self._lock:
                self._fewer.wait(0.05)

    @property
    def num_requests(self) -> int:
        """Requests not ended yet."""
        with self._lock:
            return len(self._running)

    def close(self) -> None:
        """Abort what still runs, end every session and both threads, and give all memory back."""
        self._draining = True
        with self._lock:
            remaining = list(self._running)
        for request_id in remaining:
            self.engine.abort(request_id)
        self.engine.stop()
        self._thread.join(5.0)
        self.node.close()
        self.cache.close()
