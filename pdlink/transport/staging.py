"""How short a run must be for packing it to pay: measured per transport, kept beside this file.

Every run that travels by itself has a price (a put through UCX 1 to 4 us, an entry of sendmsg and recvmsg 0.1 us).
Below some length it is cheaper to copy short runs into one piece, send that, and copy them apart again at the other
end. Where that length is depends on the machine, so `pdlink bench tune` measures it and writes the file;
`transport.staging` in the configuration names another one, or the lengths themselves.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from pdlink.errors import ConfigError

TABLE = Path(__file__).with_name("staging.json")
"""What came with the package."""

UCX = "ucx"
"""Key for lanes of UCX that have no key of their own: "ucx/tcp", "ucx/cma"."""


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file."""

    machine: dict[str, str | int | float]
    """Facts of the machine it was measured on."""
    stage_below_nbytes: dict[str, int]
    """Runs shorter than this are staged, 0 stages none; per transport ("tcp"), for UCX per lane."""


@cache
def read_table(path: str | Path = TABLE) -> Table:
    """The measured lengths in a file. Raises ConfigError."""
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=Table)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"transport.staging.table: cannot read {path}: {error}") from error


def write_table(path: Path, machine: dict[str, Any], stage_below_nbytes: dict[str, int]) -> None:
    """What `pdlink bench tune --write` leaves; `read_table` reads it."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(Table(machine, stage_below_nbytes)), indent=2) + b"\n")


def stage_below(transport: str, path: str | None = None, chosen: int | None = None) -> int:
    """The length for a transport: the chosen one, else the one in a file, 0 if that has none."""
    if chosen is not None:
        return chosen
    return read_table(path or TABLE).stage_below_nbytes.get(transport, 0)


def stage_below_lanes(path: str | None = None, chosen: int | None = None) -> dict[str, int]:
    """The length for each lane of UCX; "" is for those that were not measured."""
    if chosen is not None:
        return {"": chosen}
    lengths = read_table(path or TABLE).stage_below_nbytes
    return {key.partition("/")[2]: length for key, length in lengths.items() if key.partition("/")[0] == UCX}
