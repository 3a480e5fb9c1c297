"""Keys that travel without files."""

from __future__ import annotations

import pickle
from pathlib import Path

from pdlink.config import SecurityConfig
from pdlink.fleet import secrets
from pdlink.serve import keys


def test_processes_read_them_as_files_and_allow_each_other_alone() -> None:
    made = secrets.make(["proxy", "decode-0"])
    ours = pickle.loads(pickle.dumps(made["decode-0"]))
    files = secrets.Unnamed(ours)
    config = SecurityConfig(key_file=files.key_file, allow_file=files.allow_file, http_key_file=files.http_key_file)
    credentials = keys.load_credentials(config)
    assert credentials is not None
    assert credentials.keys == ours.pair
    assert set(credentials.allowed.values()) == {"proxy", "decode-0"}
    assert keys.http_key(config) == made["proxy"].http_key
    files.close()
    assert not Path(files.key_file).exists()


def test_no_secret_is_in_what_is_printed_and_no_two_deployments_have_the_same() -> None:
    one, two = secrets.make(["a"])["a"], secrets.make(["a"])["a"]
    assert one.pair.secret not in repr(one)
    assert one.http_key not in repr(one)
    assert one.pair != two.pair
    assert one.http_key != two.http_key
