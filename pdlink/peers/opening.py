"""The stores of other nodes that a store lends to and borrows from, by the settings of its process."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from pdlink.peers.link import PeerLink
from pdlink.peers.routed import RoutedPeers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdlink.config import TiersConfig, TransportConfig
    from pdlink.config.listen import LinkListen
    from pdlink.protocol.auth import Credentials
    from pdlink.protocol.deadlines import Deadlines
    from pdlink.store.tiers.base import Tier


def make_link(
    tiers: TiersConfig,
    listen: LinkListen,
    transport: TransportConfig,
    name: str,
    credentials: Credentials | None,
    *,
    insecure: bool,
    deadlines: Deadlines,
) -> PeerLink | None:
    """Not open yet; None where the settings want none. listen: of the process; its control port counts for nothing.
    name: of the process, which others may have, too."""
    if not tiers.peers and tiers.peer_port is None:
        return None
    return PeerLink(
        f"{(credentials and credentials.owner) or name}/store-{secrets.token_hex(4)}",
        listen=listen.on_port(tiers.peer_port or 0),
        transport=transport,
        deadlines=deadlines,
        credentials=credentials,
        insecure=insecure,
    )


def tiers_of(link: PeerLink | None, tiers: TiersConfig) -> Sequence[Tier]:
    """The stores that routers name, then those that the settings name. Raises ConfigError."""
    if link is None:
        return ()
    return (RoutedPeers(link), *(link.tier(address) for address in tiers.peers))
