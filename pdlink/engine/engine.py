"""Continuous batching with chunked prefill: schedule, run, sample, tell the listener.

Theory of operation. One thread (`run`) owns all state and is the only one that touches the model. Other threads only
put a call into the inbox, under the one lock, and wake the loop; `submit` also checks what needs no state besides
the set of live request ids, which that lock guards. A step is: do what the inbox says, admit, one forward pass,
choose a token for each request whose last token was in it. The listener is called from this thread with no lock
held, so it may call back into any public method.

KV from elsewhere may arrive layer by layer. When there is nothing else to compute, an *early pass* then begins before
the last layer is here, and asks for each layer just before it reads it. It has one request and a bounded time to
wait, so a slow source delays nobody for longer. Where the whole prompt comes from elsewhere its result is kept back
until `kv_arrived` confirms all of the KV; where the rest is computed here, the last layer is the confirmation.

Every accepted request ends exactly once: `_end` is the only way out, and when `run` returns, by `stop` or by an
exception, it ends the remaining requests.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

import torch

from pdlink.engine.answer import Detokenizer, choose
from pdlink.engine.forward import QuerySpan
from pdlink.engine.pace import Pace
from pdlink.engine.request import TokenOutput
from pdlink.engine.scheduler import EarlyPass, PassWork, Scheduler, Sequence
from pdlink.errors import (
    CapacityExceeded,
    EngineFailure,
    InvalidRequest,
    Overloaded,
    PdlinkError,
    ProtocolError,
    RequestAborted,
)
from pdlink.kv.hashing import Chain, Origin, namespace

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdlink.config import EngineConfig
    from pdlink.engine.forward import LoadedModel, PagedCache
    from pdlink.engine.request import EngineListener, GenerationRequest, KVListener
    from pdlink.memory.blocks import BlockPool

    Complete = Callable[[str, list[int], tuple[int, ...], Chain], None]
    Prompts = tuple[tuple[str, int, int], ...]
    """(request_id, start, end) of the prompt tokens in a pass."""

_EARLY_WAIT_S = 0.1
"""How long one early pass may wait for layers, all together. New requests and aborts wait as long."""

_IDLE_WAIT_S = 1.0
"""Longest sleep of the loop: a fallback, since every change wakes it."""


class _LayerMissing(Exception):
    """A layer did not come in time: ends an early pass."""


class Engine:
    """Generates tokens for many requests at once with one model."""

    def __init__(
        self,
        model: LoadedModel,
        pool: BlockPool,
        cache: PagedCache,
        config: EngineConfig,
        listener: EngineListener,
        kv: KVListener,
        *,
        share_prefixes: bool,
        on_complete: Complete | None = None,
        origin: Origin | None = None,
        chunk_tokens: int | None = None,
    ) -> None:
        """`pool` counts the blocks of `cache` and may be shared with others who hold some of them.

        on_complete(request_id, tokens, blocks, chain): told of each complete answer before it gives its blocks back,
        which hold the KV of these tokens of prompt and answer; chain: as of `submit`.
        origin, chunk_tokens: of others who name the KV of the same tokens; None where nobody does.
        """
        if pool.num_blocks != cache.layout.num_blocks:
            raise ValueError(f"pool: got {pool.num_blocks} blocks, the cache has {cache.layout.num_blocks}")
        self._model = model
        self._pool = pool
        self._cache = cache
        self._config = config
        self._listener, self._kv, self._on_complete = listener, kv, on_complete
        self._scheduler = Scheduler(
            pool,
            block_tokens=cache.block_tokens,
            max_batched_tokens=config.max_batched_tokens,
            max_running=config.max_running,
            share_prefixes=share_prefixes,
        )
        self._origin = origin or Origin(model.name, model.revision, model.dtype)
        self._chunk_tokens = chunk_tokens
        self.pace = Pace()
        self.num_sampled = 0
        """Tokens of answers made since the start, also of requests that go on."""
        self._sequences: dict[str, Sequence] = {}
        self._wakeup = threading.Condition()
        # Guarded by `_wakeup`:
        self._inbox: deque[Callable[[], None]] = deque()
        self._live: set[str] = set()
        self._awake = False
        self._stopping = False

    # --- Any thread

    def submit(self, request: GenerationRequest) -> Chain:
        """Accept the request; from now on the listener hears of it, and of its end.

        Returns what hashes its tokens, once for all who name their KV; the caller's while `awaits_lookup` holds.
        Raises InvalidRequest (empty prompt, token outside the vocabulary, id in use), CapacityExceeded (can never
        fit) or Overloaded (too many requests now, or the engine is stopping).
        """
        request.check(max_tokens=self._model.max_tokens, vocab_size=self._model.vocab_size)
        num_blocks = self._scheduler.blocks_for(request)
        if num_blocks > self._pool.num_blocks:
            raise CapacityExceeded(f"{num_blocks} KV blocks are needed, this worker has {self._pool.num_blocks}")
        limit = self._config.max_running + self._config.max_waiting
        seed = namespace(self._origin._replace(salt=request.salt))
        chain = Chain(seed, self._cache.block_tokens, self._chunk_tokens)
        with self._wakeup:  # reentrant, for `soon`
            if self._stopping:
                raise Overloaded("the engine is stopping")
            if request.request_id in self._live:
                raise InvalidRequest(f"request id {request.request_id!r} is in use")
            if len(self._live) >= limit:
                raise Overloaded(f"{len(self._live)} requests are running or queued, the limit is {limit}")
            self._live.add(request.request_id)
            self.soon(partial(self._on_submit, request, chain))
        return chain

    def abort(self, request_id: str) -> None:
        """End the request with RequestAborted, in whatever state it is. Unknown ids are ignored."""
        self.soon(partial(self._on_abort, request_id))

    def soon(self, call: Callable[[], None]) -> None:
        """Have this called in the engine's thread, between two steps. It must be quick, and not raise."""
        with self._wakeup:
            self._inbox.append(call)
            self._awake = True
            self._wakeup.notify_all()

    def wake(self) -> None:
        """Look again: something outside has changed, such as blocks given back."""
        with self._wakeup:
            self._awake = True
            self._wakeup.notify_all()

    def stop(self) -> None:
        """Make `run` return after the pass it is in; requests that are left end with RequestAborted."""
        with self._wakeup:
            self._stopping = True
            self._wakeup.notify_all()

    @property
    def num_running(self) -> int:
        """Requests that take part in forward passes."""
        return len(self._scheduler.prefilling) + len(self._scheduler.decoding)

    @property
    def num_awaiting_kv(self) -> int:
        """Requests that have their blocks and wait for KV from elsewhere."""
        return len(self._scheduler.awaiting_kv)

    @property
    def num_waiting(self) -> int:
        """Accepted requests that have no blocks yet."""
        return max(0, len(self._live) - self.num_running - self.num_awaiting_kv)

    @property
    def tokens_to_compute(self) -> int:
        """Of the prompts that it has, computed here and not yet."""
        sequences = list(self._sequences.values())
        return sum(max(0, each.num_prompt - max(each.num_computed, each.external_end)) for each in sequences)

    @property
    def tokens_held(self) -> int:
        """Of the requests that it has: their prompts, and their answers as long as they may get."""
        sequences = list(self._sequences.values())
        return sum(each.num_prompt + each.request.sampling.max_tokens for each in sequences)

    # --- The engine's thread: what becomes of KV from elsewhere, told by the listener or through `soon`

    def kv_found(self, request_id: str, upto: int) -> None:
        """The look-up is over: the KV of prompt tokens [0, upto), less than all, can come from elsewhere.

        The request is admitted now, and waits for them until `kv_ends`. Ignored if it does not wait for a look-up.
        """
        sequence = self._sequences.get(request_id)
        if sequence is not None and sequence.awaits_lookup:
            sequence.awaits_lookup, sequence.external_end = False, max(upto, sequence.external_end)

    def kv_coming(self, request_id: str, upto: int, first_token: int | None = None) -> None:
        """The KV of prompt tokens [0, upto) is on its way, layer by layer: a pass behind them may begin.

        first_token: of the answer, if they are the whole prompt. The pass asks the listener's `layer_needed`. With
        the whole prompt its result waits for `kv_arrived` with the same first token; with less it counts, because the
        last layer is here only when all of the KV counts. Ignored if the request does not wait for this KV.
        """
        sequence = self._scheduler.awaiting_kv.get(request_id)
        if sequence is None or sequence.is_all_external is not (upto == sequence.num_prompt):
            return
        if not sequence.is_all_external or 0 <= (-1 if first_token is None else first_token) < self._model.vocab_size:
            sequence.arriving, sequence.external_end, sequence.given_token = True, upto, first_token

    def kv_arrived(self, request_id: str, upto: int, first_token: int | None = None) -> None:
        """The KV of prompt tokens [0, upto) is in the request's blocks, for all layers.

        May be called several times, with growing `upto`. When it covers the request's external tokens the request
        goes on: with `first_token`, output index 0, if they are the whole prompt, else by computing the rest.
        Ends the request with ProtocolError for more tokens than it takes from elsewhere, for a first token outside
        the vocabulary and for one that is missing. Ignored if the request does not wait for KV (any more).
        """
        sequence = self._scheduler.awaiting_kv.get(request_id)
        if sequence is None:
            return
        if upto > sequence.external_end:
            error = f"upto: got {upto}, this request takes the KV of {sequence.external_end} tokens from elsewhere"
            self._end(sequence, ProtocolError(error))
            return
        self._scheduler.computed(sequence, max(upto, sequence.num_computed))
        if sequence.num_computed < sequence.external_end:
            return
        if not sequence.is_all_external:
            self._scheduler.start(sequence)
        elif first_token is None or not 0 <= first_token < self._model.vocab_size:
            error = f"first token: got {first_token}, the vocabulary has {self._model.vocab_size} tokens"
            self._end(sequence, ProtocolError(error))
        else:
            self._append(sequence, first_token)
            early = sequence.early
            if early is not None and early.first_token == first_token and request_id in self._sequences:
                self._scheduler.computed(sequence, sequence.num_prompt + 1)
                self._sample(sequence, early.logits)

    def kv_ends(self, request_id: str, upto: int) -> None:
        """As `kv_arrived`, and no more will come: the rest of the prompt is computed, in the same blocks.

        For a source that had that part in advance, which counts as cached, and that writes to no block any more.
        """
        sequence = self._scheduler.awaiting_kv.get(request_id)
        if sequence is not None:
            self._scheduler.computed(sequence, max(upto, sequence.num_computed))
            sequence.num_cached = sequence.num_computed
            self._scheduler.start(sequence)

    def kv_failed(self, request_id: str, *, recompute: bool, error: PdlinkError) -> None:
        """The rest of the external KV will not come. recompute: compute from where it ends; else end with `error`.

        A recomputed request is first in line and keeps the full blocks that `kv_arrived` has covered. The engine
        gives all its other references back. A source that may still write to blocks holds references of its own.
        Ignored if the request does not wait for KV (any more). It may not have its blocks yet.
        """
        sequence = self._sequences.get(request_id)
        if sequence is None or not sequence.external_end:
            return
        if recompute:
            self._scheduler.start_anew(sequence)
        else:
            self._end(sequence, error)

    # --- The engine's thread

    def run(self) -> None:
        """Serve until `stop`."""
        torch.set_num_threads(self._config.threads)  # of this thread, which is why it is done here
        if self._cache.device.type == "cuda":
            torch.cuda.set_device(self._cache.device)  # likewise: whose current stream a layer's event is recorded in
        try:
            while not self._stopping:
                if not self.step():
                    with self._wakeup:
                        self._wakeup.wait_for(lambda: self._awake or self._stopping, _IDLE_WAIT_S)
                        self._awake = False
        finally:
            self._end_all()

    def step(self) -> bool:
        """Do what there is to do, at most one forward pass of it; False if there was nothing."""
        num_calls = self._do_inbox()
        admitted = self._scheduler.admit()
        for sequence in admitted:
            blocks, external = tuple(sequence.blocks), sequence.external_end
            self._kv.admitted(sequence.request_id, blocks, sequence.num_cached, external)
        batch = self._scheduler.next_pass()
        early = None
        if batch:
            self._run_pass(batch)
        else:  # such a pass waits for layers, and nobody waits with it
            early = next((each for each in self._scheduler.awaiting_kv.values() if each.arriving), None)
            if early is not None:
                self._run_early(early)
        return bool(num_calls or admitted or batch or early)

    def _run_pass(self, batch: list[PassWork], follow: Callable[..., None] | None = None) -> None:
        """follow: for the one request of an early pass, called in each layer as `_follow`."""
        tokens = [token for work in batch for token in work.sequence.tokens[work.start : work.end]]
        sampling = []
        rows = []
        row = -1
        for work in batch:
            row += work.end - work.start
            if work.end == len(work.sequence.tokens):  # then the pass gives the logits of the next token
                sampling.append(work.sequence)
                rows.append(row)
        prompts = tuple(
            (work.sequence.request_id, work.start, work.end)
            for work in batch
            if work.start < work.sequence.num_prompt
        )
        written: Callable[[int], None] | None = partial(self._kv.layer_written, spans=prompts) if prompts else None
        if follow is not None:
            written = partial(follow, prompts, [])
        began_s = time.monotonic()
        if prompts:
            self._kv.prefilling(on=True)
        try:
            logits = self._forward(batch, tokens, rows, written)
        finally:
            if prompts:
                self._kv.prefilling(on=False)
        if logits is None:
            return
        for work in batch:
            if follow is not None:
                work.sequence.num_cached = work.start
                self._scheduler.start(work.sequence)
            self._scheduler.computed(work.sequence, work.end)
        for sequence, row_logits in zip(sampling, logits, strict=True):
            self._sample(sequence, row_logits)
        if follow is None:  # an early pass waits for others
            self.pace.passed(batch, time.monotonic() - began_s)  # after the samples: on a GPU they end the pass

    def _run_early(self, sequence: Sequence) -> None:
        """A pass over what is behind the KV that arrives: of the prompt, or the first token of the answer."""
        sequence.arriving, deadline_s = False, time.monotonic() + _EARLY_WAIT_S
        if not sequence.is_all_external:
            self._run_pass([self._scheduler.behind_external(sequence)], partial(self._follow, deadline_s))
            return
        first_token, end = sequence.given_token, sequence.num_prompt + 1
        assert first_token is not None
        if self._stops(sequence, first_token) or sequence.request.sampling.max_tokens == 1:
            return  # the answer ends with it
        needed = partial(self._wait_for_layer, sequence.request_id, deadline_s)
        logits = self._forward([PassWork(sequence, end - 1, end)], [first_token], [0], needed)
        if logits is not None:
            sequence.early = EarlyPass(first_token, logits[0])

    def _forward(
        self, batch: list[PassWork], tokens: list[int], rows: list[int], written: Callable[[int], None] | None
    ) -> torch.Tensor | None:
        """Logits of these rows; None for an early pass whose layer is missing, and if the pass fails: then its
        requests end.

        written: see `PagedCache.begin`.
        """
        spans = [QuerySpan(work.sequence.table, work.start, work.end) for work in batch]
        try:
            return self._model.logits(self._cache, torch.tensor(tokens), spans, rows, layer_written=written)
        except _LayerMissing:
            return None
        except RuntimeError as error:
            for work in batch:
                self._end(work.sequence, EngineFailure(f"a forward pass of {len(tokens)} tokens failed: {error}"))
            return None

    def _follow(self, deadline_s: float, prompts: Prompts, untold: list[int], layer: int) -> None:
        """An early pass has written `layer` and is about to read it: wait for its external part, tell what counts.

        What the pass has written counts once all external KV is here; before that it may yet be computed again.
        untold: layers that are written and not told.
        """
        request_id, last = prompts[0][0], len(self._cache.layout.layers) - 1
        self._wait_for_layer(request_id, deadline_s, layer)
        untold.append(layer)
        if self._kv.layer_needed(request_id, last, 0.0):
            for written in untold:
                self._kv.layer_written(written, prompts)
            untold.clear()

    def _wait_for_layer(self, request_id: str, deadline_s: float, layer: int) -> None:
        if not self._kv.layer_needed(request_id, layer, max(0.0, deadline_s - time.monotonic())):
            raise _LayerMissing

    def _sample(self, sequence: Sequence, logits: torch.Tensor) -> None:
        request = sequence.request
        position = sequence.num_output + request.num_answered
        if torch.isfinite(logits.max()):
            self._append(sequence, choose(logits, request.sampling, position))
        else:
            self._scheduler.forget(sequence)
            self._end(sequence, EngineFailure(f"the logits of output {position} are not finite"))

    def _append(self, sequence: Sequence, token: int) -> None:
        """Report the next token of the answer, and end the request if it is the last one."""
        sampling = sequence.request.sampling
        index = sequence.num_output
        sequence.tokens.append(token)
        self.num_sampled += 1
        reason: str | None = None
        if self._stops(sequence, token):
            text, reason = sequence.detokenizer.finish(), "stop"
        else:
            text, stopped = sequence.detokenizer.add(token)
            if stopped:
                reason = "stop"
            elif index + 1 == sampling.max_tokens:
                reason = "length"
                if not sequence.request.goes_on:
                    text += sequence.detokenizer.finish()
        if index == 0:
            self._scheduler.start(sequence)
        position = index + sequence.request.num_answered
        self._listener.output(TokenOutput(sequence.request_id, position, token, text, reason, sequence.num_cached))
        if reason is not None:
            self._end(sequence, None)

    def _stops(self, sequence: Sequence, token: int) -> bool:
        """Whether this token ends the answer, wherever it stands."""
        sampling = sequence.request.sampling
        is_eos = token in self._model.eos_token_ids and not sampling.ignore_eos
        return is_eos or token in sampling.stop_token_ids

    def _end(self, sequence: Sequence, error: PdlinkError | None) -> None:
        if error is None and self._on_complete is not None:
            tokens, blocks = sequence.tokens[: sequence.num_computed], tuple(sequence.blocks)
            self._on_complete(sequence.request_id, tokens, blocks, sequence.chain)
        self._scheduler.remove(sequence)
        del self._sequences[sequence.request_id]
        with self._wakeup:
            self._live.discard(sequence.request_id)
        self._listener.ended(sequence.request_id, error)

    def _end_all(self) -> None:
        """End all remaining requests, those still in the inbox included."""
        with self._wakeup:
            crashed = not self._stopping
            self._stopping = True
        self._do_inbox()
        for sequence in list(self._sequences.values()):
            error = EngineFailure("the engine has failed") if crashed else RequestAborted("the engine was stopped")
            self._end(sequence, error)

    # --- Inbox

    def _do_inbox(self) -> int:
        """Run the calls that are in the inbox now; returns their number. One at a time: an exception loses none."""
        num_calls = len(self._inbox)
        for _ in range(num_calls):
            with self._wakeup:
                call = self._inbox.popleft()
            call()
        return num_calls

    def _on_submit(self, request: GenerationRequest, chain: Chain) -> None:
        begin = len(request.prompt_token_ids) - request.num_answered
        detokenizer = Detokenizer(self._model.tokenizer, request.prompt_token_ids[:begin], request.sampling.stop)
        for token in request.prompt_token_ids[begin:]:
            detokenizer.add(token)
        sequence = Sequence(
            request=request,
            request_id=request.request_id,
            num_prompt=len(request.prompt_token_ids),
            detokenizer=detokenizer,
            tokens=list(request.prompt_token_ids),
            chain=chain,
            external_end=request.external_tokens,
            awaits_lookup=request.awaits_lookup,
        )
        self._sequences[request.request_id] = sequence
        self._scheduler.waiting.append(sequence)

    def _on_abort(self, request_id: str) -> None:
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._end(sequence, RequestAborted(f"request {request_id!r} was aborted"))
