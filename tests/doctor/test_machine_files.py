"""What doctor says of settings files."""

from __future__ import annotations

from pathlib import Path

from pdlink.doctor.machine import of_file


def test_a_proxys_file_with_a_typo_is_still_read_as_a_proxys(tmp_path: Path) -> None:
    path = tmp_path / "proxy.yaml"
    path.write_text("prefil: [http://a:1]\ndecode: [http://b:1]\n")
    [found] = of_file(str(path), running=True)
    assert "prefil" in found.text
    assert "did you mean 'prefill'" in found.text + found.remedy
