"""Which weights an engine's rank computes with, where they are changed in place: what is loaded counts, not files.

A rank that starts computes with the weights of its files, and is known by those. After a change it is known by a
digest of what is loaded: every element counts. Two ranks fit together if both compute with their files, or if both
were changed and have equal weights in equal shards; any other pair is refused, and decode computes its prompts.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import secrets
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import torch

log = logging.getLogger(__name__)

_DIGEST_NBYTES = 16
_MOST_ELEMENTS = 4 * 2**20
"""Of a tensor that are summed at once: the sums take eight bytes an element meanwhile."""


def digest_of(parameters: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Of weights as they lie in memory: of each tensor, its sums of words along every axis, so that every element
    counts. 32 hex digits. Cost: a few passes over the weights, about 80 ms for 16 GB on an H100 (estimated)."""
    digest = hashlib.blake2b(digest_size=_DIGEST_NBYTES)
    for name, tensor in sorted(parameters, key=lambda item: item[0]):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {tensor.device.type}\n".encode())
        for sums in _sums(tensor):
            digest.update(sums.contiguous().cpu().numpy().tobytes())
    return digest.hexdigest()


def _sums(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Nothing of a tensor that has no memory yet, in the middle of a change."""
    import torch

    if tensor.device.type == "meta" or not tensor.numel():
        return
    words = tensor.detach().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])
    if words.ndim < 2:
        yield words
        return
    others: list[torch.Tensor | None] = [None] * words.ndim
    step = max(1, _MOST_ELEMENTS // words[0].numel())
    for first in range(0, len(words), step):
        part = words[first : first + step].to(torch.int64)
        for axis in range(words.ndim):
            sums = part.sum([one for one in range(words.ndim) if one != axis])
            known = others[axis]
            if axis == 0:
                yield sums
            else:
                others[axis] = sums if known is None else known + sums
    yield from (sums for sums in others if sums is not None)


class LoadedWeights:
    """Of one rank. For the thread that changes them; `change` may be read in any."""

    def __init__(self) -> None:
        self.change = ""
        """Names what is loaded if that is not what the files had at the start."""
        self._first = ""
        """Digest of that; empty until it is known."""
        self._tell: list[Callable[[], None]] = []

    def named(self, content: str) -> str:
        """The name of what is loaded. content: of the files."""
        return f"{content} changed {self.change}" if self.change else content

    def when_changed(self, tell: Callable[[], None]) -> Callable[[], None]:
        """Call it after every change. Returns what ends that, and may be called twice."""
        self._tell.append(tell)

        def stop() -> None:
            with contextlib.suppress(ValueError):
                self._tell.remove(tell)

        return stop

    def known(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        """These are loaded, and nothing has changed them yet. Call it before anything can."""
        self._first = self._first or digest_of(parameters)

    def changing(self) -> str:
        """What is loaded is nobody else's until `look`. Returns `change`."""
        return self._become(secrets.token_hex(_DIGEST_NBYTES))

    def look(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> str:
        """These are loaded now. Returns `change`."""
        digest = digest_of(parameters)
        self._first = self._first or digest
        return self._become("" if digest == self._first else digest)

    def _become(self, change: str) -> str:
        if change != self.change:
            self.change = change
            log.info("weights: %s", f"changed in place, now {change}" if change else "as they were at the start")
            for tell in list(self._tell):
                tell()
        return change


HERE = LoadedWeights()
"""Of this process: engines have one for each rank."""
