"""What operators ask and tell a store over HTTP: GET /pdlink/cache, and a POST for each verb below it.

Prompts are named as a client names them: text, token ids or messages. These routes show and change what all callers
have kept: they are for operators, and a proxy's clients do not reach them. `security.http_key_file` guards them.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta, Struct

from pdlink.api.fields import decoded
from pdlink.api.session import SessionId  # noqa: TC001  (msgspec reads annotations at run time)
from pdlink.errors import InvalidRequest, Overloaded
from pdlink.serve.http import body_of, json_response
from pdlink.serve.openai import ChatRequest, CompletionRequest
from pdlink.store.slots import tenant_of
from pdlink.store.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from aiohttp import web

    from pdlink.engine.forward import LoadedModel
    from pdlink.store.interface import AnyStore
    from pdlink.store.source import Source

PATH = "/pdlink/cache"
_MAX_WAITING = 16
"""Calls that wait for the one before: a tier may take seconds for each."""

_NOTHING = msgspec.Raw()
_Name = Annotated[str, Meta(min_length=1, max_length=128)]


class NamedPrompt(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Exactly one of both."""

    prompt: msgspec.Raw = _NOTHING
    """A text or token ids, as in /v1/completions."""
    messages: list[dict[str, Any]] | None = None
    """As in /v1/chat/completions."""
    cache_salt: str = ""

    @property
    def forms(self) -> int:
        """In how many ways the prompt is given."""
        return (self.prompt != _NOTHING) + (self.messages is not None)


class PinRequest(NamedPrompt, frozen=True, kw_only=True):
    name: _Name


class UnpinRequest(Struct, frozen=True, forbid_unknown_fields=True):
    name: _Name


class EndSessionRequest(Struct, frozen=True, forbid_unknown_fields=True):
    session_id: SessionId
    cache_salt: str = ""


class MoveRequest(NamedPrompt, frozen=True, kw_only=True):
    source: str
    destination: str
    keep: bool = True
    """Whether the source keeps it, too."""


class ClearRequest(NamedPrompt, frozen=True, kw_only=True):
    everything: bool = False
    """Instead of a prompt."""
    places: list[str] | None = None
    """None: everywhere."""


class Prompts:
    """Reads prompts as the worker's clients write them."""

    def __init__(self, model: LoadedModel, source: Source) -> None:
        self._model, self.source = model, source

    def read(self, named: NamedPrompt) -> tuple[int, Sequence[bytes]]:
        """Its tokens, and the keys of its full chunks. Raises InvalidRequest, CapacityExceeded."""
        if named.forms != 1:
            raise InvalidRequest(f"prompt, messages: got {named.forms} of them; expected 1; send one")
        name = self._model.name
        if named.messages is None:
            tokens = CompletionRequest(model=name, prompt=named.prompt).token_ids(self._model)
        else:
            chat = ChatRequest(model=name, messages=named.messages)
            chat.check()
            tokens = chat.token_ids(self._model)
        try:
            return len(tokens), self.source.keys(tokens, named.cache_salt).by_group[0]
        except OverflowError as error:
            raise InvalidRequest(f"prompt: {error}; expected token ids in [0, 2**32); correct it") from None


