"""Which copy of UCX this process loads, found without loading any: two copies of one name do not mix in a process,
and one that was refused leaves its libucs behind. So each is looked at in a process of its own.

Without RDMA devices the wheel's copy is right, and nothing is looked at. With them it is the newest one that has
transports for RDMA, of the system's and the wheel's. Versions below 1.20 neither put to ordinary memory natively over
tcp nor talk to newer ones, and those below 1.16 crash where a put is for a GPU's memory.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Final, NamedTuple

from pdlink.config import environment_with

NEEDED_UCX: Final = (1, 20)
SYSTEM: Final = "libucp.so.0"
RDMA_DEVICES: Final = "/sys/class/infiniband"
_LOOK_S: Final = 20
_LOOK: Final = """
import ctypes, json, os, sys
library = ctypes.CDLL(sys.argv[1])
version = [ctypes.c_uint() for _ in range(3)]
library.ucp_get_version(*map(ctypes.byref, version))
with open("/proc/self/maps") as maps:
    path = next(line.split()[-1] for line in maps if "libucp" in line or sys.argv[1] in line)
class Attributes(ctypes.Structure):  # uct_component_attr_t; the mask asks for its name alone
    _fields_ = [("field_mask", ctypes.c_uint64), ("name", ctypes.c_char * 16), ("room", ctypes.c_char * 256)]
names = []
components, count = ctypes.POINTER(ctypes.c_void_p)(), ctypes.c_uint()
try:
    failed = library.uct_query_components(ctypes.byref(components), ctypes.byref(count))
    for index in range(0 if failed else count.value):
        one = Attributes(1)
        if library.uct_component_query(ctypes.c_void_p(components[index]), ctypes.byref(one)) == 0:
            names.append(one.name.decode())
except AttributeError:
    pass
print(json.dumps([path, [each.value for each in version], names]), flush=True)
os._exit(0)  # the exit handlers of some copies crash
"""
_QUIET: Final = {"UCX_LOG_LEVEL": "fatal", "UCX_HANDLE_ERRORS": "none", "UCX_MEM_MMAP_HOOK_MODE": "none"}


class UcxCopy(NamedTuple):
    path: str
    version: tuple[int, ...]
    components: tuple[str, ...]
    """What it can move bytes by, as UCX calls it: "tcp", "cma", "cuda_ipc", "ib"."""

    @property
    def usable(self) -> bool:
        return self.version >= NEEDED_UCX

    @property
    def has_rdma(self) -> bool:
        return "ib" in self.components

    def __str__(self) -> str:
        return f"{self.path} is UCX {'.'.join(map(str, self.version))}"


class ChosenCopy(NamedTuple):
    path: str
    """To load; empty if none can be used."""
    problem: str = ""
    """Why none can."""
    no_rdma: str = ""
    """Why bytes do not travel by RDMA, and what would help."""


def chosen(library: str | None = None) -> ChosenCopy:
    """For this host; `library` if it is given. With RDMA devices the first call takes up to a second."""
    rdma = bool(rdma_devices())
    if not library:
        return _chosen(rdma, _prefers_system(), _wheel())
    if not rdma:
        return ChosenCopy(library, no_rdma=_NO_DEVICE)
    looked = look(library)
    has_rdma = isinstance(looked, UcxCopy) and looked.has_rdma
    return ChosenCopy(library, no_rdma="" if has_rdma else f"{looked} without transports for it")


def rdma_devices() -> list[str]:
    """Names of this host's RDMA devices. /dev/infiniband is no sign of one: its rdma_cm is there without any."""
    try:
        return sorted(os.listdir(RDMA_DEVICES))
    except OSError:
        return []


@lru_cache(maxsize=8)
def _chosen(rdma: bool, prefers_system: bool, wheel: str) -> ChosenCopy:
    no_rdma = "" if rdma else _NO_DEVICE
    if wheel and not rdma and not prefers_system:
        return ChosenCopy(wheel, no_rdma=no_rdma)
    looked = [look(path) for path in (SYSTEM, wheel) if path]
    copies = [one for one in looked if isinstance(one, UcxCopy) and one.usable]
    if not copies:
        problems = "; ".join(f"{one}, needed is 1.20 or later" if isinstance(one, UcxCopy) else one for one in looked)
        return ChosenCopy("", f"no UCX 1.20 or later found ({problems}); {_REMEDY}", no_rdma)

    def worth(one: UcxCopy) -> tuple[bool, bool, tuple[int, ...]]:
        return prefers_system and one.path != wheel, rdma and one.has_rdma, one.version

    best = max(copies, key=worth)
    if rdma and not best.has_rdma:
        others = "; ".join(str(one) for one in looked if one is not best)
        no_rdma = f"{best} without transports for it{f' ({others})' if others else ''}: {_nixl() or _NEWER}"
    return ChosenCopy(best.path, no_rdma=no_rdma)


_NO_DEVICE = "no device"
_REMEDY = "pip install 'pdlink[ucx]', or set transport.ucx.library to the path of libucp.so.0"
_NEWER = "install UCX 1.20 or later with verbs, or set transport.ucx.library to one"


@lru_cache(maxsize=8)
def look(path: str) -> UcxCopy | str:
    """A copy, by its path or the name that the system knows it by; or why it cannot be loaded."""
    command = [sys.executable, "-I", "-S", "-c", _LOOK, path]
    try:
        done = subprocess.run(
            command,
            env=environment_with(_QUIET),
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_LOOK_S,
            check=False,
        )
        found, version, components = json.loads(done.stdout)
    except ValueError:
        return f"{path} cannot be loaded: {(done.stderr.strip().splitlines() or ['it ends its process'])[-1]}"
    except (OSError, subprocess.SubprocessError) as error:
        return f"{path} cannot be looked at: {error}"
    return UcxCopy(path if os.path.isabs(path) else found, tuple(version), tuple(components))


def _prefers_system() -> bool:
    """As libucx's own loader reads it."""
    return environment_with({}).get("RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY", "").lower() not in ("", "0", "false")


def _wheel() -> str:
    """libucp.so.0 of the installed libucx package, "" if there is none; the package need not be imported for that."""
    for folder in _package("libucx"):
        path = Path(folder) / "lib" / SYSTEM
        if path.exists():
            return str(path)
    return ""


def _nixl() -> str:
    """The words that lead to the copy in an installed nixl, which has verbs. It is not taken unasked: after RDMA was
    used it crashes when its process ends (UCX 1.23-dev in NIXL 1.5)."""
    for name in ("nixl_cu13", "nixl_cu12"):
        for folder in _package(name):
            for path in sorted(Path(folder).parent.glob(f"*{name}*.libs/libucp-*.so*")):
                return f"nixl's copy has them: set transport.ucx.library to {path}"
    return ""


def _package(name: str) -> list[str]:
    spec = importlib.util.find_spec(name)
    return list((spec and spec.submodule_search_locations) or ())
