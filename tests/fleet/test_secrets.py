"""A token that travels without a file."""

from __future__ import annotations

from pathlib import Path

from pdlink.config import SecurityConfig
from pdlink.endpoint.token import credentials_of, http_key_of
from pdlink.fleet.secrets import Unnamed
from pdlink.serve import keys

TOKEN = "0123456789abcdef0123456789abcdef"


def test_processes_read_it_as_a_file_until_it_is_closed() -> None:
    file = Unnamed(TOKEN)
    config = SecurityConfig(token_file=file.path)
    assert keys.load_credentials(config) == credentials_of(TOKEN)
    assert keys.http_key(config) == http_key_of(TOKEN)
    assert Path(file.path).stat().st_mode & 0o777 == 0o600
    file.close()
    assert not Path(file.path).exists()
