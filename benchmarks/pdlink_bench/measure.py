"""What every benchmark measures with: facts about the machine, and percentiles instead of single numbers."""

from __future__ import annotations

import os
import platform
import resource
from dataclasses import dataclass, field
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


@dataclass(slots=True)
class Measured:
    """What one contestant did, or the reason why there is nothing to show."""

    lane: str = ""
    """How the bytes really travelled, as the transport says."""
    samples: dict[str, list[float]] = field(default_factory=dict)
    """By what was measured, one value or more per round."""
    problem: str = ""
    """Cannot work here, failed, or delivered wrong bytes."""
    failed: bool = False
    """True if the problem is a failure; False if the contestant just cannot work on this machine."""

    def add(self, name: str, *values: float) -> None:
        self.samples.setdefault(name, []).extend(values)

    def summary(self, name: str) -> Summary | None:
        samples = self.samples.get(name)
        return summarise(samples) if samples and not self.problem else None

    def median(self, name: str) -> float:
        return summarise(self.samples[name]).median

    def share(self, name: str, other: Measured, other_name: str) -> float | None:
        """`name` divided by another measurement in the same round; None if one of them is missing."""
        if self.problem or other.problem or name not in self.samples or other_name not in other.samples:
            return None
        return median_ratio(self.samples[name], other.samples[other_name])


def spread(summary: Summary, factor: float = 1e3, digits: int = 1) -> str:
    """Median with p10 and p90 in brackets: of seconds in milliseconds, unless there is another factor."""
    median, low, high = (f"{value * factor:.{digits}f}" for value in (summary.median, summary.p10, summary.p90))
    return f"{median} ({low}..{high})"


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
        "pdlink": version_of("pdlink"),
        "libucx": version_of("libucx-cu13"),
        "page_nbytes": os.sysconf("SC_PAGE_SIZE"),
        "transparent_huge_pages": _chosen("/sys/kernel/mm/transparent_hugepage/enabled"),
        "transparent_huge_pages_shmem": _chosen("/sys/kernel/mm/transparent_hugepage/shmem_enabled"),
        "memlock_nbytes": memlock,  # -1: unlimited
        "tcp_congestion_control": _text("/proc/sys/net/ipv4/tcp_congestion_control"),
    }


def machine_line(machine: Facts) -> str:
    return (
        f"{machine['cpu']}, {machine['cores']} cores (load {machine['load_average_1min']:.1f}), "
        f"{int(machine['memory_nbytes']) / 2**30:.0f} GiB, Linux {machine['kernel']}, Python {machine['python']}, "
        f"UCX {machine['libucx']}, {int(machine['page_nbytes']) // 1024} KiB pages, huge pages "
        f"{machine['transparent_huge_pages_shmem']} for shared memory, tcp {machine['tcp_congestion_control']}"
    )


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


def version_of(package: str) -> str:
    """Of what is installed beside this."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
