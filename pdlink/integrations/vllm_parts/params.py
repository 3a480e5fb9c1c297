"""`kv_transfer_params`: what the proxy says about a request to the two servers of an attempt.

The id of a transfer is the proxy's plus a digest of the prompt. So a list of prompts in one HTTP request makes one
transfer each, and two servers that disagree about a prompt (another tokenizer, another chat template) never match:
the decode server computes it itself, and nobody gets somebody else's KV.
"""

from __future__ import annotations

import hashlib
from array import array
from typing import TYPE_CHECKING, Annotated

import msgspec

from pdlink.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_Id = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,99}\Z")]
"""It goes into logs and messages of two servers, so only harmless characters are allowed."""
_Address = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
_DIGEST_NBYTES = 8
"""Distinguishes the prompts of one HTTP request; a client that makes two collide hurts only its own request."""


class PrefillServer(msgspec.Struct, frozen=True):
    """Where the decode server finds the prefill server."""

    control: _Address | Annotated[tuple[_Address, ...], msgspec.Meta(min_length=1, max_length=1024)]
    """Control address of its one shard, or of every shard in order."""
    name: str = ""

    @property
    def addresses(self) -> tuple[str, ...]:
        return (self.control,) if isinstance(self.control, str) else self.control


class PrefillParams(msgspec.Struct, frozen=True, tag_field="leg", tag="prefill"):
    """This server computes the prompt and pushes its KV."""

    transfer_id: _Id
    num_prompts: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Prompts of the HTTP request; 0 if that is not known."""
    data_parallel_rank: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Of several engines behind one HTTP port, the one that decode asks for the KV."""

    def check_engine(self, engine: int) -> None:
        """Raises InvalidRequest if vLLM has given the request to another engine than decode asks."""
        if self.data_parallel_rank != engine:
            raise InvalidRequest(
                f"kv_transfer_params: data_parallel_rank: got {self.data_parallel_rank} at data-parallel engine "
                f"{engine}; expected the engine that decode asks; send the leg with the header X-data-parallel-rank: "
                f"{self.data_parallel_rank}, as the proxy does for servers with data_parallel"
            )


class DecodeParams(msgspec.Struct, frozen=True, tag_field="leg", tag="decode"):
    """This server gets the KV of the prompt from another one."""

    transfer_id: _Id
    prefill: PrefillServer


def parse(params: Mapping[str, object]) -> PrefillParams | DecodeParams:
    """Raises InvalidRequest: anybody who reaches the server can send this field."""
    try:
        return msgspec.convert(params, PrefillParams | DecodeParams)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"kv_transfer_params: {error}") from None


def transfer_id(attempt: str, prompt: Sequence[int], identity: Iterable[str] = ()) -> str:
    """The id of one prompt's transfer in one attempt. identity: what else its KV depends on (LoRA, images, salt)."""
    digest = hashlib.blake2b(array("q", prompt).tobytes(), digest_size=_DIGEST_NBYTES)
    for word in identity:
        digest.update(b"\0" + word.encode())
    return f"{attempt}-{digest.hexdigest()}"
