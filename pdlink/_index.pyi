"""Who has the KV of which prefix, from published events or by guess, and whom a request suits best (`csrc/index`)."""

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeAlias

import numpy as np

_Column: TypeAlias = np.ndarray[tuple[int], np.dtype[np.float64]]
_Mask: TypeAlias = np.ndarray[tuple[int], np.dtype[np.bool_]]

class Events:
    """The KV events of one batch, to be read."""

    def __init__(self, batch: bytes) -> None:
        """In MessagePack, as an engine publishes it. Raises ValueError for other bytes."""

class Index:
    """Which worker has the KV of which prompt, by the events that the workers publish. Not thread-safe.

    A publisher is a number that the caller chooses, as small as may be: it costs memory by the largest. 16 bytes per
    block and publisher and 16 per prefix, by a fill of 3/8 to 3/4.
    """

    def __init__(self, max_blocks: int, max_sizes: int, loading: tuple[float, float, float, float]) -> None:
        """max_blocks: of all publishers together, per block size; further ones are not noted. max_sizes: block sizes
        that are told apart. loading: by medium, the quickest first, what bringing a token's KV to the device costs,
        in tokens computed."""

    def apply(self, publisher: int, model: str, events: Events, scope: str = "") -> bool:
        """Note the next events that are about this model: those of 64 KB, or one that is larger. Whether there are
        more. Raises ValueError for other bytes.

        A publisher has a block until each copy of it was removed from each medium it was stored in. A block that is
        stored again is another copy, unless no parent is given: see `prefixes.h`. Of blocks whose parent is unknown,
        as after missed events, none are noted.

        scope: what the publisher calls this model, for one that has KV of several; it says so of first blocks, and
        blocks after one that is not known here are passed over.
        """

    def forget(self, publisher: int) -> None:
        """It has nothing, or nobody knows what."""

    def assign(self, publisher: int, workers: Sequence[int], *, shared: bool) -> None:
        """What this publisher tells is the KV of these workers (`WorkerLoad.number`). shared: of a store, so it costs
        each of them as much as from the last medium at least."""

    def held(self, model: str, extra: tuple[str, ...], tokens: np.ndarray[tuple[int], np.dtype[np.uint32]]) -> HeldKV:
        """What each worker has of a prompt with these tokens. extra: name of a LoRA, salt."""

    def __len__(self) -> int:
        """Blocks, those of each publisher counted."""

    def __bool__(self) -> bool:
        """Whether anything is known."""

    @property
    def nbytes(self) -> int: ...

class HeldKV:
    """What workers say that they have of one prompt."""

    def __init__(self, shares: Sequence[tuple[int, float, float]]) -> None:
        """Of each worker its number, tokens of the prompt, and what bringing their KV to its device costs, in tokens
        computed."""

    def tokens_of(self, worker: int) -> int:
        """0 of one that has nothing, or does not say."""

    @property
    def most(self) -> int:
        """Tokens that one worker has."""
    @property
    def shares(self) -> list[tuple[int, int, float]]:
        """By worker."""

    def __bool__(self) -> bool:
        """Somebody has something."""

class _Placed(Protocol):
    """A `PlacementRequest` of the proxy."""

    key_tokens: int
    num_tokens: int
    chain: Sequence[int] | None
    held: HeldKV | None

class Guesses:
    """Which worker was sent which beginnings of prompts. Not thread-safe.

    A worker is a number that the caller chooses, as small as may be: it costs 16 bytes by the largest. A beginning is
    any number of 64 bits. A worker forgets the least recent first, and a key before the one that it follows:
    who has a key has all before it.
    """

    def __init__(self, max_keys: int) -> None:
        """max_keys: of all workers together; beyond it the one that has most keeps half of its own."""

    def note(self, worker: int, keys: Sequence[int], most: int) -> int:
        """The worker is sent a prompt with these keys, the shortest beginning first, and keeps `most` keys. Returns
        how many of these it had."""

    def placed(self, of_worker: int, unheard: int, request: _Placed, worker: WorkerLoad) -> int:
        """The request goes to this worker, which keeps as many keys as fit into its pool and no more than
        `of_worker`, or `unheard` if it publishes. Returns how many tokens it lacks; 0 if nobody asked for its
        keys."""

    def forget(self, worker: int) -> None:
        """The worker has nothing."""

    @property
    def num_keys(self) -> int:
        """Of all workers."""
    @property
    def nbytes(self) -> int: ...

class Fares:
    """How the legs of one incarnation of a worker fare."""

    def __init__(self) -> None: ...

    out: bool
    """It is left out, but for a leg that finds out."""
    @property
    def failed(self) -> float:
        """Share of its recent legs."""
    @property
    def pace(self) -> float:
        """Seconds for a unit of work."""
    @property
    def num(self) -> int:
        """Legs that were counted."""
    @property
    def num_timed(self) -> int:
        """Those with a pace."""

    def count(self, failed: bool, pace: float | None) -> None:
        """A leg has ended. pace: seconds for a unit of its work, if it can be said."""

    def forget(self) -> None:
        """What was counted."""

