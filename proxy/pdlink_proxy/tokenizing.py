"""Token ids for prompts that come as text, so that placement can look them up in what workers say they have.

Asked are the workers themselves (`/tokenize` of vLLM, SGLang and pdlink: the ids that they compute with, after the
chat template). What is asked and what not:
- nothing while no worker publishes KV events: texts are guessed by their bytes, and token ids guess no better;
- nothing where there is one worker to choose from;
- nothing of prompts below 2 KB, and nothing that costs more than it saves (`Worth`);
- no request waits where most of its prompt is known, or for longer than `tokenize_wait_s`; its tokens are remembered
  all the same, for the next turn.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from pdlink._index import words_of_json

from .http_connection import HttpError
from .known_tokens import CHUNK_NBYTES, ENOUGH, KnownTokens, Worth, text_of
from .steps import Leg
from .upstream import answer_of

if TYPE_CHECKING:
    from collections.abc import Coroutine, Hashable

    from pdlink.api.openai import Call

    from .fleet import PlacementRequest, Tokens
    from .http_client import HttpClient
    from .known_tokens import KnownIds, Text
    from .metrics import Metrics
    from .pools import Pools
    from .worker import Worker

log = logging.getLogger("pdlink.proxy")

PATH = "/tokenize"
ASK_S = 5.0
"""Longest answer of a worker."""
LEAST_NBYTES = CHUNK_NBYTES
"""Of a prompt: shorter ones are not asked for."""
MAX_ASKED = 16
"""Questions at once; further prompts are placed without."""
MAX_ANSWER_NBYTES = 32 * 2**20
_NO_ROUTE = frozenset({401, 403, 404, 405, 501})
"""This worker need not be asked again."""


class _Answer(msgspec.Struct):
    tokens: msgspec.Raw


class Tokenizing:
    """Of one proxy. `close` it."""

    def __init__(self, pools: Pools, client: HttpClient, metrics: Metrics, wait_s: float) -> None:
        self._pools, self._client, self._counted, self._wait_s = pools, client, metrics.tokenized, wait_s
        self.known, self.worth = KnownTokens(), Worth()
        self._asked: dict[Hashable, asyncio.Task[Tokens | None]] = {}
        self._turn = itertools.count()

    def prepare(self, request: PlacementRequest, call: Call) -> Coroutine[Any, Any, None] | None:
        """Set what is known of the prompt's token ids: `known_ids`, and a better `num_tokens`. Returns what is to be
        awaited for that; None if nothing is: a task would take more time than the look."""
        nbytes, pools = len(request.prompt), self._pools
        if nbytes < LEAST_NBYTES or not pools.several or not pools.kv_events.index:
            return None
        if (text := text_of(request, call)) is None:
            return None
        known = self.known.find(text, nbytes)
        if known is None or known.share < 1 - CHUNK_NBYTES / nbytes:
            asked = self._ask(request, text)
            if known is None or known.share < ENOUGH:
                if asked is not None:
                    return self._answered(request, known, asked)
                self._counted.add(1, "not_asked")
        self._take(request, known)
        return None

    async def _answered(
        self, request: PlacementRequest, known: KnownIds | None, asked: asyncio.Task[Tokens | None]
    ) -> None:
        found = await self._wait(asked)
        self._counted.add(1, "asked" if found is not None else "late")
        if found is not None:
            request.known_ids, request.num_tokens = found, max(1, len(found))
        else:
            self._take(request, known)

    def _take(self, request: PlacementRequest, known: KnownIds | None) -> None:
        if known is not None:
            self._counted.add(1, "known")
            request.known_ids, request.num_tokens = known.ids, max(1, round(len(known.ids) / known.share))

    def placed(self, request: PlacementRequest) -> None:
        """By now it is known what the workers have of it."""
        if request.known_ids is not None:
            self.worth.found((request.held.most if request.held else 0) / request.num_tokens)

    async def close(self) -> None:
        for task in self._asked.values():
            task.cancel()
        await asyncio.gather(*self._asked.values(), return_exceptions=True)

    async def _wait(self, asked: asyncio.Task[Tokens | None]) -> Tokens | None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._wait_s):
                return await asyncio.shield(asked)
        return None

    def _ask(self, request: PlacementRequest, text: Text) -> asyncio.Task[Tokens | None] | None:
        """The answer about this prompt, which somebody else may have asked for; None if nobody is asked."""
        name = text.keys[-1], len(request.prompt)
        if (asked := self._asked.get(name)) is not None:
            return asked
        pace = self._pools.prefill_pace(request.model)
        if len(self._asked) >= MAX_ASKED or not self.worth.pays(len(request.prompt), pace):
            return None
        worker = self._worker(request.model)
        if worker is None:
            return None
        asked = asyncio.get_running_loop().create_task(self._answer(request, text, worker))
        self._asked[name] = asked
        asked.add_done_callback(lambda _: self._asked.pop(name, None))
        return asked

    async def _answer(self, request: PlacementRequest, text: Text, worker: Worker) -> Tokens | None:
        began_s, nbytes = time.monotonic(), len(request.prompt)
        try:
            found = await self._of_worker(worker, text)
        except (HttpError, OSError, TimeoutError, ValueError, RecursionError) as error:
            log.debug("tokens of a prompt of %d bytes: %s", nbytes, error)
            found = None
        self.worth.cost(nbytes, time.monotonic() - began_s)
        if found is not None:
            self.known.note(text, nbytes, found)
        else:
            self._counted.add(1, "failed")
        return found

    async def _of_worker(self, worker: Worker, text: Text) -> Tokens | None:
        url, most_nbytes = worker.url + PATH, MAX_ANSWER_NBYTES
        reply = await answer_of(self._client, "POST", url, text.body, max_nbytes=most_nbytes, timeout_s=ASK_S)
        if reply.status in _NO_ROUTE:
            worker.lacks.add(PATH)
        if reply.status != 200:
            return None
        return _ids(bytes(msgspec.json.decode(reply.body, type=_Answer).tokens))

    def _worker(self, model: str) -> Worker | None:
        """Each in its turn: prefill's, which need the tokens anyway, then decode's."""
        for side in (Leg.PREFILL, Leg.DECODE):
            if found := [worker for worker in self._pools.usable(side, model) if PATH not in worker.lacks]:
                return found[next(self._turn) % len(found)]
        return None


def _ids(tokens: bytes) -> Tokens:
    return np.frombuffer(words_of_json(tokens), np.uint32)
