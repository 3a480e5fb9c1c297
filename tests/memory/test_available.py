"""What this process may still take, on a machine and in a container."""

from __future__ import annotations

import os
from pathlib import Path

from pdlink.memory.available import available_nbytes
from pdlink.memory.pages import PAGE_NBYTES


def test_what_is_available_is_less_than_what_there_is() -> None:
    total = os.sysconf("SC_PHYS_PAGES") * PAGE_NBYTES
    assert 0 < available_nbytes() <= total


def test_a_containers_limit_counts_where_it_is_below_the_machines_memory(tmp_path: Path) -> None:
    """The kernel kills at the limit, whatever MemAvailable says."""
    group = tmp_path / "sys/fs/cgroup/pods/worker"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 99 kB\nMemAvailable:   1000 kB\n")
    assert available_nbytes(tmp_path) == 1000 * 1024
    (tmp_path / "proc/self/cgroup").write_text("0::/pods/worker\n")
    assert available_nbytes(tmp_path) == 1000 * 1024

    def limit(where: Path, text: str, used: int, idle: int) -> int:
        (where / "memory.max").write_text(f"{text}\n")
        (where / "memory.current").write_text(f"{used}\n")
        (where / "memory.stat").write_text(f"anon 7\ninactive_file {idle}\nactive_file 9\n")
        return available_nbytes(tmp_path)

    assert limit(group, "max", 5, 0) == 1000 * 1024
    assert limit(group, "5000", 3000, 500) == 2500
    assert limit(group.parent, "4000", 3000, 0) == 1000, "the group above has a limit too"
    assert limit(group.parent, "4000", 9000, 0) == 0
