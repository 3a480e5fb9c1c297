"""Where the KV of the built-in engine's prompts comes from: its blocks, its tiers, a prefill worker, or computing.

`Tiered` stands between the engine and its port. With tiers a prompt is looked up while its request is in line, and
kept when it is computed. What the store has of a prompt is loaded into the request's blocks as far as that is faster.
Where the rest is computed here, loaded layers are pushed like computed ones, and what is computed goes to the store,
layer by layer. A rest that comes from a prefill worker is offered for after the load.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from pdlink.errors import PdlinkError
from pdlink.events import PromptSourced, emit
from pdlink.store.line import Line
from pdlink.store.worth import Choice, Speed, longest_look_s

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from pdlink.api.session import AskedSession
    from pdlink.engine.engine import Engine
    from pdlink.kv.hashing import Chain
    from pdlink.node.port import EnginePort
    from pdlink.store.loading import Load
    from pdlink.store.prompt import Prompt
    from pdlink.store.slots import Retention
    from pdlink.store.source import Source
    from pdlink.store.worth import Reason

_LOOKERS = 2
"""Threads that look prompts up; all who wait for a slow tier do so until their own deadlines."""
_CLOSE_S = 2.0


@dataclass(eq=False, slots=True)
class KeptTurn:
    """The turn of an agent's session that a request is."""

    session: AskedSession
    kept_tokens: int | None = None
    """Of the prompt, that the session keeps, once that is known; None where this worker keeps nothing of it."""


@dataclass(eq=False, slots=True)
class _Request:
    request_id: str
    tokens: tuple[int, ...]
    salt: str
    retention: Retention | None
    """None: its KV is not kept."""
    turn: KeptTurn | None
    not_loaded: Reason
    """Why nothing of it is loaded, without a `prompt`."""
    source: str
    """Address of a store that may have KV of it; empty for none."""
    prompt: Prompt | None = None
    """Set when it is looked up, before the engine admits the request."""
    stored: Prompt | None = None
    """What is kept here of its prompt, perhaps with the answer; a prompt that is received is not."""
    blocks: Sequence[int] = ()
    """Another object after each admission."""
    load: Load | None = None
    found: int = 0
    """Leading tokens that the look-up found."""
    offered_s: float | None = None
    """When it asked the prefill worker for KV."""
    num_offered: int = 0


