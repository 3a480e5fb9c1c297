"""Every split of so many workers, each with the highest rate at which enough requests have what was promised."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from pdlink.config.proxy import DEFAULT_POLICIES

from .closed_form import closed_form, prefill_times
from .fleet import Simulation
from .traffic import Traffic

if TYPE_CHECKING:
    from .closed_form import ClosedForm
    from .curves import Curves
    from .traffic import Seconds, Tokens
    from .workers import Played

STEPS = 9
"""Of the bisection of a rate: 0.2 % of the closed form's."""
ABOVE = 1.1
"""A fleet may exceed the closed form, which knows no prompts that share a pass and no requests that may miss."""
COARSE = 64
"""Of more workers than this only every second split is played, and so on."""
NEAR_STEPS, NEAR = 7, 0.1
"""Of the same near a rate that is known: the first ones go this share up or down."""
NEIGHBOURS = 2
"""Splits on each side of the best one that are shown."""


@dataclass(frozen=True, slots=True)
class Promise:
    """What a request is promised."""

    ttft_s: float
    per_token_s: float
    """From its first token to its last, divided by the tokens after the first: time in which decode has no room yet,
    or KV is on its way, counts."""
    share: float
    """Of the requests, for which both hold."""

    def kept(self, played: Played) -> tuple[float, float, float]:
        """Share of the requests for which both hold; the first one; the second one."""
        first = played.ttft_s <= self.ttft_s
        rest = ~(played.per_token_s > self.per_token_s)
        return float((first & rest).mean()), float(first.mean()), float(rest.mean())


