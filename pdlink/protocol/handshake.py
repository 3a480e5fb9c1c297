"""Do two workers fit together, and over which transport? Both sides ask the same question and get the same answer.

What must be equal is compared factor by factor, and a refusal names the factor and both values. What may differ
(block size, number of blocks, order of axes) is the planner's business.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pdlink.errors import HandshakeRefused

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdlink.capabilities import Capabilities, Reach
    from pdlink.protocol.messages import Identity


_NEAR_TO_FAR: Final[tuple[Reach, ...]] = ("process", "host", "network")

CONNECTION_FACTOR = "data connection"
"""The two fit together, and no transport between them connected: out of descriptors, a firewall, another user."""


def compare(local: Identity, remote: Identity) -> None:
    """Return if KV can go between these two; raise HandshakeRefused(factor, local, remote) if not."""
    ours, theirs = _factors(local), _factors(remote)
    for factor, value in ours.items():
        if theirs[factor] != value:
            raise HandshakeRefused(factor, str(value), str(theirs[factor]))


def _factors(identity: Identity) -> dict[str, object]:
    layout = identity.layout
    return {
        "version": identity.version,
        "model": identity.model,
        "revision": identity.revision,
        "content": identity.content,
        "num_ranks": identity.num_ranks,
        "dtype": layout.dtype,
        "num_layers": len(layout.layers),
        "num_heads": layout.num_heads,
        "head_nbytes": layout.head_nbytes,
        "parts per layer": tuple(len(layer.parts) for layer in layout.layers),
    }


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