class WorkerLoad:
    """What one incarnation of a worker has to do, by what is sent to it and what it says of itself."""

    def __init__(self, allowed: bool) -> None:
        """allowed: its tokens are what clients allow (decode), and not what it computes for sure (prefill)."""

    slowness: float
    """Time for a token, relative to the mean of its pool. 1 for differences that may be chance."""
    taken: float
    """See `Costs`."""
    room_tokens: int | None
    """Tokens whose KV it can still take; None if it does not say."""
    pool_tokens: int | None
    """Tokens whose KV it can hold; None if it does not say."""
    publishes: bool
    """It says what KV it has, in events; some have come."""
    @property
    def number(self) -> int:
        """Names it where numbers are quicker; never given twice, so nothing of a former life is its own."""
    @property
    def load(self) -> float:
        """Tokens it has to do: those of unfinished requests of ours, and the requests it has from others. For prefill
        the tokens it must compute, for decode those of prompt and answer."""
    @property
    def requests(self) -> int:
        """Ours, not finished."""
    @property
    def tokens(self) -> int:
        """Of those."""
    @property
    def foreign(self) -> int:
        """Requests of others, by its own account."""
    @property
    def tokens_per_s(self) -> float | None:
        """Finished per second in which there was something to do; None if not measured."""
    @property
    def idle(self) -> bool:
        """It has no request, of nobody."""

    def sent(self, tokens: int, now: float) -> float:
        """A request of ours leaves for it. Returns its load."""

    def finished(self, tokens: int, now: float, served: bool) -> None:
        """A request that was `sent` needs nothing of it any more. served: it did what it was asked."""

    def served(self, tokens: int, now: float, fares: Fares, pace: float | None) -> None:
        """The same of one that did, which is counted, too, unless the worker is left out."""

    def heard(self, requests: int, free_tokens: int | None, load_tokens: float | None = None) -> None:
        """By its own account it has this many requests, room for so many tokens, and so many to do. Without the
        latter each request of others counts as a mean one."""

class Costs(Guesses):
    """Further, KV that the workers of a pool have computed of late, in shares of their pools. What was computed
    counts less with all that is computed after it; `WorkerLoad.taken` is a logarithm, which stays small. Of a prompt
    whose keys nobody asked for, as with one worker on each side, all counts as computed, also what its worker had."""

    def taken(self, worker: WorkerLoad) -> float:
        """In shares of its pool. `placed` adds to it."""

class Columns:
    """The workers of a table, judged in one pass: a thousand in microseconds. fit, everywhere: marks the rows that
    may be chosen, at least one; None: all."""

    def __init__(self, workers: Sequence[WorkerLoad], rows: dict[str, int]) -> None:
        """rows: by key of a worker; read anew with each call."""

    def put(self, row: int, worker: WorkerLoad) -> None:
        """The row is this worker's from now on."""

    @property
    def tells_room(self) -> bool:
        """Some worker does."""
    @property
    def load(self) -> _Column:
        """Of each, as it is now. So are the others."""
    @property
    def slowness(self) -> _Column: ...
    @property
    def room(self) -> _Column:
        """Tokens that fit in; infinite where nobody knows, and into an idle worker: what does not fit into that will
        never fit, and the worker says so."""

    def least(self, fit: _Mask | None, turn: int) -> int:
        """The row with the least to do; equal ones take turns."""

    def lowest(self, fit: _Mask | None, most: int) -> list[tuple[int, float]]:
        """At most so many of those with the least to do, the lowest first: rows and tokens."""

    def held(self, held: HeldKV) -> list[float]:
        """By row, tokens of the prompt that the worker says it has."""

    def cached(
        self, guesses: Guesses, keys: Sequence[int], key_tokens: int, num_tokens: int, held: HeldKV | None
    ) -> list[float]:
        """By row, tokens of the prompt that the worker may hold, by what it says or what it was sent. keys: of the
        prompt, each for `key_tokens` more."""

    def cheapest(
        self,
        costs: Costs,
        keys: Sequence[int],
        key_tokens: int,
        num_tokens: int,
        held: HeldKV | None,
        behind: dict[str, float] | None,
        fit: _Mask | None,
        turn: int,
        num_scores: int,
    ) -> tuple[int, int, list[tuple[int, float]]]:
        """The row from which the first token is expected soonest, unless one that computed less of late costs little
        more; tokens of the prompt that it may hold; and so many of the lowest costs, in tokens of a mean worker.
        Further to `cached`: behind: by key of a worker, what comes to its costs for each token of the prompt."""

class PairLeg:
    """The workers of one leg for `Pairing`, as long as the same ones may get requests."""

    def __init__(
        self, columns: Columns, fit: _Mask | None, costs: Costs | None, policy: str, labels: Sequence[str]
    ) -> None:
        """costs: None for the least loaded. policy: its name. labels: by row."""

class Pairing:
    """Both workers of a request, where nothing is unusual."""

    def __init__(
        self,
        prefill: PairLeg,
        decode: PairLeg,
        alone: int,
        idle_alone: int,
        behind: Mapping[str, dict[str, float]],
    ) -> None:
        """alone: decode computes a prompt of which it lacks at most so many tokens, or `idle_alone` if it has nothing
        else to do. behind: by decode's key, that of `Columns.cheapest`."""

    def choose(
        self,
        keys: Sequence[int],
        key_tokens: int,
        num_tokens: int,
        more_tokens: int,
        held: HeldKV | None,
        most_load: int,
        turn: int,
        num_scores: int,
    ) -> tuple[int, int, int, bytes | None] | None:
        """The rows of prefill and decode, how many tokens of the prompt prefill may hold, and in MessagePack what was
        weighed, as `Considered` by leg, with so many scores; None if nothing was, or nobody asked.

        None if that is not all: no decode worker has room for the prompt and `more_tokens`, every prefill worker has
        `most_load` tokens to do (0 for no limit), or decode computes the prompt itself."""

def keys_of(seed: int, data: bytes, piece_nbytes: int) -> list[int]:
    """Names of the beginnings of `data`, each a piece longer than the one before; equal in every process. Other
    threads run meanwhile where that is long. piece_nbytes: a multiple of 4, or it raises ValueError."""

def words_of_json(json: bytes) -> bytes:
    """The token ids of a JSON list, as native uint32. Raises ValueError for anything else."""