class CacheDesk:
    """The verbs, in the calling thread. prompts: None where nobody knows the model, in a store process."""

    def __init__(self, store: AnyStore, prompts: Prompts | None = None) -> None:
        self._store, self._prompts = store, prompts

    def state(self) -> dict[str, Any]:
        if not isinstance(self._store, Store):
            raise InvalidRequest("tiers.store: the KV of this worker is kept by a store process; ask that one")
        state: dict[str, Any] = msgspec.to_builtins(self._store.state())
        if self._prompts is not None:
            source = self._prompts.source
            state |= {"chunk_tokens": source.chunk_tokens, "record_nbytes": source.groups[0].shape.nbytes}
        return state

    def lookup(self, asked: NamedPrompt) -> dict[str, Any]:
        """How many leading tokens are known, and where they lie, in order."""
        num_tokens, keys, source = self._read(asked)
        found = self._store.lookup(keys, source.lookup_timeout_s)
        runs = [
            {"place": self._store.places[place], "tokens": len(list(same)) * source.chunk_tokens}
            for place, same in groupby(found.places)
        ]
        return {"prompt_tokens": num_tokens, "tokens": sum(run["tokens"] for run in runs), "runs": runs}

    def warm(self, asked: NamedPrompt) -> dict[str, int]:
        """Bring what is known into memory."""
        _, keys, source = self._read(asked)
        return {"tokens": self._brought(keys, source, len) * source.chunk_tokens}

    def pin(self, asked: PinRequest) -> dict[str, int]:
        """The same, and keep it there."""
        _, keys, source = self._read(asked)
        pinned = self._brought(keys, source, lambda _: self._store.pin(keys, asked.name))
        return {"tokens": pinned * source.chunk_tokens}

    def unpin(self, asked: UnpinRequest) -> dict[str, int]:
        return {"records": self._store.unpin(asked.name)}

    def end_session(self, asked: EndSessionRequest) -> dict[str, bool]:
        """Whether it was known. Its records are as others from now on."""
        return {"ended": self._store.end_session(asked.session_id, tenant_of(asked.cache_salt))}

    def move(self, asked: MoveRequest) -> dict[str, int]:
        self._check_places([asked.source, asked.destination])
        if asked.source == asked.destination:
            raise InvalidRequest(
                f"destination: got {asked.destination!r}, the source; expected another place; name one"
            )
        _, keys, source = self._read(asked)
        moved = self._store.move(keys, source.groups[0].shape, asked.source, asked.destination, copy=asked.keep)
        return {"tokens": moved * source.chunk_tokens}

    def clear(self, asked: ClearRequest) -> dict[str, int | bool]:
        """Records that were in memory, and whether a restart keeps them away; tiers forget in the background."""
        self._check_places(asked.places or [])
        if asked.everything == bool(asked.forms):
            raise InvalidRequest("everything: got a prompt and true, or neither; expected one of them; say which")
        return self._store.clear(None if asked.everything else self._read(asked)[1], asked.places)._asdict()

    def _read(self, named: NamedPrompt) -> tuple[int, Sequence[bytes], Source]:
        if self._prompts is None:
            raise InvalidRequest("prompt: a store process knows no model; ask a worker")
        return *self._prompts.read(named), self._prompts.source

    def _brought(self, keys: Sequence[bytes], source: Source, use: Callable[[tuple[Any, ...]], int]) -> int:
        """What `use` says of the slots of the prefix, while they are kept in memory."""
        found = self._store.lookup(keys, source.lookup_timeout_s)
        fetch = self._store.fetch(found, source.groups[0].shape, "operator")
        try:
            return use(fetch.done.result())
        finally:
            fetch.close()

    def _check_places(self, names: list[str]) -> None:
        for name in names:
            if name not in self._store.places:
                raise InvalidRequest(
                    f"place: got {name!r:.100}; expected {', '.join(self._store.places)}; use one of them"
                )


def add_cache_routes(app: web.Application, desk: CacheDesk) -> None:
    worker = ThreadPoolExecutor(1, thread_name_prefix="pdlink-cache-routes")
    waiting = asyncio.BoundedSemaphore(_MAX_WAITING)

    async def run(verb: Callable[[], Mapping[str, Any]]) -> web.Response:
        if waiting.locked():
            raise Overloaded(f"{PATH}: {_MAX_WAITING} calls wait already; try again later")
        async with waiting:
            answer = await asyncio.get_running_loop().run_in_executor(worker, verb)
        return json_response(answer)

    async def state(_: web.Request) -> web.Response:
        return await run(desk.state)

    def post(kind: type[Struct], verb: Callable[[Any], Mapping[str, Any]]) -> None:
        async def handle(request: web.Request) -> web.Response:
            body = await body_of(request)
            return await run(lambda: verb(decoded(body, kind)))

        app.router.add_post(f"{PATH}/{verb.__name__}", handle)

    async def cleanup(_: web.Application) -> None:
        worker.shutdown(wait=False, cancel_futures=True)

    app.router.add_get(PATH, state)
    for kind, verb in (
        (NamedPrompt, desk.lookup),
        (NamedPrompt, desk.warm),
        (PinRequest, desk.pin),
        (UnpinRequest, desk.unpin),
        (EndSessionRequest, desk.end_session),
        (MoveRequest, desk.move),
        (ClearRequest, desk.clear),
    ):
        post(kind, verb)
    app.on_cleanup.append(cleanup)
