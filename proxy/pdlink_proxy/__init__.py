"""The router in front of the prefill and decode pools.

It starts both legs of a request at once, hands the client the first token of whichever leg has it, makes the legs
share their fate, and tries again elsewhere as long as nothing was sent. `flow.py` decides, `request.py` acts, the
rest is one idea a file. Imports no torch.
"""

from __future__ import annotations

from .app import ROUTER, build_app

__all__ = ["ROUTER", "build_app"]
