"""`Turning`: a worker takes another role without a restart: it drains what it does for the old one first.

Memory stays registered, sessions with peers stay open, and nothing that runs is ended. While it drains, the worker
reports `draining` and refuses new requests, so routers choose others; if it has not drained by the deadline it stays
what it was. One turn at a time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Annotated

import msgspec

from pdlink.api.fields import decoded
from pdlink.api.keys import is_one_of, key_of
from pdlink.config import Role  # noqa: TC001  (msgspec reads the annotation at run time)
from pdlink.errors import Draining, InvalidApiKey, PeerNotAllowed, RoleNotTaken
from pdlink.serve.http import body_of, json_response

if TYPE_CHECKING:
    from aiohttp import web

    from pdlink.serve.worker import Worker

log = logging.getLogger(__name__)

_MAX_BODY_NBYTES = 4096
_LOOK_S = 0.02
"""Between two looks at what is left to drain; transfers end without a word to this loop."""
LONGEST_S = 3600.0


class Turn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST /role."""

    role: Role
    """To serve from now on."""
    epoch: str = ""
    """The life of the worker that is meant, as its /health says; empty is any. Another one is refused."""
    deadline_s: Annotated[float, msgspec.Meta(gt=0, le=LONGEST_S)] = 60.0
    """For which it may drain."""


class Turning:
    """Of one worker. Belongs to its asyncio loop."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def turn(self, body: bytes) -> dict[str, object]:
        """Take the role that the body asks for; returns it, and how long that took.

        Raises InvalidRequest, Draining while the worker ends, and RoleNotTaken if it turns already, is another life,
        or has not drained in time.
        """
        worker, asked = self._worker, decoded(body, Turn)
        epoch = worker.node.report().epoch
        if asked.epoch and asked.epoch != epoch:
            raise RoleNotTaken(f"epoch: got {asked.epoch}, this life of the worker is {epoch}; ask for its /health")
        if worker.draining:
            raise Draining("this worker is shutting down, and takes no other role")
        began_s, before = time.monotonic(), worker.role
        if not worker.begin_turn(asked.role):
            raise RoleNotTaken(f"role: got {asked.role}; it takes the role {worker.turning} now; ask again later")
        taken = False
        try:
            deadline_s = began_s + asked.deadline_s
            while (left := worker.left_to_drain()) and time.monotonic() < deadline_s:  # noqa: ASYNC110
                await asyncio.sleep(_LOOK_S)
            if left:
                raise RoleNotTaken(
                    f"role: got {asked.role}; {left} after {asked.deadline_s:g} s; it stays {before}; ask again with "
                    "a longer deadline_s"
                )
            taken = True
        finally:  # also where the caller leaves
            worker.end_turn(taken=taken)
        log.warning("%s serves the role %s now, and not %s", worker.name, worker.role, before)
        return {"role": worker.role, "was": before, "took_s": round(time.monotonic() - began_s, 3)}


def add_role_route(app: web.Application, turning: Turning, keys: tuple[str, ...]) -> None:
    """POST /role. keys: of operators; without any it answers 403."""
    secrets = [key.encode() for key in keys]

    async def role(request: web.Request) -> web.Response:
        if not secrets:
            raise PeerNotAllowed("set security.admin_key_file to change the role at run time")
        if not is_one_of(key_of(request.headers), secrets):
            raise InvalidApiKey("send a key of security.admin_key_file as `Authorization: Bearer KEY`")
        return json_response(await turning.turn(await body_of(request, _MAX_BODY_NBYTES)))

    app.router.add_post("/role", role)
