"""`Prompt`: the store for one request: what it has of the prompt, and where what is computed is kept.

What is found is found in all groups of layers (`reach.py`), what is loaded counts if all of it has come, and what is
computed is kept group by group (`save.py`): windows and states at the boundaries that a step leaves behind.
"""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from pdlink.kv import hashing
from pdlink.store.groups import Blocks
from pdlink.store.interface import Found
from pdlink.store.loading import GroupLoad, Load, when_all
from pdlink.store.lookup import NOTHING, look_up
from pdlink.store.reach import part_of
from pdlink.store.save import Save
from pdlink.store.sessions import SessionTerms
from pdlink.store.worth import Choice, choose, choose_all

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from pdlink.store.groups import RecordGroup
    from pdlink.store.interface import AnyFetch
    from pdlink.store.slots import Retention
    from pdlink.store.source import Source
    from pdlink.store.worth import Speed

    Tables = Sequence[Sequence[int]]
    """By group: a request's blocks from token 0 on; of tokens that a group does not need any number."""


class PromptKeys(NamedTuple):
    """What the store calls the full chunks of a prompt, for any number of `Source.prompt`."""

    num_tokens: int
    by_group: tuple[Sequence[bytes], ...]
    tokens: Sequence[int]
    """Empty where placeholders do not say what is in an image."""
    origin: hashing.Origin
    """Of the first group, whose records say the tokens to listeners."""

    def preimage(self, chunk: int) -> hashing.Preimage:
        origin = self.origin
        return hashing.preimage(
            self.by_group[0],
            chunk,
            self.tokens,
            origin.chunk_tokens,
            lora=origin.lora,
            salt=origin.salt,
            origin=origin,
        )


