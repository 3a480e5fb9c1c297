"""Which copy of UCX is taken. The copies are small libraries that say which version and components they are."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from pdlink.config import TransportConfig
from pdlink.config.transport import UcxConfig
from pdlink.transport import choice, ucx, ucx_copies
from pdlink.transport.base import Site
from pdlink.transport.ucx import UcxTransport
from pdlink.transport.ucx_copies import ChosenCopy, UcxCopy

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")

SOURCE = """
#include <stdint.h>
#include <string.h>
struct attributes {{ uint64_t field_mask; char name[16]; unsigned md_resource_count; }};
static const char* names[] = {{{names}}};
static void* handles[] = {{(void*)0, (void*)1, (void*)2, (void*)3}};
void ucp_get_version(unsigned* a, unsigned* b, unsigned* c) {{
    *a = {version[0]}, *b = {version[1]}, *c = {version[2]};
}}
int uct_query_components(void*** to, unsigned* count) {{ *to = handles; *count = {count}; return 0; }}
int uct_component_query(void* handle, struct attributes* to) {{
    if (to->field_mask != 1) return -1;
    strcpy(to->name, names[(intptr_t)handle]);
    return 0;
}}
"""
Make = Callable[..., str]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Path of a new copy; `folder` is searched for it by its name where it is "system"."""

    def copy(folder: str, version: tuple[int, int, int], *components: str) -> str:
        (tmp_path / folder).mkdir()
        source, library = tmp_path / f"{folder}.c", tmp_path / folder / ucx_copies.SYSTEM
        names = ", ".join(f'"{name}"' for name in components) or "0"
        source.write_text(SOURCE.format(version=version, names=names, count=len(components)))
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
        return str(library)

    return copy


@pytest.fixture(autouse=True)
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """No copy is known; the system's lies in "system". Returns where RDMA devices show, of which there is none."""
    caches = ucx_copies._chosen, ucx_copies.look
    for cache in caches:
        cache.cache_clear()
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path / "system"))
    monkeypatch.setattr(ucx_copies, "RDMA_DEVICES", str(tmp_path / "devices"))
    monkeypatch.setattr(ucx_copies, "_wheel", lambda: "")
    yield tmp_path / "devices"
    for cache in caches:
        cache.cache_clear()


@pytest.fixture
def rdma(host: Path) -> None:
    (host / "mlx5_0").mkdir(parents=True)


