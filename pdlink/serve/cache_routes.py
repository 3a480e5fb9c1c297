"""What operators ask and tell what holds KV over HTTP: GET /pdlink/cache, and a POST for each verb below it.

A worker, a store process and the engines' connectors serve the same routes. A prompt is named by its token ids and by
what else its keys depend on: the scope (`pdlink.store.scope`), LoRA and salt; to a worker of ours also as its clients
write it. These routes show and change what all callers have kept: they are for operators, and a proxy's clients do
not reach them.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct

from pdlink.api.fields import decoded
from pdlink.api.session import EndSessionRequest
from pdlink.config.tiers import A_BYTE
from pdlink.errors import ConfigError, InvalidRequest, Overloaded
from pdlink.serve.http import body_of, json_response
from pdlink.store.interface import MEMORY, REMOVED, Found
from pdlink.store.lookup import look_up
from pdlink.store.reach import chunks_of, part_of
from pdlink.store.slots import tenant_of
from pdlink.store.store import Store
from pdlink.store.tiers.opening import open_tier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from aiohttp import web

    from pdlink.store.interface import AnyStore
    from pdlink.store.scope import Scope

PATH = "/pdlink/cache"
_MAX_WAITING = 16
"""Calls that wait for the one before: a tier may take seconds for each."""
_LOOKUP_S = 5.0
"""Longest wait for what tiers say they have."""
_SHOWN = 8
"""Scopes in an error."""

_NOTHING = msgspec.Raw()
_Name = Annotated[str, Meta(min_length=1, max_length=128)]
_TokenIds = tuple[Annotated[int, Meta(ge=0, le=2**32 - 1)], ...]


class NamedPrompt(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Exactly one of both."""

    prompt: msgspec.Raw = _NOTHING
    """Token ids; to a worker also a text, as in /v1/completions."""
    messages: list[dict[str, Any]] | None = None
    """As in /v1/chat/completions; to a worker alone."""
    cache_salt: str = ""
    lora: str = ""
    """As the engine's keys name the adapter; vLLM's are "NAME CONTENT"."""
    model: str = ""
    """Needed where KV of several models is kept."""
    scope: str = ""
    """Needed where several kinds of KV of one model are kept; GET /pdlink/cache lists them."""

    @property
    def forms(self) -> int:
        """In how many ways the prompt is given."""
        return (self.prompt != _NOTHING) + (self.messages is not None)


class PinRequest(NamedPrompt, frozen=True, kw_only=True):
    name: _Name


class UnpinRequest(Struct, frozen=True, forbid_unknown_fields=True):
    name: _Name


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


class FreezeRequest(Struct, frozen=True, forbid_unknown_fields=True):
    on: bool
    """While it is on, nothing new is kept, and nothing is evicted."""


class QuotaRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    cache_salt: str = ""
    """Whose; empty for all salts that have none of their own."""
    gib: Annotated[float, Meta(ge=A_BYTE, le=2**20)] | None = None
    """A byte at least; None takes it away."""


class AddTierRequest(Struct, frozen=True, forbid_unknown_fields=True):
    url: str
    """As `tiers.remote_url`."""
    codec: Literal["raw", "zstd"] = "raw"


class RemoveTierRequest(Struct, frozen=True, forbid_unknown_fields=True):
    place: str


class CompressRequest(NamedPrompt, frozen=True, kw_only=True):
    place: str
    codec: Literal["raw", "zstd"] = "zstd"
    """raw: as records are in memory."""


class VerifyRequest(NamedPrompt, frozen=True, kw_only=True):
    everything: bool = False
    """Instead of a prompt: all that is in memory. What is below is checked whenever it is read."""


def token_ids(asked: NamedPrompt) -> Sequence[int]:
    """Of a caller who names them. Raises BadField."""
    if asked.messages is not None or bytes(memoryview(asked.prompt)[:1]) == b'"':
        raise InvalidRequest(
            "prompt: got a text; expected token ids, because only a worker of pdlink has a tokenizer"
        )
    return decoded(asked.prompt, _TokenIds, "prompt")  # type: ignore[no-any-return]


class _Prompt(NamedTuple):
    scope: Scope
    num_tokens: int
    keys: tuple[Sequence[bytes], ...]
    """By group, of all full chunks."""


class _Known(NamedTuple):
    """What is known of a prompt, and of use."""

    scope: Scope
    end: int
    """Tokens from the front."""
    parts: list[Found]
    """What is needed of it, by group."""

    def tokens(self, done: Sequence[int]) -> int:
        """Of which so many leading records of each group are done."""
        return min(
            self.end if num == len(part.keys) else num * self.scope.chunk_tokens if layout.keeps_all else 0
            for num, part, layout in zip(done, self.parts, self.scope.layouts, strict=True)
        )


