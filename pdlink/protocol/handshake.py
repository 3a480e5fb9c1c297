"""Do two workers fit together, and over which transport? Both sides ask the same question and get the same answer.

What must be equal is compared factor by factor, and a refusal names the factor and both values. What may differ
(block size, number of blocks, order of axes) is the planner's business.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pdlink.errors import HandshakeRefused

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdlink.capabilities import Capabilities, Reach
    from pdlink.kv.layout import KVLayout
    from pdlink.protocol.messages import Identity


_NEAR_TO_FAR: Final[tuple[Reach, ...]] = ("process", "host", "network")

CONNECTION_FACTOR = "data connection"
"""The two fit together, and no transport between them connected: out of descriptors, a firewall, another user."""


@dataclass(frozen=True, slots=True)
class ModelId:
    """Whose KV it is. All of it must be equal on both sides of a link, beside the sizes of the layouts."""

    name: str = ""
    revision: str = ""
    content: str = ""
    """Digest of config, tokenizer and weights (`pdlink.content`)."""
    num_ranks: int = 1
    """Tensor-parallel ranks that hold the KV heads."""


def compare(local: Identity, remote: Identity) -> None:
    """Return if KV can go between these two; raise HandshakeRefused(factor, local, remote) if not."""
    ours, theirs = _factors(local), _factors(remote)
    for factor, value in ours.items():
        if theirs[factor] != value:
            raise HandshakeRefused(factor, str(value), str(theirs[factor]))


def fingerprint(identity: Identity) -> str:
    """Of all that must be equal on both sides: equal texts if, and but for a collision of digests only if, `compare`
    accepts. Routers compare it without a handshake: `VERSION.MODEL.DTYPE.LAYOUT`."""
    factors = _factors(identity)
    version, dtype = factors.pop("version"), factors.pop("dtype")
    model = [factors.pop(name) for name in ("model", "revision", "content")]
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
    return ".".join((str(version), _digest(model), "+".join(map(str, dtypes)), _digest(factors)))


_FINGERPRINT_PARTS = "version of the wire", "model, revision or content", "dtype", "layout"


def differing(one: str, other: str) -> str:
    """What differs between two fingerprints, for people."""
    ours, theirs = one.split("."), other.split(".")
    if len(ours) != len(_FINGERPRINT_PARTS) or len(theirs) != len(_FINGERPRINT_PARTS):
        return "fingerprint"
    parts = zip(_FINGERPRINT_PARTS, ours, theirs, strict=True)
    return ", ".join(
        f"dtype ({mine} and {its})" if part == "dtype" else part for part, mine, its in parts if mine != its
    )


def _digest(value: object) -> str:
    return hashlib.blake2b(repr(value).encode(), digest_size=8).hexdigest()


def _factors(identity: Identity) -> dict[str, object]:
    layouts = identity.groups.layouts
    return {
        "version": identity.version,
        "model": identity.model,
        "revision": identity.revision,
        "content": identity.content,
        "num_ranks": identity.num_ranks,
        "groups of layers": len(layouts),
        "dtype": _of(layouts, lambda layout: layout.dtype),
        "num_layers": _of(layouts, lambda layout: len(layout.layers)),
        "num_heads": _of(layouts, lambda layout: layout.num_heads),
        "head_nbytes": _of(layouts, lambda layout: layout.head_nbytes),
        "parts per layer": _of(layouts, lambda layout: tuple(len(layer.parts) for layer in layout.layers)),
        "window": _of(layouts, lambda layout: layout.window),
        "state": _of(layouts, lambda layout: layout.state),
        "position_tokens": _of(layouts, lambda layout: layout.position_tokens),
    }


def _of(layouts: Sequence[KVLayout], value: Callable[[KVLayout], object]) -> object:
    """Of the only group, or of each."""
    return value(layouts[0]) if len(layouts) == 1 else tuple(map(value, layouts))


def common_transports(
    local: Identity, ours: Sequence[Capabilities], remote: Identity, theirs: Sequence[Capabilities]
) -> list[str]:
    """Names of the transports that both have and that both declare able to move this KV this far, in their order.

    Raises HandshakeRefused("transport", ours, theirs) if there is none.
    """
    distance = _NEAR_TO_FAR.index(_distance(local, remote))
    memory = {local.memory, remote.memory}

    def able(capabilities: Sequence[Capabilities]) -> list[str]:
        return [
            one.name for one in capabilities if _NEAR_TO_FAR.index(one.reach) >= distance and memory <= {*one.memory}
        ]

    here = able(ours)
    common = [name for name in dict.fromkeys(able(theirs)) if name in here]
    if not common:
        raise HandshakeRefused("transport", _described(local, ours), _described(remote, theirs))
    return common


def _described(identity: Identity, capabilities: Sequence[Capabilities]) -> str:
    where = f"{identity.memory} memory in process {identity.pid} of host {identity.host}"
    return f"{where}, {', '.join(map(str, capabilities)) or 'no transport'}"


def _distance(local: Identity, remote: Identity) -> Reach:
    if local.host != remote.host:
        return "network"
    return "host" if local.pid != remote.pid else "process"
