"""The store as a source of KV for an engine whose layers are in groups that keep different tokens, or in one.

Each group has a `StoreSource`: records of its own shape, under keys of its own, in the same store. What is found is
found in all of them (`reach.py`), what is loaded counts if all of it has come, and what is computed is kept group by
group: windows and states at the boundaries that a step leaves behind.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pdlink.kv.sources import TokenRange
from pdlink.store.reach import part_of, reach
from pdlink.store.worth import choose_all

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdlink.store.interface import AnyFetch
    from pdlink.store.loading import StoreLoad
    from pdlink.store.prompt import StoredPrompt
    from pdlink.store.source import StoreSource
    from pdlink.store.worth import Choice, Speed

    Tables = Sequence[Sequence[int]]
    """By group: a request's blocks from token 0 on; of tokens that a group does not need any number."""


class GroupedSource:
    """What the prompts of one engine have in common. Counts in tokens; each group's source counts in positions."""

    def __init__(self, sources: Sequence[StoreSource]) -> None:
        """By group. All but the first are `beside` it."""
        self.sources = tuple(sources)
        first = self.sources[0]
        self.store, self.copier, self.speeds = first.store, first.copier, first.speeds
        self.chunk_tokens, self.lookup_timeout_s = (
            first.chunk_tokens * first.layout.position_tokens,
            first.lookup_timeout_s,
        )
        self.layouts = tuple(source.layout for source in self.sources)
        self.keeps_all = all(layout.keeps_all for layout in self.layouts)
        """Whether any part of a prefix is of use."""

    def prompt(
        self,
        request_id: str,
        tokens: Sequence[int],
        salt: str = "",
        *,
        lora: str = "",
        media: Sequence[tuple[int, str]] = (),
    ) -> GroupedPrompt:
        """The store for one request. Costs one hash of the prompt for each group."""
        parts = [source.prompt(request_id, tokens, salt, lora=lora, media=media) for source in self.sources]
        return GroupedPrompt(self, tuple(parts), len(tokens))

    def rename(self, era: str) -> None:
        """As `StoreSource.rename`."""
        for source in self.sources:
            source.rename(era)

    def drop_own(self) -> None:
        """As `StoreSource.drop_own`."""
        self.sources[0].drop_own()

    def when_settled(self, then: Callable[[], None]) -> None:
        """As `StoreSource.when_settled`."""
        self.sources[0].when_settled(then)

    def when_read_by(self, then: Callable[[], None]) -> None:
        """As `StoreSource.when_read_by`."""
        self.sources[0].when_read_by(then)

    def follow_stores(self) -> None:
        """As `StoreSource.follow_stores`."""
        self.sources[0].follow_stores()

    def close(self) -> None:
        """After the engine has ended: finish what is in line."""
        self.sources[0].close()


