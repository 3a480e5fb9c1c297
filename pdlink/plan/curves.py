"""How long a worker computes and a link sends, by tokens: what planning knows of an engine, a GPU and a network."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pdlink.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

Cost = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Curves(BaseModel):
    """Of one kind of worker. The defaults are roughly a model of 8B parameters on one H100, and a link of 25 GB/s.

    A pass over m new tokens of a prompt with h tokens before them takes prompt_s + token_s * m
    + attention_s * m * (h + m/2); a decode step of B sequences with K tokens of KV in all takes
    step_s + sequence_s * B + context_s * K.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    schema_version: Literal[1] = 1
    source: str = "an 8B model on one H100, roughly"
    """Where the numbers come from."""
    prompt_s: Cost = 5e-3
    """Of each prefill pass."""
    token_s: Positive = 45e-6
    """Of each new token of a prompt."""
    attention_s: Cost = 7e-10
    """Of each pair of a new token and one before it."""
    step_s: Positive = 6e-3
    """Of each decode step."""
    sequence_s: Cost = 5e-5
    """Of each sequence in a decode step."""
    context_s: Cost = 4e-8
    """Of each token of KV that a decode step reads."""
    kv_nbytes_per_token: Positive = 131_072
    """Of all layers."""
    link_nbytes_per_s: Positive = 26.2144e9
    """From one prefill worker; its transfers share it."""
    num_layers: int = Field(default=32, ge=1)
    """Layers are sent while later ones are computed."""
    pool_tokens: int = Field(default=400_000, ge=1)
    """KV that a worker holds."""
    max_batched_tokens: int = Field(default=8192, ge=1)
    """Of one prefill pass; longer prompts take several."""
    max_running: int = Field(default=256, ge=1)
    """Sequences in one decode step."""
    overhead_s: Cost = 0.0
    """Of each first token: client, proxy, worker."""
    handoff_s: Cost = 0.0
    """Between the last byte of KV and the first decode step."""
    grace_s: Cost = 0.0
    """The proxy holds a first token back until decode has it, but no longer than this (`kv_header_grace_s` of its
    settings, by default 0.05)."""

    @property
    def transfer_s(self) -> float:
        """Of each token's KV."""
        return self.kv_nbytes_per_token / self.link_nbytes_per_s

    def prefill_s(self, new: int, cached: int) -> float:
        """Of one pass over `new` tokens behind `cached` ones."""
        return self.prompt_s + self.token_s * new + self.attention_s * new * (cached + new / 2)

    def decode_step_s(self, sequences: float, tokens: float) -> float:
        return self.step_s + self.sequence_s * sequences + self.context_s * tokens

    def tail_s(self, tokens: int, prefill_s: float) -> float:
        """From the end of prefill to the last byte: layers are sent while later ones are computed."""
        whole, last = self.transfer_s * tokens, 1 / self.num_layers
        return max(whole * last, whole - prefill_s * (1 - last))


def read_curves(path: Path) -> Curves:
    """What `pdlink bench curves --curves` wrote. Raises ConfigError."""
    try:
        return Curves.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"curves: got {path}: {error.strerror}; name a file that can be read") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ConfigError(
            f"curves: got {path} with {where}: {first['msg']}; expected schema version 1; make it with"
            " `pdlink bench curves`"
        ) from None
