"""What every benchmark needs: facts about the machine, and percentiles instead of single numbers."""

from __future__ import annotations

import os
import platform
import resource
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

Facts = dict[str, str | int | float]


@dataclass(frozen=True, slots=True)
class Summary:
    """Repeated measurements of one thing."""

    median: float
    p10: float
    p90: float
    samples: tuple[float, ...]
    """In order of measurement."""


def summarise(samples: Sequence[float]) -> Summary:
    """Median, p10 and p90 (interpolated). Raises ValueError if there are no samples."""
    if not samples:
        raise ValueError("nothing was measured")
    p10, median, p90 = np.percentile(samples, (10, 50, 90))
    return Summary(float(median), float(p10), float(p90), tuple(samples))


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Median of the ratios of the measurements of each round: what disturbs a whole round does not move it."""
    return float(np.median(np.divide(numerators, denominators)))


def gb_per_s(nbytes: int, seconds: float) -> float:
    """Decimal gigabytes per second."""
    return nbytes / seconds / 1e9


def machine_facts() -> Facts:
    """What decides how fast this machine moves bytes; "unknown" where it cannot be read. Call before measuring."""
    memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return {
        "cpu": _field("/proc/cpuinfo", "model name"),
        "cores": len(os.sched_getaffinity(0)),
        "virtual_machine": int("hypervisor" in _field("/proc/cpuinfo", "flags").split()),
        "memory_nbytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "load_average_1min": os.getloadavg()[0],
        "kernel": platform.release(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "pdlink": _version("pdlink"),
        "libucx": _version("libucx-cu13"),
        "page_nbytes": os.sysconf("SC_PAGE_SIZE"),
        "transparent_huge_pages": _chosen("/sys/kernel/mm/transparent_hugepage/enabled"),
        "transparent_huge_pages_shmem": _chosen("/sys/kernel/mm/transparent_hugepage/shmem_enabled"),
        "memlock_nbytes": memlock,  # -1: unlimited
        "tcp_congestion_control": _text("/proc/sys/net/ipv4/tcp_congestion_control"),
    }


def available_memory_nbytes() -> int:
    """Memory that can be taken without swapping; 0 if the system does not say."""
    words = _field("/proc/meminfo", "MemAvailable").split()
    return int(words[0]) * 1024 if words[0].isdigit() else 0


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return "unknown"


def _field(path: str, name: str) -> str:
    """The first `name: value` line of a /proc file."""
    for line in _text(path).splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return "unknown"


def _chosen(path: str) -> str:
    """The word in brackets of "always [madvise] never"."""
    text = _text(path)
    return text.partition("[")[2].partition("]")[0] or text


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
