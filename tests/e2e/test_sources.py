"""Three stores, each with a prefill worker, and a proxy that knows who has what: a worker pulls what it lacks."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from pdlink.fleet.ports import free_ports
from tests.waiting import until

from ..store.process import Process, process
from .deployment import Answer, Deployment, of_store, prompt_of, request, worker_settings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.e2e

CHUNK = 32
NUM_CHUNKS = 24
NAMES = ("a", "b", "c")
KNOWN = "pdlink_proxy_kv_index_blocks"
PULLED = 'pdlink_prompt_tokens_total{source="peer"}'


class Cell:
    """Stores and their workers, by name, and what the proxy knows of them."""

    def __init__(self, deployment: Deployment, stores: dict[str, Process]) -> None:
        self.deployment, self.stores = deployment, stores

    def ask(self, prompt: list[int], **headers: str) -> Answer:
        body = {"model": "pdlink-tiny", "prompt": prompt, "max_tokens": 16, "temperature": 0}
        said = {name.replace("_", "-"): value for name, value in headers.items()}
        answer = request(self.deployment.url("proxy") + "/v1/completions", body, headers=said)
        assert answer.status == 200, answer.body
        return answer

    def alone(self, prompt: list[int]) -> str:
        """What decode answers that computes all of it, without a store."""
        return self.deployment.complete(prompt, at="decode").text

    def fill(self, name: str, prompt: list[int]) -> None:
        """Have this worker compute a prompt, whose KV its store keeps, and wait until the proxy knows."""
        before = self.deployment.metric("proxy", KNOWN)
        self.deployment.complete(prompt, at=f"prefill-{name}", max_tokens=1)
        chunks = len(prompt) // CHUNK
        until(lambda: self.deployment.metric("proxy", KNOWN) >= before + chunks, f"the proxy knows what {name} has")

    def until_known(self, name: str) -> None:
        """A worker has told the proxy of its store."""
        label = f"prefill-{name}"
        until(lambda: bool(self.deployment.health(label)["store"]), f"{label} has its store")
        since_s, url = time.monotonic(), self.deployment.url(label)

        def heard() -> bool:
            workers = self.deployment.health("proxy")["prefill"]
            (ago_s,) = [each["heard_s_ago"] for each in workers if each["url"] == url]
            return bool(ago_s < time.monotonic() - since_s)

        until(heard, f"the proxy has heard {label}")

    def until_left(self, name: str) -> None:
        """The proxy has heard that a worker has ended: a request that comes before is recomputed by decode."""
        label = f"prefill-{name}"
        url = self.deployment.url(label)

        def has_left() -> bool:
            workers = self.deployment.health("proxy")["prefill"]
            return [each["state"] for each in workers if each["url"] == url] != ["ok"]

        until(has_left, f"the proxy knows that {label} has ended")

    def explained(self, answer: Answer) -> tuple[str, dict[str, Any]]:
        """Whence the proxy said that prefill should pull, and what prefill says of its prompt."""
        name = answer.headers["X-Request-Id"]
        found = request(self.deployment.url("proxy") + f"/decisions?request={name}").body
        (placed,) = [each["source"] for each in found["decisions"] if each["verdict"] == "placed"]
        (said,) = [each for each in found["sources"] if each.get("leg") == "prefill"]
        return placed, said


@contextmanager
def cell(path: Path, policy: str) -> Iterator[Cell]:
    with ExitStack() as stack:
        stores = {}
        for name in NAMES:
            port = free_ports(3)
            (path / name).mkdir()
            events = {"endpoint": f"tcp://127.0.0.1:{port}", "replay_endpoint": f"tcp://127.0.0.1:{port + 1}"}
            tiers = {"max_local_cpu_size": 0.25, "peer_port": port + 2}
            stores[name] = stack.enter_context(process(path / name, name=name, tiers=tiers, kv_events=events))
        cache = {"share_prefixes": False, "num_blocks": 256}  # so that only the stores know a prompt
        workers = {
            f"prefill-{name}": worker_settings("prefill", tiers=of_store(store.path, CHUNK), cache=cache)
            for name, store in stores.items()
        }
        workers["decode"] = worker_settings("decode", cache=cache, tiers={"max_local_cpu_size": 0})
        settings = {"policy": {"prefill": policy, "decode": "least_loaded"}}
        deployment = stack.enter_context(Deployment.launch(workers, settings))
        found = Cell(deployment, stores)
        for name in NAMES:
            found.until_known(name)
        yield found


def test_a_worker_pulls_what_another_ones_store_has(tmp_path: Path) -> None:
    with cell(tmp_path, "round_robin") as here:
        prompt = prompt_of(NUM_CHUNKS * CHUNK + 5, 1)
        here.fill("a", prompt)
        expected, pulled = here.alone(prompt), set()
        for _ in NAMES:
            answer = here.ask(prompt)
            assert (answer.text, answer.headers["X-Pdlink-KV"]) == (expected, "transferred")
            source, said = here.explained(answer)
            assert said["computed"] == 5, "the chunks came from somewhere"
            if source:
                assert source.startswith(f"{NUM_CHUNKS * CHUNK} tokens from prefill-")
                assert said["places"] == {"peer": NUM_CHUNKS * CHUNK}
                pulled.add(answer.headers["X-Pdlink-Prefill"])
            else:
                assert said["places"] == {"memory": NUM_CHUNKS * CHUNK}
        assert len(pulled) == 2, "all but the one that had it"
        total = sum(here.deployment.metric(f"prefill-{name}", PULLED) for name in NAMES)
        assert total == 2 * NUM_CHUNKS * CHUNK


def killed_mid_pull(here: Cell, turns: int, seed: int) -> int:
    """So many times: a store is killed while another one's worker pulls from it. How often some of the prefix came,
    and some was computed."""
    draw, mid = random.Random(seed), 0
    labels = here.deployment.health("proxy")["prefill"]
    of_label = {each["label"]: each["url"] for each in labels}
    by_url = {here.deployment.url(f"prefill-{name}"): name for name in NAMES}
    name_of = {label: by_url[url] for label, url in of_label.items()}
    last = name_of[here.ask(prompt_of(40, 1)).headers["X-Pdlink-Prefill"]]
    took_s = 0.1
    with ThreadPoolExecutor(1) as asking:
        for turn in range(turns):
            after = NAMES[(NAMES.index(last) + 1) % len(NAMES)]  # round robin
            victim = NAMES[(NAMES.index(after) + 1 + turn % 2) % len(NAMES)]
            prompt = prompt_of(NUM_CHUNKS * CHUNK + 5, seed + turn)
            here.fill(victim, prompt)
            expected = here.alone(prompt)
            sent = asking.submit(here.ask, prompt)
            time.sleep(draw.random() * took_s)
            here.stores[victim].kill()
            answer = sent.result(60)
            assert answer.text == expected, f"turn {turn}"
            last = name_of[answer.headers["X-Pdlink-Prefill"]]
            source, said = here.explained(answer)
            assert source, f"turn {turn}: the proxy knew who had it"
            pulled = said["places"].get("peer", 0)
            assert pulled + said["computed"] == len(prompt)
            mid += 0 < pulled < NUM_CHUNKS * CHUNK
            # Sooner where all had come, later where nothing had.
            took_s = min(
                1.0, max(0.005, took_s * (0.8 if pulled == NUM_CHUNKS * CHUNK else 1.2 if not pulled else 1))
            )
            here.stores[victim].start()
            here.until_known(victim)
    for label in (*(f"prefill-{name}" for name in NAMES), "decode"):
        until(lambda label=label: here.deployment.idle(label), f"{label} is idle")  # type: ignore[misc]
    return mid


@pytest.mark.timeout(0)  # its loops end by themselves
def test_a_source_killed_in_mid_pull_costs_no_token(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    times, seed = pytestconfig.getoption("--kills"), random.randrange(1 << 20)
    with cell(tmp_path, "round_robin") as here:
        mid = killed_mid_pull(here, times, seed)
    print(f"seed {seed}: in {mid} of {times} the source died with a part of the prefix sent")
