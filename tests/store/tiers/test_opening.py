"""A tier is named by a URL, and a wrong one is a wrong setting."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdlink.config import TiersConfig
from pdlink.errors import ConfigError
from pdlink.store.opening import make_store
from pdlink.store.tiers.disk import Disk
from pdlink.store.tiers.opening import ALL, open_tier

from .harness import MemoryTier, key, read, record
from .server import valkey_server


class Named(MemoryTier):
    """Someone else's tier."""

    def __init__(self, namespace: str) -> None:
        super().__init__()
        self.namespace = namespace


def test_a_directory_by_url(tmp_path: Path) -> None:
    (tmp_path / "a b").mkdir()
    tier = open_tier(f"file://{tmp_path}/a%20b?max_size=0.5", "n")
    assert tier.capacity_nbytes == 2**29
    tier.put(key(1), record(1))
    assert (tmp_path / "a b" / "n").is_dir()
    assert read(open_tier(f"file://{tmp_path}/a%20b", "n"), key(1)) == record(1)


def test_a_server_by_url(tmp_path: Path) -> None:
    tier = open_tier(f"{valkey_server().url}?ttl_s=60&timeout_s=10&connections=2", str(tmp_path))
    tier.put(key(1), record(1))
    left_ms = valkey_server().ask(b"PTTL", f"pdlink:{tmp_path}:{key(1).hex()}".encode())
    assert isinstance(left_ms, int)
    assert 30_000 < left_ms <= 60_000
    tier.close()


def test_a_bucket_by_url() -> None:
    """Of which nobody answers."""
    pytest.importorskip("obstore")
    here = "endpoint=http://127.0.0.1:9&region=x&access_key_id=x&secret_access_key=x&allow_http=true"
    tier = open_tier(f"s3://bucket/prefix?{here}&timeout_s=5", "n")
    for verb in (lambda: tier.contains([key(1)]), lambda: read(tier, key(1)), lambda: tier.put(key(1), record(1))):
        with pytest.raises(OSError, match="object store"):
            verb()
    tier.close()
    assert read(tier, key(1)) is None


def test_a_tier_of_someone_elses_by_its_path() -> None:
    tier = open_tier(f"{__name__}:Named", "n")
    assert tier.put(key(1), record(1))


def test_a_store_that_cannot_be_made_leaves_its_disk_to_others(tmp_path: Path) -> None:
    config = TiersConfig(
        max_local_cpu_size=0.1, local_disk=str(tmp_path), max_local_disk_size=0.1, remote_url="ftp://bucket"
    )
    with pytest.raises(ConfigError, match="got a URL of 'ftp'"):
        make_store(config, "worker")
    Disk(tmp_path, ALL, 100 << 20).close()


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("", "expected file"),
        ("/mnt/shared", "expected file"),
        ("ftp://bucket", "got a URL of 'ftp'; expected file"),
        ("s3://bucket?nonsense=1&secret_access_key=hunter2", "expected what obstore takes"),
        ("s3://bucket?default_content_type=x&secret_access_key=hunter2", "expected what obstore takes"),
        ("s3://bucket?timeout_s=x", "timeout_s"),
        ("file://host/path", "file:///DIRECTORY"),
        ("file:///tmp?size=3", "file:///DIRECTORY"),
        ("file:///tmp?max_size=big", "max_size"),
        ("file:///tmp?max_size=", "max_size"),
        ("file:///nowhere/at/all", "mount or create it"),
        ("redis://:hunter2@host?ttl_s=-1", "ttl_s"),
        ("redis://:hunter2@host?ttl_s=nan", "ttl_s"),
        ("redis://:hunter2@host?connections=0", "connections"),
        ("redis://:hunter2@host?other=1", "expected redis"),
        ("no.such.module:Tier", "No module named"),
        ("pdlink.store.tiers.opening:Nothing", "no attribute"),
        ("builtins:str", "has no name, medium"),
    ],
)
def test_a_tier_that_cannot_be_made_is_a_wrong_setting(url: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        open_tier(url, "n")
    assert str(error.value).startswith("tiers.remote_url: ")
    assert "hunter2" not in str(error.value)
