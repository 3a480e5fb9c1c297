"""The proxies that a worker joins by itself."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from pdlink.config.section import Section


class JoinConfig(Section):
    """A worker that dials its proxies, so that none of them must list it. They have `discover: [register:...]`."""

    proxies: tuple[str, ...] = ()
    """Where proxies listen, all of them: "tcp://HOST:PORT", with keys "tcp://HOST:PORT?key=PUBLIC_KEY". A name may
    have several addresses, as that of a headless Service; it is looked up again and again."""
    beat_s: Annotated[float, Field(ge=0.05, le=60)] = 1.0
    """Between two reports of the own health. Without three of them a worker gets no requests until a proxy's own
    probe succeeds."""
    url: str | None = None
    """Base URL that proxies reach this worker by; None makes it of `listen`, or of `listen.advertise` where that is
    every address (0.0.0.0)."""
    cell: str = ""
    """The name of its cell (a rack, an RDMA network): KV moves within one only."""
