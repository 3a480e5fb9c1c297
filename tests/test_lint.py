"""`make lint` finds what is wrong in a page, a query, a log line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools import tool

lint = tool("lint")

PAGE = """# A page
[gone](gone.md) [no section](#no-section) [this one](#a-page)
`tests/test_lint.py::test_that_is_gone`, `tools/gone.py`, `make gone`, `pdlink gone`, `cache.num_blokcs: 5`,
`rate(pdlink_gone_total[5m])`

    pdlink prefill --set cache.gone=1 --gone
"""


def test_each_wrong_word_of_a_page_is_found_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    monkeypatch.setattr(lint, "PAGES", [page])
    checks = (lint.links, lint.names_on_pages, lint.options_on_pages, lint.settings_on_pages, lint.queries)
    assert [sentence.removeprefix(f"{page}: ") for check in checks for sentence in check()] == [
        "the link gone.md leads nowhere",
        "the link #no-section leads nowhere",
        "there is no tools/gone.py",
        "tests/test_lint.py has no test_that_is_gone",
        "there is no command `pdlink gone`",
        "Makefile has no target gone",
        "`pdlink prefill --set cache.gone=1 --gone`: pdlink does not take --gone",
        "there is no setting cache.gone",
        "there is no setting cache.num_blokcs",
        "`rate(pdlink_gone_total[5m])`: nothing declares pdlink_gone_total",
    ]


def test_a_wrong_label_or_value_in_a_query_is_found() -> None:
    assert lint.wrong_words('sum by (x) (rate(pdlink_push_seconds_bucket{y="a"}[1m])) + pdlink_no_bytes') == [
        "pdlink_push_seconds_bucket{y}",
        "pdlink_no_bytes",
        "x",
    ]
    assert lint.wrong_words('pdlink_blocks{state="gone"}') == ["state=gone"]


def test_a_log_line_without_its_ids_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = tmp_path / "pdlink/x.py"
    code.parent.mkdir()
    code.write_text('log.info("request %s: gone", r)\nlog.info("transfer %s", t, extra=logs.about(transfer_id=t))\n')
    monkeypatch.setattr(lint, "ROOT", tmp_path)
    assert list(lint.logs()) == ["pdlink/x.py:1: a log line about a request needs extra=logs.about(...)"]


def test_two_classes_of_one_name_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (1, 2):
        (tmp_path / "pdlink").mkdir(exist_ok=True)
        (tmp_path / f"pdlink/file{number}.py").write_text("class Place: ...\nclass _Own: ...\nclass Hello: ...\n")
    monkeypatch.setattr(lint, "ROOT", tmp_path)
    (sentence,) = lint.class_names()
    assert sentence == (
        "pdlink/file1.py:1: pdlink/file2.py:1: Place is a class there, too; give each a name of its own"
    )


def test_a_stale_page_and_a_page_that_is_gone_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = "docs/" + "gone.md"
    monkeypatch.setattr(lint, "text_of", lambda path: page if path == lint.ROOT / "pdlink/errors.py" else "")
    assert "docs/settings.md: stale: run `make reference` and commit it" in list(lint.made_pages())
    assert list(lint.pages_that_code_names()) == [f"pdlink/errors.py: there is no {page}"]


def test_the_newcomer_finds_what_to_type_in_the_readme() -> None:
    newcomer = tool("newcomer")
    assert newcomer.commands_of_readme()[:2] == ["make up", "make test"]
    assert "git" in newcomer.packages_of_readme()
    secret, *lines = newcomer.two_servers_of_readme()
    assert "> token" in secret
    assert [line.split()[:3] for line in lines[:2]] == [["pdlink", "vllm", role] for role in ("prefill", "decode")]
    assert lines[2].startswith("pdlink proxy --dialect vllm --prefill http://")
