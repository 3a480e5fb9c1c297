"""A prompt whose KV lies in four tiers: answers are those computed; alone, sixteen at once, with processes killed.

Two store processes are peers of each other, each with a disk, and share a directory; each has a worker, and a third
worker has no tiers. Before each test the chunks of every prompt are put where they are asked for: two in memory, two
more only on the disk, two more only in the memory of the other store, the last two only in the directory.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from pdlink.fleet.ports import free_ports
from tests.waiting import until

from ..store.process import Process, process
from .deployment import Deployment, prompt_of, request, worker_settings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

CHUNK = 32
TWO = 2 * CHUNK
HEADS = [prompt_of(8 * CHUNK, seed) for seed in range(4)]
PROMPTS = [HEADS[number % 4] + prompt_of(3 + number, 100 + number) for number in range(16)]


@dataclass
class Split:
    deployment: Deployment
    stores: dict[str, Process]
    expected: list[str]
    """Answers to `PROMPTS` of the worker without tiers."""

    def post(self, label: str, verb: str, **fields: Any) -> dict[str, Any]:
        answer = request(f"{self.deployment.url(label)}/pdlink/cache/{verb}", fields)
        assert answer.status == 200, answer.body
        return answer.body

    def runs(self, prompt: list[int], label: str = "left") -> list[tuple[str, int]]:
        """Where a prompt's tokens lie, in order."""
        found = self.post(label, "lookup", prompt=prompt)["runs"]
        return [(run["place"].split()[0], run["tokens"]) for run in found]

    def arrange(self) -> None:
        for head in HEADS:
            if self.post("left", "warm", prompt=head)["tokens"] < len(head):
                self.deployment.complete(head + [65], at="left")  # else nobody has it
                until(lambda head=head: self.runs(head) == [("memory", len(head))], "it is stored")  # type: ignore[misc]
            for label in ("left", "right"):
                self.post(label, "clear", prompt=head, places=["disk"])
            self.post("left", "clear", prompt=head, places=["shared_dir"])
            assert self.post("left store", "move", prompt=head[: TWO * 2], source="memory", destination="disk") == {
                "tokens": 2 * TWO
            }
            assert self.post("left store", "move", prompt=head, source="memory", destination="shared_dir") == {
                "tokens": len(head)
            }
            self.post("right", "clear", prompt=head, places=["memory"])
            assert self.post("right", "warm", prompt=head[: 3 * TWO]) == {"tokens": 3 * TWO}
            self.post("left", "clear", prompt=head, places=["memory"])
            assert self.post("left", "warm", prompt=head[:TWO]) == {"tokens": TWO}
        for head in HEADS:
            assert self.runs(head) == [("memory", TWO), ("disk", TWO), ("peer", TWO), ("shared_dir", TWO)]

    def answers(self) -> list[str]:
        """Sixteen at once."""
        answers = self.deployment.complete_all(PROMPTS, at="left")
        assert [answer.status for answer in answers] == [200] * len(PROMPTS)
        return [answer.text for answer in answers]

    def asked(self) -> float:
        """Chunks that its worker has looked up in the left store."""
        return self.deployment.metric("left store", "pdlink_store_chunks_total")

    def computed(self) -> float:
        return self.deployment.metric("left", 'pdlink_prompt_tokens_total{source="computed"}')

    def connected(self) -> None:
        clients = 'pdlink_store_clients{state="connected"}'
        until(lambda: self.deployment.metric("left store", clients) == 1, "the worker is connected to its store")
        self.deployment.wait_store_answers("left")

    def idle(self) -> None:
        until(lambda: self.deployment.idle("left"), "the worker holds nothing")
        for label in self.stores:
            until(lambda label=label: self.held(label) == 0, f"nobody holds anything in the {label}")  # type: ignore[misc]

    def held(self, label: str) -> float:
        return sum(self.deployment.metric(label, f"pdlink_store_{what}") for what in ("leases", "reservations"))


