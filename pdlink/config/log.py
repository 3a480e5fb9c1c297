"""What is logged, and how."""

from __future__ import annotations

from typing import Literal

from pdlink.config.section import Section


class LogConfig(Section):
    """Lines on standard error."""

    level: Literal["debug", "info", "warning", "error"] | None = None
    """Least important line that is logged; `--log-level`. None is warning, but info for summaries and for what
    `pdlink up` does itself."""
    format: Literal["text", "json"] = "text"
    """Text for people, or JSON with an object a line, which has `request_id` and `transfer_id` where it is about one;
    `--log-format`."""
