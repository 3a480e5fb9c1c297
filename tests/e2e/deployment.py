"""Real processes for the tests: started, asked, killed and stopped."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from shutil import rmtree
from socket import socket
from tempfile import mkdtemp
from typing import Any

import pytest

from pdlink.config import ProxyConfig, WorkerConfig
from pdlink.fleet.child import Child, listening_on, start, stop
from tests.ports import keep_port
from tests.waiting import WAIT_S, until

from . import held

READY_S = 180.0
ANSWERS = 'pdlink_tier_answering{tier="store"}'

TIMEOUTS = {"peer_s": 5.0, "request_s": 60.0, "drain_s": 3.0}


def worker_settings(role: str, **sections: Any) -> dict[str, Any]:
    """Settings of a worker small enough that several fit on two cores."""
    base: dict[str, Any] = {"role": role, "model": {"num_layers": 8}, "timeouts": TIMEOUTS}
    return WorkerConfig.model_validate(base | sections).model_dump(mode="json")


def of_store(store: Path, chunk_tokens: int) -> dict[str, Any]:
    """The section `tiers` of a worker that uses this store process for every prompt of a chunk."""
    return {
        "store": str(store),
        "chunk_size": chunk_tokens,
        "load_if_faster": False,
        # A machine with more to do than it has cores keeps the store from answering for seconds.
        "store_timeout_s": 20.0,
    }


@dataclass
class Answer:
    status: int
    body: dict[str, Any]
    headers: dict[str, str]
    took_s: float

    @property
    def text(self) -> str:
        return str(self.body["choices"][0]["text"])


def request(url: str, body: object = None, timeout_s: float = 60.0, headers: dict[str, str] | None = None) -> Answer:
    """One HTTP exchange, whatever its status. body: JSON to POST, raw bytes to POST, or None to GET."""
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    asked = urllib.request.Request(url, data, {"Content-Type": "application/json", **(headers or {})})
    started_s = time.monotonic()
    try:
        with urllib.request.urlopen(asked, timeout=timeout_s) as answer:
            status, text, got = answer.status, answer.read(), dict(answer.headers)
    except urllib.error.HTTPError as error:
        status, text, got = error.code, error.read(), dict(error.headers)
    return Answer(status, json.loads(text), got, time.monotonic() - started_s)


def prompt_of(num_tokens: int, seed: int = 0) -> list[int]:
    """Token ids that depend on the seed; printable bytes, so that nothing special is hit."""
    state = seed * 7919 + 13
    tokens = []
    for _ in range(num_tokens):
        state = (state * 1103515245 + 12345) % 2**31
        tokens.append(33 + (state >> 16) % 90)
    return tokens


@dataclass
class Deployment:
    """Children by label, the proxy last; a context manager."""

    children: dict[str, Child] = field(default_factory=dict)
    holdable: tuple[str, ...] = ()
    """Labels of workers that `hold` is for."""
    _holds: Path = Path()
    """The folder of a file for each worker that is held, by its label."""
    _ports: list[socket] = field(default_factory=list)

    @classmethod
    def launch(
        cls,
        workers: dict[str, dict[str, Any]],
        proxy: dict[str, Any] | None = None,
        *,
        routed: bool = True,
        holdable: tuple[str, ...] = (),
    ) -> Deployment:
        """workers: label to settings. All start at once; the proxy follows when they are ready, if `routed`."""
        deployment = cls(holdable=holdable, _holds=Path(mkdtemp()) if holdable else Path())
        try:
            for label, settings in workers.items():
                deployment._start(label, settings["role"], {**settings, "name": label})
            for child in deployment.children.values():
                child.wait_ready(READY_S)
            if not routed:
                return deployment
            prefill, decode = (
                tuple(str(child.facts["url"]) for child in deployment.children.values() if child.role == role)
                for role in ("prefill", "decode")
            )
            config = ProxyConfig(
                listen="127.0.0.1:0", health_interval_s=0.2, drain_s=2.0, prefill=prefill, decode=decode
            )
            settings = config.model_dump(mode="json")
            deployment.children["proxy"] = start("proxy", "proxy", {**settings, **(proxy or {})})
            deployment.children["proxy"].wait_ready(READY_S)
            deployment.wait_proxy_hears_all()
        except BaseException:
            deployment.stop()
            raise
        return deployment

    def __enter__(self) -> Deployment:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self.let_go()
        self._give_back_ports()
        stop(list(self.children.values()), 8.0)
        if self.holdable:
            rmtree(self._holds, ignore_errors=True)

    def hold(self, label: str, at: str) -> None:
        """From now on this worker's engine stands still there; at: as of `held.HELD_BY`."""
        assert label in self.holdable
        file = self._hold_of(label)
        file.with_suffix(".new").write_text(at)
        file.with_suffix(".new").rename(file)

    def let_go(self) -> None:
        """All engines go on."""
        for label in self.holdable:
            self._hold_of(label).unlink(missing_ok=True)

    def _give_back_ports(self) -> None:
        for kept in self._ports:
            kept.close()
        self._ports.clear()

    def _hold_of(self, label: str) -> Path:
        return self._holds / label

    def url(self, label: str) -> str:
        return str(self.children[label].facts["url"])

    def kill(self, label: str, number: int = signal.SIGKILL) -> None:
        """The ports of a worker that ends of it are kept until it is started again."""
        child = self.children[label]
        os.kill(child.process.pid, number)
        if number == signal.SIGKILL and "control_port" in child.facts:
            child.process.wait(WAIT_S)
            self._ports += [keep_port(child.facts[name]) for name in ("port", "control_port")]

    def restart(self, label: str) -> None:
        """The same worker again, on the ports it had."""
        old = self.children[label]
        old.process.wait(WAIT_S)
        old.link.close()
        self._start(label, old.role, listening_on(old.settings, old.facts))
        self.children[label].wait_ready(READY_S)
        self._give_back_ports()

    def _start(self, label: str, role: str, settings: dict[str, Any]) -> None:
        if label not in self.holdable:
            self.children[label] = start(label, role, settings)
            return
        with pytest.MonkeyPatch.context() as patch:  # children inherit it
            patch.setenv(held.HELD_BY, str(self._hold_of(label)))
            self.children[label] = start(label, role, settings, held.__name__)

    def wait_proxy_hears_all(self) -> None:
        """Until the proxy can serve and each of its workers has answered it; /readyz needs a decode only."""

        def hears() -> bool:
            answer = request(self.url("proxy") + "/health")
            # A proxy with keys tells the status only.
            workers = answer.body.get("prefill", []) + answer.body.get("decode", [])
            return answer.status == 200 and all(each["heard_s_ago"] is not None for each in workers)

        until(hears, "the proxy hears all its workers")

    def complete(self, prompt: list[int] | str, *, at: str = "proxy", **fields: Any) -> Answer:
        body = {"model": "pdlink-tiny", "prompt": prompt, "max_tokens": 16, "temperature": 0, **fields}
        return request(self.url(at) + "/v1/completions", body)

    def complete_all(self, prompts: list[list[int]], *, at: str = "proxy", **fields: Any) -> list[Answer]:
        """All at the same time."""
        with ThreadPoolExecutor(len(prompts)) as threads:
            return list(threads.map(lambda prompt: self.complete(prompt, at=at, **fields), prompts))

    def health(self, label: str) -> dict[str, Any]:
        return request(self.url(label) + "/health").body

    def metric(self, label: str, name: str) -> float:
        """Sum over all samples whose name and labels begin with `name`."""
        with urllib.request.urlopen(self.url(label) + "/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))

    def wait_store_answers(self, *labels: str) -> None:
        """Until these workers know their store, which is later than that they are ready."""
        for label in labels:
            until(lambda label=label: self.metric(label, ANSWERS) == 1, f"{label} knows its store")  # type: ignore[misc]

    def idle(self, label: str) -> bool:
        """Whether this worker holds nothing for anybody: no request, no block, no transfer."""
        health = self.health(label)
        held: int = health["running"] + health["waiting"] + health["num_blocks"] - health["free_blocks"]
        return held + self.metric(label, "pdlink_live_transfers") == 0
