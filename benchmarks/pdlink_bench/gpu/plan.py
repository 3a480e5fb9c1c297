"""What is measured on a GPU, in which process, and what it has to reach. Needs neither torch nor a GPU."""

from __future__ import annotations

from dataclasses import dataclass

CASES: dict[str, tuple[int, str]] = {
    "kernels": (60, "reshape kernels beside the device-to-device copy of the same run"),
    "host": (40, "device to pinned host, layer by layer, beside one copy"),
    "mapped-cuda": (50, "two processes on one GPU: a kernel stores into the peer's pages"),
    "ucx": (60, "the same pages through UCX"),
    "exposed": (70, "how much of the push a real prefill does not hide"),
}
"""Each in a process of its own, one after the other: the most seconds it may take, and what it is."""

MAPPED, UCX = "two processes, mapped-cuda", "two processes, UCX cuda_ipc"


@dataclass(frozen=True, slots=True)
class Bar:
    """What the figure of a name has to reach, on an H100."""

    figure: str
    case: str
    ratio: float
    text: str
    at_most: bool = False


BARS = (
    Bar("gather, one launch", "kernels", 0.85, "of the device-to-device copy"),
    Bar("scatter, one launch", "kernels", 0.85, "of the device-to-device copy"),
    Bar("NHD to HND", "kernels", 0.75, "of the device-to-device copy"),
    Bar("bf16 to fp8, scale per head", "kernels", 0.75, "of the device-to-device copy"),
    Bar("device to pinned host, layer by layer", "host", 0.95, "of one large copy"),
    Bar("mapped-cuda against UCX", "ucx", 2.0, "times UCX cuda_ipc"),
    Bar("exposed transfer time", "exposed", 2 / 32, "of the transfer", at_most=True),
)


def main() -> None:
    for name, (seconds, text) in CASES.items():
        print(f"case {name}: {text} (at most {seconds} s)")
    for bar in BARS:
        print(f"bar  {bar.figure}: at {'most' if bar.at_most else 'least'} {bar.ratio:g} {bar.text}")


if __name__ == "__main__":
    main()
