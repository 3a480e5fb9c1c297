"""Plain servers: they compute prompts and answers by themselves, and any engine with OpenAI's API will do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from pdlink.api.health import Health

from ..upstream import ask
from .own import read_health
from .vllm import look as look_at_models

if TYPE_CHECKING:
    from ..upstream import Asking
    from .base import KnownHealth


async def look(asking: Asking, known: KnownHealth) -> Health | str:
    """Polls it: a pdlink worker by what it says in GET /health, another one by its status and GET /v1/models."""
    reply = await ask(asking, "/health")
    health = read_health(*reply) if reply.body[:1] == b"{" else ""
    if isinstance(health, Health):
        return msgspec.structs.replace(health, role=None)
    return await look_at_models(asking, known)