def test_old_copy_of_the_system_is_passed_over_without_loading_it(
    rdma: None, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Ubuntu 24.04 has it: once loaded, its libucs would break every other copy."""
    make("system", (1, 16, 0), "tcp", "ib")
    wheel = make("wheel", (1, 22, 0), "tcp", "cma")
    monkeypatch.setattr(ucx_copies, "_wheel", lambda: wheel)
    chosen = ucx_copies.chosen()
    assert (chosen.path, chosen.problem) == (wheel, "")
    assert f"{wheel} is UCX 1.22.0 without transports for it" in chosen.no_rdma
    assert "system/libucp.so.0 is UCX 1.16.0" in chosen.no_rdma
    assert "install UCX 1.20 or later with verbs" in chosen.no_rdma
    assert str(Path(wheel).parents[1]) not in Path("/proc/self/maps").read_text()


def test_copy_with_rdma_is_taken_before_a_newer_one_without(
    rdma: None, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    system, wheel = make("system", (1, 20, 1), "tcp", "ib"), make("wheel", (1, 22, 0), "tcp")
    monkeypatch.setattr(ucx_copies, "_wheel", lambda: wheel)
    assert ucx_copies.chosen() == ChosenCopy(system)


def test_newest_of_equal_copies_is_taken(rdma: None, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    system, wheel = make("system", (1, 23, 0), "ib"), make("wheel", (1, 22, 0), "ib")
    monkeypatch.setattr(ucx_copies, "_wheel", lambda: wheel)
    assert ucx_copies.chosen().path == system


def test_wheel_is_taken_unseen_where_there_is_no_rdma_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """`rdma_cm` in /dev/infiniband does not make one."""

    def look(path: str) -> UcxCopy:
        raise AssertionError(path)

    monkeypatch.setattr(ucx_copies, "look", look)
    monkeypatch.setattr(ucx_copies, "_wheel", lambda: "/wheel/libucp.so.0")
    assert ucx_copies.chosen() == ChosenCopy("/wheel/libucp.so.0", no_rdma="no device")


def test_user_may_prefer_the_copy_of_the_system(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    system, wheel = make("system", (1, 20, 0)), make("wheel", (1, 22, 0))
    monkeypatch.setattr(ucx_copies, "_wheel", lambda: wheel)
    assert ucx_copies.chosen().path == wheel
    monkeypatch.setenv("RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY", "true")
    assert ucx_copies.chosen().path == system


def test_without_a_copy_that_can_be_used_each_one_found_is_named(rdma: None, make: Make, tmp_path: Path) -> None:
    make("system", (1, 13, 1), "ib")
    problem = ucx_copies.chosen().problem
    assert "system/libucp.so.0 is UCX 1.13.1, needed is 1.20 or later" in problem
    assert "transport.ucx.library" in problem
    broken = tmp_path / "libucp.so.0"
    broken.write_bytes(b"\x7fELF and no more")
    assert str(ucx_copies.look(str(broken))).startswith(f"{broken} cannot be loaded")


def test_copy_that_ends_its_process_with_other_bytes_than_text_cannot_be_loaded(tmp_path: Path) -> None:
    source, library = tmp_path / "rude.c", tmp_path / "libucp.so.0"
    source.write_text(
        '#include <unistd.h>\n__attribute__((constructor)) static void end(void) { _exit(write(2, "\\xff", 1)); }'
    )
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    assert str(ucx_copies.look(str(library))).startswith(f"{library} cannot be loaded")


def test_chosen_copy_is_looked_at_for_rdma(rdma: None, make: Make) -> None:
    with_ib, without = make("mine", (1, 20, 0), "ib"), make("other", (1, 20, 0), "tcp")
    assert ucx_copies.chosen(with_ib) == ChosenCopy(with_ib)
    assert "without transports for it" in ucx_copies.chosen(without).no_rdma


def order(memory: str, **config: str) -> list[str]:
    site = Site("cuda" if memory == "cuda" else "host")
    return [one.name for one in choice.candidates(TransportConfig(ucx=UcxConfig(**config)), site)]


def test_ucx_comes_before_tcp_only_where_its_copy_does_rdma(
    host: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_ib, without = make("mine", (1, 20, 0), "ib"), make("other", (1, 20, 0), "tcp")
    assert order("host", library=with_ib) == ["mapped", "tcp", "ucx"]
    (host / "mlx5_0").mkdir(parents=True)
    assert order("host", library=with_ib) == ["mapped", "ucx", "tcp"]
    assert order("host", library=without) == ["mapped", "tcp", "ucx"]
    assert order("host", library="off") == ["mapped", "tcp", "ucx"]


def test_copy_that_another_package_has_loaded_is_the_one_that_is_asked_for_rdma(
    rdma: None, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the one that is used, whatever better one there is."""
    make("system", (1, 23, 0), "ib")
    loaded = SimpleNamespace(path=make("other", (1, 20, 0), "tcp"))
    library = SimpleNamespace(loaded=lambda: loaded)
    monkeypatch.setattr(ucx, "_ucx", SimpleNamespace(Library=library, Unavailable=RuntimeError))
    assert order("host") == ["mapped", "tcp", "ucx"]
    loaded.path = make("mine", (1, 20, 1), "ib")
    assert order("host") == ["mapped", "ucx", "tcp"]


def test_device_memory_goes_through_pinned_slots_where_the_card_does_not_reach_it(
    rdma: None, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_ib = make("mine", (1, 20, 0), "ib")
    monkeypatch.setattr(ucx, "no_gpu_direct", lambda index: "")
    assert order("cuda", library=with_ib) == ["mapped-cuda", "staged-mapped", "ucx", "staged-ucx", "staged-tcp"]
    monkeypatch.setattr(ucx, "no_gpu_direct", lambda index: f"GPU {index} has none")
    assert order("cuda", library=with_ib) == ["mapped-cuda", "staged-mapped", "staged-ucx", "staged-tcp", "ucx"]


def test_card_reaches_a_gpu_by_dmabuf_or_peermem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ucx, "PEERMEM", (str(tmp_path / "nvidia_peermem"),))
    monkeypatch.setattr(platform, "release", lambda: "6.8.0-31-generic")
    monkeypatch.setattr(ucx, "moves_dma_buf", lambda index: index == 0)
    assert ucx.no_gpu_direct(0) == ""
    assert "modprobe nvidia_peermem" in ucx.no_gpu_direct(1)
    monkeypatch.setattr(platform, "release", lambda: "5.10.0")
    assert "modprobe nvidia_peermem" in ucx.no_gpu_direct(0)
    (tmp_path / "nvidia_peermem").mkdir()
    assert ucx.no_gpu_direct(0) == ""


@pytest.mark.skipif(not UcxTransport().probe().ok, reason="there is no UCX")
def test_real_copy_is_looked_at_and_the_probe_says_what_is_missing_for_rdma(rdma: None) -> None:
    facts = UcxTransport().probe().facts
    looked = ucx_copies.look(facts["library"])
    assert isinstance(looked, UcxCopy)
    assert looked.usable
    assert "tcp" in looked.components
    library = UcxTransport(library=facts["library"]).probe().facts
    assert library["RDMA"] == ("mlx5_0" if looked.has_rdma else f"no: {looked} without transports for it")
