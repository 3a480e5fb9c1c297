"""Python's small objects in pages of 2 MiB. Each test has a process of its own: what it sets stays."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_LOOK = """
    import gc, hashlib
    from pdlink import _http

    def kb(name):
        with open("/proc/self/smaps_rollup") as lines:
            return next(int(line.split()[1]) for line in lines if line.startswith(name))
"""


_given = pytest.mark.skipif(
    not _ENABLED.exists() or "[never]" in _ENABLED.read_text(encoding="ascii"),
    reason="this system gives nobody large pages",
)


def _moves() -> bool:
    return tuple(map(int, re.findall(r"\d+", platform.release())[:2])) >= (6, 1)


def _run(code: str, *before: str) -> None:
    code = textwrap.dedent(_LOOK) + textwrap.dedent(code)
    command = [*before, sys.executable, "-c", code]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert not done.returncode, done.stderr


@_given
def test_small_objects_are_in_large_pages_once_they_are_asked_for() -> None:
    _run("""
        _http.take_arenas_from_large_pages()
        before = kb("AnonHugePages")
        made = [object() for _ in range(500_000)]  # 8 MB
        assert kb("AnonHugePages") - before > 4096, (before, kb("AnonHugePages"))
    """)


def test_arenas_go_and_come_again() -> None:
    _run("""
        old = [str(number) for number in range(200_000)]
        _http.take_arenas_from_large_pages()
        _http.take_arenas_from_large_pages()
        for _ in range(3):
            new = [str(number) for number in range(400_000)]
            most = kb("Rss")
            assert new[-1] == "399999" and old[-1] == "199999"
            del new
            gc.collect()
            assert kb("Rss") < most - 10_000, (most, kb("Rss"))
        del old  # of arenas that were there before
        gc.collect()
    """)


_MOVE = """
    made = [bytes([number % 256]) * 5000 for number in range(4000)]
    before = hashlib.sha256(b"".join(made)).digest()
    _http.move_heap_to_large_pages()
    large = kb("AnonHugePages")
    assert hashlib.sha256(b"".join(made)).digest() == before
    made += [b"x" * 5000 for _ in range(4000)]
"""


@_given
@pytest.mark.skipif(not _moves(), reason="this system moves nothing: before Linux 6.1")
def test_what_is_in_the_heap_is_the_same_after_its_move() -> None:
    _run(_MOVE + "    assert large > 10_000, large")


def test_nothing_moves_where_the_system_gives_nobody_large_pages(tmp_path: Path) -> None:
    never = tmp_path / "enabled"
    never.write_text("always madvise [never]\n", encoding="ascii")
    unshared = ["unshare", "--map-root-user", "--mount"]
    bound = f'mount --bind {never} {_ENABLED} && exec "$@"'
    tried = [*unshared, "sh", "-c", bound, "", "true"]
    if shutil.which(unshared[0]) is None or subprocess.run(tried, check=False, capture_output=True).returncode:
        pytest.skip("what the system says cannot be replaced for one process here")
    _run(_MOVE + "    assert large == 0, large", *unshared, "sh", "-c", bound, "")
