"""`Launcher`: starts a worker on this node, and keeps it. It is the class of Ray's actors, and knows nothing of Ray.

The worker is a child of this process with a socket between them, as one of `pdlink up`: its requests and its KV never
pass here, it is started again when it ends, and it ends when this process does, however that ends.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

from pdlink import __version__
from pdlink.errors import PdlinkError
from pdlink.launch.post import State
from pdlink.launch.secrets import Unnamed
from pdlink.serve.keeper import Keeper
from pdlink.serve.process import bind
from pdlink.serve.up import START_TIMEOUT_S, start, stop

if TYPE_CHECKING:
    from pdlink.launch.secrets import Keys
    from pdlink.serve.up import Child

_LOOK_S = 0.05


class Launcher:
    """One worker. The constructor starts it and returns; `state` says what has become of it."""

    def __init__(self, label: str, role: str, settings: dict[str, Any], keys: Keys, host: str, node: str) -> None:
        """host: address of this node that all others reach. node: the name of it in `State`."""
        self._node = node
        self.warnings: tuple[str, ...] = ()
        """About this node."""
        self._held = contextlib.ExitStack()
        self._stopping = threading.Event()
        self._failed = ""
        self._child: Child | None = None
        self._ready = False
        try:
            self._child = start(label, role, self._completed(settings, keys, host))
        except (PdlinkError, OSError) as error:
            self._failed = str(error)
            return
        self._thread = threading.Thread(target=self._keep, args=(self._child,), name="keeper", daemon=True)
        self._thread.start()

    def state(self) -> State:
        child, ready = self._child, self._ready
        if child is None:
            return State(self._node, failed=self._failed, version=__version__)
        facts = dict(child.facts) if ready else {}
        return State(self._node, facts, child.doing, self._failed, (*self.warnings, *child.warnings), __version__)

    def stop(self, timeout_s: float) -> None:
        """Let the worker drain for so long, then end it."""
        self._stopping.set()
        if self._child is not None:
            self._thread.join()
            stop([self._child], timeout_s)
        self._held.close()

    def _completed(self, settings: dict[str, Any], keys: Keys, host: str) -> dict[str, Any]:
        """With what only this node knows: addresses, ports, which stay bound, and the files of keys."""
        files = Unnamed(keys)
        self._held.callback(files.close)
        security = {name: getattr(files, name) for name in ("key_file", "allow_file", "http_key_file")}
        completed = {**settings, "host": host, "control_host": host}
        completed["security"] = {**settings["security"], **security}
        for name in ("port", "control_port"):
            bound = self._held.enter_context(bind(host, settings[name], name))
            completed[name] = bound.getsockname()[1]
        return completed

    def _keep(self, child: Child) -> None:
        try:
            while not self._ready and not self._stopping.wait(_LOOK_S):
                self._ready = child.look()
            keeper = Keeper(child, START_TIMEOUT_S)
            while not self._stopping.wait(_LOOK_S):
                keeper.look()
        except (PdlinkError, OSError) as error:
            child.kill()
            self._failed = str(error)