@dataclass(frozen=True, slots=True, eq=False)
class Demand:
    """Requests at no particular rate, and the workers that are to serve them."""

    curves: Curves
    prompt: Tokens
    answer: Tokens
    cached: Tokens | None
    """Of each prompt, at prefill already: for the closed form."""
    unit_s: Seconds
    """When they come, one a second in the mean."""
    promise: Promise
    seed: int = 1
    policies: tuple[str, str] = (DEFAULT_POLICIES["prefill"], DEFAULT_POLICIES["decode"])
    """Of the proxy, for prefill and decode."""
    cache_tokens: int = 0
    """That all prefill workers keep of prompts, each its share."""
    keys: tuple[tuple[int, ...], ...] = field(default=(), repr=False)
    """Of the prompts, their beginnings."""

    def closed_form(self) -> ClosedForm:
        return closed_form(self.curves, self.prompt, self.answer, self.cached, self.promise.per_token_s)

    def played(self, num_prefill: int, num_decode: int, per_s: float) -> Played:
        """At so many requests a second."""
        simulation = Simulation(
            self.policies,
            num_prefill,
            num_decode,
            curves=self.curves,
            cache_tokens=(self.cache_tokens // num_prefill, 0),
            seed=self.seed,
        )
        traffic = Traffic("", self.unit_s / per_s, self.prompt, self.answer, self.keys)
        return simulation.run(traffic).played

    @property
    def most_alone(self) -> float:
        """Share of the requests whose prompt, with nobody before it, is computed in the promised time."""
        alone_s = prefill_times(self.curves, self.prompt, self.cached) + self.curves.overhead_s
        return float((alone_s <= self.promise.ttft_s).mean())


@dataclass(frozen=True, slots=True)
class Split:
    """So many workers of each kind."""

    num_prefill: int
    num_decode: int
    per_s: float
    """Highest rate at which the promise is kept; 0 if it is not at any."""
    ttft_s: tuple[float, float, float]
    """p50, p90, p99 at that rate."""
    per_token_s: tuple[float, float, float]
    prefill_busy: float
    decode_busy: float
    batch: float
    limit: str
    """What breaks the promise at a higher rate: `time to first token` or `time per token`."""

    @property
    def name(self) -> str:
        return f"{self.num_prefill}P{self.num_decode}D"


def demand_of(
    traffic: Traffic,
    curves: Curves,
    promise: Promise,
    cached: Tokens | None = None,
    *,
    num: int | None = None,
    as_traced: bool = False,
    seed: int = 1,
    policies: tuple[str, str] = (DEFAULT_POLICIES["prefill"], DEFAULT_POLICIES["decode"]),
    cache_tokens: int = 0,
) -> Demand:
    """num: requests, the trace again where it ends; all of the trace if None. as_traced: they come in the trace's
    rhythm, bursts included, instead of at random."""
    num = num or len(traffic)
    prompt, answer = traffic.repeated(num)
    again = None if cached is None else np.resize(cached, num)
    unit_s = traffic.poisson(num, seed)
    if as_traced and traffic.per_s:
        whole_s = float(traffic.at_s[-1]) + 1 / traffic.per_s
        rounds = np.arange(num) // len(traffic)
        unit_s = (np.resize(traffic.at_s, num) + rounds * whole_s) * traffic.per_s
    keys = tuple(itertools.islice(itertools.cycle(traffic.keys), num)) if cache_tokens and traffic.keys else ()
    return Demand(curves, prompt, answer, again, unit_s, promise, seed, policies, cache_tokens, keys)


def sweep(demand: Demand, workers: int) -> list[Split]:
    """The splits of so many workers that may be the best one, with fewest prefill workers first: from the closed
    form's to both sides, as long as the closed form allows a higher rate than the best that was found.

    Cost: some 40 us of CPU a request and rate: 24 workers and 12,000 requests take half a minute.
    """
    form = demand.closed_form()
    middle = form.split(workers)[0]
    found = {middle: best_rate(demand, middle, workers - middle, form)}
    step = max(1, workers // COARSE)
    for side in (-step, step):
        num, share = middle + side, _share_of(form, found[middle])
        while 1 <= num < workers:
            bound = form.rate(num, workers - num) * ABOVE
            near = abs(num - middle) <= NEIGHBOURS * step
            if not near and bound < max(each.per_s for each in found.values()):
                break
            found[num] = best_rate(demand, num, workers - num, form, near=share * bound / ABOVE)
            share = _share_of(form, found[num]) or share
            num += side
    return [found[num] for num in sorted(found)]


def _share_of(form: ClosedForm, split: Split) -> float:
    """Of the closed form's rate; 0 where there is none."""
    most = form.rate(split.num_prefill, split.num_decode)
    return split.per_s / most if most else 0.0


def best(splits: list[Split]) -> Split:
    """The one with the highest rate."""
    return max(splits, key=lambda split: split.per_s)


def best_rate(demand: Demand, num_prefill: int, num_decode: int, form: ClosedForm, near: float = 0.0) -> Split:
    """By bisection, below what the closed form says that no fleet can exceed. near: begin at this rate, with fewer
    steps."""
    low, high = 0.0, form.rate(num_prefill, num_decode) * ABOVE
    at_low = at_high = None
    for step in range(NEAR_STEPS if near else STEPS):
        per_s = (low + high) / 2
        if near and (at_low is None or at_high is None):
            per_s = min(high, near if step == 0 else high * (1 - NEAR) if at_low is None else low * (1 + NEAR))
        if per_s <= 0:
            break
        played = demand.played(num_prefill, num_decode, per_s)
        if demand.promise.kept(played)[0] >= demand.promise.share:
            low, at_low = per_s, played
        else:
            high, at_high = per_s, played
    if near and at_low is None:
        return best_rate(demand, num_prefill, num_decode, form)
    limit = "time per token"
    if at_high is not None:
        _, first, rest = demand.promise.kept(at_high)
        limit = "time to first token" if first <= rest else "time per token"
    return _split(num_prefill, num_decode, low, at_low, limit)


def _split(num_prefill: int, num_decode: int, per_s: float, played: Played | None, limit: str) -> Split:
    nothing = (0.0, 0.0, 0.0)
    if played is None:
        return Split(num_prefill, num_decode, 0.0, nothing, nothing, 0.0, 0.0, 0.0, limit)
    return Split(
        num_prefill,
        num_decode,
        per_s,
        percentiles(played.ttft_s),
        percentiles(played.per_token_s),
        played.prefill_busy,
        played.decode_busy,
        played.batch,
        limit,
    )


def percentiles(values: Seconds) -> tuple[float, float, float]:
    """p50, p90 and p99; zeros where there is nothing."""
    there = values[~np.isnan(values)]
    if not len(there):
        return 0.0, 0.0, 0.0
    p50, p90, p99 = (float(each) for each in np.percentile(there, (50, 90, 99)))
    return p50, p90, p99


def fewest_workers(demand: Demand, per_s: float, most: int) -> int | None:
    """The smallest fleet that keeps the promise at this rate; None above `most`.

    Looks at the closed form's split and at those beside it, and halves between a fleet that does not and one that
    does: more workers are taken to be no worse.
    """
    form = demand.closed_form()
    if not form.decode_per_s or demand.most_alone < demand.promise.share:
        return None

    def keeps(workers: int) -> bool:
        middle = form.split(workers)[0]
        tried = [num for num in (middle, middle - 1, middle + 1) if 1 <= num < workers]
        return any(
            demand.promise.kept(demand.played(num, workers - num, per_s))[0] >= demand.promise.share for num in tried
        )

    low, high = 1, max(2, int(form.workers(per_s)) + 1)
    while not keeps(min(high, most)):
        if high >= most:
            return None
        low, high = high, high * 3 // 2 + 1
    high = min(high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if keeps(middle) else (middle, high)
    return high


def bottleneck(demand: Demand, split: Split) -> str:
    """What more of would help most at a rate that is 10 % too high: each is tried. Empty if there is no rate."""
    if not split.per_s:
        return ""
    curves, per_s = demand.curves, split.per_s * 1.1
    roomy = replace(demand, curves=curves.model_copy(update={"pool_tokens": int(curves.pool_tokens * 1.25)}))
    linked = replace(demand, curves=curves.model_copy(update={"link_nbytes_per_s": curves.link_nbytes_per_s * 1.25}))
    tried = {
        "prefill": demand.played(split.num_prefill + 1, split.num_decode, per_s),
        "decode": demand.played(split.num_prefill, split.num_decode + 1, per_s),
        "the memory of decode": roomy.played(split.num_prefill, split.num_decode, per_s),
        "the link": linked.played(split.num_prefill, split.num_decode, per_s),
    }
    return max(tried, key=lambda each: demand.promise.kept(tried[each])[0])
