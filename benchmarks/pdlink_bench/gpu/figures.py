"""What is measured on a GPU and has to be reached, and the table and JSON of a run. Needs neither torch nor a GPU."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


CASES: dict[str, tuple[int, str]] = {
    "mapped-cuda": (60, "two processes on one GPU: a kernel stores into the peer's pages"),
    "layers": (40, "layer_ready of a node: CPU of the engine's thread, and one layer to its report"),
    "tiers": (60, "KV into a store's pinned arena and back, beside one large copy; copy engine against kernel"),
    "exposed": (70, "how much of the push a real prefill does not hide"),
    "staged-mapped": (40, "the same pages through pinned slots that the peer maps"),
    "ucx": (60, "the same pages through UCX"),
    "kernels": (60, "reshape kernels beside the device-to-device copy of the same run"),
    "host": (40, "device to pinned host, layer by layer, beside one copy"),
    "staged-tcp": (40, "the same pages through pinned slots and a socket"),
    "serving": (300, "vLLM pairs with an 8-billion-parameter model, pdlink beside NixlConnector"),
}
"""Each in a process of its own, what is wanted most first: the most seconds it may take, and what it is."""
BY_ITSELF = ("serving",)
"""Cases that run only when they are asked for: a stage of their own of run.sh."""

MAPPED, UCX = "two processes, mapped-cuda", "two processes, UCX cuda_ipc"
STAGED_MAPPED = "two processes, through pinned slots, mapped"
WHOLE, BY_LAYER, OTHER_LAYOUT = "mapped-cuda, one submit", "mapped-cuda, layer by layer", "mapped-cuda, NHD to HND"
LAYER_CPU, ONE_LAYER = "engine's thread, CPU of a layer", "one layer, layer_ready to report"
TO_ARENA, FROM_ARENA = "GPU pages to arena, layer by layer", "arena to GPU pages, layer by layer"
TO_ARENA_FIRST = "GPU pages to arena, the first time"
SLOWER = "a prefill beside a push, longer by"
SERVING_TOKENS = 16000
SERVING = f"two vLLM servers, pdlink: TTFT beyond the prefill leg, {SERVING_TOKENS} tokens"


@dataclass(frozen=True, slots=True)
class Threshold:
    """What the figure of a name has to reach, on an H100."""

    figure: str
    case: str
    ratio: float
    text: str
    at_most: bool = False


BARS = (
    Threshold("gather, one launch", "kernels", 0.85, "of the device-to-device copy"),
    Threshold("scatter, one launch", "kernels", 0.85, "of the device-to-device copy"),
    Threshold("NHD to HND", "kernels", 0.75, "of the device-to-device copy"),
    Threshold("device to pinned host, layer by layer", "host", 0.95, "of one large copy"),
    Threshold("mapped-cuda against UCX", "ucx", 2.0, "times UCX cuda_ipc"),
    Threshold(WHOLE, "mapped-cuda", 0.8, "of 32 device-to-device copies"),
    Threshold(BY_LAYER, "mapped-cuda", 0.6, "of 32 device-to-device copies"),
    Threshold(OTHER_LAYOUT, "mapped-cuda", 0.8, "of equal layouts"),
    Threshold(LAYER_CPU, "layers", 1.0, "of 8 us", at_most=True),
    Threshold(ONE_LAYER, "layers", 1.0, "of 35 us", at_most=True),
    Threshold(STAGED_MAPPED, "staged-mapped", 0.8, "of one copy to the host"),
    Threshold(TO_ARENA, "tiers", 0.95, "of one large copy"),
    Threshold(FROM_ARENA, "tiers", 0.95, "of one large copy"),
    Threshold(TO_ARENA_FIRST, "tiers", 0.5, "of one large copy"),
    Threshold("exposed transfer time", "exposed", 2 / 32, "of the transfer", at_most=True),
    Threshold(SLOWER, "exposed", 0.01, "of the prefill", at_most=True),
    Threshold(SERVING, "serving", 0.05, "of NixlConnector's", at_most=True),
)


@dataclass(frozen=True, slots=True)
class GpuFigure:
    """One measurement beside what it is compared with, both of this run."""

    name: str
    seconds: float | None
    """Median; None if it was not measured, and `note` says why."""
    gb_per_s: float = 0.0
    """Decimal; bytes read plus bytes written where both are device memory."""
    against: str = ""
    ratio: float | None = None
    """Of the two speeds, or of the two times where the bar is one of time."""
    note: str = ""
    case: str = ""

    @property
    def bar(self) -> Threshold | None:
        return next((bar for bar in BARS if bar.figure == self.name), None)

    @property
    def verdict(self) -> str:
        if self.bar is None:
            return ""
        if self.ratio is None:
            return "not measured"
        met = self.ratio <= self.bar.ratio if self.bar.at_most else self.ratio >= self.bar.ratio
        return "met" if met else "MISSED"


@dataclass
class Run:
    """All there is of one run, complete or not."""

    machine: dict[str, Any] = field(default_factory=dict)
    stages: list[dict[str, str]] = field(default_factory=list)
    figures: list[GpuFigure] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    """Why a case gave no figures."""

    def complete(self) -> list[GpuFigure]:
        """The figures, comparisons of two of them, and a row for every bar without a measurement."""
        known = {one.name: one for one in self.figures}
        name, ours, theirs = "mapped-cuda against UCX", known.get(MAPPED), known.get(UCX)
        if ours and theirs and ours.seconds and theirs.seconds:
            known[name] = GpuFigure(name, ours.seconds, ours.gb_per_s, UCX, theirs.seconds / ours.seconds)
        elif reasons := [one.note for one in (ours, theirs) if one and one.seconds is None]:
            known[name] = GpuFigure(name, None, note=reasons[0])
        for bar in BARS:
            if bar.figure not in known:
                known[bar.figure] = GpuFigure(
                    bar.figure, None, note=self.failures.get(bar.case, f"no case {bar.case}")
                )
        return list(known.values())

    def write(self, path: Path) -> None:
        """At once or not at all: a reader never finds half a file."""
        figures = [
            {**asdict(one), "bar": None if one.bar is None else asdict(one.bar), "verdict": one.verdict}
            for one in self.complete()
        ]
        content = {
            "machine": self.machine,
            "stages": self.stages,
            "failures": self.failures,
            "figures": figures,
            "measured": [one.name for one in self.figures],
        }
        made = path.with_suffix(".new")
        made.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        os.replace(made, path)

    @classmethod
    def read(cls, path: Path) -> Run:
        """What `write` wrote; an empty run if there is no such file."""
        if not path.exists():
            return cls()
        content = json.loads(path.read_text(encoding="utf-8"))
        names = set(GpuFigure.__dataclass_fields__)
        figures = [GpuFigure(**{key: one[key] for key in names}) for one in content["figures"]]
        measured = set(content["measured"])
        return cls(
            content["machine"],
            content["stages"],
            [one for one in figures if one.name in measured],
            content["failures"],
        )


def table(figures: Sequence[GpuFigure]) -> str:
    """Short, for the end of a log; the rows with a bar come last."""
    rows = [("what", "ms", "GB/s", "ratio", "bar", "", "")]
    for one in sorted(figures, key=lambda one: one.bar is not None):
        bar = "" if one.bar is None else f"at {'most' if one.bar.at_most else 'least'} {one.bar.ratio:g}"
        against = f"{one.against}; {one.note}" if one.against and one.note else one.against or one.note
        rows.append(
            (
                one.name,
                "" if one.seconds is None else f"{one.seconds * 1e3:.3f}",
                f"{one.gb_per_s:.1f}" if one.gb_per_s else "",
                "" if one.ratio is None else f"{one.ratio:.3f}",
                bar,
                one.verdict,
                against[:100],
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def main() -> None:
    for name, (seconds, text) in CASES.items():
        print(f"case {name}: {text} (at most {seconds} s)")
    for bar in BARS:
        print(f"bar  {bar.figure}: at {'most' if bar.at_most else 'least'} {bar.ratio:g} {bar.text}")


if __name__ == "__main__":
    main()
