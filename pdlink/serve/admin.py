"""`AdminServer`: the HTTP of a store that is inside an engine's process, in a thread of its own."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Future
from typing import TYPE_CHECKING

from aiohttp import web

from pdlink import threads
from pdlink.config import read_secrets
from pdlink.config.listen import HostPort
from pdlink.serve.process import bind
from pdlink.serve.store_app import build_app

if TYPE_CHECKING:
    from pdlink.config.admin import AdminConfig
    from pdlink.store.store import Store

log = logging.getLogger(__name__)

_CLOSE_S = 5.0


class AdminServer:
    """Of an open store, from the constructor on until `close`."""

    def __init__(self, name: str, store: Store, config: AdminConfig, rank: int = 0) -> None:
        """name: of the server, in /health. Raises ConfigError for a port that is taken, and a file without a key."""
        key = None if config.key_file is None else read_secrets(config.key_file, "admin.key_file")[0]
        app = build_app(name, store, http_key=key, loopback=config.loopback, setting="admin.key_file")
        bound = bind(*config.of_rank(rank), "admin")
        self._stop = asyncio.Event()
        begun: Future[asyncio.AbstractEventLoop] = Future()

        async def serve() -> None:
            runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
            try:
                await runner.setup()
                await web.SockSite(runner, bound).start()
                begun.set_result(asyncio.get_running_loop())
                await self._stop.wait()
            except OSError as error:
                begun.set_exception(error)
            finally:
                await runner.cleanup()
                bound.close()

        def failed(why: str) -> None:
            if not begun.done():
                begun.set_exception(RuntimeError(why))

        self._thread = threads.guarded("pdlink-admin", lambda: asyncio.run(serve()), failed)
        self._thread.start()
        self._loop = begun.result()
        self.url = f"http://{HostPort(*bound.getsockname()[:2])}"
        """With the port that was taken."""
        log.info("%s: operators see and change what it keeps on %s", name, self.url)

    def close(self) -> None:
        """Before the store's end."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(_CLOSE_S)
