"""The transfer backend between servers of other shapes (ranks, stages, latents, states): SGLang's managers, no model.

All ranks of a server are in one process. Run with `make test-sglang`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pdlink.fleet.ports import free_ports

from .sglang_process import Engine

if importlib.util.find_spec("sglang") is None:
    pytest.skip("needs SGLang", allow_module_level=True)

pytestmark = [pytest.mark.sglang, pytest.mark.e2e, pytest.mark.timeout(300)]

FAILED, WAITING, SUCCESS = 0, 2, 4
ENDS = [FAILED, SUCCESS]
SOURCE, TARGET, SEED = [9, 2, 30], [100, 4, 77], 17
ROW, OTHER_ROW = 3, 5


class Servers:
    """Two processes with the ranks of one server each."""

    def __init__(self, folder: Path) -> None:
        self.sides = {
            mode: Engine("sglang_rank", folder / f"{mode}.log", SGLANG_PLUGINS="pdlink")
            for mode in ("prefill", "decode")
        }
        self.room = 1000
        self.reasons: dict[str, list[str]] = {}
        """Why ranks have failed the last request, by side."""
        self.address = ""

    def open(self, shapes: dict[str, list[dict[str, Any]]], roles: tuple[str, str] = ("prefill", "decode")) -> None:
        """One list of ranks for the process of each name; roles: what they are."""
        port = free_ports(2)
        self.address = f"127.0.0.1:{port}"
        for (process, ranks), role in zip(shapes.items(), roles, strict=True):
            for number, shape in enumerate(ranks):
                self.sides[process].send("open", name=f"{number}", mode=role, port=port, **shape)
                self.sides[process].answer()

    def on(self, process: str, number: int) -> Engine:
        side = self.sides[process]
        side("use", name=f"{number}")
        return side

    def transfer(
        self,
        num_prefill: int,
        num_decode: int,
        places: tuple[list[list[int]], list[list[int]]] | None = None,
        processes: tuple[str, str] = ("prefill", "decode"),
    ) -> tuple[list[int], list[int]]:
        """One request through all ranks; the ends of them on either side. places: of states."""
        self.room += 1
        room, (sender, receiver) = self.room, processes
        theirs, mine = places or (None, None)
        for number in range(num_prefill):
            self.on(sender, number)("sender", room=room)
        for number in range(num_decode):
            rank = self.on(receiver, number)
            rank("receiver", room=room, address=self.address)
            rank("ask", room=room, pages=TARGET, row=OTHER_ROW, places=mine)
        for number in range(num_prefill):
            rank = self.on(sender, number)
            if rank("wait", room=room, status=[WAITING, *ENDS]) == {"status": WAITING}:
                rank("init", room=room, num_pages=len(SOURCE), row=ROW, seed=SEED)
                rank("send", room=room, pages=SOURCE[:1], seed=SEED)
                rank("send", room=room, pages=SOURCE[1:], seed=SEED, places=theirs)
        received = [self.on(receiver, n)("wait", room=room, status=ENDS)["status"] for n in range(num_decode)]
        sent = [self.on(sender, n)("wait", room=room, status=ENDS)["status"] for n in range(num_prefill)]
        self.reasons = {
            process: [self._why(process, number) for number, end in enumerate(ends) if end == FAILED]
            for process, ends in ((sender, sent), (receiver, received))
        }
        print(self.reasons)  # noqa: T201 -- shown where a test fails
        return sent, received

    def check(self, num_decode: int, places: list[list[int]] | None = None, process: str = "decode") -> None:
        for number in range(num_decode):
            found = self.on(process, number)(
                "check", pages=TARGET, source=SOURCE, seed=SEED, row=OTHER_ROW, places=places
            )
            assert found == {"wrong": 0, "aux": [SEED, SEED]}, f"decode rank {number}"

    def _why(self, process: str, number: int) -> str:
        return str(self.on(process, number)("failure", room=self.room)["why"])

    def close(self) -> None:
        for side in self.sides.values():
            side.close()


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    servers = Servers(tmp_path_factory.mktemp("servers"))
    try:
        yield servers
    finally:
        servers.close()


def tensor_ranks(count: int, **form: Any) -> list[dict[str, Any]]:
    return [{"tp": [rank, count], **form} for rank in range(count)]


@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1), (4, 2), (2, 2)])
@pytest.mark.parametrize("latent", [False, True], ids=["heads", "latent"])
def test_servers_with_other_numbers_of_ranks(servers: Servers, prefill: int, decode: int, latent: bool) -> None:
    """Two KV heads: four ranks share them in pairs. A latent is whole on every rank, and comes from one."""
    servers.open({"prefill": tensor_ranks(prefill, latent=latent), "decode": tensor_ranks(decode, latent=latent)})
    assert servers.transfer(prefill, decode) == ([SUCCESS] * prefill, [SUCCESS] * decode)
    servers.check(decode)


@pytest.mark.parametrize("stages", [1, 2])
def test_prefill_in_stages_serves_decode_in_one_or_as_many(servers: Servers, stages: int) -> None:
    of_prefill = [{"pp": [rank, 2]} for rank in range(2)]
    servers.open({"prefill": of_prefill, "decode": [{"pp": [rank, stages]} for rank in range(stages)]})
    assert servers.transfer(2, stages) == ([SUCCESS] * 2, [SUCCESS] * stages)
    servers.check(stages)


@pytest.mark.parametrize("states", [["mamba"], ["swa"], ["swa", "mamba"]], ids="+".join)
def test_states_beside_the_kv_arrive(servers: Servers, states: list[str]) -> None:
    servers.open({"prefill": [{"states": states}], "decode": [{"states": states}]})
    theirs, mine = [[6, 2], [8]], [[3, 40], [1]]
    used = [one[: len(states)] for one in (theirs, mine)]
    assert servers.transfer(1, 1, (used[0], used[1])) == ([SUCCESS], [SUCCESS])
    servers.check(1, used[1])


def test_states_between_servers_of_other_numbers_of_ranks_are_refused_by_name(servers: Servers) -> None:
    servers.open({"prefill": tensor_ranks(1, states=["mamba"]), "decode": tensor_ranks(2, states=["mamba"])})
    assert servers.transfer(1, 2, ([[6]], [[3]])) == ([FAILED], [FAILED] * 2)
    for side in ("prefill", "decode"):
        assert all("states beside its KV (mamba)" in reason for reason in servers.reasons[side])


def test_other_places_of_a_state_on_both_sides_fail_the_request(servers: Servers) -> None:
    servers.open({"prefill": [{"states": ["swa"]}], "decode": [{"states": ["swa"]}]})
    assert servers.transfer(1, 1, ([[6]], [[3, 4]])) == ([FAILED], [FAILED])


def test_states_that_are_not_carried_are_refused_when_the_server_starts(servers: Servers) -> None:
    servers.sides["decode"].send("open", mode="decode", port=1, states=["dsa_tail"])
    with pytest.raises(AssertionError, match=r"UnsupportedSglang: KV pool: got states dsa_tail.*expected mamba, swa"):
        servers.sides["decode"].answer()


def test_servers_exchange_their_roles(servers: Servers) -> None:
    shapes: dict[str, list[dict[str, Any]]] = {"prefill": [{}], "decode": [{}]}
    servers.open(shapes)
    assert servers.transfer(1, 1) == ([SUCCESS], [SUCCESS])
    for side in ("prefill", "decode"):
        assert servers.on(side, 0)("teardown") == {"alive": [], "switches": True}
    servers.open({"decode": [{}], "prefill": [{}]})
    assert servers.transfer(1, 1, processes=("decode", "prefill")) == ([SUCCESS], [SUCCESS])
    servers.check(1, process="prefill")