class Tiered:
    """Implements `pdlink.engine.request.KVListener`; hands on to the port what it is told."""

    def __init__(
        self,
        port: EnginePort,
        source: Source | None,
        engine: Callable[[], Engine],
        *,
        load_if_faster: bool = True,
    ) -> None:
        """source: None without tiers. engine: the one whose listener this becomes. load_if_faster: False loads all
        that is found."""
        self._port, self._source, self._engine = port, source, engine
        self._load_if_faster = load_if_faster
        self._num_layers = 0 if source is None else source.groups[0].num_layers
        self._requests: dict[str, _Request] = {}
        """Added to before the engine knows the request; otherwise the engine's thread's."""
        self._lookers = Line("pdlink-store-look", _LOOKERS)
        self._computing, self._receiving = Speed(), Speed()
        """Seconds for tokens. The engine's thread measures."""
        self._pass_s: float | None = None
        """When the pass began that is measured, and its tokens of prompts."""
        self._pass_tokens = 0

    # --- The thread that starts requests

    def begin(
        self,
        request_id: str,
        tokens: tuple[int, ...],
        salt: str,
        retention: Retention | None,
        turn: KeptTurn | None = None,
        source: str = "",
    ) -> bool:
        """The engine is about to get this request, which ends with `ended`. Whether it waits for a look-up.

        A prompt shorter than a chunk has nothing in the store, nor is it kept.
        """
        kept = self._source
        why: Reason = "look_up_failed"
        if kept is None:
            why = "no_tiers"
        elif len(tokens) < kept.chunk_tokens:
            why = "not_found"
        self._requests[request_id] = _Request(request_id, tokens, salt, retention, turn, why, source)
        return why == "look_up_failed"

    def look(self, request_id: str, chain: Chain, *, receives: bool) -> None:
        """The engine has it, and waits for the look-up: no longer than the whole prompt would take otherwise.

        chain: of `Engine.submit`. receives: a prefill worker computes it.
        """
        request, source = self._requests.get(request_id), self._source
        if request is None or source is None:
            return
        now_s, timeout_s = time.monotonic(), source.lookup_timeout_s
        if self._load_if_faster:
            other = self._receiving if receives else self._computing
            timeout_s = longest_look_s(timeout_s, other, len(request.tokens), now_s)
        self._lookers.put(partial(self._look, source, request, chain, now_s + timeout_s, receives=receives))

    def _look(self, source: Source, request: _Request, chain: Chain, deadline_s: float, *, receives: bool) -> None:
        """In a looker's thread. Holds nothing but what the request's session keeps."""
        try:
            keys = source.keys(request.tokens, request.salt, chain=chain)
            prompt = source.prompt(request.request_id, keys, request.retention)
            if not receives:
                request.stored = prompt
                _hold(request, waits=False)
                if self._requests.get(request.request_id) is not request:  # it has ended, and `ended` may be first
                    _hold(request, waits=True)
            if request.source:
                prompt.comes_from(request.source)
            request.found = prompt.lookup(timeout_s=max(0.0, deadline_s - time.monotonic()))
            request.prompt = prompt
        finally:
            self._engine().soon(partial(self._looked_up, request))

    # --- The engine's thread

    def _looked_up(self, request: _Request) -> None:
        if self._requests.get(request.request_id) is request:
            self._engine().kv_found(request.request_id, request.found)

    def ended(self, request_id: str, *, forget: bool = False) -> None:
        """The request is over, or was not accepted. forget: its KV is not to be trusted."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            if request.load is not None:
                request.load.cancel()
            if request.prompt is not None:
                request.prompt.close(forget=forget)
            if request.turn is not None and self._source is not None and not forget:
                self._source.copier.put(partial(_hold, request, waits=True))

    def admitted(self, request_id: str, blocks: Sequence[int], num_cached_tokens: int, external_tokens: int) -> None:
        request = self._requests.get(request_id)
        if request is None:
            self._port.admitted(request_id, [blocks], num_cached_tokens)
            return
        if request.load is not None:  # into blocks that it has no more
            request.load.cancel()
        request.blocks, request.load, request.offered_s = blocks, None, None
        cached, receives = num_cached_tokens, external_tokens == len(request.tokens)
        if not receives:
            self._port.admitted(request_id, [blocks], cached)
        if request.prompt is None:
            choice = Choice(cached, request.not_loaded)
        else:
            other = self._receiving if receives else self._computing
            choice = request.prompt.choose(cached, other, always=not self._load_if_faster)
        waits = external_tokens > cached  # the engine does, for a load even of nothing
        if choice.end > cached and not (receives or waits):
            choice = choice._replace(end=cached, reason="not_awaited")
        if choice.end > cached:
            self._load(request, cached, choice, receives=receives)
        elif receives:
            self._offer(request, cached, choice, cached)
        else:
            if waits:
                self._engine().kv_ends(request_id, cached)
            self._tell(request, cached, choice, cached)

    def _load(self, request: _Request, cached: int, choice: Choice, *, receives: bool) -> None:
        """What is not loaded is computed here, or (receives) offered for: a prefill worker computes it."""
        assert request.prompt is not None
        blocks = request.blocks
        landed = None if receives else partial(self._landed, request, cached, choice, blocks, time.monotonic())
        request.load = request.prompt.load(cached, choice.end, [blocks], landed)

        def over(done: Future[int]) -> None:
            self._engine().soon(partial(self._loaded, request, blocks, cached, choice, done.result(), receives))

        request.load.done.add_done_callback(over)

    def _loaded(
        self, request: _Request, blocks: Sequence[int], cached: int, choice: Choice, end: int, receives: bool
    ) -> None:
        """A load has ended there. If the request has ended meanwhile, its blocks are others'."""
        if request.source and request.prompt is not None and self._source is not None:
            self._source.copier.put(request.prompt.announce)
        if not self._has(request, blocks):
            return
        if not receives:
            self._engine().kv_ends(request.request_id, end)
            if end < choice.end:
                self._tell(request, cached, choice, end)
            return
        if end > cached:
            self._engine().kv_arrived(request.request_id, end)
        self._offer(request, cached, choice, end)

    def _offer(self, request: _Request, cached: int, choice: Choice, end: int) -> None:
        """Tokens before `end` are here: a prefill worker is asked for the others."""
        request.offered_s, request.num_offered = time.monotonic(), len(request.tokens) - end
        self._port.admitted(request.request_id, [request.blocks], end)
        self._tell(request, cached, choice, end, receives=True)

    def layer_needed(self, request_id: str, layer: int, timeout_s: float) -> bool:
        request = self._requests.get(request_id)
        if request is None or request.load is None or request.offered_s is not None:
            return self._port.layer_needed(request_id, layer, timeout_s)
        self._pass_s = None  # it waits, and does not only compute
        try:
            request.load.wait_layer(layer, timeout_s)
        except PdlinkError:  # too late, or never
            return False
        return True

    def prefilling(self, on: bool) -> None:
        self._port.node.prefilling(on)
        now_s = time.monotonic()
        if on:
            self._pass_s, self._pass_tokens = now_s, 0
        elif self._pass_s is not None and self._pass_tokens:
            self._computing.measured(self._pass_tokens, now_s - self._pass_s, now_s)

    def layer_written(self, layer: int, spans: Sequence[tuple[str, int, int]]) -> None:
        self._port.layer_written(layer, spans)
        for request_id, start, end in spans:
            self._pass_tokens += end - start if layer == 0 else 0
            request = self._requests.get(request_id)
            if request is not None and request.prompt is not None:
                request.prompt.store(start, end, request.blocks, layer)

    def answering(self, request_id: str) -> None:
        """The first token of the answer is there, and so is the KV of the prompt."""
        request = self._requests.get(request_id)
        if request is not None and request.offered_s is not None:
            now_s = time.monotonic()
            self._receiving.measured(request.num_offered, now_s - request.offered_s, now_s)

    def complete(self, request_id: str, tokens: Sequence[int], blocks: Sequence[int], chain: Chain) -> None:
        """The answer is complete: keep the KV of what was received and generated, too."""
        request = self._requests.get(request_id)
        if request is not None and self._source is not None:
            keys = self._source.keys(tokens, request.salt, chain=chain)
            prompt = request.stored = self._source.prompt(request_id, keys, request.retention)
            for layer in range(self._num_layers):
                prompt.store(0, len(tokens), blocks, layer)
            prompt.close()

    def _has(self, request: _Request, blocks: Sequence[int]) -> bool:
        """Whether the request has these blocks still."""
        return self._requests.get(request.request_id) is request and request.blocks is blocks

    def _begin_pass(self, request: _Request, blocks: Sequence[int], end: int) -> None:
        if self._has(request, blocks):
            self._engine().kv_coming(request.request_id, end)

    def _tell(
        self,
        request: _Request,
        cached: int,
        choice: Choice,
        end: int,
        *,
        receives: bool = False,
        began_s: float | None = None,
    ) -> None:
        """Where its KV came from. began_s: when its load began; by default as the engine's thread knows it."""
        if began_s is None:
            began_s = request.load.began_s if request.load is not None else time.monotonic()
        rest, prompt = len(request.tokens) - end, request.prompt
        places = prompt.tokens_by_place(cached, end) if prompt is not None and end > cached else {}
        emit(
            PromptSourced(
                request_id=request.request_id,
                cached=cached,
                loaded=end - cached,
                received=rest if receives else 0,
                computed=0 if receives else rest,
                found=request.found,
                reason=choice.reason,
                load_s=choice.load_s,
                other_s=choice.other_s,
                began_s=began_s,
                places=places,
            )
        )

    # --- The copier's thread

    def _landed(
        self,
        request: _Request,
        cached: int,
        choice: Choice,
        blocks: Sequence[int],
        began_s: float,
        layer: int,
        end: int,
    ) -> None:
        """A layer of a load is here, which began then; the engine's thread may not have the load yet. If it fails,
        computing reports the layer again, and that ends a transfer."""
        self._port.layer_written(layer, [(request.request_id, cached, end)])
        if end == choice.end and layer == self._num_layers - 1:
            self._tell(request, cached, choice, end, began_s=began_s)
        if layer == 0 and end == choice.end:
            self._engine().soon(partial(self._begin_pass, request, blocks, end))

    def close(self) -> None:
        """After the engine has ended."""
        self._lookers.close(_CLOSE_S)
        if self._source is not None:
            self._source.close()
            self._source.store.close()


def _hold(request: _Request, *, waits: bool) -> None:
    """Have the request's session keep what is stored of it. waits: the turn has ended. In a looker's or the copier's
    thread: a store in another process may not answer."""
    turn, prompt = request.turn, request.stored
    if turn is not None and prompt is not None and request.retention is not None:
        kept = prompt.hold(*turn.session, waits=waits)
        if not waits:
            turn.kept_tokens = kept
