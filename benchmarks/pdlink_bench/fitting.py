"""What of a run can be done here in a few minutes: sizes that fit into memory, peers where they can follow.

Whatever is left out is said before anything is measured.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from .measure import available_memory_nbytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from .rounds import Contestant
    from .workload import Workload

PROCESS_NBYTES = 200_000_000
"""Of an interpreter with numpy, numba and a transport."""
MANY_RUNS = 1 << 17
"""More runs than this are for those who pack them. Peers and bare loops make a request of each: NIXL took 10 to 20 us
for one of 256 bytes (32,768 of them, on a busy machine), and in such runs the default workload has a million."""


def fitting(
    sizes: dict[str, Workload],
    layouts: dict[str, Workload],
    contestants: Mapping[str, Contestant],
    tell: Callable[[str], None],
) -> dict[str, Workload]:
    """All cases, without the largest sizes if they need more memory than there is. Raises ValueError."""
    available = available_memory_nbytes()
    while True:
        cases = layouts | sizes
        needed = memory_needed_nbytes(cases, contestants)
        if not available or needed <= 0.9 * available:
            return cases
        if len(sizes) < 2:
            raise ValueError(
                f"needs {needed / 1e9:.1f} GB of memory, {available / 1e9:.1f} GB are available: "
                "try fewer --tokens, a smaller --pool-factor or one --transport"
            )
        name, _ = sizes.popitem()
        tell(
            f"[yellow]left out: {name}[/], {len(contestants) + 1} pairs of pools need {needed / 1e9:.1f} GB of "
            f"memory and {available / 1e9:.1f} GB are available"
        )


def without_many_runs(
    contestants: Mapping[str, Contestant], cases: Mapping[str, Workload], tell: Callable[[str], None]
) -> dict[str, Contestant]:
    """The contestants; those that cannot be given many runs without the cases that have them."""
    num_runs = {name: workload.plan().num_runs for name, workload in cases.items()}
    many = [name for name, count in num_runs.items() if count > MANY_RUNS]
    found = dict(contestants)
    for name, contestant in contestants.items():
        taken = contestant.cases or tuple(cases)
        left = tuple(case for case in taken if case not in many)
        if contestant.many_runs or left == taken:
            continue
        said = ", ".join(f"{case} ({num_runs[case]:,} runs)" for case in taken if case in many)
        tell(f"[yellow]without {name}[/]: {said}")
        if left:
            found[name] = replace(contestant, cases=left)
        else:
            del found[name]
    return found


def memory_needed_nbytes(cases: Mapping[str, Workload], contestants: Mapping[str, Contestant]) -> int:
    """Pools of all processes together, and the processes themselves."""
    needed = _pools_nbytes(list(cases.values())) + PROCESS_NBYTES  # the ceilings'
    for contestant in contestants.values():
        needed += _pools_nbytes([cases[name] for name in contestant.cases or cases]) + 2 * PROCESS_NBYTES
    return needed


def _pools_nbytes(workloads: Sequence[Workload]) -> int:
    return max(workload.src.extent(0) for workload in workloads) + max(
        workload.dst.extent(0) for workload in workloads
    )
