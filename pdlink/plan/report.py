"""What `pdlink plan` says: the sentences, worst news first. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .sweep import best

if TYPE_CHECKING:
    from .closed_form import ClosedForm
    from .sweep import Demand, Split


@dataclass(frozen=True, slots=True)
class PlanReport:
    """Everything that was found out."""

    name: str
    """Of the traffic."""
    asked: Demand
    form: ClosedForm
    splits: list[Split]
    """Of so many workers."""
    limit: str
    """What more of would help the best of them most."""
    per_s: float
    """Rate that is to be served; 0 if nobody says."""
    fewest: int | None
    """Workers for that rate; None if it is 0, or if no fleet that was tried keeps the promise."""

    @property
    def best(self) -> Split:
        return best(self.splits)

    @property
    def workers(self) -> int:
        return self.best.num_prefill + self.best.num_decode

    @property
    def closed_per_s(self) -> float:
        """The closed form's rate of the best split."""
        return self.form.rate(self.best.num_prefill, self.best.num_decode)

    @property
    def usable(self) -> float:
        """Share of the closed form's rate that keeps the promise; above 1 where prompts share passes."""
        return self.best.per_s / self.closed_per_s if self.closed_per_s else 0.0


def sentences(plan: PlanReport) -> list[str]:
    """The first one says whether to do it at all."""
    form, asked, found = plan.form, plan.asked, plan.best
    promise, curves = asked.promise, asked.curves
    said = []
    if form.link_loses:
        said.append(
            f"P/D loses here: the link takes {1e3 / form.link_per_s:.0f} ms for the KV of a mean prompt, and prefill"
            f" {1e3 / form.compute_per_s:.0f} ms for computing it; a link of"
            f" {curves.link_nbytes_per_s * form.compute_per_s / form.link_per_s / 1e9:.1f} GB/s would hide behind it."
        )
    promised = (
        f"{promise.share:.0%} of the requests with a first token within {promise.ttft_s:g} s and"
        f" {promise.per_token_s * 1e3:g} ms a token after it"
    )
    if not found.per_s:
        said.append(f"No split of {plan.workers} workers serves {promised}, at any rate: {_why_none(plan)}.")
        return said
    said.append(
        f"{found.name} of {plan.workers} workers: {found.per_s:.1f} requests/s, {promised}, placed by the proxy's"
        f" policies ({','.join(asked.policies)}). {_beside_closed_form(plan)} At a higher rate the"
        f" {found.limit} is missed first; the bottleneck is {plan.limit}."
    )
    said.append(
        f"Closed form: {form.num_prefill(plan.workers):.1f} prefill workers of {plan.workers}, batch {form.batch:.0f}"
        f" (bound by {form.batch_limit}), context {form.context:.0f} tokens, weighted by the tokens of the answers."
    )
    if plan.per_s and plan.fewest:
        num, other = form.split(plan.fewest)
        said.append(
            f"For the {plan.per_s:.1f} requests/s of {plan.name}: {plan.fewest} workers, about {num}P{other}D."
        )
    elif plan.per_s:
        said.append(
            f"For the {plan.per_s:.1f} requests/s of {plan.name}: no number of workers that was tried is enough."
        )
    return said


def _beside_closed_form(plan: PlanReport) -> str:
    most = f"{plan.closed_per_s:.1f} requests/s of the closed form"
    if plan.usable > 1:
        return f"That is more than the {most}, which lets no prompts share a pass and no request miss the promise."
    return f"That is {plan.usable:.0%} of the {most}, where no request ever waits."


def _why_none(plan: PlanReport) -> str:
    promise, curves = plan.asked.promise, plan.asked.curves
    alone = plan.asked.most_alone
    if alone < promise.share:
        return (
            f"{1 - alone:.0%} of the prompts take longer to compute even without a queue; promise more time, or a"
            " smaller share"
        )
    if promise.per_token_s <= curves.decode_step_s(1, plan.form.context):
        step_ms = curves.decode_step_s(1, plan.form.context) * 1e3
        return f"a decode step of one sequence takes {step_ms:.1f} ms; promise more time a token"
    if plan.form.link_loses:
        return "KV arrives too late for the second token; see the link"
    return f"the {plan.splits[0].limit} is missed; promise more time"
