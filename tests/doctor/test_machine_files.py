"""What doctor says of settings files."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdlink.doctor.machine import of_file


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("prefil: [http://a:1]\ndecode: [http://b:1]\n", "prefill"),
        ("listen: 127.0.0.1:8000\npolcy: cost\n", "policy"),
    ],
    ids=["with known keys", "with none of its own"],
)
def test_a_proxys_file_with_a_typo_is_still_read_as_a_proxys(tmp_path: Path, text: str, meant: str) -> None:
    path = tmp_path / "proxy.yaml"
    path.write_text(text)
    [found] = of_file(str(path), running=True)
    assert f"did you mean {meant!r}" in found.text + found.remedy
