"""Sessions of agents in SGLang: what a turn leaves in its prefix tree stays in the store while tools run. And the
store that has a request's prompt: the proxy names both in `session_id`.

SGLang hands neither HiCache nor a linker the session of a request. So the tree is watched where it takes a request's
KV: when the first tokens of the prompt are computed, and when the turn has ended.

A call ends a session: POST /set_internal_state with `SGLANG_END` as the name of a setting. Of all that SGLang's HTTP
hands to its scheduler this alone carries a text and an answer of each data-parallel rank (/close_session has none).
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from pdlink.api.session import SGLANG_END, EndSessionRequest, decode_session, source_of
from pdlink.store.line import Line
from pdlink.store.sessions import SessionTerms
from pdlink.store.slots import tenant_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdlink.integrations.sglang_parts.pages import PageRecords

log = logging.getLogger(__name__)

INSERT = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.checkpoint_into_tree"
"""In the scheduler's process and thread, as `SET`."""
QUEUE = "sglang.srt.managers.scheduler.Scheduler._add_request_to_queue"
"""Before HiCache or a linker is asked for what a request's prompt is in."""
SET = "sglang.srt.managers.scheduler.Scheduler.set_internal_state"
_CLOSE_S = 5.0
_END_S = 1.0
"""The scheduler stands still meanwhile. A session whose turns are still being told to a store then ends unheard."""


class SessionTurns:
    """The records that keep the turns of one process's requests."""

    def __init__(self) -> None:
        self._kept: tuple[PageRecords, str, Line] | None = None

    def keep_in(self, records: PageRecords, scope: str) -> Callable[[], None]:
        """Keep turns in these records until the returned function is called. scope: as of `SessionTerms`."""
        line = Line("pdlink-sglang-sessions")
        kept = self._kept = records, scope, line

        def close() -> None:
            self._kept = None if self._kept is kept else self._kept
            line.close(_CLOSE_S)

        return close

    def turn(self, session: str, tree: Any, request: Any, tokens: Any, *, waits: bool) -> None:
        """A request has begun, with this prompt, or ended (waits), with these tokens in the tree."""
        asked = decode_session(session)
        if asked is None or self._kept is None:
            return
        records, scope, line = self._kept
        terms = SessionTerms(asked.id, tenant_of(request.cache_salt or ""), asked.ttl_s, scope, asked.owner)
        hashes = _hashes_of(tree, request, tokens)

        def keep() -> None:
            records.keep(terms, hashes(), waits=waits)

        line.put(keep)

    def comes_from(self, source: str, tree: Any, request: Any) -> None:
        """The store at this address may have the request's prompt."""
        if self._kept is not None:
            self._kept[0].comes_from(source, _hashes_of(tree, request, request.origin_input_ids[:])())

    def end(self, asked: EndSessionRequest) -> bool:
        """Whether it was known, behind what `turn` was told. Raises what the store does, and TimeoutError."""
        if self._kept is None:
            return False
        records, _, line = self._kept
        end = partial(records.end, asked.session_id, tenant_of(asked.cache_salt), asked.owner)
        return line.submit(end).result(_END_S)


TURNS = SessionTurns()
"""Of this process."""


def install(register: Callable[[str, Callable[..., Any]], None]) -> None:
    """register(name, around): SGLang calls around(original, tree, ...) instead of this function of its own."""
    register(INSERT, _around)
    register(QUEUE, _queue)
    register(SET, _set)


def _queue(original: Callable[..., Any], scheduler: Any, request: Any, *args: Any, **named: Any) -> Any:
    _guarded(_noted, scheduler, request)
    return original(scheduler, request, *args, **named)


def _noted(scheduler: Any, request: Any) -> None:
    if source := source_of(request.session_id or ""):
        TURNS.comes_from(source, scheduler.tree_cache, request)


def _set(original: Callable[..., Any], scheduler: Any, request: Any) -> Any:
    name = next(iter(request.server_args), "")
    if not name.startswith(SGLANG_END):
        return original(scheduler, request)
    from sglang.srt.managers.io_struct import SetInternalStateReqOutput

    return SetInternalStateReqOutput(updated=_ended(name.removeprefix(SGLANG_END)))


def _ended(asked: str) -> bool:
    try:
        return TURNS.end(msgspec.json.decode(asked, type=EndSessionRequest))
    except Exception as error:  # noqa: BLE001  the scheduler goes on
        log.warning("pdlink store: a session was not ended: %r", error)
        return False


def _around(original: Callable[..., Any], *args: Any, **named: Any) -> Any:
    begun = _guarded(_session_of, *args, **named)
    result = original(*args, **named)
    if begun is not None:
        _guarded(_told, begun, *args, **named)
    return result


def _guarded(look: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """SGLang's own call goes on, also in a later SGLang whose requests are other ones."""
    try:
        return look(*args, **named)
    except Exception as error:  # noqa: BLE001
        log.warning("pdlink store: what a request's session_id says has no effect: %r", error)
        return None


def _session_of(_tree: Any, request: Any, **_: Any) -> tuple[str, bool] | None:
    """And whether nothing of the request is in the tree yet."""
    session = request.session_id or (request.session and request.session.session_id)
    return (session, not request.kv.cache_inserted_len) if session else None


def _told(begun: tuple[str, bool], tree: Any, request: Any, *, up_to: int, **_: Any) -> None:
    session, begins = begun
    if request.finished():
        TURNS.turn(session, tree, request, request.full_untruncated_fill_ids[:up_to], waits=True)
    elif begins:
        TURNS.turn(session, tree, request, request.origin_input_ids[:], waits=False)


def _hashes_of(tree: Any, request: Any, tokens: Any) -> Callable[[], list[str]]:
    page, is_bigram = int(tree.page_size), bool(tree.tree_core.is_eagle)
    return partial(_hashes, tokens, request.extra_key, request.cache_salt or "", page, is_bigram)


def _hashes(tokens: Any, extra_key: str | None, salt: str, page: int, is_bigram: bool) -> list[str]:  # noqa: FBT001
    """Of whole pages, as SGLang names them."""
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    key = RadixKey(tokens, extra_key, is_bigram=is_bigram, cache_salt=salt).page_aligned(page)
    return list(get_storage_hash_str(key, None, page_size=page)) if len(key) else []