class Prompt:
    """`load` and `store` are for one thread. Counts in tokens; groups count in positions."""

    def __init__(
        self, source: Source, request_id: str, keys: PromptKeys, retention: Retention, *, stores: bool
    ) -> None:
        """stores: whether `store` does anything."""
        self.source, self.request_id, self.keys, self.num_tokens = source, request_id, keys, keys.num_tokens
        self.end = 0
        """What the last look-up found ends there; 0 for nothing."""
        self._retention = retention
        self._goes_on: int | None = None
        self._announced = False
        self._found = [NOTHING] * len(source.groups)
        """By group. The place of a record that is not there is -1."""
        self._ahead: PromptFetch | None = None
        told: list[Callable[[int], hashing.Preimage | None]] = [keys.preimage]
        told += [lambda _: None] * (len(source.groups) - 1)
        self._saves = [
            Save(source, group, mine, preimage, request_id, retention)
            for group, mine, preimage in zip(source.groups, keys.by_group, told, strict=True)
            if stores
        ]

    def comes_from(self, address: str) -> None:
        """The store of another node at this address may have it: look-ups that follow ask it, too. `announce` it
        when it has come."""
        for keys in self.keys.by_group:
            self.source.store.comes_from(address, keys)
        for save in self._saves[:1]:
            save.before_commit = self.announce

    def announce(self) -> None:
        """The store's listeners hear of what was found, as far as it is in memory by now: before they hear of what is
        computed behind it, of which they could not tell else what it follows. In the copier's thread; the second call
        does nothing."""
        if self._announced:
            return
        self._announced = True
        keys, shape = self.keys.by_group[0][: self.end // self.source.chunk_tokens], self.source.groups[0].shape
        if keys:
            self.source.store.announce(keys, shape, [self.keys.preimage(chunk) for chunk in range(len(keys))])

    def lookup(
        self,
        begin: int = 0,
        timeout_s: float | None = None,
        goes_on: int | None = None,
        barred: Collection[int] = (),
    ) -> int:
        """Where what the store has of the prompt ends; 0 for nothing.

        Somebody must compute the last token, so it ends before that one, in the middle of a chunk if need be. Where
        a part of a chunk is of no use it ends before that chunk.
        begin, goes_on: as of `reach`. Waits for the tiers' answers for `timeout_s` at most, by default
        `lookup_timeout_s`. barred: places whose records do not count.
        """
        source, last = self.source, self.num_tokens - 1
        self._goes_on = goes_on
        self.end, self._found = look_up(
            source.store,
            [group.layout for group in source.groups],
            self.keys.by_group,
            source.chunk_tokens,
            (self.num_tokens if source.parts_chunks else last) // source.chunk_tokens,
            last,
            source.lookup_timeout_s if timeout_s is None else timeout_s,
            begin,
            goes_on,
            barred,
        )
        return self.end

    def choose(self, cached: int, other: Speed, *, always: bool = False) -> Choice:
        """How much of what was found to load, where the engine's blocks have the first `cached` tokens: all or
        nothing where a part is of no use. Less than a block and a chunk is not worth a load.

        other: seconds for tokens that are not loaded. always: load all, whatever it takes.
        """
        source, now_s = self.source, time.monotonic()
        if 0 < self.end - cached < min(source.chunk_tokens, source.groups[0].layout.block_tokens):
            return Choice(cached, "in_blocks")
        if source.keeps_all and len(source.groups) == 1:
            places, nbytes = self._found[0].places, source.groups[0].shape.nbytes
            choice = choose(cached, self.end, places, source.chunk_tokens, nbytes, source.speeds, other, now_s)
        else:
            records = [record for wanted in self._wanted(cached, self.end) for record in self._records(*wanted)]
            choice = choose_all(cached, self.end, records, source.speeds, other, now_s)
        return choice._replace(end=self.end, reason="always") if always and self.end > cached else choice

    def tokens_by_place(self, begin: int, end: int) -> dict[str, int]:
        """Where tokens [begin, end) of what was found were: memory, or names of tiers.

        Of a group that has all tokens; without one all are where the last ones are.
        """
        chunk_tokens, names = self.source.chunk_tokens, self.source.store.places
        for group, found in zip(self.source.groups, self._found, strict=True):
            if group.layout.keeps_all:
                counts = Counter[str]()
                for chunk in range(begin // chunk_tokens, min(-(-end // chunk_tokens), len(found.places))):
                    after = min(end, (chunk + 1) * chunk_tokens)
                    counts[names[found.places[chunk]]] += after - max(begin, chunk * chunk_tokens)
                return dict(counts)
        return {names[self._found[0].places[(end - 1) // chunk_tokens]]: end - begin} if end > begin else {}

    def fetch(self, begin: int, end: int) -> PromptFetch:
        """Bring what is needed of tokens [begin, end) of what was found into memory, ahead of the load.

        The load ends it; or close it. The records are checked before it is done, and not while they are copied: an
        engine that fetches ahead has promised what it got before it copies.
        """
        fetches = [self._fetch(*wanted, checks=False) for wanted in self._wanted(begin, end)]
        self._ahead = PromptFetch(self.source, begin, end, fetches)
        return self._ahead

    def load(self, begin: int, end: int, tables: Tables, landed: Callable[[int, int], None] | None = None) -> Load:
        """Begin to fill the blocks of tokens [begin, end). After `lookup`, and perhaps `fetch` of at least these.

        landed(layer, end): told in the copier's thread that tokens up to `end`, perhaps not all that are wanted, are
        in the blocks for `layer` of the only group; the last layer only when all of it counts.
        """
        ahead, self._ahead = self._ahead, None
        fetched = {} if ahead is None else {fetch.number: fetch for fetch in ahead.fetches}
        loads = []
        for index, first, last in self._wanted(begin, end):
            group = self.source.groups[index]
            fetch = fetched.get(index) or self._fetch(index, first, last, checks=self.source.fuses(group))
            assert fetch.first <= first, "more is wanted than was fetched"
            mine = Blocks(tuple(tables[index][group.layout.blocks_of(first, last)]), first)
            records = () if ahead is not None else fetch.records
            chunk = fetch.first // group.chunk_tokens
            loads.append(
                GroupLoad(self.source, group, fetch.fetch, chunk, first, last, mine, landed=landed, records=records)
            )
        return Load(begin, end, loads)

    def store(
        self, begin: int, end: int, table: Sequence[int], layer: int, *, group: int = 0, stops: bool = False
    ) -> None:
        """Keep tokens [begin, end) of one layer of a group, which the engine has computed, or launches.

        Layers come in order, from the first. table: the request's blocks of the group, from token 0 on; they are held
        until the last layer has been copied.
        At the first call tokens before `begin` are in the blocks for all layers: they are kept, too, unless the group
        is one that has given up some of them.
        stops: nothing behind `end` is computed in this step: a state in the blocks is the one after it.
        """
        if not self._saves:
            return
        save, layout = self._saves[group], self.source.groups[group].layout
        if layout.state:
            if not stops or end % self.source.chunk_tokens:
                return
            begin = end - self.source.chunk_tokens
        if layer == 0:
            first = begin if save.has_begun or not layout.keeps_all else 0
            unit = layout.position_tokens
            save.begin(first // unit, end // unit, Blocks(tuple(table), 0))
        save.layer(layer)

    def hold(self, name: str, ttl_s: float, owner: str = "", *, waits: bool) -> int:
        """The session of that name and owner keeps its records, and no others of this model's; how many leading
        tokens its quota allows. As `AnyStore.hold`."""
        session = SessionTerms(name, self._retention.tenant, ttl_s, self.source.scope, owner)
        keys = [key for chunk in zip(*self.keys.by_group, strict=True) for key in chunk]
        sizes = [group.shape.nbytes for group in self.source.groups]
        return self.source.store.hold(session, keys, sizes, waits=waits) // len(sizes) * self.source.chunk_tokens

    def close(self, *, forget: bool = False) -> None:
        """The request has ended: nothing more is stored, and chunks that are not complete are dropped.

        forget: its KV is not to be trusted, so what the store has of the prompt is dropped, too.
        """
        for save in self._saves:
            save.close()
        if forget:
            keys = [key for mine in self.keys.by_group for key in mine]
            self.source.copier.put(partial(self.source.settle, lambda: self._forget(keys)))

    def _forget(self, keys: Sequence[bytes]) -> None:
        self.source.store.clear(keys)

    def withdraw(self, *, all_groups: bool = True) -> None:
        """Others are about to write into its blocks: what is not copied by now is not kept. Or into those of groups
        that give up blocks while a request goes on."""
        for save, group in zip(self._saves, self.source.groups, strict=False):
            if all_groups or not group.layout.keeps_all:
                save.withdraw()

    def _wanted(self, begin: int, end: int) -> list[tuple[int, int, int]]:
        """Group, and positions [first, last) of it that are needed of tokens [begin, end)."""
        goes_on = end if self._goes_on is None else self._goes_on
        ranges = [part_of(group.layout, begin, end, goes_on) for group in self.source.groups]
        return [(index, *positions) for index, positions in enumerate(ranges) if positions[0] < positions[1]]

    def _records(self, index: int, first: int, last: int) -> list[tuple[int, int]]:
        """(place, bytes) of each record of what was found that holds some of positions [first, last)."""
        group = self.source.groups[index]
        chunks = group.chunks_of(first, last)
        return [(place, group.shape.nbytes) for place in self._found[index].places[chunks.start : chunks.stop]]

    def _fetch(self, index: int, first: int, last: int, *, checks: bool) -> GroupFetch:
        """checks: the load compares the sums of records while it copies."""
        group, found = self.source.groups[index], self._found[index]
        chunks = group.chunks_of(first, last)
        wanted = Found(found.keys[chunks.start : chunks.stop], found.places[chunks.start : chunks.stop])
        fetch = self.source.store.fetch(
            wanted, group.shape, self.request_id, retention=self._retention, checks=checks
        )
        return GroupFetch(index, group, first, last, fetch, self._records(index, first, last))


class GroupFetch(NamedTuple):
    """Positions [first, last) of one group on their way into the arena."""

    number: int
    group: RecordGroup
    first: int
    last: int
    fetch: AnyFetch
    records: list[tuple[int, int]]
    """(place, bytes) of each."""


class PromptFetch:
    """What is needed of a prefix in all groups, on its way into the arena, leased there until it is closed."""

    def __init__(self, source: Source, begin: int, end: int, fetches: Sequence[GroupFetch]) -> None:
        self._source, self._begin, self._end, self.fetches = source, begin, end, fetches
        self._began_s = time.monotonic()
        self._took_s = 0.0
        self.done: Future[int] = Future()
        """Tokens before this one are in the arena: `begin`, if nothing of use is. Set in any thread."""
        when_all([each.fetch.done for each in fetches], self._settled)

    def _settled(self) -> None:
        self._took_s = time.monotonic() - self._began_s
        ends = [self._end]
        for each in self.fetches:
            came = each.first // each.group.chunk_tokens + len(each.fetch.done.result())
            is_whole = came * each.group.chunk_tokens >= each.last
            ends.append(self._end if is_whole else came * self._source.chunk_tokens)
        end = max(self._begin, min(ends))
        self.done.set_result(end if end == self._end or self._source.keeps_all else self._begin)

    def measure(self) -> None:
        """Note how long it took. In the copier's thread, after `done`."""
        records: list[tuple[int, int]] = []
        num_came = 0
        for each in self.fetches:
            if len(records) == num_came:
                num_came += len(each.fetch.done.result())
            records += each.records
        self._source.brought(records, num_came, self._took_s)

    def finish(self) -> None:
        """Wait no longer for what is still on its way."""
        for each in self.fetches:
            each.fetch.finish()

    def close(self) -> None:
        """Give the leases back."""
        for each in self.fetches:
            each.fetch.close()
