"""Do two workers fit together, and over which transport? Both sides ask the same question and get the same answer.

What must be equal is compared factor by factor, and a refusal names the factor and both values. What may differ
(block size, number of blocks, order of axes) is the planner's business.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdlink.errors import HandshakeRefused

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pdlink.protocol.messages import Identity


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


def common_transports(offered: Sequence[str], available: Mapping[str, bool], *, same_host: bool) -> list[str]:
    """Those of the dialer's list that the listener has too and that can work between these hosts, in its order.

    available: by name, whether both ends must be on one host.
    Raises HandshakeRefused("transport", listener's, dialer's) if there is none.
    """
    common = [name for name in dict.fromkeys(offered) if name in available and (same_host or not available[name])]
    if not common:
        where = "same host" if same_host else "different hosts"
        raise HandshakeRefused(
            "transport", f"{', '.join(available) or 'none'} ({where})", ", ".join(offered) or "none"
        )
    return common
