"""The workers of one leg, and which of them may get requests: known until something about a worker changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .table import Table, Workers
from .worker import State

if TYPE_CHECKING:
    from collections.abc import Callable

    from .table import Mask
    from .worker import Worker


class Usable(NamedTuple):
    """Workers that may get requests of one model now."""

    pair: Workers
    """Workers that work in pairs."""
    plain: Workers | None
    """Workers that serve requests by themselves; None if there are none."""
    model: str | None
    """As the first of them calls it."""


class _Well(NamedTuple):
    """Those whose health is good, for one model."""

    workers: list[Worker]
    mask: Mask
    trial: list[tuple[int, Worker]]
    """Of them those whose legs fail or are slow, with their rows: whether they get requests is a matter of time."""
    usable: Usable
    """Without looking at those."""


class Side:
    """Row n of the table is worker n."""

    def __init__(self, changed: Callable[[], object] = lambda: None) -> None:
        """changed: called when it is another question who may get requests."""
        self._tell = changed
        self.workers: list[Worker] = []
        self.table = Table(())
        self._well: dict[str | None, _Well] = {}
        self._models: list[str] | None = None
        self._all_heard = False
        self._barred: bool | None = None

    def replace(self, workers: list[Worker]) -> None:
        """These are the workers from now on."""
        for worker in self.workers:
            worker.work.row, worker.changed = -1, None
        self.workers, self.table = workers, Table(worker.work for worker in workers)
        for row, worker in enumerate(workers):
            worker.work.row, worker.changed = row, self._changed
        self._changed()

    def settled(self, model: str) -> bool:
        """Whether the same workers may get requests until something about one changes."""
        return not self._well_of(model).trial

    def usable(self, model: str | None, now_s: float) -> Usable:
        """model: None for any."""
        well = self._well_of(model)
        away = _left_alone(well, now_s) if well.trial else ()
        if not away:
            return well.usable
        mask = well.mask.copy()
        mask[away] = False
        return self._split(mask, well.usable.model)

    def usable_workers(self, model: str | None, now_s: float) -> list[Worker]:
        """The same, as a list: costs by their number."""
        well = self._well_of(model)
        away = _left_alone(well, now_s) if well.trial else ()
        return [worker for worker in well.workers if worker.work.row not in away] if away else [*well.workers]

    @property
    def models(self) -> list[str]:
        """Of an absent worker its last known ones."""
        if self._models is None:
            said = [
                worker.health for worker in self.workers if worker.health and worker.state is not State.WRONG_ROLE
            ]
            self._models = sorted({name for health in said for name in (health.model, *health.aliases)})
            self._all_heard = all(worker.health for worker in self.workers)
        return self._models

    @property
    def all_heard(self) -> bool:
        """Every worker has answered once."""
        return bool(self.models) and self._all_heard

    @property
    def barred(self) -> bool:
        """Some worker refuses this proxy's key."""
        if self._barred is None:
            self._barred = any(worker.state is State.BARRED for worker in self.workers)
        return self._barred

    def _changed(self) -> None:
        self._well.clear()
        self._models = self._barred = None
        self._tell()

    def _well_of(self, model: str | None) -> _Well:
        found = self._well.get(model)
        if found is None:
            if len(self._well) > 2 * len(self.models):  # clients name models that nobody serves
                self._well.clear()
            mask: Mask = np.zeros(len(self.workers), np.bool_)
            well, trial = [], []
            for row, worker in enumerate(self.workers):
                said = worker.health
                if worker.state is State.OK and said and said.serves(model) and not worker.listed_as_draining:
                    mask[row] = True
                    well.append(worker)
                    if worker.on_trial:
                        trial.append((row, worker))
            first = well[0].health.model if well and well[0].health else None
            found = self._well[model] = _Well(well, mask, trial=trial, usable=self._split(mask, first))
        return found

    def _split(self, mask: Mask, model: str | None) -> Usable:
        plain: Mask = np.array([worker.plain for worker in self.workers], np.bool_)
        if not plain.any():
            return Usable(Workers(self.table).only(mask), None, model)
        return Usable(Workers(self.table, mask & ~plain), Workers(self.table, mask & plain), model)


def _left_alone(well: _Well, now_s: float) -> list[int]:
    """Rows of those on trial that get no request now.

    A worker whose legs fail is left alone for a growing while, unless most fail: then the cause is another one. One
    that is far slower than its peers is left alone, too, if there is another.
    """
    away = [row for row, worker in well.trial if not worker.breaker.allows(now_s)]
    num = len(well.workers)
    if 2 * (num - len(away)) < num:
        away = []
    out = [row for row, worker in well.trial if row not in away and not worker.outlier.allows(now_s)]
    return away + out if len(away) + len(out) < num else away
