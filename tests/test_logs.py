"""Log lines: how they look, and whose request or transfer they are about."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import re
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from pdlink import logs
from pdlink.config import UpConfig


@contextlib.contextmanager
def standard_error() -> Iterator[io.StringIO]:
    """Of a process in which nobody has logged yet."""
    root = logging.getLogger()
    kept, level, summaries = root.handlers[:], root.level, logs.summaries.level
    root.handlers[:] = []
    with contextlib.redirect_stderr(io.StringIO()) as found:
        yield found
    root.handlers[:] = kept
    root.setLevel(level)
    logs.summaries.setLevel(summaries)


def test_a_text_line_has_time_level_process_and_words() -> None:
    with standard_error() as said:
        logs.set_up(None, None, "decode-0")
        logging.getLogger("pdlink.x").info("not at this level")
        logging.getLogger("pdlink.x").warning("transfer %s: lost", "t", extra=logs.about(transfer_id="t"))
        assert re.fullmatch(r"\d{4}-\d\d-\d\d \S+ WARNING decode-0 pdlink\.x: transfer t: lost\n", said.getvalue())


def test_a_json_line_is_an_object_with_the_ids_apart() -> None:
    with standard_error() as said:
        logs.set_up("info", "json", "decode-0")
        log = logging.getLogger("pdlink.x")
        log.info("é\n%s", 5, extra=logs.about(request_id="r", transfer_id="t"))
        try:
            raise ValueError("why")
        except ValueError:
            log.exception("request %s failed", "r", extra=logs.about(request_id="r"))
        first, second = map(json.loads, said.getvalue().splitlines())
        at = datetime.fromisoformat(first.pop("time"))
        assert abs((datetime.now(UTC) - at).total_seconds()) < 60
        assert first == {
            "level": "INFO",
            "logger": "pdlink.x",
            "message": "é\n5",
            "process": "decode-0",
            "request_id": "r",
            "transfer_id": "t",
        }
        assert "transfer_id" not in second
        assert second["error"].endswith("ValueError: why")


def test_it_can_be_set_up_again_and_leaves_the_log_of_others_alone() -> None:
    with standard_error() as said:
        logs.set_up("error", None)
        logs.set_up("debug", "json")
        logging.getLogger("pdlink.x").debug("now")
        assert [json.loads(line)["message"] for line in said.getvalue().splitlines()] == ["now"]
        root = logging.getLogger()
        root.handlers[:] = [other := logging.NullHandler()]
        logs.set_up("info", "json")
        assert (root.handlers, root.level, other.formatter) == ([other], logging.DEBUG, None)


@pytest.mark.parametrize(("level", "shown"), [(None, True), ("info", True), ("warning", False)])
def test_summaries_are_shown_unless_a_level_is_set_above_them(level: str | None, shown: bool) -> None:
    with standard_error() as said:
        logs.set_up(level, None)
        logs.summaries.info("12 requests/s")
        assert ("12 requests/s" in said.getvalue()) is shown


def test_up_hands_its_log_down_to_processes_that_have_none_of_their_own() -> None:
    own = {"level": "debug"}
    config = UpConfig.model_validate({"log": {"format": "json"}, "decode": {"log": own}, "share_store": True})
    for part in (config.proxy, config.prefill, config.store):
        assert part.log.format == "json"
    assert (config.decode.log.level, config.decode.log.format, config.decode.role) == ("debug", "text", "decode")
