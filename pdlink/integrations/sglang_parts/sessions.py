"""Sessions of agents in SGLang: what a turn leaves in its prefix tree stays in the store while tools run.

SGLang hands neither HiCache nor a linker the session of a request. So the tree is watched where it takes a request's
KV: when the first tokens of the prompt are computed, and when the turn has ended.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from pdlink.api.session import decode_session
from pdlink.store.line import Line
from pdlink.store.sessions import SessionTerms
from pdlink.store.slots import tenant_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdlink.integrations.sglang_parts.pages import PageRecords

log = logging.getLogger(__name__)

INSERT = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.checkpoint_into_tree"
"""In the scheduler's process and thread."""
_CLOSE_S = 5.0


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
        salt = request.cache_salt or ""
        terms = SessionTerms(asked.id, tenant_of(salt), asked.ttl_s, scope, asked.owner)
        hashes = partial(_hashes, tokens, request.extra_key, salt, int(tree.page_size), bool(tree.tree_core.is_eagle))

        def keep() -> None:
            records.keep(terms, hashes(), waits=waits)

        line.put(keep)


TURNS = SessionTurns()
"""Of this process."""


def install(register: Callable[[str, Callable[..., Any]], None]) -> None:
    """register(name, around): SGLang calls around(original, tree, ...) instead of this function of its own."""
    register(INSERT, _around)


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
        log.warning("pdlink store: the session of a request keeps nothing: %r", error)
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


def _hashes(tokens: Any, extra_key: str | None, salt: str, page: int, is_bigram: bool) -> list[str]:  # noqa: FBT001
    """Of whole pages, as SGLang names them."""
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    key = RadixKey(tokens, extra_key, is_bigram=is_bigram, cache_salt=salt).page_aligned(page)
    return list(get_storage_hash_str(key, None, page_size=page)) if len(key) else []