class CacheDesk:
    """The verbs, in the calling thread."""

    def __init__(
        self,
        store: AnyStore,
        read: Callable[[NamedPrompt], Sequence[int]] = token_ids,
        *,
        keyed: bool,
        setting: str = "http_key_file",
    ) -> None:
        """read: gives the token ids of a prompt. Raises InvalidRequest, CapacityExceeded. keyed: callers have the key
        that `setting` names."""
        self._store, self._tokens_of = store, read
        self._keyed, self._setting = keyed, setting

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = msgspec.to_builtins(self._own_store().state())
        scopes = [
            {
                "scope": name,
                "model": scope.model,
                "revision": scope.groups[0].revision,
                "chunk_tokens": scope.chunk_tokens,
                "record_nbytes": [group.shape.nbytes for group in scope.groups],
            }
            for name, scope in self._store.scopes.all().items()
        ]
        return state | {"scopes": scopes}

    def lookup(self, asked: NamedPrompt) -> dict[str, Any]:
        """How many leading tokens are known, and where they lie, in order."""
        prompt = self._read(asked)
        end, found = self._look_up(prompt)
        num_chunks, names = end // prompt.scope.chunk_tokens, self._store.places
        whole = next(
            (each for each, layout in zip(found, prompt.scope.layouts, strict=True) if layout.keeps_all), None
        )
        if whole is not None:
            places = whole.places[:num_chunks]
        else:  # all are where the last ones are
            places = found[0].places[num_chunks - 1 : num_chunks] * num_chunks
        runs = [
            {"place": names[place], "tokens": len(list(same)) * prompt.scope.chunk_tokens}
            for place, same in groupby(places)
        ]
        return {"prompt_tokens": prompt.num_tokens, "tokens": end, "runs": runs}

    def warm(self, asked: NamedPrompt) -> dict[str, int]:
        """Bring what is known into memory."""
        with self._brought(asked) as (known, came):
            return {"tokens": known.tokens(came)}

    def pin(self, asked: PinRequest) -> dict[str, int | bool]:
        """The same, and keep it there until `unpin`; whether a restart keeps it, too."""
        store = self._own_store()
        with self._brought(asked) as (known, _):
            pinned = [part.keys[: store.pin(part.keys, asked.name)] for part in known.parts]
            shapes = [group.shape for group in known.scope.groups]
            stands = [
                store.stand(keys, shape, asked.name) for keys, shape in zip(pinned, shapes, strict=True) if keys
            ]
            return {"tokens": known.tokens(list(map(len, pinned))), "durable": bool(stands) and all(stands)}

    def unpin(self, asked: UnpinRequest) -> dict[str, int]:
        return {"records": self._own_store().unpin(asked.name)}

    def end_session(self, asked: EndSessionRequest) -> dict[str, bool]:
        """Whether it was known. Its records are as others from now on."""
        return {"ended": self._store.end_session(asked.session_id, tenant_of(asked.cache_salt), asked.owner)}

    def move(self, asked: MoveRequest) -> dict[str, int]:
        self._check_places([asked.source, asked.destination])
        if asked.source == asked.destination:
            raise InvalidRequest(
                f"destination: got {asked.destination!r}, the source; expected another place; name one"
            )
        store, known, places = self._own_store(), self._known(self._read(asked)), (asked.source, asked.destination)
        moved = [
            store.move(part.keys, group.shape, *places, copy=asked.keep)
            for part, group in zip(known.parts, known.scope.groups, strict=True)
        ]
        return {"tokens": known.tokens(moved)}

    def clear(self, asked: ClearRequest) -> dict[str, int | bool]:
        """Records that were in memory, and whether a restart keeps them away; tiers forget in the background."""
        self._check_places(asked.places or [])
        if asked.everything == bool(asked.forms):
            raise InvalidRequest("everything: got a prompt and true, or neither; expected one of them; say which")
        keys = None if asked.everything else [key for mine in self._read(asked).keys for key in mine]
        return self._store.clear(keys, asked.places)._asdict()

    def freeze(self, asked: FreezeRequest) -> dict[str, bool]:
        self._own_store().frozen = asked.on
        return {"frozen": asked.on}

    def quota(self, asked: QuotaRequest) -> dict[str, int | bool]:
        """Of memory; whether a restart keeps it. What exceeds it is evicted at once, and tiers keep theirs."""
        store, tenant = self._own_store(), tenant_of(asked.cache_salt)
        durable = store.set_quota(None if asked.gib is None else int(asked.gib * 2**30), tenant)
        used_nbytes, quota_nbytes = store.quota(tenant)
        return {"used_nbytes": used_nbytes, "quota_nbytes": quota_nbytes, "durable": durable}

    def add_tier(self, asked: AddTierRequest) -> dict[str, str]:
        """Below the others, for what is kept from now on, until the end of this process."""
        store = self._own_store()
        if not self._keyed:
            raise InvalidRequest(
                f"{self._setting}: got none, and a tier gets the KV of all callers; set it, and send the key"
            )
        if "://" not in asked.url:
            raise InvalidRequest(
                "url: got none; expected file:///DIRECTORY, redis://HOST or s3://BUCKET, or their kin"
            )
        try:
            return {"place": store.add_tier(open_tier(asked.url), asked.codec)}
        except ConfigError as error:
            raise InvalidRequest(str(error).replace("tiers.remote_url", "url")) from None

    def remove_tier(self, asked: RemoveTierRequest) -> dict[str, bool]:
        """Whether it got all that it was to have before. Nothing is found there from now on; what it has stays."""
        self._check_places([asked.place])
        if asked.place == MEMORY:
            raise InvalidRequest(f"place: got {MEMORY!r}; expected a tier below it; name one")
        return {"drained": self._own_store().remove_tier(asked.place)}

    def compress(self, asked: CompressRequest) -> dict[str, int]:
        """Pack what a tier has of a prompt; memory keeps records as they are."""
        self._check_places([asked.place])
        store, known = self._own_store(), self._known(self._read(asked))
        packed = [
            store.repack(part.keys, group.shape, asked.place, asked.codec)
            for part, group in zip(known.parts, known.scope.groups, strict=True)
        ]
        return {"tokens": known.tokens(packed)}

    def verify(self, asked: VerifyRequest) -> dict[str, dict[str, int]]:
        """By place how many records are what was put, and how many were not and are dropped."""
        store = self._own_store()
        if asked.everything == bool(asked.forms):
            raise InvalidRequest("everything: got a prompt and true, or neither; expected one of them; say which")
        if asked.everything:
            return {place: one._asdict() for place, one in store.verify().items()}
        prompt, found = self._read(asked), defaultdict[str, Counter[str]](Counter)
        for keys, group in zip(prompt.keys, prompt.scope.groups, strict=True):
            for place, one in store.verify(keys, group.shape).items():
                found[place].update(one._asdict())
        return {place: dict(counts) for place, counts in found.items()}

    def _own_store(self) -> Store:
        if not isinstance(self._store, Store):
            raise InvalidRequest("tiers.store: the KV of this worker is kept by a store process; ask that one")
        return self._store

    def _read(self, asked: NamedPrompt) -> _Prompt:
        if asked.forms != 1:
            raise InvalidRequest(f"prompt, messages: got {asked.forms} of them; expected 1; send one")
        scope, tokens = self._scope(asked), self._tokens_of(asked)
        try:
            return _Prompt(scope, len(tokens), scope.keys(tokens, asked.cache_salt, asked.lora))
        except OverflowError as error:
            raise InvalidRequest(f"prompt: {error}; expected token ids in [0, 2**32); correct it") from None

    def _scope(self, asked: NamedPrompt) -> Scope:
        every = self._store.scopes.all()
        if not every:
            raise InvalidRequest(
                "model: got a prompt, and no engine has used this store since it began; expected one; start it, or "
                "clear everything"
            )
        fitting = [
            scope for name, scope in every.items() if asked.scope in ("", name) and asked.model in ("", scope.model)
        ]
        if len(fitting) != 1:
            shown = "; ".join(f"{name} ({scope.model})" for name, scope in list(every.items())[-_SHOWN:])
            raise InvalidRequest(
                f"model, scope: got {asked.model!r:.100} and {asked.scope!r:.100}, which {len(fitting)} of the kept "
                f"kinds of KV fit; expected 1; choose a scope of {shown:.1000}"
            )
        return fitting[0]

    def _look_up(self, prompt: _Prompt) -> tuple[int, list[Found]]:
        scope, num_chunks = prompt.scope, len(prompt.keys[0])
        end = num_chunks * scope.chunk_tokens
        return look_up(self._store, scope.layouts, prompt.keys, scope.chunk_tokens, num_chunks, end, _LOOKUP_S)

    def _known(self, prompt: _Prompt) -> _Known:
        end, found = self._look_up(prompt)
        parts = []
        for layout, each in zip(prompt.scope.layouts, found, strict=True):
            chunks = chunks_of(*part_of(layout, 0, end, end), prompt.scope.chunk_tokens // layout.position_tokens)
            mine = slice(chunks.start, chunks.stop)
            parts.append(Found(each.keys[mine], each.places[mine]))
        return _Known(prompt.scope, end, parts)

    @contextmanager
    def _brought(self, asked: NamedPrompt) -> Iterator[tuple[_Known, list[int]]]:
        """What is known, and how many records of each group have come into memory; they stay there meanwhile."""
        known = self._known(self._read(asked))
        wanted = zip(known.parts, known.scope.groups, strict=True)
        fetches = [self._store.fetch(part, group.shape, "operator") for part, group in wanted]
        try:
            yield known, [len(fetch.done.result()) for fetch in fetches]
        finally:
            for fetch in fetches:
                fetch.close()

    def _check_places(self, names: list[str]) -> None:
        there = [place for place in self._store.places if not place.endswith(REMOVED)]
        for name in names:
            if name not in there:
                raise InvalidRequest(f"place: got {name!r:.100}; expected {', '.join(there)}; use one of them")


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
        (FreezeRequest, desk.freeze),
        (QuotaRequest, desk.quota),
        (AddTierRequest, desk.add_tier),
        (RemoveTierRequest, desk.remove_tier),
        (CompressRequest, desk.compress),
        (VerifyRequest, desk.verify),
    ):
        post(kind, verb)
    app.on_cleanup.append(cleanup)