@contextmanager
def launched(directory: Path) -> Iterator[Split]:
    port = free_ports(2)
    ports = {"left": port, "right": port + 1}
    (directory / "shared").mkdir()
    with ExitStack() as ends:
        stores = {}
        for label, other in (("left", "right"), ("right", "left")):
            (directory / label).mkdir()
            tiers = {
                "max_local_cpu_size": 0.1,
                "local_disk": str(directory / label / "disk"),
                "max_local_disk_size": 0.1,
                "peer_port": ports[label],
                "peers": [f"tcp://127.0.0.1:{ports[other]}"],
                "remote_url": f"file://{directory / 'shared'}",
            }
            stores[f"{label} store"] = ends.enter_context(process(directory / label, tiers=tiers))
        cache = {"share_prefixes": False}  # so that only the stores know a prompt
        workers = {
            label: worker_settings(
                "both",
                cache=cache,
                # A machine with more to do than it has cores keeps the store from answering for seconds.
                tiers={
                    "store": str(stores[f"{label} store"].path),
                    "chunk_size": CHUNK,
                    "load_if_faster": False,
                    "store_timeout_s": 20.0,
                },
            )
            for label in ports
        }
        workers["alone"] = worker_settings("both", cache=cache, tiers={"max_local_cpu_size": 0})
        deployment = ends.enter_context(Deployment.launch(workers, routed=False))
        deployment.wait_store_answers(*ports)
        expected = [answer.text for answer in deployment.complete_all(PROMPTS, at="alone")]
        deployment.kill("alone")
        assert len(set(expected)) == len(PROMPTS)
        deployment.children |= {label: store.child for label, store in stores.items()}
        try:
            yield Split(deployment, stores, expected)
        finally:
            for label in stores:
                del deployment.children[label]


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Split]:
    with launched(tmp_path_factory.mktemp("split")) as found:
        yield found


def test_a_prefix_that_lies_in_memory_on_disk_at_a_peer_and_in_a_directory_is_answered_as_computed(
    split: Split,
) -> None:
    split.arrange()
    before = split.computed()
    answers = [split.deployment.complete(prompt, at="left").text for prompt in PROMPTS[:4]]
    assert answers == split.expected[:4]
    assert split.computed() - before == sum(len(prompt) - 8 * CHUNK for prompt in PROMPTS[:4])
    split.idle()


def test_sixteen_at_once_whose_prefixes_lie_in_four_tiers_are_answered_as_computed(split: Split) -> None:
    split.arrange()
    before = split.computed()
    assert split.answers() == split.expected
    assert split.computed() - before == sum(len(prompt) - 8 * CHUNK for prompt in PROMPTS)
    split.idle()


def test_a_worker_killed_while_it_loads_from_four_tiers_harms_no_record_and_its_successor_finds_them(
    split: Split,
) -> None:
    deployment = split.deployment
    split.arrange()
    asked = split.asked()
    with ThreadPoolExecutor(1) as threads:
        lost = threads.submit(deployment.complete_all, PROMPTS, at="left", max_tokens=200, ignore_eos=True)
        until(lambda: split.asked() > asked, "they are looked up")
        deployment.kill("left")
        with pytest.raises(OSError):  # noqa: PT011 - the connection ends somehow
            lost.result(60)
    until(lambda: split.held("left store") == 0, "its leases have ended with it")
    deployment.restart("left")
    split.connected()
    split.arrange()
    before = split.computed()
    assert split.answers() == split.expected
    assert split.computed() - before == sum(len(prompt) - 8 * CHUNK for prompt in PROMPTS)
    split.idle()


def test_answers_are_as_computed_while_either_store_is_killed_and_after_they_are_started_again(split: Split) -> None:
    deployment = split.deployment
    for label, store in split.stores.items():
        split.arrange()
        asked = split.asked()
        with ThreadPoolExecutor(1) as threads:
            future = threads.submit(split.answers)
            until(lambda asked=asked: split.asked() > asked, "it began")  # type: ignore[misc]
            store.kill()
            assert future.result(120) == split.expected
        assert split.answers() == split.expected, "without that store"
        store.start()
        deployment.children[label] = store.child
        split.connected()
        assert split.runs(HEADS[0])[-1][0] != "peer", "its memory is empty"
        assert split.answers() == split.expected, "with its disk"
        split.idle()
