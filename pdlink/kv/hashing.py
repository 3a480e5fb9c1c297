"""Chained block keys: the name of a prefix, equal in every process.

The key of a block is the hash of its parent's key and of its own tokens, and the parent of the first block is a
*namespace*: everything besides the tokens that the KV depends on. Two equal keys therefore mean equal KV, position
included. The hash is cryptographic, because a client who could make two prompts collide would read another one's
context, and it is independent of `PYTHONHASHSEED`, byte order and word size, because keys travel between hosts.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

KEY_NBYTES = 32


def namespace(
    *,
    model: str,
    revision: str,
    dtype: str,
    layout: str = "",
    lora: str = "",
    salt: str = "",
    media: Sequence[str] = (),
) -> bytes:
    """The parent of first blocks: equal only where KV of equal tokens may be shared.

    layout: how the stored bytes are arranged, for keys of stored bytes; empty where blocks never leave their pool.
    salt: keeps tenants apart. media: content hashes of images and the like, in prompt order; their placeholder
    tokens are all the same.
    """
    digest = blake2b(digest_size=KEY_NBYTES, person=b"pdlink-namespace")
    for field in (model, revision, dtype, layout, lora, salt, *media):
        data = field.encode()
        digest.update(len(data).to_bytes(8, "little"))  # so that ("ab", "c") and ("a", "bc") differ
        digest.update(data)
    return digest.digest()


def chain(seed: bytes, tokens: Sequence[int], block_tokens: int) -> list[bytes]:
    """Keys of the full blocks of `tokens`, in order; a partial last block has none.

    seed: a namespace, or the key of the block before `tokens` to continue a chain.
    Raises OverflowError for a token id outside [0, 2**32).
    """
    words = np.asarray(tokens, dtype="<u4")
    keys: list[bytes] = []
    parent = seed
    for start in range(0, len(words) - block_tokens + 1, block_tokens):
        digest = blake2b(parent, digest_size=KEY_NBYTES, person=b"pdlink-block")
        digest.update(words[start : start + block_tokens].tobytes())
        parent = digest.digest()
        keys.append(parent)
    return keys
