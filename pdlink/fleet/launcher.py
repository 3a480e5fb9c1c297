"""`Launcher`: starts a worker on this node, and keeps it. It is the class of Ray's actors, and knows nothing of Ray.

The worker is a child of this process with a socket between them, as one of `pdlink up`: its requests and its KV never
pass here, it is started again when it ends, and it ends when this process does, however that ends.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from dataclasses import replace
from functools import partial
from typing import Any

from pdlink.config.listen import ListenConfig
from pdlink.errors import PdlinkError
from pdlink.fleet.child import START_TIMEOUT_S, start, stop
from pdlink.fleet.post import Here, Post, PostPlan, ProcessReport
from pdlink.fleet.secrets import Unnamed
from pdlink.serve.process import bind

log = logging.getLogger(__name__)

_LOOK_S = 0.05


class Launcher:
    """One worker. The constructor returns at once; `report` says what has become of it."""

    def __init__(self, label: str, role: str, settings: dict[str, Any], token: str, host: str, node: str) -> None:
        """host: address of this node that all others reach. node: the name of it in `ProcessReport`."""
        self._report = ProcessReport(node)
        self.warnings: tuple[str, ...] = ()
        """About this node."""
        self._held = contextlib.ExitStack()
        self._stopping = threading.Event()
        self._post: Post | None = None
        try:
            begin = partial(start, label, role, self._completed(settings, token, host))
        except (PdlinkError, OSError) as error:
            self._report = replace(self._report, failed=f"{label}: {error}")
            return
        self._post = Post(Here(begin), PostPlan(label, role), start_timeout_s=START_TIMEOUT_S)
        self._thread = threading.Thread(target=self._keep, args=(self._post,), name="keeper", daemon=True)
        self._thread.start()

    def report(self) -> ProcessReport:
        return replace(self._report, warnings=(*self.warnings, *self._report.warnings))

    def stop(self, timeout_s: float) -> None:
        """Let the worker drain for so long, then end it."""
        self._stopping.set()
        if self._post is not None:
            self._thread.join()
            stop([self._post.actor] if self._post.actor is not None else [], timeout_s)
        self._held.close()

    def _completed(self, settings: dict[str, Any], token: str, host: str) -> dict[str, Any]:
        """With what only this node knows: addresses, ports, which stay bound, and the token's file."""
        file = Unnamed(token)
        self._held.callback(file.close)
        completed = dict(settings)
        completed["security"] = {**settings["security"], "token_file": file.path}
        ports = {
            name: self._held.enter_context(bind(host, 0, f"listen.{name}")).getsockname()[1]
            for name in ("http", "control")
        }
        completed["listen"] = ListenConfig(address=host).on(**ports).model_dump()
        return completed

    def _keep(self, post: Post) -> None:
        node = self._report.node
        try:
            while not self._stopping.wait(_LOOK_S):
                post.look()
                if post.report is not None:  # while it is away, it has the facts of its last life: the same address
                    facts = post.report.facts or self._report.facts
                    self._report = replace(post.report, node=node, facts=facts)
        except Exception as error:  # noqa: BLE001  the outermost frame: the report says it
            if not isinstance(error, PdlinkError | OSError):
                log.exception("the keeper of %s has died", self._report.node or "this process")
                error = RuntimeError(f"its keeper has died: {type(error).__name__}: {error}")
            self._report = replace(self._report, facts={}, failed=str(error))
            post.end()
