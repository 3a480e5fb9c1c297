"""Why transfers end: codes, and their text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pdlink.errors import DeadlineExceeded, PdlinkError, RequestAborted, TransferFailed
from pdlink.reasons import Code, Reason

ROOT = Path(__file__).parents[1]


def test_every_code_is_given_somewhere() -> None:
    homes = [ROOT / "pdlink", ROOT / "proxy" / "pdlink_proxy"]
    sources = [path for home in homes for path in home.rglob("*.py") if path != ROOT / "pdlink" / "reasons.py"]
    given = set(re.findall(r"\bCode\.([A-Z_]+)", "".join(path.read_text() for path in sources)))
    assert given == {code.name for code in Code}


def test_every_code_is_a_label_and_has_a_meaning() -> None:
    assert all(re.fullmatch("[a-z_]{4,32}", code) and len(code.meaning) > 10 for code in Code)


@pytest.mark.parametrize(
    "reason",
    [
        *map(Reason, Code),
        Reason(Code.PEER_LOST, "closed by prefill: shutdown"),
        Reason.refused("parts per layer", "parts per layer differs: local (2,), remote (1,)"),
    ],
    ids=lambda reason: reason.label,
)
def test_a_reason_is_the_same_after_it_was_text(reason: Reason) -> None:
    assert Reason.of(str(reason)) == reason
    assert re.fullmatch("[a-z0-9_:]+", reason.label)


@pytest.mark.parametrize(
    "text", ["of_tomorrow: too blue", "of_tomorrow", "a peer's own words\n", "", ": ", "Aborted"]
)
def test_a_code_of_a_newer_peer_is_other_and_keeps_its_words(text: str) -> None:
    assert Reason.of(text) == Reason(Code.OTHER, text)
    assert Reason.of(text).label == "other"


def test_a_log_has_the_words_and_the_code() -> None:
    assert Reason(Code.PEER_LOST, "silent for 3 s").sentence == "silent for 3 s (peer_lost)"
    assert Reason(Code.NO_REQUEST).sentence == f"{Code.NO_REQUEST.meaning} (no_request)"
    assert Reason.of("short_prompt").sentence == "short_prompt"
    differs = Reason.of("refused:parts_per_layer").sentence
    assert differs.startswith("the two workers differ in parts per layer; ")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (TransferFailed("transfer t: deadline", Reason(Code.DEADLINE)), Reason(Code.DEADLINE)),
        (TransferFailed("the GPU is gone"), Reason(Code.OTHER, "the GPU is gone")),
        (RequestAborted("the client left"), Reason(Code.ABORTED, "the client left")),
        (DeadlineExceeded("too late"), Reason(Code.REQUEST_FAILED, "too late")),
    ],
)
def test_an_error_says_why_a_transfer_ends_with_it(error: PdlinkError, reason: Reason) -> None:
    assert error.reason == reason