@dataclass(eq=False, slots=True)
class GroupedPrompt:
    """The store for one request. `load` and `store` are for one thread."""

    source: GroupedSource
    parts: tuple[StoredPrompt, ...]
    """By group."""
    num_tokens: int
    end: int = 0
    """What the last look-up found ends there; 0 for nothing."""
    _goes_on: int | None = None

    def lookup(self, begin: int, timeout_s: float, goes_on: int | None = None) -> int:
        """Where what the store has of the prompt ends; 0 for nothing, and never behind its last token but one.

        begin, goes_on: as of `reach`. Waits for the tiers' answers for `timeout_s` at most.
        """
        deadline_s = time.monotonic() + timeout_s
        chunk_tokens = self.source.chunk_tokens
        self._goes_on = goes_on
        num_chunks = (self.num_tokens - 1) // chunk_tokens
        known: dict[int, list[bool]] = {}
        for index, part in enumerate(self.parts):
            if part.source.layout.keeps_all:
                found = part.lookup(timeout_s=max(0.0, deadline_s - time.monotonic()))
                num_chunks = min(num_chunks, found[0].end // part.source.chunk_tokens if found else 0)
                known[index] = [True] * num_chunks
        self.end = 0
        if num_chunks * chunk_tokens <= begin and not self.source.keeps_all:
            return 0
        for index, part in enumerate(self.parts):
            if index not in known:
                known[index] = part.look_up_each(num_chunks, max(0.0, deadline_s - time.monotonic()))
        by_group = [known[index][:num_chunks] for index in range(len(self.parts))]
        self.end = reach(self.source.layouts, by_group, chunk_tokens, 0 if self.source.keeps_all else begin, goes_on)
        return self.end

    def choose(self, cached: int, other: Speed, *, always: bool = False) -> Choice:
        """How much of what was found to load, as `StoredPrompt.choose`; all or nothing where no part is of use."""
        if self.source.keeps_all and len(self.parts) == 1:
            return self.parts[0].choose(cached, other, always=always)
        ranges = zip(self.parts, self._ranges(cached, self.end), strict=True)
        records = [record for part, span in ranges for record in part.records_at(*span)]
        choice = choose_all(cached, self.end, records, self.source.speeds, other, time.monotonic())
        return choice._replace(end=self.end, reason="always") if always and self.end > cached else choice

    def tokens_by_place(self, begin: int, end: int) -> dict[str, int]:
        """As `StoredPrompt.tokens_by_place`, of a group that has all tokens; else all are where the last ones are."""
        for part in self.parts:
            if part.source.layout.keeps_all:
                unit = part.source.layout.position_tokens
                found = part.tokens_by_place(begin // unit, end // unit)
                return {place: count * unit for place, count in found.items()}
        unit = self.parts[0].source.layout.position_tokens
        last = self.parts[0].records_at(end // unit - 1, end // unit) if end > begin else []
        return {self.source.store.places[place]: end - begin for place, _ in last}

    def fetch(self, begin: int, end: int) -> GroupedFetch:
        """Bring what is needed of tokens [begin, end) of what was found into memory, ahead of the load."""
        fetches = []
        for part, (first, last) in zip(self.parts, self._ranges(begin, end), strict=True):
            if last > first:
                fetches.append((part, first, last, part.fetch(first, last)))
        return GroupedFetch(self.source, begin, end, fetches)

    def load(self, begin: int, end: int, tables: Tables) -> GroupedLoad:
        """Begin to fill the blocks of tokens [begin, end). After `fetch` of at least these."""
        loads = []
        for part, table, (first, last) in zip(self.parts, tables, self._ranges(begin, end), strict=True):
            if last > first:
                of_block = part.source.layout.block_tokens
                blocks = table[first // of_block : -(-last // of_block)]
                loads.append((part, last, part.load(TokenRange(first, last, part), blocks)))
        return GroupedLoad(begin, end, loads)

    def store(self, group: int, begin: int, end: int, table: Sequence[int], layer: int, *, stops: bool) -> None:
        """Keep tokens [begin, end) of one layer of a group, as `StoredPrompt.store`.

        stops: nothing behind `end` is computed in this step: a state in the blocks is the one after it.
        """
        part = self.parts[group]
        if part.source.layout.state:
            chunk_tokens = self.source.chunk_tokens
            if not stops or end % chunk_tokens:
                return
            begin = end - chunk_tokens
        unit = part.source.layout.position_tokens
        part.store(begin // unit, end // unit, table, layer)

    def close(self) -> None:
        """The request has ended: nothing more is stored, and chunks that are not complete are dropped."""
        for part in self.parts:
            part.close()

    def withdraw(self, *, all_groups: bool = True) -> None:
        """Others are about to write into its blocks: what is not copied by now is not kept. Or into those of groups
        that give up blocks while a request goes on."""
        for part in self.parts:
            if all_groups or not part.source.layout.keeps_all:
                part.withdraw()

    def _ranges(self, begin: int, end: int) -> list[tuple[int, int]]:
        goes_on = end if self._goes_on is None else self._goes_on
        return [part_of(layout, begin, end, goes_on) for layout in self.source.layouts]


class GroupedFetch:
    """What is needed of a prefix in all groups, on its way into the arena, leased there until it is closed."""

    def __init__(
        self,
        source: GroupedSource,
        begin: int,
        end: int,
        fetches: Sequence[tuple[StoredPrompt, int, int, AnyFetch]],
    ) -> None:
        """fetches: of some positions [first, last) of a group each."""
        self._source, self._begin, self._end, self._fetches = source, begin, end, fetches
        self._began_s = time.monotonic()
        self._took_s = 0.0
        self.done: Future[int] = Future()
        """Tokens before this one are in the arena: `begin`, if nothing of use is. Set in any thread."""
        _when_all([fetch.done for *_, fetch in fetches], self._settled)

    def _settled(self) -> None:
        self._took_s = time.monotonic() - self._began_s
        chunk_tokens, ends = self._source.chunk_tokens, [self._end]
        for part, first, last, fetch in self._fetches:
            came = first // part.source.chunk_tokens + len(fetch.done.result())
            ends.append(self._end if came * part.source.chunk_tokens >= last else came * chunk_tokens)
        end = max(self._begin, min(ends))
        self.done.set_result(end if end == self._end or self._source.keeps_all else self._begin)

    def measure(self) -> None:
        """Note how long it took. In the copier's thread, after `done`."""
        records: list[tuple[int, int]] = []
        num_came = 0
        for part, first, last, fetch in self._fetches:
            if len(records) == num_came:
                num_came += len(fetch.done.result())
            records += part.records_at(first, last)
        self._source.sources[0].brought_bytes(records, num_came, self._took_s)

    def finish(self) -> None:
        """Wait no longer for what is still on its way."""
        for *_, fetch in self._fetches:
            fetch.finish()

    def close(self) -> None:
        """Give the leases back."""
        for *_, fetch in self._fetches:
            fetch.close()


class GroupedLoad:
    """KV on its way from the store into the blocks of one request, in all groups."""

    def __init__(self, begin: int, end: int, loads: Sequence[tuple[StoredPrompt, int, StoreLoad]]) -> None:
        """loads: with the end of what each is to load."""
        self._begin, self._end, self._loads = begin, end, loads
        self.done: Future[int] = Future()
        """Tokens before this one are in the blocks: `begin`, if nothing of use is; when nothing touches the blocks
        any more. Set in any thread."""
        _when_all([load.done for *_, load in loads], self._settled)

    def cancel(self) -> None:
        for *_, load in self._loads:
            load.cancel()

    def _settled(self) -> None:
        ends, keeps_all = [self._end], True
        for part, last, load in self._loads:
            came = load.done.result()
            ends.append(self._end if came == last else came * part.source.layout.position_tokens)
            keeps_all = keeps_all and part.source.layout.keeps_all
        end = max(self._begin, min(ends))
        self.done.set_result(end if end == self._end or keeps_all else self._begin)


def _when_all(futures: Sequence[Future[Any]], call: Callable[[], None]) -> None:
    """Once, when the last of them is done, in its thread; now, if there are none."""
    lock = threading.Lock()
    missing = len(futures)

    def one_less(_: object) -> None:
        nonlocal missing
        with lock:
            missing -= 1
            is_last = missing == 0
        if is_last:
            call()

    for future in futures:
        future.add_done_callback(one_less)
    if not futures:
        call()
