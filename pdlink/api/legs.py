"""`kv_transfer_params`: what the proxy says about a request to the two workers of an attempt."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from msgspec import Meta, Struct

from pdlink.api.fields import Count, Int64  # noqa: TC001  (msgspec reads annotations at run time)
from pdlink.api.session import MAX_OWNER_CHARS
from pdlink.config.tiers import MAX_SESSION_CHARS, MAX_SESSION_TTL_S

MAX_ID_CHARS = 100
TransferId = Annotated[str, Meta(pattern=rf"^[A-Za-z0-9][A-Za-z0-9._:-]{{0,{MAX_ID_CHARS - 1}}}\Z")]
"""It goes into logs and messages of two workers, so only harmless characters are allowed."""
LegSession = Annotated[str, Meta(max_length=MAX_SESSION_CHARS)]
MAX_ADDRESS_CHARS = 512
_Address = Annotated[str, Meta(min_length=1, max_length=MAX_ADDRESS_CHARS)]


class PrefillAddress(Struct, frozen=True, omit_defaults=True):
    """Where decode finds the KV of its prompt."""

    control: _Address | Annotated[tuple[_Address, ...], Meta(min_length=1, max_length=1024)]
    """Control address of the one shard of that worker, or of every shard in order."""
    name: str = ""
    data_parallel_rank: int | None = None
    """Of several engines behind one URL, which this is."""

    @property
    def addresses(self) -> tuple[str, ...]:
        return (self.control,) if isinstance(self.control, str) else self.control


class LegParams(Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="leg"):
    """Of either leg."""

    leg: ClassVar[Literal["prefill", "decode"]]
    transfer_id: TransferId
    seed: Int64 = 0
    """With which both legs sample if the client gave none. Servers of vLLM take it from the client alone."""
    created: Int64 = 0
    """Unix seconds; the same in both legs' answers."""
    session_id: LegSession = ""
    """For servers of vLLM, whose connector sees no header: of an agent, whose KV is kept between its turns."""
    session_ttl_s: Annotated[float, Meta(ge=0, le=MAX_SESSION_TTL_S)] = 0.0
    session_owner: Annotated[str, Meta(max_length=MAX_OWNER_CHARS)] = ""
    """`owner_of` the client's API key."""
    source: Annotated[str, Meta(max_length=MAX_ADDRESS_CHARS)] = ""
    """`Health.store` of the worker that has most of the prompt: what the store lacks is pulled from there."""


class PrefillParams(LegParams, frozen=True, kw_only=True, omit_defaults=True, tag="prefill"):
    """This worker computes the prompt and pushes its KV."""

    leg = "prefill"
    num_prompts: Count = 0
    """Prompts of the HTTP request; 0 if that is not known."""
    data_parallel_rank: Count = 0
    """Of several engines behind one HTTP port, the one that decode asks for the KV."""
    do_remote_decode: bool = False
    """For vLLM itself, which else refuses a budget of thinking that is above prefill's one token."""


class DecodeParams(LegParams, frozen=True, kw_only=True, tag="decode"):
    """This worker gets the KV of the prompt from another one."""

    leg = "decode"
    prefill: PrefillAddress


class AloneParams(Struct, frozen=True, kw_only=True, tag_field="leg", tag="alone"):
    """This worker computes prompt and answer; no KV leaves it."""

    source: _Address
    """As of `LegParams`."""


AnyParams = PrefillParams | DecodeParams
