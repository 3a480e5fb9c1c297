"""A Ray cluster of several nodes on this machine, and `pdlink ray up` on it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .deployment import TIMEOUTS, WAIT_S, Answer, request, until

if TYPE_CHECKING:
    import psutil

START_S = 240.0
"""Of a deployment, on a machine with much else to do: actors and workers are new Python processes."""
_STORE_NBYTES = 80 << 20


class Nodes:
    """A head without room, and nodes with room for one worker each."""

    def __init__(self, count: int) -> None:
        from ray.cluster_utils import Cluster

        # Actors are nice otherwise, and on a busy machine they hardly begin.
        os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112
        os.environ["RAY_raylet_start_wait_time_s"] = "180"  # noqa: SIM112
        common = {"object_store_memory": _STORE_NBYTES, "include_dashboard": False}
        self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **common})
        self._nodes: dict[str, Any] = {}
        for _ in range(count):
            self.add()

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add(self) -> None:
        node = self._cluster.add_node(num_cpus=1, object_store_memory=_STORE_NBYTES)
        self._nodes[node.node_id] = node

    def raylet(self, node: str) -> subprocess.Popen[bytes]:
        """By the beginning of the node's id."""
        found = next(each for name, each in self._nodes.items() if name.startswith(node))
        process: subprocess.Popen[bytes] = found.all_processes["raylet"][0].process
        return process

    def kill(self, node: str) -> None:
        """The node's raylet, which is reaped at once: as a zombie it would count as alive."""
        raylet = self.raylet(node)
        raylet.kill()
        threading.Thread(target=raylet.wait, daemon=True).start()
        self._nodes = {name: each for name, each in self._nodes.items() if not name.startswith(node)}

    def processes(self, node: str) -> list[psutil.Process]:
        """The raylet and all below it: actors, and workers of pdlink."""
        import psutil

        raylet = psutil.Process(self.raylet(node).pid)
        return [raylet, *raylet.children(recursive=True)]

    def with_process(self, pid: int) -> str:
        """The id of the node that runs this process."""
        return next(name for name in self._nodes if pid in {each.pid for each in self.processes(name)})

    def close(self) -> None:
        for node in self._nodes.values():
            for raylet in node.all_processes.get("raylet", ()):
                if raylet.process.poll() is None:
                    raylet.process.send_signal(signal.SIGCONT)
        self._cluster.shutdown()


class RayUp:
    """`pdlink ray up` as a process, from its start until it has drained."""

    def __init__(self, address: str, folder: Path, *words: str) -> None:
        sets = [f"{side}.model.num_layers=8" for side in ("prefill", "decode")]
        sets += [
            f"{side}.timeouts.{name}={value}" for side in ("prefill", "decode") for name, value in TIMEOUTS.items()
        ]
        # What a host that hangs had in hand ends with these; they are minutes by default, for long prompts.
        sets += ["proxy.first_byte_timeout_s=20", "proxy.idle_timeout_s=20"]
        sets += ["proxy.drain_s=2", "proxy.health_interval_s=0.2", "ray.lost_after_s=8", "ray.place_timeout_s=120"]
        self.log = folder / "ray-up.log"
        command = [sys.executable, "-m", "pdlink", "ray", "up", "--address", address, "--listen", "127.0.0.1:0"]
        command += [word for each in sets for word in ("--set", each)]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, *words], stdout=subprocess.PIPE, stderr=log, start_new_session=True, text=True
            )
        self.proxy = ""
        self.first: dict[str, tuple[str, str]] = {}
        """Label to URL and beginning of the node's id, as the summary says."""

    def wait_ready(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if found := re.match(r"  (\S+-\d+) +(http://\S+) +node (\w+)", line):
                self.first[found[1]] = (found[2], found[3])
            elif found := re.match(r"  proxy +(http://\S+)", line):
                self.proxy = found[1]
            elif line.startswith("Ctrl-C"):
                return
        raise AssertionError(self.log.read_text()[-3000:])

    def urls(self, side: str) -> list[str]:
        """Of the workers that the proxy uses."""
        body = request(self.proxy + "/health").body
        return [each["url"] for each in body[side] if each["state"] == "ok"]

    def complete(self, prompt: list[int]) -> Answer:
        body = {"model": "pdlink-tiny", "prompt": prompt, "max_tokens": 16, "temperature": 0}
        return request(self.proxy + "/v1/completions", body, timeout_s=90.0)

    def worker(self, url: str) -> psutil.Process:
        """The process that listens there."""
        import psutil

        port = int(url.rpartition(":")[2])
        for each in psutil.net_connections("tcp"):
            if each.laddr and each.laddr[1] == port and each.status == psutil.CONN_LISTEN and each.pid:
                return psutil.Process(each.pid)
        raise AssertionError(f"nobody listens at {url}")

    def node_of(self, url: str, nodes: Nodes) -> str:
        """The id of the node that this worker is on."""
        pid = self.worker(url).pid
        return nodes.with_process(pid)

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(WAIT_S * 3)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            raise


class Load:
    """Clients that never stop asking, and what they were told."""

    def __init__(self, up: RayUp, expected: dict[tuple[int, ...], str], num_clients: int) -> None:
        self._up, self._expected = up, expected
        self._stop = threading.Event()
        self.num_right = 0
        self.wrong: list[Any] = []
        self.refused: list[str] = []
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(num_clients)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def goes_on(self, count: int = 5) -> None:
        """Until so many more answers were right."""
        before = self.num_right
        until(lambda: self.num_right >= before + count, "answers come", START_S)

    def _ask(self, number: int) -> None:
        prompts = list(self._expected)
        while not self._stop.is_set():
            prompt = prompts[number % len(prompts)]
            number += 1
            try:
                answer = self._up.complete(list(prompt))
            except OSError as error:
                self.refused.append(str(error))
                continue
            if answer.status != 200:
                self.refused.append(f"{answer.status} {answer.body}")
                self._stop.wait(0.2)
            elif answer.text == self._expected[prompt]:
                self.num_right += 1
            else:
                self.wrong.append((prompt, answer.text))
