"""Curves from the files of aiconfigurator (github.com/ai-dynamo/aiconfigurator, read with those of 0.12.0).

`aiconfigurator cli default --save-dir DIR` writes DIR/.../disagg/pareto.csv: for one length of prompts (`isl`) and
answers (`osl`) a row for each deployment, with `(p)seq/s/worker`, and `tpot` in ms at a batch `(d)bs` of each decode
worker. Its `ttft` is not used: it holds an allowance for waiting. Curves of one kind of worker come from the rows of
one way to split a model over GPUs, `(p)parallel` and `(d)parallel`. How speed depends on the length of prompts is
seen with several files, of several lengths.
"""

from __future__ import annotations

import csv
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from pdlink.errors import ConfigError

from .curves import Curves
from .fitting import fit_decode, fit_prefill

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_COLUMNS = ("isl", "osl", "prefix", "tpot", "(p)bs", "(p)seq/s/worker", "(p)parallel", "(d)bs", "(d)parallel")


def read_aiconfigurator(paths: Sequence[Path]) -> Curves:
    """One disagg/pareto.csv for each length of prompts; one alone gives a speed without the dependence on the length.
    KV bytes, memory and link are not in them: those of `Curves`. Raises ConfigError.
    """
    rows = [row for path in paths for row in _rows(path)]
    parallel = {side: Counter(row[f"({side})parallel"] for row in rows).most_common(1)[0][0] for side in ("p", "d")}
    prefill, decode = [], []
    for row in rows:
        isl, osl, before = (float(row[name]) for name in ("isl", "osl", "prefix"))
        if row["(p)parallel"] == parallel["p"]:
            prefill.append(
                (isl - before, before, float(row["(p)bs"]) / float(row["(p)seq/s/worker"]) / float(row["(p)bs"]))
            )
        if row["(d)parallel"] == parallel["d"]:
            batch = float(row["(d)bs"])
            decode.append((batch, batch * (isl + osl / 2), float(row["tpot"]) / 1e3))
    found = fit_prefill(np.array(prefill)) | fit_decode(np.array(decode))
    source = (
        f"aiconfigurator: {', '.join(path.name for path in paths)}, prefill {parallel['p']}, decode {parallel['d']}"
    )
    return Curves.model_validate({"source": source, **found})


def _rows(path: Path) -> list[dict[str, str]]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        missing = [name for name in _COLUMNS if not rows or name not in rows[0]]
        if missing:
            raise ValueError(f"without column {missing[0]}")
        for row in rows:
            if any(float(row[name]) < 0 for name in ("isl", "osl", "prefix", "tpot")):
                raise ValueError("a negative number")
            if not (float(row["(p)seq/s/worker"]) > 0 and float(row["(p)bs"]) > 0 and float(row["(d)bs"]) > 0):
                raise ValueError("a batch or rate of 0")
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"curves: got {path}: {error}; expected disagg/pareto.csv of aiconfigurator 0.12; name that file"
        ) from None
    return rows
